"""One training that shrinks, grows, moves and restarts, and goes on where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import parse_duration
from mig_agent.elastic.batch_plan import BatchPlan, checked
from mig_agent.elastic.checkpoints import CheckpointFolder
from mig_agent.elastic.environment import FOLDER_VARIABLE, YIELD_CODE, ProcessPlace
from mig_agent.elastic.loaders import source_of
from mig_agent.elastic.notice import YieldNotice
from mig_agent.elastic.sample_order import LocalBatch, Order, Position, local_batches
from mig_agent.elastic.words import say


class Yielded(SystemExit):
    """Ends the program with exit code 75, so that it is started again."""

    def __init__(self) -> None:
        super().__init__(YIELD_CODE)


class Job:
    """A training in global steps; `init` makes one."""

    def __init__(
        self, batches: BatchPlan, *, max_batch: int, name: str, place: ProcessPlace, notice: YieldNotice
    ) -> None:
        self.name: str = name
        """The name of the training, which tells its checkpoints from those of others."""
        self.plan: BatchPlan = batches
        self.max_batch: int = max_batch
        """The most samples on one device at a time."""
        self.place: ProcessPlace = place
        self.agree: Callable[[bool], bool] = bool
        """Returns whether any process of the job says True; all of them call it together."""
        self._notice = notice
        self._position = Position()
        self._local_batch: LocalBatch | None = None
        """The samples that the loop's body works on."""
        self._checkpoints: _Saving | None = None

    # Sizes

    @property
    def global_batch(self) -> int:
        """Samples in one step of the optimizer."""
        return self.plan.global_batch

    @property
    def steps(self) -> int:
        """Accumulation steps in one global step."""
        return len(self.plan.steps)

    @property
    def batch_size(self) -> int:
        """The size of the largest micro-batch of one device."""
        return self.plan.batch_size

    @property
    def devices(self) -> int:
        """Devices that the global batch is spread over."""
        return self.place.devices

    @property
    def rank(self) -> int:
        """The number of this process among those of the job, from 0."""
        return self.place.rank

    @property
    def master(self) -> bool:
        """True in the process that writes checkpoints and should write logs."""
        return self.place.rank == 0

    # Where the training is

    @property
    def position(self) -> Position:
        """Return what is done: in the body of the loop, the step of the last micro-batch counts as done."""
        if self._local_batch is not None and self._local_batch.is_last:
            return self._local_batch.done
        return self._position

    @property
    def is_last(self) -> bool:
        """True while the body of the loop works on the last micro-batch of its global step."""
        return self._local_batch is not None and self._local_batch.is_last

    @property
    def weight(self) -> float:
        """The factor for the loss, or the gradient, of the current micro-batch.

        With it, the gradients of a global step, averaged over the processes (as DDP does) and summed over accumulation
        steps, are the exact mean over the global batch. `elastic.torch.Optimizer` does that by itself.
        """
        if self._local_batch is None:
            raise UsageError("cannot tell a weight: no micro-batch is at work", "use it in the loop over job.batches()")
        return self._local_batch.weight * self.place.processes

    @property
    def local_batch(self) -> LocalBatch | None:
        """The samples that the loop's body works on; None outside of it."""
        return self._local_batch

    def epochs(self, number: int) -> Iterator[int]:
        """Yield the epochs that are left of so many, beginning with the one in which the training is."""
        while self._position.epoch < number:
            epoch = self._position.epoch
            yield epoch
            if self._position.epoch == epoch:  # left before its end
                self._position = self._position.next_epoch()

    def batches(
        self, loader: object, *, shuffle: bool | None = None, seed: int = 0, order: Order | None = None
    ) -> Iterator[Any]:
        """Yield this process's micro-batches from where the training is to the end of the epoch.

        `loader`: a DataLoader of PyTorch, whose batch size counts for nothing and which is shuffled if it was made so;
        or anything with a length and items by index, from which lists of items come. `range(n)` gives indices.
        `order`: returns the indices of an epoch in order; it replaces `shuffle` and `seed`. Each epoch has an order of
        its own that depends on nothing but its number and the seed.

        After `checkpoint`, the state is saved between global steps when it is due. If the process is to yield, it is
        saved as well and the program ends with exit code 75. Raises UsageError.
        """
        source = source_of(loader)
        indices = (order or source.order(shuffle=shuffle, seed=seed))(self._position.epoch)
        if self._position.sample > len(indices):
            raise UsageError(
                f"cannot go on at sample {self._position.sample}: this epoch has {len(indices)}",
                "the data is not what it was when the checkpoint was saved",
            )
        mine = local_batches(
            indices,
            self._position,
            self.plan,
            max_batch=self.max_batch,
            rank=self.rank,
            devices_here=self.place.devices_here,
        )
        for local, batch in source.batches(mine):
            self._local_batch = local
            try:
                yield batch
            except GeneratorExit:  # the loop was left; with its last micro-batch the step was done
                self._position, self._local_batch = self.position, None
                raise
            self._position, self._local_batch = self.position, None
            if local.is_last:
                self._between_steps()
        self._position = self._position.next_epoch()

    # Yielding

    def should_yield(self) -> bool:
        """Return whether the program is to save its state and end with exit code 75; all processes are told the same.

        From the first call on SIGTERM and SIGUSR1 are caught. Call it between global steps, in all processes alike.
        """
        self._notice.watch()
        return self.agree(self._notice.is_given)

    def checkpoint(
        self,
        save: Callable[[Path], object],
        load: Callable[[Path], object],
        *,
        folder: str | os.PathLike[str] | None = None,
        every: str | int | None = "10m",
        keep: int = 2,
    ) -> bool:
        """Go on from the last good checkpoint, and save others from now on; return whether there was one.

        `save(path)` writes the state of the training to a file or a folder of that name, `load(path)` reads it.
        `folder`: where checkpoints are; None: MIG_AGENT_CHECKPOINTS, or else `checkpoints/NAME`. `every`: how often
        `batches` saves, in time (`10m`) or global steps (100); None: only to yield. Raises UsageError.
        """
        chosen = Path(folder or os.environ.get(FOLDER_VARIABLE, "") or Path("checkpoints", self.name))
        saving = _Saving(CheckpointFolder(chosen, keep=keep), save, every)
        if self.master:
            saving.folder.open()
        found = saving.folder.newest()
        if found is not None:
            load(found.state)
            self._position = found.position
            if self.master:
                say(f"going on after step {found.position.step}")
        saving.saved(self._position)
        self._checkpoints = saving
        self._notice.watch()
        return found is not None

    def save(self) -> None:
        """Save a checkpoint now, in the master; elsewhere do nothing. Raises UsageError, CheckpointError.

        In the body of the loop, call it after the step of the optimizer.
        """
        if self._checkpoints is None:
            raise UsageError("cannot save a checkpoint: how is not known", "call job.checkpoint(save, load) first")
        if self.master:
            self._checkpoints.folder.write(self.position, self._checkpoints.save)
        self._checkpoints.saved(self.position)

    def yield_now(self) -> NoReturn:
        """Save a checkpoint if that is known how, and end the program with exit code 75 in all processes alike."""
        if self._checkpoints is not None:
            self.save()
        self.agree(True)  # the others end once the master has saved
        if self.master:
            say(f"yielding after step {self.position.step}")
        raise Yielded

    def close(self) -> None:
        """Stop catching signals, and let others write to the folder of checkpoints."""
        self._notice.stop_watching()
        if self._checkpoints is not None:
            self._checkpoints.folder.close()

    def _between_steps(self) -> None:
        if self._checkpoints is None:
            return
        if self.should_yield():
            self.yield_now()
        if self._checkpoints.is_due(self._position):
            self.save()


class _Saving:
    """The way in which checkpoints are saved, and when the next one is due."""

    def __init__(self, folder: CheckpointFolder, save: Callable[[Path], object], every: str | int | None) -> None:
        self.folder = folder
        self.save = save
        self._every_steps = checked("every", every) if isinstance(every, int) else None
        self._every_seconds = parse_duration(every) if isinstance(every, str) else None
        self._last_step = 0
        self._last_time = 0.0

    def saved(self, position: Position) -> None:
        """Count from this position on."""
        self._last_step, self._last_time = position.step, time.monotonic()

    def is_due(self, position: Position) -> bool:
        """Return whether the time or the steps since the last one have passed."""
        if self._every_steps is not None:
            return position.step - self._last_step >= self._every_steps
        return self._every_seconds is not None and time.monotonic() - self._last_time >= self._every_seconds
