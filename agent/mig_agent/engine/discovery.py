"""Discovery of GPUs: those that answer when the agent starts, and later those that did not answer then.

Each GPU is read on a thread of its own, so that one that hangs or fails does not keep the agent from serving with the
others. It is read again after each reconciliation, and managed as soon as it answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mig_agent.adapters.filelock import LockedError
from mig_agent.adapters.ledger.reader import Contents
from mig_agent.adapters.nvml import Observation
from mig_agent.adapters.threads import CallThread
from mig_agent.core.errors import DriverError, DriverErrorKind, LedgerError
from mig_agent.core.events import EventKind
from mig_agent.core.model import GpuUuid, Instance, InstanceState, Slot
from mig_agent.core.observation import ObservedGpu
from mig_agent.engine.context import Context
from mig_agent.engine.gpu_worker import GpuWorker
from mig_agent.engine.reconciler import Reconciler
from mig_agent.engine.state import GpuRecord

LockGpu = Callable[[int, GpuUuid], None]
"""Locks a GPU (index, UUID) for this agent. Raises LockedError where another agent has it."""


class Discovery:
    """Finds GPUs and puts them under management, with what the ledger knows of them. Use from the event loop."""

    def __init__(self, context: Context, contents: Contents, reconciler: Reconciler, lock: LockGpu) -> None:
        """`contents` is the ledger as it was opened; `lock` is called for each GPU before it is managed."""
        self._context = context
        self._contents = contents
        self._reconciler = reconciler
        self.lock = lock
        self._readings: dict[int, asyncio.Future[ObservedGpu]] = {}
        """The readings that have not returned, by GPU index."""

    async def observe(self) -> Observation:
        """Read all GPUs, each as far as it answers in time. Raises DriverError where the driver does not answer."""
        count = await self.count()
        answers = await asyncio.gather(*(self._read(index) for index in range(count)))
        return Observation(
            gpus=tuple(each for each in answers if isinstance(each, ObservedGpu)),
            failed={index: each for index, each in enumerate(answers) if isinstance(each, DriverError)},
        )

    async def count(self) -> int:
        """Return how many GPUs the driver has. Raises DriverError where it does not answer in time."""
        context = self._context
        deadline = context.settings.call_deadline_seconds
        thread = CallThread("count-gpus")
        counting = thread.run(context.driver.count)
        thread.close()
        await asyncio.wait({counting}, timeout=deadline)
        if not counting.done():
            detail = f"the GPUs could not be counted in {deadline:g} s"
            raise DriverError(DriverErrorKind.TIMEOUT, "nvmlDeviceGetCount", detail=detail)
        return counting.result()

    def note_missing(self, failed: Mapping[int, DriverError]) -> None:
        """Note GPUs that do not answer: `look` reads them again from now on."""
        for index, error in failed.items():
            self._context.missing[index] = str(error)
            self._tell(
                EventKind.GPU_CORDONED, f"GPU {index} is set aside, and looked for from time to time: {error}", index
            )

    async def look(self) -> None:
        """Read the missing GPUs again, and manage those that answer now."""
        for index in sorted(self._context.missing):
            observed = await self._read(index)
            if isinstance(observed, ObservedGpu) and await self._take_up(observed):
                self._context.missing.pop(index, None)

    async def _take_up(self, observed: ObservedGpu) -> bool:
        """Return True if the GPU needs no further attempts (managed or not selected), False if another agent has it."""
        context = self._context
        if observed.uuid in context.state.gpus or not selected([observed], context.settings.gpus):
            return True
        try:
            self.lock(observed.index, observed.uuid)
        except LockedError as error:
            if context.missing.get(observed.index) != error.message:
                context.missing[observed.index] = error.message
                self._tell(EventKind.GPU_CORDONED, error.message, observed.index)
            return False
        record = self.add(observed)
        self.load_instances(observed.uuid)
        async with context.gpu_workers[observed.uuid].lock:
            try:
                await self._reconciler.compare(record, observed)
            except DriverError as error:
                await self._reconciler.unread(observed.uuid, error)
            except LedgerError:
                pass  # the next look compares again
        self._tell(EventKind.GPU_RECOVERED, f"GPU {observed.index} answers, and is managed from now on", observed.index)
        context.state.capacity_freed.emit()
        return True

    async def _read(self, index: int) -> ObservedGpu | DriverError:
        """Read a GPU, or wait for a reading that is still in progress; return the error where it fails."""
        deadline = self._context.settings.call_deadline_seconds
        reading = self._readings.get(index) or self._begin(index)
        await asyncio.wait({reading}, timeout=deadline)
        if not reading.done():
            return DriverError(
                DriverErrorKind.TIMEOUT, "reading it", detail=f"no answer in {deadline:g} s", gpu_index=index
            )
        self._readings.pop(index, None)
        error = reading.exception()
        if error is None:
            return self._believed(reading.result())
        if not isinstance(error, DriverError):
            raise error
        return error

    def _believed(self, observed: ObservedGpu) -> ObservedGpu | DriverError:
        """Return what was read, or an error if the GPU denies MIG mode though instances are recorded for it."""
        partitioned = any(
            each.slot.gpu == observed.uuid and each.kind.needs_mig_mode for each in self._contents.instances
        )
        if observed.mode.capable or not partitioned:
            return observed
        detail = "it has instances on record, and says that it has no MIG mode"
        return DriverError(DriverErrorKind.UNKNOWN, "nvmlDeviceGetMigMode", detail=detail, gpu_index=observed.index)

    def _begin(self, index: int) -> asyncio.Future[ObservedGpu]:
        context = self._context

        def observe() -> ObservedGpu:
            return context.with_sharing(context.driver.observe_at(index))

        def read() -> ObservedGpu:
            try:
                return observe()
            except DriverError as error:
                if error.kind is DriverErrorKind.GPU_LOST:
                    raise
                return observe()  # one bad answer is no reason to go without the GPU

        thread = CallThread(f"gpu-{index}-first-reading")
        reading = self._readings[index] = thread.run(read)
        thread.close()
        return reading

    def add(self, observed: ObservedGpu) -> GpuRecord:
        """Put a GPU under management; its recorded instances are loaded by `load_instances`."""
        context, reconciler = self._context, self._reconciler
        record = GpuRecord(
            index=observed.index,
            uuid=observed.uuid,
            layout=reconciler.layout_of(observed),
            mode=observed.mode,
            minor=observed.minor,
            cordon=self._contents.cordons.get(observed.uuid),
            not_shared="" if observed.sharing is None else observed.sharing.why_not,
        )
        context.state.add_gpu(record)
        context.gpu_workers[observed.uuid] = GpuWorker(
            observed.uuid,
            observed.index,
            clock=context.clock,
            deadline=context.settings.call_deadline_seconds,
            on_hung=reconciler.hung,
            on_answered=reconciler.answered,
        )
        reconciler.tell_differences(observed)
        return record

    def load_instances(self, gpu: GpuUuid) -> None:
        """Load the recorded instances of a GPU; the leases have to be loaded before."""
        state, contents = self._context.state, self._contents
        if contents.boot_id != self._reconciler.boot_id:
            return  # of a boot before this one, whose leases have ended
        record = state.gpus[gpu]
        for instance in contents.instances:
            gone = instance.lease is None or instance.lease not in state.leases
            if gone and state.is_doubtful(instance.generation):
                continue  # its lease has ended, and it may be another's by now: it is found again
            if instance.slot.gpu == gpu:
                state.put(_at_rest_without_lease(_with_whole_profile(instance, record), self._context))

    def _tell(self, kind: EventKind, words: str, index: int) -> None:
        self._context.journal.record(self._context.journal.event(kind, words, index=index))


def selected(gpus: Iterable[ObservedGpu], names: Iterable[str]) -> list[ObservedGpu]:
    """Return the GPUs that are named by index, UUID or the beginning of one; all where none is named."""
    wanted = tuple(names)
    return [gpu for gpu in gpus if not wanted or any(_is_named(gpu, name) for name in wanted)]


def _is_named(gpu: ObservedGpu, name: str) -> bool:
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.lower().startswith(name.lower()))


def _with_whole_profile(instance: Instance, record: GpuRecord) -> Instance:
    """Return the instance with the layout's profile: the recorded one lacks engines and other placements."""
    profile = record.layout.by_id.get(instance.slot.profile.id)
    if profile is None:
        return instance
    return replace(instance, slot=Slot(record.uuid, profile, instance.slot.placement))


def _at_rest_without_lease(instance: Instance, context: Context) -> Instance:
    """Return the instance, idle if its lease has ended while the GPU did not answer."""
    if instance.lease is None or instance.lease in context.state.leases:
        return instance
    return replace(instance, lease=None, state=InstanceState.IDLE)
