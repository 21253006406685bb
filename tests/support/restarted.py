"""A real agent that dies and is started again, as its clients and its simulated hardware see it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from mig_agent.adapters.host import Host
from mig_agent.adapters.shares.mps import MpsDaemons
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from support.acquire import granted
from support.agent import GENEROUS_SECONDS, eventually
from support.failpoint_control import ControlledAgent

GPUS = "a100-40gb:1,a30:1,h100-80gb:1:off"


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

    def __init__(self, agent: ControlledAgent) -> None:
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
        return told(granted(self.users, message, GENEROUS_SECONDS))

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

    def shares_settle(self) -> set[int]:
        """Return the shares that are set up, once they are those that are leased: a folder and a daemon of each."""

        def leased() -> set[int]:
            return {
                each.generation
                for gpu in self.status().gpus
                for each in gpu.instances
                if each.profile.startswith("share.") and each.lease
            }

        def settled() -> bool:
            known = [each for gpu in self.status().gpus for each in gpu.instances if each.profile.startswith("share.")]
            wanted = {each.generation for each in known}
            daemons = self._daemons()
            return leased() == wanted == set(daemons.existing()) and all(
                len(daemons.pids(each)) == (1 if each in wanted else 0) for each in daemons.existing()
            )

        eventually(settled, "each share that is set up is leased")
        return leased()

    def _daemons(self) -> MpsDaemons:
        folders = list((self.agent.simulator.host_root / "run/mps").glob("*"))
        return MpsDaemons(folders[0] if folders else Path("/none"), search_path="")

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


@contextlib.contextmanager
def world(agent: ControlledAgent) -> Iterator[World]:
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
