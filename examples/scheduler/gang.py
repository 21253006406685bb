"""Gangs: the pods of a Job that all run, or none. It is scheduler.py with another way to place them.

A lease is taken for every pod first, on whatever nodes; each is then confirmed by Renew; when all are, the pods are
bound. What goes wrong before that leaves nothing behind: leases are released, and those of an agent or a scheduler that
has died end at their deadline.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from cluster import JOB, Waiting

from scheduler import FAILED, AsyncLease, NoRoom, Scheduler, main

SIZE = "mig-agent.io/gang-size"
"""Annotation of the pods: how many of the Job run at once."""


class GangScheduler(Scheduler):
    """Gangs one after the other, so that no two of them wait for what the other holds; single pods as ever."""

    async def place_all(self, pods: list[Waiting]) -> None:
        """The single ones first: a gang takes longer."""
        gangs: defaultdict[tuple[str, str], list[Waiting]] = defaultdict(list)
        for pod in pods:
            if SIZE in pod.annotations:
                gangs[pod.namespace, pod.labels.get(JOB, "")].append(pod)
        await super().place_all([pod for pod in pods if SIZE not in pod.annotations])
        for (namespace, job), gang in gangs.items():
            try:
                # Those that are bound already count: a scheduler before this one may have died between two of them.
                there = len(gang) + await self.cluster.bound(namespace, job)
                if there >= int(gang[0].annotations[SIZE]):
                    await self.place_gang(gang)
            except (*FAILED, ValueError) as error:
                self.say(f"{namespace}/{job}", f"cannot place all of {namespace}/{job} now: {error}")

    async def place_gang(self, gang: list[Waiting]) -> None:
        """All, or none. After the confirmation there is no way back: what cannot be bound then is looked at again."""
        taken: list[tuple[Waiting, str, AsyncLease]] = []
        try:
            for pod in gang:
                node, lease = await self.take(pod)
                taken.append((pod, node, lease))
            for _, _, lease in taken:
                await self.confirm(lease)
        except (NoRoom, *FAILED) as why:
            await asyncio.gather(*(self.give_back(pod, lease) for pod, _, lease in taken), return_exceptions=True)
            words = f"not all {len(gang)} of its gang can be placed: {why}"
            await asyncio.gather(*(self.cluster.tell(pod, words) for pod in gang), return_exceptions=True)
            return
        outcomes = await asyncio.gather(*(self.bind(*each) for each in taken), return_exceptions=True)
        for (pod, _, _), outcome in zip(taken, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                await self.cluster.tell(pod, f"cannot bind it beside the others of its gang: {outcome}")


if __name__ == "__main__":
    main(GangScheduler)
