"""Shares whose limit a cgroup enforces, as people meet them: `migctl run` on a GPU without MIG and a driver of r615."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters import processes
from support.agent import GENEROUS_SECONDS, Agent, eventually

L40S = "l40s:1,driver=615.71"
FULL_MIB = 3815
"""What 4G are."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can limit memory")


@pytest.fixture
def node(folder: Path) -> Iterator[Agent]:
    with Agent(folder, L40S) as running:
        yield running


def cgroups(node: Agent) -> list[Path]:
    """The cgroups of shares."""
    return list((node.simulator.host_root / "sys/fs/cgroup").glob("mig-agent-*/*/"))


def run(node: Agent, *arguments: str, script: str) -> subprocess.Popen[str]:
    """`migctl run` of a script that finds the simulated machine's programs."""
    path = f"{node.simulator.host_root / 'usr/bin'}:{os.environ['PATH']}"
    return node.begin("run", "--gpu-memory", "4G", *arguments, "--", "env", f"PATH={path}", "sh", "-c", script)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, errors = process.communicate(timeout=2 * GENEROUS_SECONDS)
    return process.returncode, out.splitlines(), errors


def is_clean(node: Agent) -> None:
    """Nothing is left of any share."""
    eventually(lambda: not cgroups(node), "its cgroup is removed")
    assert not node.simulator.leaked_guarantees()
    eventually(lambda: [each["profile"] for each in node.instances()] == ["whole"], "the GPU is whole again")


def test_a_command_and_what_it_starts_get_no_more_than_the_limit(node: Agent) -> None:
    script = "simulated-cuda info alloc=3G alloc=1G; sh -c 'simulated-cuda alloc=4G'; exit 7"
    code, out, errors = ended(run(node, "-o", "json", script=script))
    assert code == 7, errors
    assert out[1:4] == [
        f"info: free {FULL_MIB - 512} MiB, total {FULL_MIB} MiB",
        "alloc=3G: ok",
        "alloc=1G: CUDA_ERROR_OUT_OF_MEMORY (2)",
    ]
    assert out[5:] == ["alloc=4G: CUDA_ERROR_OUT_OF_MEMORY (2)"]
    is_clean(node)
    assert " ended: released by root" in node.migctl("events").stdout, "and not: its process has ended"


def test_shares_outlive_the_agent_and_migctl_ends_what_it_has_started(node: Agent) -> None:
    """The limit holds while the agent is down; a migctl that is killed leaves neither a process nor a cgroup."""
    with run(node, script="simulated-cuda alloc=3G sleep=1000") as process:
        lives_on(node, process)
    is_clean(node)


def lives_on(node: Agent, process: subprocess.Popen[str]) -> None:
    (cgroup,) = eventually(lambda: [each for each in cgroups(node) if used_mib(node)], "the command has memory")
    node.restart_after_crash()
    assert cgroups(node) == [cgroup]
    (lease,) = node.ask("status")["leases"]
    (device,) = lease["devices"]
    assert device["memory_mib"] == FULL_MIB
    members = [int(each) for each in (cgroup / "cgroup.procs").read_text().split()]
    assert len(members) >= 2, "the process that starts the command, and the command"
    process.send_signal(signal.SIGKILL)
    process.wait()
    eventually(lambda: not any(processes.started(each) for each in members), "all of it has ended")


def test_a_command_whose_time_is_over_may_save_its_work(node: Agent) -> None:
    """It gets SIGTERM from migctl, and the agent waits with SIGKILL."""
    script = "trap 'sleep 0.3; echo saved; exit 3' TERM; sleep 1000 & wait"
    code, out, errors = ended(run(node, "--ttl", "1s", script=script))
    assert (code, out) == (124, ["saved"]), errors
    is_clean(node)


def used_mib(node: Agent) -> int:
    return sum(each["used_mib"] or 0 for each in node.simulator.machine()["gpus"][0]["processes"])


def test_a_request_without_a_process_takes_mps(node: Agent) -> None:
    """That process of the user which only says how long the lease lasts is never moved: its share would kill it."""
    with subprocess.Popen(["sleep", "1000"]) as own:
        for arguments in ((), ("--pid", str(own.pid))):
            answer = json.loads(node.migctl("request", "--gpu-memory", "4G", *arguments, "-o", "json").stdout)
            assert "CUDA_MPS_PIPE_DIRECTORY" in answer["env"]
            node.migctl("release", answer["lease"])
            assert own.poll() is None
        own.kill()
    assert not cgroups(node)
    assert "share" in node.migctl("run", "--gpu-memory", "4G", "--dry-run").stdout
