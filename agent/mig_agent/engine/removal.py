"""Destroying one instance: tried for a moment when it is in use, then set aside with the name of who holds it."""

from __future__ import annotations

from mig_agent.core.errors import DriverError, DriverErrorKind, MigAgentError
from mig_agent.core.model import Instance, Slot
from mig_agent.engine.blocks import Blocks
from mig_agent.engine.context import Context
from mig_agent.engine.pace import timed

IN_USE_SECONDS = 1.0
"""Processes that have ended keep an instance in use for some tenths of a second."""
PAUSE_SECONDS = 0.1


class StepFailedError(MigAgentError):
    """A step of a plan failed; `error` says how."""

    def __init__(self, error: DriverError, words: str, exclude: Slot | None = None) -> None:
        super().__init__(words)
        self.error = error
        self.words = words
        self.exclude = exclude
        """The slot that shall not be tried again for the same request."""

    @property
    def counts(self) -> bool:
        """Whether it speaks against the hardware, so that a request may meet only a few of these."""
        return self.error.kind is not DriverErrorKind.IN_USE


class Remover:
    """Belongs to the event loop. Its methods are called under the lock of the GPU's lane."""

    def __init__(self, context: Context, blocks: Blocks) -> None:
        self._context = context
        self._blocks = blocks

    async def destroy(self, instance: Instance) -> None:
        """Destroys it on the hardware; the caller records it. Raises StepFailedError.

        What is in use is blocked from now on. After any other failure the GPU has to be read again.
        """
        context = self._context
        what = f"destroy {instance.slot}"
        lane = context.lanes[instance.slot.gpu]
        gi = instance.gpu_instance_id
        if gi is None:
            return
        began = context.clock.now()
        while True:
            try:
                _, seconds = await lane.change(what, lambda: timed(lambda: context.driver.destroy(instance.slot, gi)))
            except DriverError as error:
                if error.kind is not DriverErrorKind.IN_USE:
                    raise StepFailedError(error, f"cannot {what}: {error}") from error
                if context.clock.now() - began < IN_USE_SECONDS:
                    await context.clock.sleep(PAUSE_SECONDS)
                    continue
                raise await self._in_use(instance, error) from error
            context.timing.destroyed(seconds)
            self._blocks.forget(instance.generation)
            return

    async def _in_use(self, instance: Instance, error: DriverError) -> StepFailedError:
        try:
            users = await self._context.users(instance)
        except DriverError:
            users = error.holders
        holder = f"held by {', '.join(users)}" if users else "in use, and the driver does not say by whom"
        self._blocks.block(instance, holder)
        return StepFailedError(error, f"cannot destroy idle {self._context.place(instance)}: it is {holder}")
