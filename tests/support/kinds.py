"""Every kind of request, over real sockets to a real agent: made ready, asked, asked again after a crash, undone."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.acquire import confirming
from support.agent import GENEROUS_SECONDS, eventually
from support.restarted import Answered, World, profile, told

CREATE_COMPUTE = "nvmlGpuInstanceCreateComputeInstance"
UNKNOWN = 999


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

    def back(self) -> None:
        """What is done first when the agent is back, so that everything can be looked at."""

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
        stream = confirming(self.world.users, message, GENEROUS_SECONDS)
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


class Share(Taking):
    """A part of the memory of a GPU without MIG mode, which an MPS daemon of its own enforces."""

    wants = (pb.Want(memory_bytes=4 << 30),)
    gpu = "2"

    def back(self) -> None:
        self.world.shares_settle()

    def again(self) -> Answered | None:
        self.world.shares_settle()  # the share of a former try is not in the way, and leaves nothing
        return super().again()

    def check(self) -> None:
        super().check()
        assert len(self.world.shares_settle()) == 1


class ShareEnds(Kind):
    """The daemon goes after the lease."""

    def prepare(self) -> None:
        self.lease = self.world.acquire(*Share.wants, gpu=Share.gpu)

    def ask(self) -> Answered | None:
        self.world.release(self.lease)
        self.world.shares_settle()
        return None

    def back(self) -> None:
        self.world.shares_settle()

    def check(self) -> None:
        assert self.lease.request not in self.world.leases()
        assert not self.world.shares_settle()


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


class Drain(OnALease):
    """Its deadline is recorded with it: what is leased there does not end before, whenever the agent dies."""

    def ask(self) -> Answered | None:
        drain = pb.DrainRequest(gpus=["0", "1"], deadline_seconds=3600, reason="fan")
        self.world.admins.Drain(drain, timeout=GENEROUS_SECONDS)
        return None

    def back(self) -> None:
        """It was recorded for both GPUs with its deadline, or not at all."""
        assert self.lease.request in self.world.leases()
        gpus = self.world.status().gpus[:2]
        for gpu in gpus:
            assert gpu.draining == gpu.HasField("drain_deadline") == (gpu.state == pb.GPU_STATE_CORDONED)
        assert len({gpu.draining for gpu in gpus}) == 1

    def check(self) -> None:
        assert all(gpu.draining for gpu in self.world.status().gpus[:2])
        self.world.admins.Drain(pb.DrainRequest(undrain=True), timeout=GENEROUS_SECONDS)
        assert not any(gpu.draining for gpu in self.world.status().gpus)


class Pause(OnALease):
    """The driver is let go; a release in between is recorded all the same."""

    def ask(self) -> Answered | None:
        answer = self.world.admins.Pause(pb.PauseRequest(reason="driver"), timeout=GENEROUS_SECONDS)
        assert answer.driver_released
        return None

    def back(self) -> None:
        """Whether the pause was recorded or not: nothing is lost, and a lease can be given back."""
        assert self.lease.request in self.world.leases()
        self.world.release(self.lease)
        self.resume()

    def check(self) -> None:
        (reason,) = self.world.status().paused
        assert reason.endswith(": driver")
        self.resume()

    def resume(self) -> None:
        self.world.admins.Resume(pb.ResumeRequest(), timeout=GENEROUS_SECONDS)
        assert not self.world.status().paused


class Resume(Pause):
    """The driver is taken up again, and all is read."""

    def prepare(self) -> None:
        super().prepare()
        super().ask()

    def ask(self) -> Answered | None:
        self.resume()
        return None

    def check(self) -> None:
        assert not self.world.status().paused
        self.world.acquire(*profile("1g.5gb"), gpu="0")


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
    "share": Share,
    "share ended": ShareEnds,
    "release": Release,
    "renew": Renew,
    "reclaim": Reclaim,
    "cordon": Cordon,
    "drain": Drain,
    "pause": Pause,
    "resume": Resume,
    "MIG mode on": ModeOn,
    "MIG mode off": ModeOff,
}
