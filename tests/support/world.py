"""An agent as a process, clients on its sockets, the machine below it, and what all of them must agree on.

Whatever breaks because the agent was killed is asked again of the next one, with the same request id: then every
answer is known, and what nobody was told may only belong to requests that were given up before their answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1.partition_manager_pb2_grpc import PartitionManagerStub
from mig_agent.simulator import SimulatorError
from mig_agent.simulator.state import mig_uuid, profile_of
from support.acquire import asking, granted
from support.agent import GENEROUS_SECONDS, eventually
from support.failpoint_control import ControlledAgent

CLIENTS = 3
PATIENCE = 2 * GENEROUS_SECONDS
GRACE_SECONDS = 60.0 + PATIENCE
GPUS = "a100-40gb:1,h100-80gb:1"
FLAGS = ("--reread", "1s", "--call-deadline", "2s", "--log-level", "warning")
_PASSING = frozenset({"cancelled", "shutting-down"})

_Answer = TypeVar("_Answer")


class BrokenError(Exception):
    """The connection broke: nobody knows what became of the call."""


@dataclass(frozen=True)
class Answered:
    """A lease that a client was told of."""

    request: pb.Request
    granted: pb.Granted

    @property
    def id(self) -> str:
        return self.granted.lease.id


@dataclass
class World:
    """What the test knows."""

    folder: Path
    leases: dict[str, Answered] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)
    """The open streams of leases that live as long as those."""
    in_doubt: dict[str, pb.Request] = field(default_factory=dict)
    """Requests that their clients gave up, by id."""
    foreign: set[tuple[int, int]] = field(default_factory=set)
    pids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.agent = ControlledAgent(self.folder, GPUS, flags=FLAGS)
        self._channels = ExitStack()
        self.users: list[PartitionManagerStub] = []
        self.agent.start()
        self._connect()

    # The agent

    def _connect(self) -> None:
        self._channels.close()
        options = (("grpc.use_local_subchannel_pool", 1),)

        def stub(address: str) -> PartitionManagerStub:
            return PartitionManagerStub(self._channels.enter_context(grpc.insecure_channel(address, options=options)))

        self.users = [stub(self.agent.address) for _ in range(CLIENTS)]
        self.admin = stub(f"unix://{self.folder}/admin.sock")

    def come_back(self) -> None:
        """The agent starts again on what it left, and clients that hold a lease attach to it again."""
        assert self.agent.process is not None
        self.agent.process.wait(GENEROUS_SECONDS)
        self.agent.control.stand_by()
        self.agent.simulator.clear()
        self.agent.start()
        self._connect()
        for lease in tuple(self.held):
            self._attach(self.leases[lease])

    def close(self) -> None:
        self._channels.close()
        self.agent.kill()

    # Calls

    def ask(self, call: Callable[[], _Answer]) -> _Answer | str:
        """The answer, or the reason of the refusal; from the next agent where this one dies meanwhile."""
        answers: list[_Answer | str] = []

        def asked() -> bool:
            try:
                answers.append(told(call))
            except BrokenError:
                self.come_back()
                return False
            return not _passing(answers[-1])

        eventually(asked, "the call comes to an end", PATIENCE)
        return answers[-1]

    def acquire(self, client: int, request: pb.Request) -> str:
        """The lease's id, or the reason of the refusal."""
        answer = self.ask(lambda: granted(self.users[client], request, PATIENCE))
        return self._answered(request, answer)

    def acquire_together(self, requests: Sequence[pb.Request]) -> None:
        """Several clients at once; those whose connection breaks ask again one by one."""

        def first(place: int) -> pb.Granted | str:
            stub = self.users[place % CLIENTS]
            return told(lambda: granted(stub, requests[place], PATIENCE))

        with ThreadPoolExecutor(len(requests)) as pool:
            asked = [pool.submit(first, place) for place in range(len(requests))]
        for place, (request, answer) in enumerate(zip(requests, asked, strict=True)):
            if isinstance(answer.exception(), BrokenError) or _passing(answer.result()):
                self.acquire(place % CLIENTS, request)
            else:
                self._answered(request, answer.result())

    def give_up(self, client: int, request: pb.Request) -> None:
        """A client that does not wait for its answer."""
        self.in_doubt[request.request_id] = request
        self.users[client].Acquire(asking(request), timeout=PATIENCE).cancel()

    def ask_again(self, request_id: str) -> None:
        """The same client after all."""
        self.acquire(0, self.in_doubt.pop(request_id))

    def hold(self, client: int, request: pb.Request) -> None:
        """A lease that lives as long as its stream."""

        def open_stream() -> tuple[Any, pb.Granted]:
            stream = self.users[client].Hold(pb.HoldRequest(request=request))
            return stream, _first(stream)

        answer = self.ask(open_stream)
        if not isinstance(answer, str):
            stream, granted = answer
            self._answered(request, granted)
            self.held[granted.lease.id] = stream

    def _attach(self, answered: Answered) -> None:
        stream = self.users[0].Hold(pb.HoldRequest(request=answered.request))
        self.held[answered.id] = stream
        try:
            granted = _first(stream)
        except grpc.RpcError as error:
            raise AssertionError(f"a held lease was not given back: {error}") from error
        self._same(answered, granted)

    def let_go(self, lease: str) -> None:
        """The client of a held lease is gone: it ends by itself."""
        self.agent.control.stand_by()  # else the next agent gives it a minute to be back
        stream = self.held.pop(lease)
        del self.leases[lease]
        stream.cancel()
        self.gone(lease, "a lease ends with its stream")

    def release(self, lease: str) -> None:
        """Refused without the token, done with it, and harmless the second time."""
        answered = self.leases.pop(lease)
        for token, expected in (("0" * 64, "wrong-token"), (answered.granted.token, ""), (answered.granted.token, "")):
            message = pb.ReleaseRequest(lease=lease, token=token)
            answer = self.ask(lambda: self.users[1].Release(message, timeout=PATIENCE))  # noqa: B023 -- called at once
            assert answer == expected or (not expected and isinstance(answer, pb.ReleaseResponse)), answer

    def gone(self, lease: str, why: str) -> None:
        """Returns when the lease has ended. An agent that is killed meanwhile gives its holder a minute to be back."""
        eventually(lambda: lease not in {each.id for each in self.status().leases}, why, GRACE_SECONDS)

    def status(self) -> pb.StatusResponse:
        """As administrators see it."""
        answer = self.ask(lambda: self.admin.Status(pb.StatusRequest(), timeout=PATIENCE))
        assert isinstance(answer, pb.StatusResponse), answer
        return answer

    def _answered(self, request: pb.Request, answer: pb.Granted | str) -> str:
        if isinstance(answer, str):
            return answer
        known = self.leases.get(answer.lease.id)
        if known is not None:
            self._same(known, answer)
        else:
            self.leases[answer.lease.id] = Answered(request, answer)
        return answer.lease.id

    @staticmethod
    def _same(answered: Answered, again: pb.Granted) -> None:
        before = answered.granted
        assert (again.lease.id, again.token) == (before.lease.id, before.token)
        assert [each.uuid for each in again.lease.devices] == [each.uuid for each in before.lease.devices]

    # The machine

    def instances(self) -> Iterator[tuple[tuple[int, int], Any, Any]]:
        """What is really there: (GPU, GPU instance), the GPU, the instance."""
        for index, gpu in enumerate(self.agent.simulator.machine()["gpus"]):
            for instance in gpu["instances"]:
                yield (index, instance["id"]), gpu, instance

    def destroy(self, number: int) -> None:
        """Somebody destroys an instance, whoever it is; a lease on it ends, and its holder is not left believing."""
        there = [where for where, _, _ in self.instances()]
        if not there:
            return
        gpu, instance = where = there[number % len(there)]
        self.agent.simulator.clear()  # what cannot be read is not judged
        try:
            self.agent.simulator.destroy_foreign(f"{gpu}/{instance}")
        except SimulatorError:
            return  # somebody is on it
        self.foreign.discard(where)
        lost = {
            lease
            for lease, answered in self.leases.items()
            if any((each.gpu_index, each.gpu_instance_id) == where for each in answered.granted.lease.devices)
        }
        for lease in lost:
            self.gone(lease, "the lease of an instance that is gone ends")
            del self.leases[lease]
            stream = self.held.pop(lease, None)
            if stream is not None:
                assert told(lambda: list(stream)) == "lease-ended"  # noqa: B023 -- called at once

    # What must be so, at any moment

    def check(self) -> None:
        """Every answered lease stands with its devices; nothing is given twice; nothing foreign is touched."""
        status = self.status()
        standing = {each.id: each for each in status.leases}
        assert set(self.leases) <= set(standing), (set(self.leases) - set(standing), self.agent.log())
        for each in status.leases:
            assert each.id in self.leases or each.request_id in self.in_doubt, each
        devices = [each.uuid for lease in status.leases for each in lease.devices]
        assert len(devices) == len(set(devices))
        there = {where: (gpu, instance) for where, gpu, instance in self.instances()}
        for lease, answered in self.leases.items():
            assert [each.uuid for each in standing[lease].devices] == [
                each.uuid for each in answered.granted.lease.devices
            ]
            for device in answered.granted.lease.devices:
                gpu, instance = there[device.gpu_index, device.gpu_instance_id]
                assert profile_of(gpu, instance).name == device.profile
                assert mig_uuid(gpu, instance["id"], device.compute_instance_id) == device.uuid
                assert [each["id"] for each in instance["compute"]] == [device.compute_instance_id]
        assert self.foreign <= set(there)

    def come_to_rest(self) -> None:
        """Everybody goes home: nothing has leaked, and an administrator gets all GPUs back empty."""
        self.agent.control.stand_by()
        self.agent.simulator.clear()
        for pid in self.pids:
            self.vacate(pid)
        self.pids.clear()
        for gpu in range(2):
            self.ask(lambda: self.admin.Cordon(pb.CordonRequest(gpu=str(gpu), uncordon=True), timeout=PATIENCE))  # noqa: B023 -- called at once
        for request_id in tuple(self.in_doubt):
            self.ask_again(request_id)
        self.check()
        for lease in tuple(self.held):
            self.let_go(lease)
        for lease in tuple(self.leases):
            self.release(lease)
        assert not self.status().leases
        at_rest = {pb.INSTANCE_STATE_IDLE, pb.INSTANCE_STATE_FOREIGN}
        eventually(
            lambda: {each.state for gpu in self.status().gpus for each in gpu.instances} <= at_rest, "it comes to rest"
        )

        def empty() -> bool:
            self.ask(lambda: self.admin.Reclaim(pb.ReclaimRequest(), timeout=PATIENCE))
            return {where for where, _, _ in self.instances()} == self.foreign

        eventually(empty, "nothing is left but what others made")

    def vacate(self, pid: int) -> None:
        try:
            self.agent.simulator.vacate(pid)
        except SimulatorError:
            return  # its instance went with a reboot


def told(call: Callable[[], _Answer]) -> _Answer | str:
    """The answer of a call or the reason of its refusal, which is told in words. Raises BrokenError."""
    try:
        return call()
    except grpc.RpcError as error:
        for each in error.trailing_metadata() or ():
            if each.key == TRAILER and isinstance(each.value, bytes):
                detail = pb.RefusalDetail.FromString(each.value)
                assert detail.message.startswith("cannot "), detail
                return detail.reason
        if error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
            raise BrokenError(error.details()) from error
        raise


def _passing(answer: object) -> bool:
    """Whether to ask again: what an earlier call of the same request left is still being cleared away."""
    return isinstance(answer, str) and answer in _PASSING


def request_for(wants: Sequence[str], **fields: Any) -> pb.Request:
    """A request with an id of its own."""
    return pb.Request(wants=[pb.Want(profile=each) for each in wants], request_id=uuid.uuid4().hex, **fields)


def _first(stream: Any) -> pb.Granted:
    """Of a stream that stays open; it does not wait, so that the first message is the lease."""
    granted: pb.Granted = next(stream).granted
    return granted
