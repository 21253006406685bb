"""What an agent may find when it starts, and its end: made ready on the disk, and looked at when it serves."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.simulator import STATE_FILE
from support.acquire import asking
from support.agent import eventually
from support.kinds import CREATE_COMPUTE, Create
from support.restarted import World, profile

DESTROY = "nvmlGpuInstanceDestroy"
INIT = "nvmlInitWithFlags"
DRIVER_NOT_LOADED = 9
WAS = b"this was a ledger, once"
_SNAPSHOT = "kept"


@dataclass
class Start:
    """One kind of start. The world has two leases that stand, and its agent is dead."""

    world: World

    @property
    def state_dir(self) -> Path:
        return self.world.agent.state_dir

    def prepare(self) -> None:
        """Once: the state directory as the agent is to find it."""

    def keep(self) -> None:
        """Remembers the state directory."""
        # Sockets cannot be copied; those of the agent itself are in a folder of theirs.
        ignore = shutil.ignore_patterns("sockets")
        shutil.copytree(self.state_dir, self.world.agent.folder / _SNAPSHOT, symlinks=True, ignore=ignore)

    def restore(self) -> None:
        """Before each try: the state directory as it was; dead sockets stay where they are."""
        shutil.rmtree(self.state_dir, ignore_errors=True)
        shutil.copytree(self.world.agent.folder / _SNAPSHOT, self.state_dir, symlinks=True)

    def check(self) -> None:
        """What holds when it serves at last."""
        self.world.check()
        self.world.undo()


class First(Start):
    """Nothing is there: no folder, no ledger, no key, no GPU that was ever used."""

    def restore(self) -> None:
        shutil.rmtree(self.state_dir, ignore_errors=True)
        for path in self.world.agent.folder.glob("*.sock*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def check(self) -> None:
        self.world.standing = [self.world.acquire(*profile("1g.5gb"), gpu="0")]
        super().check()
        self.world.standing = []


class AfterACrash(Start):
    """One GPU instance is half made, an idle one half destroyed, another is somebody else's, and leases stand."""

    def prepare(self) -> None:
        world = self.world
        world.agent.start()
        world.connect()
        simulator = world.agent.simulator
        idle = Create(world).ask()
        assert idle is not None
        world.release(idle)
        simulator.hang(DESTROY, gpu=0)
        simulator.hang(CREATE_COMPUTE, gpu=1)
        calls = [
            world.admins.Reclaim.future(pb.ReclaimRequest()),
            world.users.Acquire(asking(world.request(*profile("1g.6gb"), gpu="1"))),
        ]
        eventually(lambda: self._half() == [0, 1], "both are under way")
        world.agent.kill()
        for call in calls:
            call.cancel()
        simulator.clear()
        made, _ = simulator.create_foreign(0, "1g.5gb", start=0)
        world.foreign = {(0, made)}

    def _half(self) -> list[int]:
        gpus = self.world.agent.simulator.machine()["gpus"]
        return [index for index, gpu in enumerate(gpus) for each in gpu["instances"] if not each["compute"]]


class OnADamagedLedger(Start):
    """Nothing in it can be read: what stands on the hardware is nobody's that the agent knows."""

    def prepare(self) -> None:
        world = self.world
        world.agent.start()
        assert world.agent.stop() == 0  # everything is in the ledger itself now ...
        world.agent.start()
        world.connect()
        world.release(world.acquire(*profile("1g.5gb"), gpu="0"))
        world.admins.Reclaim(pb.ReclaimRequest())
        world.agent.kill()  # ... and only this in the log beside it, which alone makes no ledger
        ledger = self.state_dir / LEDGER_FILE
        ledger.write_bytes(WAS * 500)
        assert ledger.with_name(f"{LEDGER_FILE}-wal").stat().st_size

    def check(self) -> None:
        world = self.world
        # All of it is kept as it was found, with the log that lay beside it.
        assert (self.state_dir / f"{LEDGER_FILE}.damaged-1").read_bytes() == WAS * 500
        assert (self.state_dir / f"{LEDGER_FILE}.damaged-1-wal").stat().st_size
        assert not (self.state_dir / f"{LEDGER_FILE}.damaged-2").exists()
        status = world.status()
        found = [each for gpu in status.gpus for each in gpu.instances if each.HasField("gpu_instance_id")]
        assert [each.state for each in found] == [pb.INSTANCE_STATE_FOREIGN] * len(world.standing)
        assert not status.leases
        made = world.acquire(*profile("1g.5gb"), gpu="0")
        assert made.devices[0][:2] not in {device[:2] for each in world.standing for device in each.devices}
        world.release(made)


class Paused(Start):
    """The driver is not asked anything, and may be gone; the leases are known, and are found again afterwards."""

    def prepare(self) -> None:
        world = self.world
        world.agent.start()
        world.connect()
        assert world.admins.Pause(pb.PauseRequest(reason="driver")).driver_released
        world.agent.kill()
        world.agent.simulator.fail(INIT, DRIVER_NOT_LOADED, times=None)

    def check(self) -> None:
        world = self.world
        status = world.status()
        assert len(status.paused) == 1
        assert len(status.gpus) == 3  # as they were last known
        assert {each.request_id for each in status.leases} == {each.request for each in world.standing}
        world.agent.simulator.clear()
        assert not world.admins.Resume(pb.ResumeRequest()).paused
        super().check()
        world.agent.simulator.fail(INIT, DRIVER_NOT_LOADED, times=None)


class AfterAReboot(Start):
    """All instances are gone, and with them the leases."""

    def prepare(self) -> None:
        self.world.agent.simulator.reboot()

    def check(self) -> None:
        world = self.world
        standing, world.standing = world.standing, []
        world.check()
        assert not world.leases()
        ended = [each for each in world.users.Events(pb.EventsRequest()).events if each.kind == "lease-ended"]
        reasons = {each.lease: each.data["reason"].text for each in ended}
        assert {reasons[each.lease] for each in standing} == {"reboot"}
        world.undo()
        world.standing = standing


class AfterAnUpgrade(AfterACrash):
    """A former version, or the chart's hostPath, left the state directory and the locks open to everybody."""

    def restore(self) -> None:
        super().restore()
        for path in (self.state_dir, self.state_dir / "locks"):
            path.chmod(0o755)
        for path in (self.state_dir / "lock", *self.world.agent.folder.rglob("*.lock")):
            path.chmod(0o644)

    def check(self) -> None:
        wide = [each for each in self.state_dir.rglob("*lock") if each.stat().st_mode & 0o077]
        assert [each.name for each in wide] == [f"{STATE_FILE}.lock"]  # the simulated machine's
        assert self.state_dir.stat().st_mode & 0o777 == 0o700
        super().check()


STARTS: dict[str, type[Start]] = {
    "first start": First,
    "start after a crash": AfterACrash,
    "start after an upgrade": AfterAnUpgrade,
    "start after a reboot": AfterAReboot,
    "start while paused": Paused,
    "start on a damaged ledger": OnADamagedLedger,
}
