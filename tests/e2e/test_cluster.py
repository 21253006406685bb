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
        with pytest.raises(ClusterError, match=r"(?s)^cannot .*etcd ended with 3.*the moon is in the way"):
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
