"""Administration: cordon a GPU, destroy idle instances, adopt foreign ones, switch MIG mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from mig_agent.adapters.ledger.reader import Cordon
from mig_agent.adapters.ledger.records import DropCordon, DropDoubt, DropInstance, PutCordon, PutInstance
from mig_agent.core.errors import Blocker, DriverError, DriverErrorKind, LedgerError, Reason, RefusedError, refuse
from mig_agent.core.events import EventKind
from mig_agent.core.model import Generation, Gpu, Instance, InstanceState
from mig_agent.core.observation import ModeChange
from mig_agent.engine.callers import Caller
from mig_agent.engine.context import Context
from mig_agent.engine.instances import InstanceDestroyer, StepFailedError
from mig_agent.engine.journal import Transaction, ledger_refusal
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.results import ModeAnswer
from mig_agent.engine.state import GpuRecord


class Admin:
    """Carries out the calls of administrators. Not thread-safe; use from the event loop."""

    def __init__(self, context: Context, destroyer: InstanceDestroyer, reconciler: Reconciler) -> None:
        self._context = context
        self._destroyer = destroyer
        self._reconciler = reconciler

    async def cordon(self, name: str, reason: str, caller: Caller, *, on: bool) -> Gpu:
        """Cordon a GPU, so that it gets no new leases, or uncordon it. Raises RefusedError."""
        context = self._context
        record = context.gpu_named(name)
        now = context.clock.now()
        if on:
            if not reason and record.cordon is not None:
                return context.state.gpu(record.uuid)  # it is cordoned already, with the reason given then
            words = f"cordoned by {caller}" + (f": {reason}" if reason else "")
            cordon = Cordon(reason=words, since=now)
            change: PutCordon | DropCordon = PutCordon(record.uuid, words, now)
            kind, told = EventKind.GPU_CORDONED, f"GPU {record.index} was {words}"
        else:
            cordon, change = None, DropCordon(record.uuid)
            kind, told = EventKind.GPU_UNCORDONED, f"GPU {record.index} was uncordoned by {caller}"

        def apply() -> None:
            record.cordon = cordon
            context.state.touch(record.uuid)

        try:
            event = context.journal.event(kind, told, gpu=record.uuid, caller=caller)
            await context.journal.commit((change,), (event,), apply)
        except LedgerError as error:
            raise ledger_refusal(error, "cordon" if on else "uncordon") from error
        context.state.capacity_freed.emit()
        return context.state.gpu(record.uuid)

    async def reclaim(self, names: Sequence[str], caller: Caller) -> tuple[Instance, ...]:
        """Destroy the idle instances of the named GPUs, or of all; return those destroyed. Raises RefusedError."""
        context = self._context
        context.driver_use.refuse_when_paused("reclaim idle instances")
        records = [context.gpu_named(name) for name in names] if names else list(context.state.gpus.values())
        why = f"reclaimed by {caller}"
        results = await asyncio.gather(
            *(self._destroy_idle(record, why, lambda _: True, caller) for record in records), return_exceptions=True
        )
        destroyed: list[Instance] = []
        for result in results:
            if isinstance(result, LedgerError):
                raise ledger_refusal(result, "reclaim") from result
            if isinstance(result, BaseException):
                raise result
            destroyed += result
        return tuple(destroyed)

    async def destroy_overdue(self) -> None:
        """Destroy the instances that have been idle for longer than the configured limit, if there is one."""
        limit = self._context.settings.idle_limit_seconds
        if limit is None:
            return
        before = self._context.clock.now() - limit
        for record in tuple(self._context.state.gpus.values()):
            if any(each.state is InstanceState.IDLE and each.since <= before for each in record.instances.values()):
                try:
                    await self._destroy_idle(record, "idle for too long", lambda each: each.since <= before)
                except LedgerError:
                    return

    async def _destroy_idle(
        self, record: GpuRecord, why: str, chosen: Callable[[Instance], bool], caller: Caller | None = None
    ) -> list[Instance]:
        worker = self._context.gpu_workers[record.uuid]
        if worker.hung or record.lost:
            return []
        with self._context.driver_use.inside():
            async with worker.lock:
                return await self._destroy_idle_locked(record, why, chosen, caller)

    async def _destroy_idle_locked(
        self, record: GpuRecord, why: str, chosen: Callable[[Instance], bool], caller: Caller | None = None
    ) -> list[Instance]:
        context, state = self._context, self._context.state
        now = context.clock.now()
        going = [
            replace(each, state=InstanceState.DESTROYING, since=now)
            for each in record.instances.values()
            if each.state is InstanceState.IDLE
            and each.generation not in record.reserved
            and each.kind.is_created
            and chosen(each)
        ]
        if not going:
            return []
        gone: list[Instance] = []
        failed = False
        state.reserve(going)
        try:

            def begun() -> None:
                for each in going:
                    state.put(each)

            await context.journal.commit(tuple(PutInstance(each) for each in going), (), begun)
            for each in going:
                try:
                    await self._destroyer.destroy(each)
                except StepFailedError:
                    failed = True
                    if context.gpu_workers[record.uuid].hung:
                        break
                else:
                    gone.append(each)
        finally:
            state.unreserve(going)
            await self._commit_destroyed(gone, why, caller)
            if failed:
                await self._reconciler.check_locked(record.uuid)
            context.state.capacity_freed.emit()
        return gone

    async def _commit_destroyed(self, gone: Iterable[Instance], why: str, caller: Caller | None) -> None:
        context = self._context
        transaction = Transaction(context.journal)
        for each in gone:
            context.state.drop(each.generation)
            transaction.changes.append(DropInstance(each.generation))
            transaction.events.append(
                context.journal.event(
                    EventKind.INSTANCE_DESTROYED,
                    f"destroyed idle {context.place(each)}: {why}",
                    instance=each,
                    reason="reclaimed",
                    caller=caller,
                )
            )
        if transaction:
            await transaction.commit()

    # Adopting: an administrator says that the foreign instances are no longer needed by anyone

    async def adopt(
        self, gpus: Sequence[str], uuids: Sequence[str], caller: Caller, *, everything: bool
    ) -> tuple[Instance, ...]:
        """Adopt the foreign instances of the named GPUs, those with these UUIDs, or all; return the adopted ones.

        An instance on which a process is found is blocked until the process ends. Raises RefusedError.
        """
        context = self._context
        context.driver_use.refuse_when_paused("adopt instances")
        records = {each.uuid: each for each in map(context.gpu_named, gpus)}
        found = {
            each.uuid for gpu in context.state.gpus.values() for each in gpu.instances.values() if _may_adopt(each)
        }
        for uuid in uuids:
            if uuid not in found:
                raise refuse(
                    Reason.INVALID_REQUEST,
                    f"cannot adopt {uuid}: no foreign instance has this UUID",
                    "`migctl status -o json` shows the UUIDs",
                )
        adopted: list[Instance] = []
        try:
            with context.driver_use.inside():
                for record in tuple(context.state.gpus.values()):
                    whole = everything or record.uuid in records
                    adopted += await self._adopt_on(record, None if whole else set(uuids), caller)
            if everything:
                await self._settle_doubt(caller)
        except LedgerError as error:
            raise ledger_refusal(error, "adopt instances") from error
        context.state.capacity_freed.emit()
        return tuple(adopted)

    async def _adopt_on(self, record: GpuRecord, uuids: Collection[str] | None, caller: Caller) -> list[Instance]:
        context, state = self._context, self._context.state
        adopted: list[Generation] = []
        worker = context.gpu_workers[record.uuid]
        if worker.hung or record.lost:
            return []
        async with worker.lock:
            transaction = Transaction(context.journal)
            for each in tuple(record.instances.values()):
                if (
                    not _may_adopt(each)
                    or not _is_known(record, each)
                    or (uuids is not None and each.uuid not in uuids)
                ):
                    continue
                own = replace(
                    each,
                    # A new generation: what a restored ledger recorded of the former one is obsolete.
                    generation=state.next_generation(),
                    state=InstanceState.IDLE,
                    since=context.clock.now(),
                    last_tenant="",
                )
                transaction.changes.append(PutInstance(own))
                words = f"{caller} adopted {context.place(own)}"
                event = context.journal.event(EventKind.INSTANCE_FOUND, words, instance=own, caller=caller)
                transaction.events.append(event)
                transaction.applied += [partial(state.put, own), partial(state.drop, each.generation)]
                adopted.append(own.generation)
            if transaction:
                await transaction.commit()
                await self._reconciler.check_locked(record.uuid)  # blocks those that are in use
        return [each for each in record.instances.values() if each.generation in adopted]

    async def _settle_doubt(self, caller: Caller) -> None:
        context, state = self._context, self._context.state
        if state.doubt is None:
            return

        words = f"{caller} settled what the ledger did not account for: it {state.doubt.why}"
        event = context.journal.event(EventKind.LEDGER_RECOVERED, words, caller=caller)
        await context.journal.commit((DropDoubt(),), (event,), state.settle_doubt)

    # MIG mode

    async def set_mig_mode(self, name: str, caller: Caller, *, enable: bool) -> ModeAnswer:
        """Switch MIG mode on or off. Raises RefusedError (IN_USE) while the GPU is leased or a process uses it."""
        context = self._context
        record = context.gpu_named(name)
        verb = "enable" if enable else "disable"
        context.driver_use.refuse_when_paused(f"{verb} MIG mode on GPU {record.index}")
        if not record.mode.capable:
            raise refuse(
                Reason.NOT_SUPPORTED, f"cannot {verb} MIG mode on GPU {record.index}: {record.layout.model} has none"
            )
        if record.lost or record.hung:
            raise refuse(
                Reason.GPU_UNAVAILABLE, f"cannot {verb} MIG mode on GPU {record.index}: {record.lost or record.hung}"
            )
        if record.mode.current is enable and record.mode.pending is enable:
            words = f"MIG mode of GPU {record.index} is {'on' if enable else 'off'} already"
            return ModeAnswer(gpu=record.uuid, gpu_index=record.index, mode=record.mode, needs="", message=words)
        self._refuse_when_used(record, verb)
        record.switching = f"MIG mode is being switched by {caller}"
        context.state.touch(record.uuid)
        context.journal.republish()
        context.driver_use.enter()
        try:
            async with context.gpu_workers[record.uuid].lock:
                return await self._switch(record, verb, caller, enable=enable)
        except DriverError as error:
            await self._reconciler.check(record.uuid)  # the mode may have changed despite the error
            raise _mode_refusal(record, verb, error) from error
        except LedgerError as error:
            raise ledger_refusal(error, f"{verb} MIG mode") from error
        finally:
            context.driver_use.leave()
            record.switching = ""
            context.state.touch(record.uuid)
            context.journal.republish()
            context.state.capacity_freed.emit()

    async def _switch(self, record: GpuRecord, verb: str, caller: Caller, *, enable: bool) -> ModeAnswer:
        context, driver = self._context, self._context.driver
        worker = context.gpu_workers[record.uuid]
        self._refuse_when_used(record, verb)  # again, since operations in flight have ended by now
        users = await self._users(record)
        if users:
            raise refuse(
                Reason.IN_USE,
                f"cannot {verb} MIG mode on GPU {record.index}: used by {', '.join(users)}",
                "end those processes first",
            )
        await self._destroy_idle_locked(record, f"MIG mode is switched by {caller}", lambda _: True, caller)
        self._refuse_when_used(record, verb)
        change = await worker.change(f"{verb} MIG mode", lambda: driver.set_mig_mode(record.uuid, on=enable))
        await self._reconciler.check_locked(record.uuid)
        needs, words = _outcome(record, change, enable=enable)
        asked = f"{caller} asked to turn MIG mode {'on' if enable else 'off'} on GPU {record.index}: {words}"
        context.journal.record(
            context.journal.event(EventKind.GPU_MODE_REQUESTED, asked, gpu=record.uuid, caller=caller)
        )
        if change.problem is DriverErrorKind.IN_USE:
            raise refuse(Reason.IN_USE, f"cannot {verb} MIG mode on GPU {record.index}: {words}", _IN_USE_HINT)
        if change.problem is not None and not needs:
            raise refuse(Reason.DRIVER_FAILED, f"cannot {verb} MIG mode on GPU {record.index}: {words}")
        return ModeAnswer(gpu=record.uuid, gpu_index=record.index, mode=change.mode, needs=needs, message=words)

    def _refuse_when_used(self, record: GpuRecord, verb: str) -> None:
        state = self._context.state
        there = (record.instances | record.reserved).values()
        held = sorted(
            (each for each in there if each.state is not InstanceState.IDLE), key=lambda each: each.slot.placement
        )
        if not held:
            return
        blockers = []
        for each in held:
            lease = None if each.lease is None else state.leases.get(each.lease)
            blockers.append(
                Blocker(
                    gpu_index=record.index,
                    what=str(each.slot),
                    state=each.state.value,
                    lease=each.lease or "",
                    holder=str(lease.holder) if lease is not None else "",
                )
            )
        others = f", and {len(blockers) - 1} more" if len(blockers) > 1 else ""
        raise refuse(
            Reason.IN_USE,
            f"cannot {verb} MIG mode on GPU {record.index}: {blockers[0].what} {blockers[0].condition}{others}",
            f"cordon it with `migctl cordon --gpu {record.index}`, wait for its leases to end, and try again",
            tuple(blockers),
        )

    async def _users(self, record: GpuRecord) -> tuple[str, ...]:
        """Return the processes on a GPU that NVML lists, and those that have its instances open."""
        host, driver, minor = self._context.host, self._context.driver, record.minor

        def users() -> tuple[str, ...]:
            observed = driver.observe_gpu(record.uuid)
            pids = {*observed.processes, *(pid for each in observed.instances for pid in each.processes)}
            found = {pid: host.describe_process(pid) for pid in sorted(pids)}
            if minor is not None:
                for each in observed.instances:
                    found |= {process.pid: str(process) for process in host.holders(minor, each.gpu_instance_id)}
            return tuple(found.values())

        return await self._context.gpu_workers[record.uuid].read("look who uses the GPU", users)


_IN_USE_HINT = "stop what has the GPU open, such as dcgm-exporter or nvidia-persistenced, and try again"


def _outcome(record: GpuRecord, change: ModeChange, *, enable: bool) -> tuple[Literal["", "reset", "reboot"], str]:
    wanted = "on" if enable else "off"
    if change.problem is None:
        return "", f"MIG mode of GPU {record.index} is {wanted}"
    if change.mode.pending is enable or change.problem is DriverErrorKind.RESET_REQUIRED:
        return (
            "reset",
            f"MIG mode of GPU {record.index} goes {wanted} at its reset: `nvidia-smi --gpu-reset -i {record.index}`",
        )
    return "", f"the driver answers {change.problem}"


def _mode_refusal(record: GpuRecord, verb: str, error: DriverError) -> RefusedError:
    reason = {
        DriverErrorKind.IN_USE: Reason.IN_USE,
        DriverErrorKind.NOT_SUPPORTED: Reason.NOT_SUPPORTED,
        DriverErrorKind.NO_PERMISSION: Reason.NOT_PERMITTED,
        DriverErrorKind.RESET_REQUIRED: Reason.RESET_REQUIRED,
    }.get(error.kind, Reason.DRIVER_FAILED)
    hint = "the agent must run as root to switch MIG mode" if reason is Reason.NOT_PERMITTED else ""
    return refuse(reason, f"cannot {verb} MIG mode on GPU {record.index}: {error}", hint)


def _may_adopt(instance: Instance) -> bool:
    """Return whether an instance is foreign and complete; another program is still creating an incomplete one."""
    return instance.state is InstanceState.FOREIGN and instance.is_complete and bool(instance.uuid)


def _is_known(record: GpuRecord, instance: Instance) -> bool:
    return instance.slot.profile.id in record.layout.by_id
