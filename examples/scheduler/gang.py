"""Gangs: the pods of a Job that all run, or none. It is scheduler.py with another way to place them.

A lease is taken for every pod first, on whatever nodes; each is then confirmed by Renew; when all are, the pods are
bound. What goes wrong before that leaves nothing behind: leases are released, and those of an agent or a scheduler that
has died end at their deadline. It has to be the only one: what it releases would be another's, too.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from cluster import JOB, Waiting

from mig_agent.client import Reservation
from scheduler import FAILED, NoRoom, Scheduler, main

SIZE = "mig-agent.io/gang-size"
"""Annotation of the pods: how many of the Job run at once."""


class GangScheduler(Scheduler):
    """Gangs one after the other, so that no two of them wait for what the other holds; single pods as ever."""

    async def place_all(self, pods: list[Waiting]) -> None:
        """Place single pods first, since a gang takes longer."""
        gangs: defaultdict[tuple[str, str], list[Waiting]] = defaultdict(list)
        for pod in pods:
            if SIZE in pod.annotations:
                gangs[pod.namespace, pod.labels.get(JOB, "")].append(pod)
        await super().place_all([pod for pod in pods if SIZE not in pod.annotations])
        for (namespace, job), gang in gangs.items():
            # Those that are bound already count: a scheduler before this one may have died between two of them.
            there = len(gang) + await self.cluster.bound(namespace, job)
            size = gang[0].annotations[SIZE]
            if not size.isdecimal():
                await self.tell_all(gang, "Unschedulable", f"cannot understand {SIZE}: {size}")
            elif there >= int(size):
                await self.place_gang(gang)

    async def place_gang(self, gang: list[Waiting]) -> None:
        """All, or none. After the confirmation there is no way back: what cannot be bound then is looked at again."""
        promises: list[Reservation] = []
        try:
            for pod in gang:
                promises.append(await self.take(pod))  # noqa: PERF401 -- what was taken before a failure is given back
            for promise in promises:
                await promise.commit()
        except (NoRoom, *FAILED) as why:
            await asyncio.gather(*(promise.give_back() for promise in promises), return_exceptions=True)
            reason = "Unschedulable" if isinstance(why, NoRoom) else "SchedulerError"
            await self.tell_all(gang, reason, f"not all {len(gang)} of its gang can be placed: {why}")
            return
        outcomes = await asyncio.gather(*map(self.bind, gang, promises), return_exceptions=True)
        for pod, outcome in zip(gang, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                words = f"cannot bind it beside the others of its gang: {outcome}"
                await self.cluster.tell(pod, "SchedulerError", words)

    async def tell_all(self, gang: list[Waiting], reason: str, words: str) -> None:
        """Why they wait."""
        await asyncio.gather(*(self.cluster.tell(pod, reason, words) for pod in gang))


if __name__ == "__main__":
    main(GangScheduler)
