"""A reference scheduler: it puts the pods that name it on the nodes whose mig-agent serves them best.

Read it from `run` on; docs/scheduler.md draws the protocol, and says what happens when a part of it dies. It remembers
nothing that it cannot find again, so it may be killed at any moment. It is an example and no product: it looks at GPUs
alone, where a real scheduler looks at processors, taints and affinities as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from pathlib import Path

from cluster import AGENTS_NAME, LOST, Cluster, Rejected, Waiting

from mig_agent.client import AsyncClient, AsyncLease, ClientError, Plan, Pod, Refused, Tls, UsageError

TTL = 60.0
"""Seconds until a lease ends by itself that was not confirmed."""
AT_ONCE = 16
"""Pods that are placed at the same time; an instance that has to be made takes its time."""
TRIES = 8
"""Plans of a pod that may be overtaken before it waits for the next look."""
ANSWER = float(os.environ.get("SCHEDULER_ANSWER_SECONDS", "5"))
"""Seconds that an agent has for an answer which needs no work."""
NOBODY = "no agent is ready"
NOTHING = "it asks for nothing of the agents: mig-agent.io/memory-10g, or nvidia.com/mig-1g.10gb, goes into its limits"
FAILED = (ClientError, UsageError, TimeoutError, *LOST)
SECRET = Path(os.environ.get("SCHEDULER_TLS", "/tls"))
TLS = Tls(ca=SECRET / "ca.crt", cert=SECRET / "tls.crt", key=SECRET / "tls.key", server_name=AGENTS_NAME)

log = logging.getLogger("scheduler")


class NoRoom(Exception):  # noqa: N818 -- nothing has failed
    """No node can serve a pod now; the words say why."""


class Scheduler:
    """What it remembers, `meet` finds again where it is started anew."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.agents: dict[str, AsyncClient] = {}
        """By node."""
        self.promised: dict[str, str] = {}
        """Where a pod (by its UID) may have a lease already: that node is asked for it, and no other."""
        self.spent: Counter[tuple[str, str]] = Counter()
        """Leases for a pod that have ended on a node."""
        self.said: dict[str, str] = {}
        """What was logged last, by what it is about."""

    async def run(self) -> None:
        """For ever: whenever a pod has changed, and every second, looks at all pods that wait for a node."""
        while True:
            try:
                await self.find_agents()
                pods = await self.cluster.waiting()
                self.forget_but({pod.uid for pod in pods})
                await self.place_all(pods)
                self.say("the cluster", "")
            except FAILED as error:
                self.say("the cluster", f"cannot look at the cluster: {error}")
            await self.cluster.change(seconds=1)

    async def place_all(self, pods: list[Waiting]) -> None:
        """Some at once; the most important first, then who came first."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def in_turn(pod: Waiting) -> None:
            async with turns:
                try:
                    await self.place(pod)
                except FAILED as error:
                    self.say(f"pod {pod.uid}", f"cannot place {pod} now: {error}")

        await asyncio.gather(*map(in_turn, pods))

    async def place(self, pod: Waiting) -> None:
        """Takes what it asks for where that is best, and binds it there."""
        try:
            node, lease = await self.take(pod)
            await self.confirm(lease)
            await self.bind(pod, node, lease)
        except (NoRoom, Rejected) as why:
            await self.cluster.tell(pod, str(why))

    async def take(self, pod: Waiting) -> tuple[str, AsyncLease]:
        """The node and the lease. Raises NoRoom."""
        if not pod.devices:
            raise NoRoom(NOTHING)
        promised = self.promised.get(pod.uid)
        if promised in self.agents:
            return promised, await self.acquire(promised, pod)
        for _ in range(TRIES):
            answers = await self.plan_everywhere(pod)
            plans = {node: plan for node, plan in answers.items() if isinstance(plan, Plan)}
            if not plans:
                raise NoRoom("; ".join(f"{node}: {answer}" for node, answer in sorted(answers.items())) or NOBODY)
            best = min(plans, key=lambda node: plans[node].score)
            try:
                # Refused where the node has changed since it was asked: another may be better now.
                return best, await self.acquire(best, pod, if_revision=plans[best].revision)
            except Refused as refused:
                if not refused.retryable:
                    raise
        raise NoRoom("plans for it were overtaken")

    async def plan_everywhere(self, pod: Waiting) -> dict[str, Plan | str]:
        """How each node would serve it, or why it cannot; all asked at once."""

        async def ask(node: str, agent: AsyncClient) -> Plan | str:
            if words := self.cluster.objection(node, pod):
                return words
            try:
                async with asyncio.timeout(ANSWER):
                    answer = await agent.plan(devices=pod.devices)
                    return answer if isinstance(answer, Plan) else answer.message
            except (ClientError, UsageError, TimeoutError) as error:
                return str(error) or "no answer in time"

        answers = await asyncio.gather(*map(ask, self.agents, self.agents.values()))
        return dict(zip(self.agents, answers, strict=True))

    async def acquire(self, node: str, pod: Waiting, if_revision: int | None = None) -> AsyncLease:
        """The same lease, however often it is asked for and by whom: the pod's UID is the request's id.

        An id whose lease has ended is spent, as is one by which something else was asked for (a version of this with
        another TTL, say): what is taken once more for the same pod has the next one.
        """
        self.promised[pod.uid] = node  # a call that is not answered may have taken it all the same
        whose = Pod(namespace=pod.namespace, name=pod.name, uid=pod.uid)
        while True:
            number = self.spent[pod.uid, node] + 1
            try:
                async with asyncio.timeout(TTL / 2):
                    return await self.agents[node].acquire(
                        devices=pod.devices,
                        pod=whose,
                        ttl=TTL,
                        request_id=f"{pod.uid}-{number}",
                        if_revision=if_revision,
                    )
            except Refused as refused:
                if refused.reason not in {"lease-ended", "request-id-reused"}:
                    self.promised.pop(pod.uid, None)
                    raise
                self.spent[pod.uid, node] = number

    async def confirm(self, lease: AsyncLease) -> None:
        """Refused where it has ended meanwhile; from now on it stays until the pod has come, or will never come."""
        async with asyncio.timeout(ANSWER):
            await lease.renew(ttl=None)

    async def bind(self, pod: Waiting, node: str, lease: AsyncLease) -> None:
        """Releases what cannot be bound. Where no answer says so, the pod is looked at again, and has its lease."""
        uuids = [device.uuid for device in lease.devices]
        try:
            await self.cluster.bind(pod, node, uuids)
        except Rejected:
            await self.give_back(pod, lease)
            raise
        self.promised.pop(pod.uid, None)
        log.info("%s is on %s with %s", pod, node, ",".join(uuids))

    async def give_back(self, pod: Waiting, lease: AsyncLease) -> None:
        """The instance is idle again; where its agent does not answer, once the lease's time is over."""
        self.promised.pop(pod.uid, None)
        async with asyncio.timeout(ANSWER):
            await lease.release()

    def forget_but(self, waiting: set[str]) -> None:
        """What was noted of pods that do not wait any more; agents see for themselves what becomes of their leases."""
        kept = {f"pod {uid}" for uid in waiting}
        self.said = {key: words for key, words in self.said.items() if key in kept or not key.startswith("pod ")}
        self.promised = {uid: node for uid, node in self.promised.items() if uid in waiting}
        self.spent = Counter({key: count for key, count in self.spent.items() if key[0] in waiting})

    def say(self, about: str, words: str) -> None:
        """Into the log, where it is not what was said last."""
        if words and self.said.get(about) != words:
            log.warning("%s", words)
        self.said[about] = words

    async def find_agents(self) -> None:
        """Those that are ready; one whose address has changed is another."""
        found = await self.cluster.agents()
        for node in [node for node, agent in self.agents.items() if found.get(node) != str(agent.address)]:
            await self.agents.pop(node).close()
        await asyncio.gather(*(self.meet(node, found[node]) for node in found.keys() - self.agents.keys()))

    async def meet(self, node: str, address: str) -> None:
        """Learns from an agent for which pods something was taken, by this scheduler or by the one before it."""
        agent = AsyncClient(address, tls=TLS, patience=5)
        try:
            async with asyncio.timeout(ANSWER):
                leases = (await agent.status()).leases
        except (ClientError, UsageError, TimeoutError) as error:
            self.say(node, f"cannot ask the agent of {node}: {error or 'no answer'} {getattr(error, 'hint', '')}")
            await agent.close()
            return
        self.say(node, "")
        self.promised |= {lease.pod.uid: node for lease in leases if lease.pod}
        self.agents[node] = agent


def main(kind: type[Scheduler] = Scheduler) -> None:
    """Until it is killed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    async def run() -> None:
        await kind(Cluster()).run()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())


if __name__ == "__main__":
    main()
