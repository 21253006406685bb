"""Every kind of request, over real sockets to a real agent: made ready, asked, asked again after a crash, undone."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from mig_agent.adapters.host import Host
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.agent import GENEROUS_SECONDS, eventually
from support.nursery import ForkedAgent

GPUS = "a100-40gb:1,a30:1,h100-80gb:1:off"
CREATE_COMPUTE = "nvmlGpuInstanceCreateComputeInstance"
UNKNOWN = 999


@dataclass(frozen=True)
class Answered:
    """What a client was told of a lease."""

    lease: str
    token: str
    devices: tuple[tuple[int, int, str], ...]
    """GPU, GPU instance (-1 for a whole GPU) and UUID of each."""
    request: str


class World:
    """One agent, restarted as often as it dies, and what its clients remember."""

    def __init__(self, agent: ForkedAgent) -> None:
        self.agent = agent
        self.standing: list[Answered] = []
        """Leases that nobody touches: they stand whatever happens."""
        self.foreign: set[tuple[int, int]] = set()
        """GPU and GPU instance of what somebody else made, and nobody may touch."""
        self._stack = contextlib.ExitStack()

    # Talking

    def connect(self) -> None:
        """New connections, for an agent that has just begun to serve."""
        self._stack.close()
        options = (("grpc.use_local_subchannel_pool", 1),)
        channels = [
            self._stack.enter_context(grpc.insecure_channel(address, options=options))
            for address in (self.agent.address, f"unix://{self.agent.folder}/admin.sock")
        ]
        self.users: Any = PartitionManagerStub(channels[0])
        self.admins: Any = PartitionManagerStub(channels[1])

    def close(self) -> None:
        self._stack.close()

    def acquire(self, *wants: pb.Want, request: str = "", gpu: str = "") -> Answered:
        message = self.request(*wants, request=request, gpu=gpu)
        stream = self.users.Acquire(pb.AcquireRequest(request=message), timeout=GENEROUS_SECONDS)
        return told(list(stream)[-1].granted)

    @staticmethod
    def request(*wants: pb.Want, request: str = "", gpu: str = "") -> pb.Request:
        holder = pb.Holder(tenant="team", name="alice")
        gpus = [gpu] if gpu else []
        return pb.Request(wants=wants, request_id=request or uuid.uuid4().hex, holder=holder, gpus=gpus)

    def release(self, lease: Answered) -> None:
        self.users.Release(pb.ReleaseRequest(lease=lease.lease, token=lease.token), timeout=GENEROUS_SECONDS)

    def renew(self, lease: Answered, seconds: float | None) -> pb.Lease:
        message = pb.RenewRequest(lease=lease.lease, token=lease.token, ttl_seconds=seconds)
        renewed: pb.Lease = self.users.Renew(message, timeout=GENEROUS_SECONDS).lease
        return renewed

    def status(self) -> pb.StatusResponse:
        status: pb.StatusResponse = self.users.Status(pb.StatusRequest(), timeout=GENEROUS_SECONDS)
        return status

    def settle(self) -> None:
        """Returns when all that was under way is on the disk: a commit comes after those before it."""
        self.renew(self.standing[0], None)

    # Looking

    def leases(self) -> dict[str, Answered]:
        """The leases that stand, by request; without their tokens."""
        return {
            each.request_id: Answered(each.id, "", _devices(each), each.request_id) for each in self.status().leases
        }

    def check(self) -> None:
        """The records, the hardware and the promises agree, and nothing is half there."""
        status = self.status()
        there = {
            (index, instance["id"]): [each["id"] for each in instance["compute"]]
            for index, gpu in enumerate(self.agent.simulator.machine()["gpus"])
            for instance in gpu["instances"]
        }
        assert all(len(compute) == 1 for compute in there.values()), f"half made: {there}"
        known = [each for gpu in status.gpus for each in gpu.instances]
        shown = {(each.gpu_index, each.gpu_instance_id) for each in known if each.HasField("gpu_instance_id")}
        assert shown == set(there)
        busy = {each.generation: each.lease for each in known if each.state == pb.INSTANCE_STATE_LEASED}
        others = {(each.gpu_index, each.gpu_instance_id): each.state for each in known if each.generation not in busy}
        assert {where for where, state in others.items() if state != pb.INSTANCE_STATE_IDLE} == self.foreign
        assert all(others[where] == pb.INSTANCE_STATE_FOREIGN for where in self.foreign)
        held = [(device.generation, lease.id) for lease in status.leases for device in lease.devices]
        assert dict(held) == busy
        assert len(dict(held)) == len(held), "given twice"
        stand = self.leases()
        places = [device for each in stand.values() for device in each.devices]
        assert len(set(places)) == len(places), "given twice"
        for promised in self.standing:
            assert stand[promised.request].lease == promised.lease
            assert stand[promised.request].devices == promised.devices
        assert {node for each in stand.values() for node in self._nodes(each)} <= self._nodes_there()
        modes = [(gpu.mig.current, gpu.mig.pending) for gpu in status.gpus]
        machine = self.agent.simulator.machine()
        assert modes == [(gpu["mig_current"], gpu["mig_pending"]) for gpu in machine["gpus"]]

    def undo(self) -> None:
        """Back to the leases that stand, as an administrator does it."""
        for request, lease in self.leases().items():
            if request not in {each.request for each in self.standing}:
                self.admins.Release(pb.ReleaseRequest(lease=lease.lease), timeout=GENEROUS_SECONDS)
        for gpu in self.status().gpus:
            if gpu.state == pb.GPU_STATE_CORDONED:
                self.admins.Cordon(pb.CordonRequest(gpu=str(gpu.index), uncordon=True), timeout=GENEROUS_SECONDS)
        self.mode(2, on=False)
        self.admins.Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)
        left = [
            (index, instance["id"])
            for index, gpu in enumerate(self.agent.simulator.machine()["gpus"])
            for instance in gpu["instances"]
        ]
        promised = [device[:2] for each in self.standing for device in each.devices]
        assert sorted(left) == sorted([*promised, *self.foreign]), "leaked"
        # Nodes of instances that are gone are harmless and stay; here they go, so that the next try makes them.
        needed = {node for each in self.standing for node in self._nodes(each)}
        for node in self._nodes_there() - needed:
            node.unlink()

    def _nodes(self, lease: Answered) -> list[Path]:
        """The device nodes without which its instances cannot be used."""
        root = self.agent.simulator.host_root
        host = Host(root, simulated=True)
        pairs = [host.caps_nodes(gpu, instance, 0) for gpu, instance, _ in lease.devices if instance >= 0]
        return [root / node.path[1:] for pair in pairs for node in pair]

    def _nodes_there(self) -> set[Path]:
        return set((self.agent.simulator.host_root / "dev/nvidia-caps").iterdir())

    def mode(self, gpu: int, *, on: bool) -> None:
        target = pb.MIG_MODE_TARGET_ENABLED if on else pb.MIG_MODE_TARGET_DISABLED
        self.admins.SetMigMode(pb.SetMigModeRequest(gpu=str(gpu), mode=target), timeout=GENEROUS_SECONDS)


def told(granted: pb.Granted) -> Answered:
    return Answered(granted.lease.id, granted.token, _devices(granted.lease), granted.lease.request_id)


def _devices(lease: pb.Lease) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (each.gpu_index, each.gpu_instance_id if each.HasField("gpu_instance_id") else -1, each.uuid)
        for each in lease.devices
    )


def profile(*names: str) -> tuple[pb.Want, ...]:
    return tuple(pb.Want(profile=name) for name in names)


@dataclass
class Kind:
    """A kind of request. One object serves one try: from its preparation to the retry after the crash."""

    world: World
    request: str = field(default_factory=lambda: uuid.uuid4().hex)
    answer: Answered | None = None
    """The last one, for `check`."""

    def prepare(self) -> None:
        """What has to be there."""

    def ask(self) -> Answered | None:
        """What is to be interrupted, and what the client does again afterwards; the lease that it is answered."""

    def again(self) -> Answered | None:
        """What the client does when the agent is back."""
        return self.ask()

    def check(self) -> None:
        """What holds then."""


class Taking(Kind):
    """Kinds that are answered with a lease."""

    wants: tuple[pb.Want, ...] = profile("1g.5gb")
    gpu = "0"

    def ask(self) -> Answered | None:
        return self.world.acquire(*self.wants, request=self.request, gpu=self.gpu)

    def check(self) -> None:
        assert self.answer is not None
        assert len(self.answer.devices) == len(self.wants)
        assert self.world.leases()[self.request].lease == self.answer.lease

    def leave_idle(self, *wants: pb.Want) -> None:
        """An idle instance for each, side by side."""
        taken = [self.world.acquire(want, gpu=self.gpu) for want in wants]
        for each in taken:
            self.world.release(each)


class Create(Taking):
    """Nothing fits: a new instance."""


class Reuse(Taking):
    """An idle instance fits."""

    def prepare(self) -> None:
        self.leave_idle(*self.wants)


class Victims(Taking):
    """Idle instances have to go first."""

    wants = profile("4g.24gb")
    gpu = "1"

    def prepare(self) -> None:
        self.leave_idle(*profile("2g.12gb", "1g.6gb", "1g.6gb"))


class Several(Taking):
    """Unlike devices on two GPUs, all or nothing, one of them in the place of an idle instance."""

    wants = profile("2g.10gb", "2g.12gb", "1g.5gb")
    gpu = ""

    def prepare(self) -> None:
        self.gpu = "1"
        self.leave_idle(*profile("1g.6gb", "1g.6gb", "1g.6gb", "1g.6gb"))
        self.gpu = ""


class WholeGpu(Taking):
    """A GPU without MIG mode."""

    wants = (pb.Want(whole_gpu=True),)
    gpu = "2"


class Undone(Taking):
    """The compute instance cannot be made: the GPU instance goes again, and another place is taken."""

    def prepare(self) -> None:
        self.world.agent.simulator.fail(CREATE_COMPUTE, UNKNOWN)


class Waited(Taking):
    """Another has it: the request waits, and is served when that lease is released."""

    wants = profile("4g.24gb")
    gpu = "1"

    def prepare(self) -> None:
        self.before = self.world.acquire(*self.wants, gpu=self.gpu)

    def ask(self) -> Answered | None:
        message = self.world.request(*self.wants, request=self.request, gpu=self.gpu)
        message.wait_seconds = GENEROUS_SECONDS
        stream = self.world.users.Acquire(pb.AcquireRequest(request=message), timeout=GENEROUS_SECONDS)
        first = next(stream)
        self.world.release(self.before)  # once more where it has ended: that is no error
        return told(list(stream)[-1].granted if first.HasField("queued") else first.granted)


@dataclass
class Hold(Taking):
    """A lease that lives as long as its stream."""

    streams: list[Any] = field(default_factory=list)

    def ask(self) -> Answered | None:
        message = pb.HoldRequest(request=self.world.request(*self.wants, request=self.request, gpu=self.gpu))
        # All are kept: a stream that nobody has any more is cancelled, and its lease ends.
        self.streams.append(self.world.users.Hold(message, timeout=GENEROUS_SECONDS))
        return told(next(self.streams[-1]).granted)

    def check(self) -> None:
        super().check()
        self.let_go()

    def let_go(self) -> None:
        for stream in self.streams:
            stream.cancel()
        eventually(lambda: self.request not in self.world.leases(), "the lease ends with its stream")


class HoldEnds(Hold):
    """The stream of a held lease is closed by its client."""

    def prepare(self) -> None:
        held = super().ask()
        assert held is not None
        self.held = held

    def ask(self) -> Answered | None:
        self.let_go()
        return None

    def again(self) -> Answered | None:
        self.world.release(self.held)
        return None

    def check(self) -> None:
        assert self.request not in self.world.leases()


class OnALease(Kind):
    """Kinds that concern a lease that is there."""

    def prepare(self) -> None:
        self.lease = self.world.acquire(*profile("1g.5gb"), gpu="0")


class Release(OnALease):
    def ask(self) -> Answered | None:
        self.world.release(self.lease)
        return None

    def check(self) -> None:
        assert self.lease.request not in self.world.leases()


class Renew(OnALease):
    def ask(self) -> Answered | None:
        self.world.renew(self.lease, 5000.0)
        return None

    def check(self) -> None:
        stands = {each.id: each for each in self.world.status().leases}
        assert stands[self.lease.lease].HasField("expires_at")


class Reclaim(Taking):
    def prepare(self) -> None:
        self.leave_idle(*profile("1g.5gb", "2g.10gb"))

    def ask(self) -> Answered | None:
        self.world.admins.Reclaim(pb.ReclaimRequest(), timeout=GENEROUS_SECONDS)
        return None

    def check(self) -> None:
        states = {each.state for gpu in self.world.status().gpus for each in gpu.instances if gpu.index == 0}
        assert states <= {pb.INSTANCE_STATE_LEASED}


class Cordon(Kind):
    def ask(self) -> Answered | None:
        self.world.admins.Cordon(pb.CordonRequest(gpu="1", reason="fan"), timeout=GENEROUS_SECONDS)
        return None

    def check(self) -> None:
        assert self.world.status().gpus[1].state == pb.GPU_STATE_CORDONED
        assert "fan" in self.world.status().gpus[1].reason


class ModeOn(Kind):
    def ask(self) -> Answered | None:
        self.world.mode(2, on=True)
        return None

    def check(self) -> None:
        assert self.world.status().gpus[2].state == pb.GPU_STATE_READY
        self.world.acquire(*profile("1g.10gb"), gpu="2")


class ModeOff(Taking):
    """With an idle instance, that is destroyed first."""

    gpu = "2"

    def prepare(self) -> None:
        self.world.mode(2, on=True)
        self.leave_idle(*profile("1g.10gb"))

    def ask(self) -> Answered | None:
        self.world.mode(2, on=False)
        return None

    def check(self) -> None:
        assert self.world.status().gpus[2].state == pb.GPU_STATE_WHOLE
        self.world.acquire(pb.Want(whole_gpu=True), gpu="2")


KINDS: dict[str, type[Kind]] = {
    "create": Create,
    "reuse": Reuse,
    "victims destroyed": Victims,
    "several devices": Several,
    "whole GPU": WholeGpu,
    "waited for": Waited,
    "creation undone": Undone,
    "hold": Hold,
    "hold ended": HoldEnds,
    "release": Release,
    "renew": Renew,
    "reclaim": Reclaim,
    "cordon": Cordon,
    "MIG mode on": ModeOn,
    "MIG mode off": ModeOff,
}


@contextlib.contextmanager
def world(agent: ForkedAgent) -> Iterator[World]:
    """A world whose agent serves and whose two leases stand; the agent is killed at the end."""
    made = World(agent)
    with agent:
        try:
            made.connect()
            made.standing = [made.acquire(*profile("1g.5gb"), gpu="0") for _ in range(2)]
            made.undo()
            yield made
        finally:
            made.close()
