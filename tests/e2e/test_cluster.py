"""The cluster of the tests itself: whatever ends it, nothing of it is left on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.agent import eventually
from support.cluster import cluster as clusters
from support.cluster import programs
from support.cluster.cgroups import hierarchies
from support.cluster.failures import ClusterError
from support.cluster.keeper import Keeper
from support.cluster.layout import Layout

CLUSTER_SH = "hack/cluster.sh"
ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120.0
STARTS = """
import os, signal, sys
from pathlib import Path
from support.cluster import cluster, programs
started = cluster.start(Path(sys.argv[1]), programs.ensure())
print(started.keeper.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a cluster may be; gone afterwards."""
    path = Path(tempfile.mkdtemp(prefix="mig-agent-e2e-"))
    yield path
    if path.exists():
        keeper = Keeper(Layout(path), programs.Programs(()))
        keeper.claim()
        keeper.down()


def left(folder: Path) -> list[str]:
    """Processes, cgroups and files of the cluster in that folder."""
    found = [str(path) for root in hierarchies() for path in root.glob(f"{Layout(folder).cgroup}*")]
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(folder) in each for each in process.cmdline()):
                found.append(str(process))
        except psutil.Error:
            continue
    return [*found, str(folder)] if folder.exists() else found


def starting(folder: Path) -> subprocess.Popen[str]:
    """A program that starts a cluster and holds it, as pytest does."""
    return subprocess.Popen(
        [sys.executable, "-c", STARTS, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
    )


def cluster_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a person types."""
    return subprocess.run(
        [ROOT / CLUSTER_SH, *arguments],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * PATIENCE_SECONDS,
    )


def test_it_goes_with_whoever_started_it(folder: Path) -> None:
    with starting(folder) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline(), "the cluster stands"
        assert left(folder)
        holder.kill()
    eventually(lambda: not left(folder), f"nothing is left: {left(folder)}", PATIENCE_SECONDS)


def test_it_goes_when_its_start_is_broken_off(folder: Path) -> None:
    with starting(folder) as holder:
        eventually(lambda: Layout(folder).log("etcd").exists(), "it is on its way", PATIENCE_SECONDS)
        holder.kill()
    eventually(lambda: not left(folder), f"nothing is left: {left(folder)}", PATIENCE_SECONDS)


def test_its_processes_go_with_its_keeper_and_the_rest_with_the_next_one(folder: Path) -> None:
    with starting(folder) as holder:
        assert holder.stdout is not None
        os.kill(int(holder.stdout.readline()), signal.SIGKILL)
        eventually(
            lambda: not [each for each in left(folder) if each.startswith("psutil") and str(holder.pid) not in each],
            "no process is left",
            PATIENCE_SECONDS,
        )
        holder.kill()
    keeper = Keeper(Layout(folder), programs.Programs(()))
    keeper.claim()
    keeper.down()
    assert not left(folder)


def test_a_part_that_fails_is_named_with_the_end_of_its_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = folder.with_name(folder.name + "-programs")
    broken.mkdir()
    etcd = broken / "etcd"
    etcd.write_text("#!/bin/sh\necho the moon is in the way\nexit 3\n")
    etcd.chmod(0o755)
    found = programs.ensure()
    try:
        with pytest.raises(ClusterError, match=r"(?s)^cannot .*etcd of n1 ended with 3.*the moon is in the way"):
            clusters.start(folder, programs.Programs((broken, *found.folders)))
    finally:
        etcd.unlink()
        broken.rmdir()
    assert not left(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=r"^cannot make a cluster: that needs root"):
        programs.ensure()


def test_two_cannot_be_in_one_folder(folder: Path) -> None:
    found = programs.ensure()
    with_one = clusters.start(folder, found)
    try:
        with pytest.raises(ClusterError, match=r"^cannot make a cluster in .*: there is one; take it down first"):
            clusters.start(folder, found)
        assert with_one.api.get("/version")
    finally:
        with_one.stop()
    assert not left(folder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["h200-1tb:1"], "cannot simulate a GPU 'h200-1tb': the models are"),
        (["a30:lots"], "cannot read 'a30:lots': write MODEL:COUNT"),
        (["--nodes", "3", "a30:1", "a30:2"], "cannot give 2 sorts of GPUs to 3 nodes: "),
        (["--nodes", "0"], "cannot make a cluster of 0 nodes: "),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_is_started(
    folder: Path, arguments: list[str], words: str
) -> None:
    place = folder / "cluster"
    done = cluster_sh("--dir", str(place), "up", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(words)
    assert len(done.stderr.splitlines()) == 1
    assert not place.exists()


@pytest.mark.parametrize("command", [["up"], ["--name", "mine", "down"], ["kubectl", "get", "nodes"]])
def test_whoever_is_not_root_is_told_so(tmp_path: Path, command: list[str]) -> None:
    somebody = tmp_path / "id"
    somebody.write_text("#!/bin/sh\necho 1000\n")
    somebody.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = cluster_sh(*command, PATH=path)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("cannot work on a cluster: that needs root")
    assert line.endswith(f"sudo {CLUSTER_SH} {' '.join(command)}")
    assert "usage: hack/cluster.sh" in cluster_sh("--help", PATH=path).stdout


def test_ctrl_c_takes_what_was_coming_up_away(folder: Path) -> None:
    with subprocess.Popen(
        [ROOT / CLUSTER_SH, "--dir", str(folder), "up", "--bare"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a group of its own, as a terminal's foreground
    ) as up:
        eventually(lambda: Layout(folder).log("etcd").exists(), "it is on its way", PATIENCE_SECONDS)
        os.killpg(up.pid, signal.SIGINT)
        _, words = up.communicate(timeout=PATIENCE_SECONDS)
    assert up.returncode == 128 + signal.SIGINT
    assert words == "up was broken off\n"
    assert not left(folder)


def test_by_hand(folder: Path) -> None:
    """Two nodes, and the parts of one of them, as the help says."""
    dir_of = ("--dir", str(folder))
    done = cluster_sh(*dir_of, "up", "--bare", "--nodes", "2")
    assert done.returncode == 0, done.stderr
    try:
        assert cluster_sh(*dir_of, "kubectl", "get", "nodes", "-o", "name").stdout.split() == ["node/n1", "node/n2"]
        again = cluster_sh(*dir_of, "--node", "n2", "start", "kubelet")
        assert again.returncode == 1
        assert again.stderr.startswith("cannot start kubelet on n2: it runs already, as process ")
        assert cluster_sh(*dir_of, "--node", "n2", "stop", "kubelet").returncode == 0
        shown = cluster_sh(*dir_of, "status").stdout
        assert [line.split()[2:] for line in shown.splitlines() if "kubelet " in line] == [
            ["running"],
            ["ended", "with", "0"],
        ]
        assert cluster_sh(*dir_of, "--node", "n2", "start", "kubelet").returncode == 0
        unknown = cluster_sh(*dir_of, "--node", "n2", "stop", "etcd")
        assert unknown.stderr == "cannot stop etcd: the parts of n2 are containerd, kubelet\n"
        assert cluster_sh(*dir_of, "--node", "n3", "logs").stderr == "cannot find a node n3: there are n1, n2\n"
        assert cluster_sh(*dir_of, "net", "ip", "-brief", "address").stdout.count("10.77.0.1/24") == 1
        assert cluster_sh(*dir_of, "--node", "n2", "exec", "hostname").stdout == "n2\n"
    finally:
        cluster_sh(*dir_of, "down")
    # On a busy machine the command ends a moment before the last process that it has told to end.
    eventually(lambda: not left(folder), "what was started has ended")
    assert cluster_sh(*dir_of, "status").stderr.startswith(f"cannot find a cluster in {folder}")
