"""A reference scheduler: it puts the pods that name it on the nodes whose mig-agent serves them best.

Read `place` and `take` first; docs/scheduler.md draws the protocol, and says what happens when a part of it dies. It
remembers nothing that it does not find again, so it may be killed at any moment. It is an example and no product: it
looks at GPUs alone, where a real scheduler looks at processors, taints and affinities as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from cluster import AGENTS_NAME, LOST, Cluster, Rejected, Waiting

from mig_agent.client import AsyncFleet, ClientError, Refused, Reservation, Tls, UsageError

AT_ONCE = 16  # pods that are placed at the same time: an instance that has to be made takes its time
TRIES = 8  # plans for a pod that may be overtaken before it waits for the next look
NOTHING = "it asks for nothing of the agents: mig-agent.io/memory-10g, or nvidia.com/mig-1g.10gb, goes into its limits"
FAILED = (ClientError, UsageError, *LOST)
log = logging.getLogger("scheduler")


class NoRoom(Exception):  # noqa: N818 -- nothing has failed
    """No node can serve a pod now; the words say why."""


class Scheduler:
    """Single pods, the most important first; gang.py has another `place_all`."""

    def __init__(self, cluster: Cluster, fleet: AsyncFleet) -> None:
        self.cluster, self.fleet = cluster, fleet
        self.turns = asyncio.Semaphore(AT_ONCE)

    async def run(self) -> None:
        """For ever: looks whenever a pod has changed, and every second. What is wrong for long is logged once."""
        self.cluster.watch()
        said: set[str] = set()
        while True:
            trouble = await self.look()
            for words in sorted(trouble - said):
                log.warning(words)
            said = trouble
            await self.cluster.change(seconds=1)

    async def look(self) -> set[str]:
        """At all pods that wait for a node, and places what can be placed. Returns what is wrong, in words."""
        try:
            silent = await self.fleet.update(await self.cluster.agents())
            pods = await self.cluster.waiting()
            self.fleet.forget_all_but(pods)
            await self.place_all(pods)
        except LOST as error:
            return {f"cannot look at the cluster: {error}"}
        return set(silent.values())

    async def place_all(self, pods: list[Waiting]) -> None:
        """Place the pods in their order, several at a time."""
        await asyncio.gather(*map(self.place, pods))

    async def place(self, pod: Waiting) -> None:
        """Lease what the pod requests on the best node and bind it there, or write why not into its status."""
        async with self.turns:
            try:
                promise = await self.take(pod)
                await promise.commit()  # from here on the lease waits for the pod, however long the binding takes
                await self.bind(pod, promise)
            except NoRoom as why:
                await self.cluster.tell(pod, "Unschedulable", str(why))
            except (Rejected, *FAILED) as error:
                await self.cluster.tell(pod, "SchedulerError", f"cannot place it now: {error}")

    async def take(self, pod: Waiting) -> Reservation:
        """Return a lease on the best node, with a deadline. Raises NoRoom."""
        if not pod.devices:
            raise NoRoom(NOTHING)
        if node := self.fleet.promised(pod):  # an answer was lost, or the scheduler before this one was killed
            return await self.fleet.acquire(node, pod, devices=pod.devices)
        for _ in range(TRIES):
            words = {node: why for node in self.fleet.agents if (why := self.cluster.objection(node, pod))}
            # Containers get no shares of GPUs.
            plans, refusals = await self.fleet.plan(but=words, devices=pod.devices, isolation="mig")
            if not plans:
                for node in set(self.fleet.expiring(pod)) - words.keys():  # its own lease may be in its way there
                    with contextlib.suppress(Refused):
                        return await self.fleet.acquire(node, pod, devices=pod.devices)
                words |= refusals
                raise NoRoom("; ".join(f"{node}: {words[node]}" for node in sorted(words)) or "no agent is ready")
            best = min(plans, key=lambda node: plans[node].score)
            try:
                return await self.fleet.acquire(best, pod, devices=pod.devices, if_revision=plans[best].revision)
            except Refused as refused:
                overtaken = refused  # the node has changed since: another may be better now
                if not refused.retryable:
                    raise
        raise overtaken

    async def bind(self, pod: Waiting, promise: Reservation) -> None:
        """Where no answer tells whether it is bound, the pod is looked at again, and has its lease."""
        try:
            await self.cluster.bind(pod, promise.node, promise.uuids)
        except Rejected as rejected:  # a second scheduler, with the same lease, may be binding it just now
            await (promise.give_back() if rejected.for_good else promise.expire())
            raise
        await promise.committed()
        log.info("%s is on %s with %s", pod, promise.node, ",".join(promise.uuids))


async def serve(kind: type[Scheduler]) -> None:
    """For ever."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tls = Tls.in_folder(os.environ.get("SCHEDULER_TLS", "/tls"), server_name=AGENTS_NAME)
    async with AsyncFleet(tls=tls, answer=float(os.environ.get("SCHEDULER_ANSWER_SECONDS", "5"))) as fleet:
        await kind(Cluster(), fleet).run()


def main(kind: type[Scheduler] = Scheduler) -> None:
    """Until it is killed."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(kind))


if __name__ == "__main__":
    main()
