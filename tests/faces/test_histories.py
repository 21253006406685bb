"""Random histories through the real faces: clients over gRPC, an agent process that is killed and started again.

Beside `tests/engine/test_histories.py`, which does the same within one process on every GPU model and is much faster.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.simulator import Code, SimulatorError
from support.acquire import asking
from support.agent import GENEROUS_SECONDS, eventually
from support.figures import Figure
from support.world import CLIENTS, GRACE_SECONDS, PATIENCE, World, request_for

EXAMPLES = int(os.environ.get("PROCESS_HISTORIES", "20"))
"""More of them by hand: PROCESS_HISTORIES=500."""
STEPS = 30
SECONDS_EACH = 60

PROFILES = ["1g.5gb", "1g.10gb", "2g.10gb", "2g.20gb", "3g.20gb", "3g.40gb", "7g.40gb", "7g.80gb", "1g.5gb+me"]
CALLS = [
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceDestroy",
    "nvmlComputeInstanceDestroy",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetMigMode",
]
HANGING = CALLS[:4]
CODES = [Code.INSUFFICIENT_RESOURCES, Code.IN_USE, Code.UNKNOWN, Code.NOT_FOUND, Code.INVALID_ARGUMENT, Code.TIMEOUT]
PLACES = [
    f"{when}-{what}"
    for when in ("before", "after")
    for what in ("commit", "device-node", "ledger-checkpoint", *HANGING)
]

CLIENT = st.integers(0, CLIENTS - 1)
WANTS = st.lists(st.sampled_from(PROFILES), min_size=1, max_size=3)
NUMBER = st.integers(0, 100)


class Histories(RuleBasedStateMachine):
    """One history; every rule is a step.

    No rule has a precondition: what is drawn must not depend on what has come of the steps so far, since that differs
    from run to run where processes are killed, and hypothesis would find its own drawing flaky. A step for which there
    is nothing to do does nothing.
    """

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self._open = ExitStack()
        folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="mig-"))
        self.world = World(Path(folder))
        self._open.callback(self.world.close)

    @invariant()
    def all_agree(self) -> None:
        type(self).steps += 1
        self.world.check()

    def teardown(self) -> None:
        with self._open:
            self.world.come_to_rest()
            assert "Traceback" not in self.world.agent.log(), self.world.agent.log()

    # Clients

    @rule(client=CLIENT, wants=WANTS)
    def acquire(self, client: int, wants: list[str]) -> None:
        self.world.acquire(client, request_for(wants))

    @rule(each=st.lists(WANTS, min_size=2, max_size=5))
    def acquire_together(self, each: list[list[str]]) -> None:
        self.world.acquire_together([request_for(wants) for wants in each])

    @rule(client=CLIENT, wants=WANTS)
    def give_up(self, client: int, wants: list[str]) -> None:
        self.world.give_up(client, request_for(wants))

    @rule(number=NUMBER)
    def ask_again(self, number: int) -> None:
        waiting = sorted(self.world.in_doubt)
        if waiting:
            self.world.ask_again(waiting[number % len(waiting)])

    @rule(client=CLIENT, number=NUMBER)
    def repeat(self, client: int, number: int) -> None:
        """The same request again: the same lease and token."""
        acquired = sorted(set(self.world.leases) - set(self.world.held))
        if acquired:
            lease = acquired[number % len(acquired)]
            assert self.world.acquire(client, self.world.leases[lease].request) == lease

    @rule(number=NUMBER)
    def release(self, number: int) -> None:
        acquired = sorted(set(self.world.leases) - set(self.world.held))
        if acquired:
            self.world.release(acquired[number % len(acquired)])

    @rule(client=CLIENT, wants=WANTS)
    def hold(self, client: int, wants: list[str]) -> None:
        self.world.hold(client, request_for(wants))

    @rule(number=NUMBER)
    def let_go(self, number: int) -> None:
        held = sorted(self.world.held)
        if held:
            self.world.let_go(held[number % len(held)])

    @rule(sooner=st.booleans())
    def kill_a_client(self, sooner: bool) -> None:
        """`migctl run` as a process, killed before or after it has got something."""
        self.world.agent.control.stand_by()  # else the next agent gives it a minute to be back
        running = self.world.agent.begin("run", "--gpu-memory", "4G", "--name", "doomed", "--", "sleep", "600")
        if not sooner:
            eventually(lambda: self._doomed() or running.poll() is not None, "it holds a lease or was refused")
        running.kill()
        running.communicate(timeout=GENEROUS_SECONDS)
        eventually(lambda: not self._doomed(), "what a killed client held has ended", GRACE_SECONDS)

    def _doomed(self) -> bool:
        return any(each.holder.name == "doomed" for each in self.world.status().leases)

    # The agent

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 3))
    def dies_at(self, place: str, count: int) -> None:
        """Some step from now on kills it."""
        self.world.agent.control.arm(place, count)

    @rule()
    def kill(self) -> None:
        self.world.agent.kill()
        self.world.come_back()

    @rule()
    def restart(self) -> None:
        self.world.agent.stop()
        self.world.come_back()

    @rule(keep=st.booleans())
    def reboot(self, keep: bool) -> None:
        """All is gone: leases end and say why. On the H100 MIG mode may be lost as well, and is turned on again."""
        world = self.world
        ended = list(world.leases.values())
        was_held = set(world.held)
        world.agent.kill()
        for stream in world.held.values():
            stream.cancel()
        for known in (world.leases, world.held, world.foreign, world.pids):
            known.clear()
        world.agent.simulator.clear()
        world.agent.simulator.reboot(keep_mig_mode=keep)
        world.come_back()
        status = world.status()
        assert not status.leases
        for each in ended:
            if each.id not in was_held:
                assert world.acquire(0, each.request) == "lease-ended"
        if not keep:
            hopper = status.gpus[1]
            assert not hopper.mig.current
            if hopper.state != pb.GPU_STATE_CORDONED:  # which somebody may have done, and has its own reason
                assert hopper.state == pb.GPU_STATE_WHOLE
                assert "migctl mode enable --gpu 1" in hopper.reason
            enable = pb.SetMigModeRequest(gpu="1", mode=pb.MIG_MODE_TARGET_ENABLED)
            assert not isinstance(world.ask(lambda: world.admin.SetMigMode(enable, timeout=PATIENCE)), str)

    # Administrators, other people, the driver

    @rule(gpu=st.integers(0, 1), on=st.booleans())
    def cordon(self, gpu: int, on: bool) -> None:
        world = self.world
        message = pb.CordonRequest(gpu=str(gpu), uncordon=not on, reason="example")
        assert not isinstance(world.ask(lambda: world.admin.Cordon(message, timeout=PATIENCE)), str)

    @rule()
    def reclaim(self) -> None:
        world = self.world
        world.ask(lambda: world.admin.Reclaim(pb.ReclaimRequest(), timeout=PATIENCE))

    @rule(gpu=st.integers(0, 1), profile=st.sampled_from(PROFILES), with_compute=st.booleans())
    def create_foreign(self, gpu: int, profile: str, with_compute: bool) -> None:
        try:
            made, _ = self.world.agent.simulator.create_foreign(gpu, profile, with_compute=with_compute)
        except SimulatorError:
            return  # there is no room, or no such profile
        self.world.foreign.add((gpu, made))

    @rule(number=NUMBER)
    def destroy_somebodys(self, number: int) -> None:
        self.world.destroy(number)

    @rule(number=NUMBER, listed=st.booleans())
    def occupy(self, number: int, listed: bool) -> None:
        """A process comes to an instance; the driver lists it, or only /proc tells of it."""
        simulator = self.world.agent.simulator
        there = [where for where, _, instance in self.world.instances() if instance["compute"]]
        if there:
            gpu, instance = there[number % len(there)]
            self.world.pids.append((simulator.occupy if listed else simulator.hold)(f"{gpu}/{instance}"))

    @rule(number=NUMBER)
    def vacate(self, number: int) -> None:
        if self.world.pids:
            self.world.vacate(self.world.pids.pop(number % len(self.world.pids)))

    @rule(call=st.sampled_from(CALLS), code=st.sampled_from(CODES), nth=st.integers(1, 3))
    def driver_fails(self, call: str, code: Code, nth: int) -> None:
        self.world.agent.simulator.fail(call, code, nth=nth)

    @rule(call=st.sampled_from(HANGING), wants=WANTS)
    def driver_hangs(self, call: str, wants: list[str]) -> None:
        """Under a request that is given up; others are answered meanwhile, and the driver comes back."""
        world = self.world
        fault = world.agent.simulator.hang(call)
        request = request_for(wants)
        stream = world.users[0].Acquire(asking(request), timeout=PATIENCE)
        world.in_doubt[request.request_id] = request
        world.status()
        stream.cancel()
        if any(each["id"] == fault for each in world.agent.simulator.machine()["faults"]):
            world.agent.simulator.clear(fault)


@pytest.mark.timeout(max(600, SECONDS_EACH * EXAMPLES))
def test_histories(figure: Figure) -> None:
    class ThisRun(Histories):
        steps = 0

    phases = [Phase.explicit, Phase.reuse, Phase.generate]  # making an example smaller would take hours
    run_state_machine_as_test(
        ThisRun, settings=settings(max_examples=EXAMPLES, stateful_step_count=STEPS, phases=phases)
    )
    figure("steps of random histories through the real faces", ThisRun.steps)
