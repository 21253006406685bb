"""Watches shared GPUs: what each lease uses in total, and which processes use a GPU without a share of it.

MPS holds each process to the limit of its share, and not their sum. So the memory of the processes of a lease is added
up, and while it is above the limit the newest of them loses the GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from mig_agent.adapters.shares.enforcer import EndsProcesses
from mig_agent.core.errors import DriverError
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState
from mig_agent.core.observation import ProcessUsage
from mig_agent.core.quantities import format_mib
from mig_agent.engine.context import Context

WATCH_SECONDS = 1.0
"""The pause between two readings of a GPU whose shares are watched, in seconds."""


class ShareWatch:
    """Adds up what leases use of shares, and reports processes without one. Use from the event loop."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._strangers: dict[GpuUuid, frozenset[int]] = {}
        self._failed: dict[Generation, str] = {}
        """The error of each share whose process could not be ended, lest it be reported each second."""
        self.report_problem: Callable[[str, str], None] = _tell_nobody
        """Shows in status what does not work in a part of the agent; set once there is a status."""

    async def run(self) -> None:
        """Watch all shared GPUs, until cancelled."""
        wake = asyncio.Event()
        while True:
            timer = self._context.clock.call_later(WATCH_SECONDS, wake.set)
            try:
                await wake.wait()
            finally:
                timer.cancel()
            wake.clear()
            await self.look()

    async def look(self) -> None:
        """Read all GPUs once whose shares are limited process by process."""
        if self._context.driver_use.paused:
            return
        with self._context.driver_use.inside():
            gpus = {each.slot.gpu for each in self._limited_by_process()}
            await asyncio.gather(*(self._look_at(gpu) for gpu in gpus))

    async def look_for_strangers(self) -> None:
        """Report the processes that use a shared GPU without a share; called after each reconciliation."""
        for gpu, record in tuple(self._context.state.gpus.items()):
            is_shared = any(each.kind.shares_memory for each in record.instances.values())
            self._report(gpu, record.others if is_shared else ())

    def _report(self, gpu: GpuUuid, others: Sequence[ProcessUsage]) -> None:
        pids = frozenset(each.pid for each in others)
        before = self._strangers.get(gpu, frozenset())
        if pids == before:
            return
        self._strangers[gpu] = pids
        context = self._context
        index, host = context.state.gpus[gpu].index, context.host
        words = {each.pid: f"{host.describe_process(each.pid)} uses {_memory(each)}GPU {index}" for each in others}
        for pid in sorted(pids - before):
            found = f"{words[pid]} without a share of it"
            context.journal.record(context.journal.event(EventKind.PROCESS_FOUND, found, gpu=gpu, pid=pid))
        listed = ", ".join(words[pid] for pid in sorted(pids))
        self.report_problem(f"shares of GPU {index}", f"{listed} without a share of it" if pids else "")

    async def _look_at(self, gpu: GpuUuid) -> None:
        context = self._context
        worker = context.gpu_workers[gpu]
        if worker.hung:
            return
        shares = [each for each in self._limited_by_process() if each.slot.gpu == gpu]
        try:
            users, others = await worker.read("read who uses its shares", lambda: context.share_users(gpu, shares))
        except DriverError:
            return  # the next reconciliation reports it
        if not self._leased_meanwhile(gpu, shares):
            self._report(gpu, others)
        for share in shares:
            used = sum(each.used_mib or 0 for each in users.get(share.generation, ()))
            if used > share.slot.profile.memory_mib:
                await self._end_newest(share, users[share.generation], used)

    async def _end_newest(self, share: Instance, users: Sequence[ProcessUsage], used: int) -> None:
        context = self._context
        enforcer = self._ender(share)
        started = {each.pid: process.started for each in users if (process := context.host.process(each.pid))}
        if enforcer is None or not started:
            return
        newest = max(started, key=lambda pid: (started[pid], pid))
        name = context.host.describe_process(newest)
        async with context.gpu_workers[share.slot.gpu].lock:
            current = context.state.instance(share.generation)
            lease = None if current is None or current.lease is None else context.state.leases.get(current.lease)
            if lease is None:
                return
            try:
                await context.gpu_workers[share.slot.gpu].change(
                    f"end {name}", partial(enforcer.end_process, share.generation, newest)
                )
            except DriverError as error:
                words = f"cannot take the GPU from {name}, which exceeds the {context.place(share)}: {error}"
                if self._failed.get(share.generation) == words:
                    return
                self._failed[share.generation] = words
                kind = EventKind.STEP_FAILED
            else:
                self._failed.pop(share.generation, None)
                kind = EventKind.PROCESS_ENDED
                words = (
                    f"took the GPU from {name}: the processes of lease {lease.id} of {lease.holder} use "
                    f"{format_mib(used)} of the {context.place(share)}"
                )
        context.journal.record(
            context.journal.event(kind, words, instance=share, lease=lease.id, holder=str(lease.holder), pid=newest)
        )

    def _leased_meanwhile(self, gpu: GpuUuid, shares: Sequence[Instance]) -> bool:
        """Return whether there are other shares on a GPU than these, whose processes were not told apart."""
        there = self._context.state.gpus[gpu].instances.values()
        now = {each.generation for each in there if each.kind.shares_memory}
        return now != {each.generation for each in shares}

    def _limited_by_process(self) -> Iterator[Instance]:
        for record in self._context.state.gpus.values():
            for each in record.instances.values():
                if each.kind.shares_memory and each.state is InstanceState.LEASED and self._ender(each) is not None:
                    yield each

    def _ender(self, share: Instance) -> EndsProcesses | None:
        for each in self._context.share_survey.enforcers:
            if each.enforcement is share.enforced_by and isinstance(each, EndsProcesses):
                return each
        return None


def _memory(process: ProcessUsage) -> str:
    return "" if process.used_mib is None else f"{format_mib(process.used_mib)} of "


def _tell_nobody(_part: str, _words: str) -> None:
    """Show nothing, while there is no status."""
