"""The agents of many nodes for a scheduler: asks all at once, and takes leases for pods.

This is common to all schedulers and has no policy: it does not choose the best node, and calls nothing of Kubernetes.
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
    from mig_agent.client.request_args import RequestArgs

TTL_SECONDS = 60.0
ANSWER_SECONDS = 5.0
_USED_UP = frozenset({"lease-ended", "request-id-reused"})
"""Reasons for which a request id can give no lease any more."""
_UNSEEN = frozenset({"shutting-down", "queue-full", "cancelled"})
"""Reasons given before an agent looks up earlier leases: one that it granted before may still be active."""


class AsyncFleet:
    """The agents of a cluster's nodes, by node. Not thread-safe; use from one event loop.

    >>> async with AsyncFleet(tls=tls) as fleet:                                         # doctest: +SKIP
    ...     silent = await fleet.update({"n1": "10.88.0.3:7400", "n2": "10.88.0.4:7400"})
    ...     plans, refusals = await fleet.plan(gpu_memory="4G")
    ...     best = min(plans, key=lambda node: plans[node].score)
    ...     reservation = await fleet.acquire(best, pod, gpu_memory="4G", if_revision=plans[best].revision)
    ...     await reservation.commit()

    `update` finds everything again, so its user may be killed at any moment. Its calls raise ClientError (NoAgent also
    if an answer did not come in time), or UsageError for an invalid argument.
    """

    def __init__(self, *, tls: Tls | None = None, ttl: float = TTL_SECONDS, answer: float = ANSWER_SECONDS) -> None:
        """Set `ttl`, after which an uncommitted lease ends, and the time limit `answer` of a plain call, in seconds."""
        self.ttl, self.answer = ttl, answer
        self._tls = tls
        self._updating = asyncio.Lock()
        self._agents: dict[str, AsyncClient] = {}
        self._promised: dict[str, str] = {}
        """Node that may have a lease for a pod already, by the pod's UID."""
        self._used_up: Counter[tuple[str, str]] = Counter()
        """Number of used-up request ids, whose leases have ended, by a pod's UID and a node."""
        self._expiring: dict[str, dict[str, Reservation]] = {}
        """Expiring reservations by a pod's UID and by node."""

    @property
    def agents(self) -> Mapping[str, AsyncClient]:
        """Agents that have answered, by node."""
        return MappingProxyType(self._agents)

    async def close(self) -> None:
        """Close all connections; leases stay."""
        await self._disconnect(self._agents)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ agents

    async def update(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Set the agents' addresses by node, `host:port`; return which cannot be reached and why.

        Call it again whenever the addresses may have changed, and while some cannot be reached. A new agent reports the
        pods for which it has leases: another scheduler may have taken them, before this one or beside it.
        """
        async with self._updating:
            await self._disconnect(
                node for node, agent in self._agents.items() if addresses.get(node) != str(agent.address)
            )
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

    async def _disconnect(self, nodes: Iterable[str]) -> None:
        await asyncio.gather(*(self._agents.pop(node).close() for node in tuple(nodes)))

    # ------------------------------------------------------------ all agents

    async def plan(
        self, *, but: Container[str] = (), explain: bool = False, **args: Unpack[RequestArgs]
    ) -> tuple[dict[str, Plan], dict[str, str]]:
        """Ask all nodes at once how each would serve a request; return plans by node, and reasons of the others.

        `but`: nodes that are not asked. Raises UsageError for an invalid argument, whatever the node.
        """

        async def ask(node: str, agent: AsyncClient) -> Plan | str:
            try:
                async with _in_time(node, self.answer):
                    answer = await agent.plan(explain=explain, **args)
            except ClientError as error:
                return str(error)
            return answer if isinstance(answer, Plan) else answer.message

        asked = {node: agent for node, agent in self._agents.items() if node not in but}
        answers = dict(zip(asked, await asyncio.gather(*map(ask, asked, asked.values())), strict=True))
        plans = {node: answer for node, answer in answers.items() if isinstance(answer, Plan)}
        return plans, {node: answer for node, answer in answers.items() if isinstance(answer, str)}

    # ------------------------------------------------------------ leases for pods

    def promised(self, pod: Pod) -> str | None:
        """Return the node that may have a lease for the pod already, if its agent answers: ask it before others."""
        node = self._promised.get(pod.uid)
        return node if node in self._agents else None

    def expiring(self, pod: Pod) -> list[str]:
        """Return the nodes where a lease for the pod expires: it blocks plans there, and may be requested again."""
        return [node for node in self._expiring.get(pod.uid, ()) if node in self._agents]

    async def acquire(self, node: str, pod: Pod, /, **args: Unpack[RequestArgs]) -> Reservation:
        """Take a lease with a deadline for a pod on a node; any repetition, by any scheduler, gives the same lease.

        The request id consists of the pod's UID and a number. An id whose lease has ended is used up, as is one that
        was used for a different request; then the next number is used. Raises Refused; with NoAgent the lease may still
        have been granted, and `promised` returns its node until it is requested again.
        """
        if not pod.uid:
            raise UsageError(f"cannot take a lease for {pod.namespace}/{pod.name} without its UID", "give Pod(uid=...)")
        agent = self._agents.get(node)
        if agent is None:
            raise NoAgent(f"cannot ask the agent of {node}: none has been met there", "look whether its pod is ready")
        may_be_active = self._promised.get(pod.uid) == node or node in self.expiring(pod)
        self._promised[pod.uid] = node
        args["pod"] = pod
        args.setdefault("ttl", self.ttl)
        while True:
            number = self._used_up[pod.uid, node] + 1
            args["request_id"] = f"{pod.uid}-{number}"
            try:
                async with _in_time(node, self.ttl / 2):
                    return Reservation(node=node, pod=pod, lease=await agent.acquire(**args), fleet=self)
            except Refused as refused:
                if may_be_active and refused.reason in _UNSEEN:
                    raise
                if refused.reason not in _USED_UP:
                    self.forget(pod)
                    self._expiring.get(pod.uid, {}).pop(node, None)
                    raise
                self._used_up[pod.uid, node] = number

    def forget(self, pod: Pod) -> None:
        """Forget leases for the pod: the next one is taken wherever it is best."""
        self._promised.pop(pod.uid, None)

    def expires(self, reservation: Reservation) -> None:
        """Record that a reservation expires; called by `Reservation.expire`."""
        self.forget(reservation.pod)
        self._expiring.setdefault(reservation.pod.uid, {})[reservation.node] = reservation

    async def committed(self, reservation: Reservation) -> None:
        """Release the pod's expiring reservations on other nodes; called by `Reservation.committed`."""
        others = [
            each for node, each in self._expiring.pop(reservation.pod.uid, {}).items() if node != reservation.node
        ]
        # If that fails, the deadline ends it.
        await asyncio.gather(*(each.give_back() for each in others), return_exceptions=True)

    def forget_all_but(self, pods: Iterable[Pod]) -> None:
        """Forget all pods except these. Agents end the leases of pods by themselves."""
        kept = {pod.uid for pod in pods}
        self._promised = {uid: node for uid, node in self._promised.items() if uid in kept}
        self._used_up = Counter({key: count for key, count in self._used_up.items() if key[0] in kept})
        self._expiring = {uid: reservations for uid, reservations in self._expiring.items() if uid in kept}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A lease taken for a pod that has not started. Until it is committed it ends at its deadline."""

    node: str
    pod: Pod
    lease: AsyncLease
    fleet: AsyncFleet

    @property
    def uuids(self) -> list[str]:
        """UUIDs of its devices."""
        return [device.uuid for device in self.lease.devices]

    async def commit(self) -> None:
        """Remove the deadline: the lease stays until the pod is bound, or its agent learns that it will not be.

        Raises Refused if it has ended meanwhile.
        """
        await self._renew(None)

    async def expire(self) -> None:
        """Set a deadline again, at which the lease ends if the pod has not started.

        For a pod that was not bound and may still be, by another scheduler that got the same lease.
        """
        self.fleet.expires(self)
        await self._renew(self.fleet.ttl)

    async def committed(self) -> None:
        """Release expiring reservations on other nodes, now that the pod is bound. Raises no agent's error."""
        await self.fleet.committed(self)

    async def give_back(self) -> None:
        """Release the lease at once: only if no scheduler that got the same lease will bind the pod to this node."""
        async with _in_time(self.node, self.fleet.answer):
            await self.lease.release()
        # Not before: a lease that may be active would be in the way of a plan for its own pod.
        self.fleet.forget(self.pod)

    async def _renew(self, ttl: float | None) -> None:
        async with _in_time(self.node, self.fleet.answer):
            await self.lease.renew(ttl)


@asynccontextmanager
async def _in_time(node: str, seconds: float) -> AsyncIterator[None]:
    """Raise NoAgent if the block takes longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise NoAgent(f"cannot wait longer for the agent of {node}: no answer in {seconds:g} s") from error
