"""What is looked at on the hardware before a step of a plan: nothing in use is leased, destroyed or built over."""

from __future__ import annotations

from collections.abc import Sequence

from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import GpuUuid, Instance
from mig_agent.engine.blocks import Blocks
from mig_agent.engine.context import Context
from mig_agent.engine.removal import StepFailedError


class Looks:
    """Belongs to the event loop. Each look raises StepFailedError when the step must not be taken."""

    def __init__(self, context: Context, blocks: Blocks) -> None:
        self._context = context
        self._blocks = blocks

    async def before_reuse(self, instance: Instance) -> None:
        """It must be there still, and nothing may run on it: an instance with a process on it is never leased."""
        driver, host = self._context.driver, self._context.host
        gpu, gi, ci = instance.slot.gpu, instance.gpu_instance_id, instance.compute_instance_id
        uuid, whole = instance.uuid, instance.slot.profile.is_whole_gpu
        what = f"look whether {instance.slot} is free"

        def look() -> tuple[str, ...]:
            if not whole and (gi is None or ci is None):
                raise DriverError(DriverErrorKind.NOT_FOUND, what, detail="it is only half made")
            found = driver.processes(gpu) if gi is None or ci is None else driver.verify(gpu, gi, ci, uuid)
            return tuple(host.describe_process(process.pid) for process in found)

        try:
            users = await self._context.lanes[gpu].read(what, look)
        except DriverError as error:
            raise StepFailedError(error, f"cannot {what}: {error}", instance.slot) from error
        self._refuse_used(instance, users, what, "reuse")

    async def before_destroying(self, victims: Sequence[Instance]) -> None:
        """With a process on one of them none needs to be destroyed: they would not make room."""
        for victim in victims:
            what = f"look whether {victim.slot} is free"
            try:
                users = await self._context.processes(victim)
            except DriverError as error:
                raise StepFailedError(error, f"cannot {what}: {error}") from error
            self._refuse_used(victim, users, what, "destroy idle")

    async def before_creating(self, gpu: GpuUuid, intended: Sequence[Instance]) -> None:
        """What stands where something is to be created must be ours, before the intention is recorded.

        After a crash the intention alone tells that an instance there is ours, and may be removed.
        """
        driver, record = self._context.driver, self._context.state.gpus[gpu]
        what = "look what stands on the GPU"
        try:
            standing = await self._context.lanes[gpu].read(what, lambda: driver.standing(gpu))
        except DriverError as error:
            raise StepFailedError(error, f"cannot {what} {record.index}: {error}") from error
        ours = {each.gpu_instance_id for each in record.instances.values()}
        for instance in intended:
            for number, placement in standing.items():
                if number not in ours and placement.mask & instance.slot.placement.mask:
                    taken = DriverError(
                        DriverErrorKind.INSUFFICIENT_RESOURCES,
                        what,
                        detail=f"GPU instance {number} of somebody else stands on slices {placement}",
                        gpu_index=record.index,
                    )
                    words = f"cannot create {self._context.place(instance)}: {taken.detail}"
                    raise StepFailedError(taken, words, instance.slot)

    def _refuse_used(self, instance: Instance, users: tuple[str, ...], what: str, step: str) -> None:
        if users:
            held = f"held by {', '.join(users)}"
            self._blocks.block(instance, held)
            in_use = DriverError(DriverErrorKind.IN_USE, what, holders=users)
            raise StepFailedError(in_use, f"cannot {step} {self._context.place(instance)}: it is {held}")
