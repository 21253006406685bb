"""The agents of many nodes, as a scheduler needs them: asked all at once, and leases that are taken for pods.

What is in here is the same for every scheduler, and no policy: which node is the best one is not decided here, and
nothing of Kubernetes is called.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from mig_agent.client.aio.client import AsyncClient
from mig_agent.client.aio.leases import AsyncLease
from mig_agent.client.channels import Tls
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.client.types import Plan, Pod
from mig_agent.core.errors import UsageError

if TYPE_CHECKING:
    from mig_agent.client.request_args import Asking

TTL_SECONDS = 60.0
ANSWER_SECONDS = 5.0
_SPENT = frozenset({"lease-ended", "request-id-reused"})
"""Reasons for which a request id gives no lease any more."""
_UNSEEN = frozenset({"shutting-down", "queue-full", "cancelled"})
"""Reasons that come before an agent looks what it has given: a lease that it gave before stands all the same."""


class AsyncFleet:
    """The agents of a cluster's nodes, each known by its node. It belongs to one event loop.

    >>> async with AsyncFleet(tls=tls) as fleet:                                         # doctest: +SKIP
    ...     silent = await fleet.update({"n1": "10.88.0.3:7400", "n2": "10.88.0.4:7400"})
    ...     plans, refusals = await fleet.plan(gpu_memory="4G")
    ...     best = min(plans, key=lambda node: plans[node].score)
    ...     reservation = await fleet.acquire(best, pod, gpu_memory="4G", if_revision=plans[best].revision)
    ...     await reservation.commit()

    It remembers nothing that `update` does not find again, so its user may be killed at any moment. Whatever its calls
    raise is a ClientError (NoAgent, too, where an answer did not come in time), or UsageError for a wrong argument.
    """

    def __init__(self, *, tls: Tls | None = None, ttl: float = TTL_SECONDS, answer: float = ANSWER_SECONDS) -> None:
        """`ttl`: seconds after which a lease ends that is not committed. `answer`: those for a call without work."""
        self.ttl, self.answer = ttl, answer
        self._tls = tls
        self._updating = asyncio.Lock()
        self._agents: dict[str, AsyncClient] = {}
        self._promised: dict[str, str] = {}
        """By a pod's UID: the node that may have a lease for it already."""
        self._spent: Counter[tuple[str, str]] = Counter()
        """By a pod's UID and a node: the request ids that have given their lease, which has ended."""
        self._expiring: dict[str, dict[str, Reservation]] = {}
        """By a pod's UID and by node."""

    @property
    def agents(self) -> Mapping[str, AsyncClient]:
        """Those that have answered, by node."""
        return MappingProxyType(self._agents)

    async def close(self) -> None:
        """Closes all connections; leases stay."""
        await self._leave(self._agents)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ who is there

    async def update(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """From now on these are the agents, by node: `host:port`. Returns those that cannot be asked, and why.

        To be called again whenever that may have changed, and while some cannot be asked. An agent that is new here
        tells for which pods it has leases: they may have been taken by a scheduler before this one, or beside it.
        """
        async with self._updating:
            await self._leave(node for node, agent in self._agents.items() if addresses.get(node) != str(agent.address))
            new = [node for node in addresses if node not in self._agents]
            words = await asyncio.gather(*(self._connect(node, addresses[node]) for node in new))
        return {node: each for node, each in zip(new, words, strict=True) if each}

    async def _connect(self, node: str, address: str) -> str:
        try:
            agent = AsyncClient(address, tls=self._tls, patience=self.answer)
            try:
                async with _in_time(node, self.answer):
                    leases = (await agent.status()).leases
            except BaseException:
                await agent.close()
                raise
        except (ClientError, UsageError) as error:
            return " ".join(filter(None, (f"cannot ask the agent of {node}: {error}", getattr(error, "hint", ""))))
        self._promised |= {lease.pod.uid: node for lease in leases if lease.pod and lease.pod.uid}
        self._agents[node] = agent
        return ""

    async def _leave(self, nodes: Iterable[str]) -> None:
        await asyncio.gather(*(self._agents.pop(node).close() for node in tuple(nodes)))

    # ------------------------------------------------------------ asking all

    async def plan(
        self, *, but: Container[str] = (), explain: bool = False, **asking: Unpack[Asking]
    ) -> tuple[dict[str, Plan], dict[str, str]]:
        """How each node would serve a request, all asked at once: plans by node, and of the others why not.

        `but`: nodes that are not asked. Raises UsageError for a wrong argument, whatever the node.
        """

        async def ask(node: str, agent: AsyncClient) -> Plan | str:
            try:
                async with _in_time(node, self.answer):
                    answer = await agent.plan(explain=explain, **asking)
            except ClientError as error:
                return str(error)
            return answer if isinstance(answer, Plan) else answer.message

        asked = {node: agent for node, agent in self._agents.items() if node not in but}
        answers = dict(zip(asked, await asyncio.gather(*map(ask, asked, asked.values())), strict=True))
        plans = {node: answer for node, answer in answers.items() if isinstance(answer, Plan)}
        return plans, {node: answer for node, answer in answers.items() if isinstance(answer, str)}

    # ------------------------------------------------------------ leases for pods

    def promised(self, pod: Pod) -> str | None:
        """The node that may have a lease for the pod already, where its agent is there: to be asked before others."""
        node = self._promised.get(pod.uid)
        return node if node in self._agents else None

    def expiring(self, pod: Pod) -> list[str]:
        """The nodes where a lease for the pod expires: it is in the way of plans there, and may be asked for again."""
        return [node for node in self._expiring.get(pod.uid, ()) if node in self._agents]

    async def acquire(self, node: str, pod: Pod, /, **asking: Unpack[Asking]) -> Reservation:
        """Takes a lease for a pod on a node, with a deadline: the same one however often, and by whom, it is asked for.

        The request's id is made of the pod's UID and a number. An id whose lease has ended is spent, as is one by which
        something else was asked for; then the next number is taken. Raises Refused; with NoAgent the lease may have
        been given all the same, and `promised` says so until it is asked for again.
        """
        if not pod.uid:
            raise UsageError(f"cannot take a lease for {pod.namespace}/{pod.name} without its UID", "give Pod(uid=...)")
        agent = self._agents.get(node)
        if agent is None:
            raise NoAgent(f"cannot ask the agent of {node}: none has been met there", "look whether its pod is ready")
        may_stand = self._promised.get(pod.uid) == node or node in self.expiring(pod)
        self._promised[pod.uid] = node
        asking["pod"] = pod
        asking.setdefault("ttl", self.ttl)
        while True:
            number = self._spent[pod.uid, node] + 1
            asking["request_id"] = f"{pod.uid}-{number}"
            try:
                async with _in_time(node, self.ttl / 2):
                    return Reservation(node=node, pod=pod, lease=await agent.acquire(**asking), fleet=self)
            except Refused as refused:
                if may_stand and refused.reason in _UNSEEN:
                    raise
                if refused.reason not in _SPENT:
                    self.forget(pod)
                    self._expiring.get(pod.uid, {}).pop(node, None)
                    raise
                self._spent[pod.uid, node] = number

    def forget(self, pod: Pod) -> None:
        """What is known of leases for the pod: the next one is taken wherever it is best."""
        self._promised.pop(pod.uid, None)

    def expires(self, reservation: Reservation) -> None:
        """As `Reservation.expire` has done it."""
        self.forget(reservation.pod)
        self._expiring.setdefault(reservation.pod.uid, {})[reservation.node] = reservation

    async def committed(self, reservation: Reservation) -> None:
        """As `Reservation.committed`."""
        others = [
            each for node, each in self._expiring.pop(reservation.pod.uid, {}).items() if node != reservation.node
        ]
        # Where it is not answered the deadline does it.
        await asyncio.gather(*(each.give_back() for each in others), return_exceptions=True)

    def forget_all_but(self, pods: Iterable[Pod]) -> None:
        """What is known of pods that do not wait any more. Their agents see what becomes of their leases."""
        kept = {pod.uid for pod in pods}
        self._promised = {uid: node for uid, node in self._promised.items() if uid in kept}
        self._spent = Counter({key: count for key, count in self._spent.items() if key[0] in kept})
        self._expiring = {uid: reservations for uid, reservations in self._expiring.items() if uid in kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A lease that was taken for a pod which has not come yet. While it is not committed it ends at its deadline."""

    node: str
    pod: Pod
    lease: AsyncLease
    fleet: AsyncFleet

    @property
    def uuids(self) -> list[str]:
        """Of its devices."""
        return [device.uuid for device in self.lease.devices]

    async def commit(self) -> None:
        """It has no deadline any more: it stays until the pod has come, or its agent learns that it will not.

        Raises Refused where it has ended meanwhile.
        """
        await self._renew(None)

    async def expire(self) -> None:
        """It has a deadline again, and ends then if the pod has not come.

        For a pod that was not bound and may still be, by another scheduler that was given the same lease.
        """
        self.fleet.expires(self)
        await self._renew(self.fleet.ttl)

    async def committed(self) -> None:
        """The pod is bound to the node: what expires for it on others ends at once. Raises nothing of the agents'."""
        await self.fleet.committed(self)

    async def give_back(self) -> None:
        """It ends at once: only where nobody will bind the pod to this node, who was given the same lease."""
        async with _in_time(self.node, self.fleet.answer):
            await self.lease.release()
        # Not before: what may stand would be in the way of a plan for its own pod.
        self.fleet.forget(self.pod)

    async def _renew(self, ttl: float | None) -> None:
        async with _in_time(self.node, self.fleet.answer):
            await self.lease.renew(ttl)


@asynccontextmanager
async def _in_time(node: str, seconds: float) -> AsyncIterator[None]:
    """Raises NoAgent where it takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise NoAgent(f"cannot wait longer for the agent of {node}: no answer in {seconds:g} s") from error
