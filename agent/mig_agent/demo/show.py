"""The script of the demo, with a check of each step."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from mig_agent.core.slicemap import SliceMapBlock, SliceMapGpu, render_text
from mig_agent.demo.stage import DemoStepError, Stage
from mig_agent.migctl.printing import can_unicode, wants_color

# ruff: noqa: T201 -- the demo prints

FAILED = 1
_BY_SIGNAL = 128
_CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
_DESTROY = "nvmlGpuInstanceDestroy"
_PAUSE_SECONDS = 1.0
_WORKLOAD_SECONDS = 30.0
_WIDTH = 78
_A100, _H100, _OTHER_H100 = 0, 1, 2
_WORKLOAD = """
import os, pathlib, time
here = pathlib.Path('workload')
beats = 0
while True:
    beats += 1
    here.with_suffix('.new').write_text(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']} {beats}")
    here.with_suffix('.new').replace(here)
    time.sleep(0.05)
"""
_NEXT = """
Where to go next
  An agent of your own to play with, and in another terminal the command line:
    mig-agent serve --simulate h100-80gb:2 --state-dir /tmp/mig --listen unix:///tmp/mig/agent.sock
    export MIG_AGENT_ADDRESS=unix:///tmp/mig/agent.sock; migctl --help
  (In a checkout both are in .venv/bin.)
  To read: README.md, then docs/guide.md for researchers, docs/admin.md for administrators,
  docs/python.md and docs/api.md for programs, docs/simulator.md for the simulated GPUs.
"""


def show(*, fast: bool) -> int:
    """Play the demo; return the exit code, 0 if every step worked as described."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with Stage() as stage:
            _Script(stage, pause=0.0 if fast or not sys.stdout.isatty() else _PAUSE_SECONDS).play()
    except DemoStepError as error:
        print(f"\nNOT AS TOLD: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\nstopped; nothing is left running", file=sys.stderr)
        return _BY_SIGNAL + signal.SIGINT
    print(_NEXT)
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class _Script:
    """The script; each method is one chapter."""

    def __init__(self, stage: Stage, *, pause: float) -> None:
        self._stage = stage
        self._pause = pause

    def play(self) -> None:
        """Play all chapters in order."""
        self._narrate("An agent over three simulated GPUs: one A100-40GB (GPU 0) and two H100-80GB (GPUs 1 and 2).")
        self._stage.start_agent()
        alice = self._memory_becomes_the_smallest_profile("alice", _A100, "the A100", "1g.5gb")
        bob = self._memory_becomes_the_smallest_profile("bob", _H100, "an H100", "1g.10gb")
        carol = self._a_profile_is_passed_through()
        self._a_release_leaves_the_instance_idle(alice)
        self._the_idle_instance_serves_again(alice)
        lease, workload = self._a_workload_runs()
        self._idle_instances_gather(bob, carol)
        self._a_large_request_destroys_just_what_is_in_its_way(lease, workload)
        self._everything_ends(workload)

    def _memory_becomes_the_smallest_profile(self, name: str, gpu: int, where: str, profile: str) -> Mapping[str, Any]:
        self._narrate(
            f"4 GB on {where}, please. The smallest profile there that holds 4 GB is {profile}; it is created."
        )
        lease = self._request("--gpu-memory", "4G", "--gpu", str(gpu), "--name", name)
        self._show_map(gpu)
        device = lease["devices"][0]
        self._check((device["profile"], device["gpu_index"]) == (profile, gpu), f"4G on {where} is a {profile}")
        return lease

    def _a_profile_is_passed_through(self) -> Mapping[str, Any]:
        self._narrate("If you know the profile, name it. Only the A100 has a 2g.10gb.")
        lease = self._request("--mig-profile", "2g.10gb", "--name", "carol")
        self._show_map(_A100)
        device = lease["devices"][0]
        self._check((device["profile"], device["gpu_index"]) == ("2g.10gb", _A100), "2g.10gb is passed through")
        return lease

    def _a_release_leaves_the_instance_idle(self, lease: Mapping[str, Any]) -> None:
        self._narrate("alice's lease is released. Its instance stays, idle, for whoever comes next.")
        self._stage.migctl("release", lease["lease"])
        self._show_map(_A100)
        uuid = lease["devices"][0]["uuid"]
        self._check(self._instance(uuid)["state"] == "idle", "the released instance is idle and still there")

    def _the_idle_instance_serves_again(self, former: Mapping[str, Any]) -> None:
        self._narrate("The next request that it fits gets it at once: nothing is created.")
        before = self._stage.nvml_calls(_CREATE)
        device = self._request("--gpu-memory", "4500M", "--gpu", str(_A100), "--name", "dave")["devices"][0]
        self._show_map(_A100)
        same = device["uuid"] == former["devices"][0]["uuid"] and device["reused"]
        created = self._stage.nvml_calls(_CREATE) - before
        self._check(same and created == 0, "the idle instance served the next request, with no NVML create")

    def _a_workload_runs(self) -> tuple[Mapping[str, Any], subprocess.Popen[bytes]]:
        self._narrate(
            "erin's workload starts on GPU 2. `migctl run` takes a device, runs the command on it, releases it."
        )
        known = self._lease_ids()
        arguments = ("run", "--gpu-memory", "20G", "--gpu", str(_OTHER_H100), "--name", "erin", "--")
        workload = self._stage.run_in_background(
            *arguments, sys.executable, "-c", _WORKLOAD, shown=(*arguments, "python", "train.py")
        )
        pid, uuid, _ = self._heartbeat(workload)
        # A real driver would see the process by itself.
        self._stage.simulator("occupy", uuid, "--pid", str(pid))
        (lease,) = (each for each in self._stage.status()["leases"] if each["lease"] not in known)
        self._show_map(_OTHER_H100)
        self._check(lease["devices"][0]["uuid"] == uuid, "the workload has its device in CUDA_VISIBLE_DEVICES")
        return lease, workload

    def _idle_instances_gather(self, *leases: Mapping[str, Any]) -> None:
        self._narrate(
            "Idle instances gather: somebody takes a 3g.40gb on GPU 1 and releases it, and so do bob and carol."
        )
        third = self._request("--mig-profile", "3g.40gb", "--gpu", str(_H100), "--name", "frank")
        self._stage.migctl("release", *(lease["lease"] for lease in (third, *leases)))
        self._show_map(_A100, _H100)
        idle = sorted(each["profile"] for each in self._instances_of(_H100) if each["state"] == "idle")
        self._check(idle == ["1g.10gb", "3g.40gb"], "two idle instances stand on GPU 1")

    def _a_large_request_destroys_just_what_is_in_its_way(
        self, lease: Mapping[str, Any], workload: subprocess.Popen[bytes]
    ) -> None:
        self._narrate("Now a whole H100 as one instance. The plan names the idle instances in its way, and no others.")
        self._stage.migctl("plan", "--mig-profile", "7g.80gb")
        destroyed = self._stage.nvml_calls(_DESTROY)
        _, _, beats = self._heartbeat(workload)
        device = self._request("--mig-profile", "7g.80gb", "--name", "grace")["devices"][0]
        destroyed = self._stage.nvml_calls(_DESTROY) - destroyed
        self._stage.migctl("status")
        on_gpu = [each["profile"] for each in self._instances_of(_H100)]
        self._check(
            device["gpu_index"] == _H100 and destroyed == len(("1g.10gb", "3g.40gb")) and on_gpu == ["7g.80gb"],
            "the 7g.80gb took GPU 1 and destroyed just the two idle instances in its way",
        )
        idle = [each["profile"] for each in self._instances_of(_A100) if each["state"] == "idle"]
        self._check(idle == ["2g.10gb"], "the idle 2g.10gb on the A100 was not in its way and is still there")
        deadline = time.monotonic() + _WORKLOAD_SECONDS
        while self._heartbeat(workload)[2] <= beats and time.monotonic() < deadline:
            time.sleep(0.05)
        _, uuid, now = self._heartbeat(workload)
        leased = self._instance(uuid)["lease"] == lease["lease"]
        self._check(leased and now > beats, "the workload on GPU 2 went on undisturbed")

    def _everything_ends(self, workload: subprocess.Popen[bytes]) -> None:
        self._narrate("The workload is stopped, and its lease ends with it. Then the agent is stopped with SIGTERM.")
        workload.terminate()
        workload.wait(_WORKLOAD_SECONDS)
        leased = [each for each in self._instances_of(_OTHER_H100) if each["state"] == "leased"]
        self._show_map(_OTHER_H100)
        self._check(not leased, "the end of `migctl run` released its lease")
        self._check(self._stage.stop_agent() == 0, "the agent stopped cleanly")

    # The pieces

    def _narrate(self, text: str) -> None:
        time.sleep(self._pause)
        print("\n" + textwrap.fill(text, _WIDTH), flush=True)

    def _check(self, right: bool, words: str) -> None:  # noqa: FBT001 -- reads as an assertion
        if not right:
            raise DemoStepError(f"{words}\n{self._stage.log_tail()}")
        print(f"ok: {words}", flush=True)

    def _lease_ids(self) -> set[str]:
        return {lease["lease"] for lease in self._stage.status()["leases"]}

    def _request(self, *arguments: str) -> Mapping[str, Any]:
        """Make a request and return the new lease."""
        known = self._lease_ids()
        self._stage.migctl("request", *arguments)
        new = [lease for lease in self._stage.status()["leases"] if lease["lease"] not in known]
        if len(new) != 1:
            raise DemoStepError(f"there are {len(new)} new leases\n{self._stage.log_tail()}")
        found: Mapping[str, Any] = new[0]
        return found

    def _show_map(self, *gpus: int) -> None:
        """Print the slices of these GPUs, as `migctl status` draws them."""
        status = self._stage.status()
        for index in gpus:
            print(render_text(_map_of(status["gpus"][index]), _WIDTH, color=wants_color(), unicode=can_unicode()))
        sys.stdout.flush()

    def _instances_of(self, gpu: int) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = self._stage.status()["gpus"][gpu]["instances"]
        return found

    def _instance(self, uuid: str) -> Mapping[str, Any]:
        for gpu in self._stage.status()["gpus"]:
            for instance in gpu["instances"]:
                if instance["uuid"] == uuid:
                    found: Mapping[str, Any] = instance
                    return found
        raise DemoStepError(f"{uuid} is gone\n{self._stage.log_tail()}")

    def _heartbeat(self, workload: subprocess.Popen[bytes]) -> tuple[int, str, int]:
        """Return the workload's pid, the device that it sees, and its number of heartbeats."""
        path = self._stage.folder / "workload"
        deadline = time.monotonic() + _WORKLOAD_SECONDS
        while not path.exists():
            if workload.poll() is not None or time.monotonic() > deadline:
                raise DemoStepError(f"the workload does not run\n{self._stage.log_tail()}")
            time.sleep(0.02)
        pid, uuid, beats = path.read_text(encoding="utf-8").split()
        if workload.poll() is not None:
            raise DemoStepError(f"the workload has ended\n{self._stage.log_tail()}")
        return int(pid), uuid, int(beats)


def _map_of(gpu: Mapping[str, Any]) -> SliceMapGpu:
    return SliceMapGpu(
        title=f"GPU {gpu['index']}: {gpu['model']}",
        memory_slices=gpu["memory_slices"],
        blocks=tuple(
            SliceMapBlock(
                start=each["placement"]["start"],
                size=each["placement"]["size"],
                label=each["profile"],
                state=each["state"],
                holder=each["holder"] or "",
            )
            for each in gpu["instances"]
        ),
        unusable=frozenset(gpu["unusable_slices"]),
    )
