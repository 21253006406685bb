"""Elastic training with PyTorch: an optimizer that steps once per global step, and DataLoaders that are resumed."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from mig_agent.core.errors import UsageError
from mig_agent.elastic.job import Job
from mig_agent.elastic.sample_order import LocalBatch, Order, in_order, shuffled
from mig_agent.elastic.start import current_job
from mig_agent.elastic.words import say


class Optimizer(torch.optim.Optimizer):
    """An optimizer that steps once per global step, with the exact mean gradient of the global batch.

    It takes the place of the optimizer that it wraps: call `step` and `zero_grad` after each micro-batch, with the
    loss a mean over it. Until the last one `step` only keeps the weighted gradients, in a second copy of them if there
    are several accumulation steps. Schedulers and GradScaler take it as any other; its state is the inner one's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        job: Job | None = None,
        *,
        before_step: Callable[[], object] | None = None,
        weigh_gradients: bool = True,
    ) -> None:
        """Wrap an optimizer.

        `job`: None: that of `elastic.init`. `before_step` is called with the gradient of the global batch in place, for
        what changes it as a whole, such as clipping. `weigh_gradients`: False if the loss is multiplied by
        `job.weight`, as it must be where parameters are not those of the model, as with FSDP.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "cannot wrap LBFGS: it computes the loss several times in one step, and a global batch comes in parts",
                "use an optimizer that takes one gradient a step",
            )
        # Not the initializer of the base class: all that it would set is the inner optimizer's.
        self.optimizer = optimizer
        self._job = job or current_job()
        self._before_step = before_step
        self._weighs = weigh_gradients
        self._weighed: set[int] = set()
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        """The weighted gradients of each parameter from the micro-batches of this global step so far."""
        self._last: LocalBatch | None = None
        """The micro-batch whose gradients came last."""
        self._taken = 0
        """Micro-batches of its global step whose gradients have come."""
        self._has_told = False
        """True once a step that was left out has been told of."""
        if self._job.place.processes > 1:
            self._job.agree = any_process
        self._weigh()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever the inner optimizer has
        """Return what the inner optimizer has: `param_groups`, `state`, `defaults`."""
        if name == "optimizer":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set parts of the optimizer that both know on the inner one."""
        if name in {"param_groups", "state", "defaults"}:
            setattr(self.optimizer, name, value)
        else:
            object.__setattr__(self, name, value)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401 -- as PyTorch has it
        """Keep the gradients of this micro-batch, and with the last one step the inner optimizer.

        Returns what `closure` returns, which is called once: to compute the micro-batch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        local = self._job.local_batch
        if local is None:
            raise UsageError("cannot step: no micro-batch is at work", "step in the loop over job.batches()")
        last = self._last
        if local is last:
            raise UsageError("cannot step twice in one micro-batch", "call optimizer.step() once for each")
        if last is None or last.done != local.done or last.number >= local.number:  # another step has begun
            self._drop()
        self._last, self._taken = local, self._taken + 1
        if not local.is_last:
            self._keep()
            return loss
        if self._taken == local.number:
            self._add_kept()
            if self._before_step is not None:
                self._before_step()
            self.optimizer.step()
        else:  # GradScaler leaves out a micro-batch whose gradients are not finite: then none of them counts
            self._tell(local)
        self._drop()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 -- as PyTorch has it
        """Clear the gradients of the last micro-batch; those that count for the global step are kept elsewhere."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the inner optimizer."""
        self.optimizer.add_param_group(param_group)
        self._weigh()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, for a checkpoint between global steps."""
        found: dict[str, Any] = self.optimizer.state_dict()
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state, of a run with or without this wrapper."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"elastic.torch.Optimizer({self.optimizer!r})"

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _weigh(self) -> None:
        """Have each parameter's gradient weighted before it is added up or exchanged between processes."""
        if not self._weighs:
            return
        for parameter in self._parameters():
            if id(parameter) not in self._weighed:
                self._weighed.add(id(parameter))
                # A frozen one takes no hook, and may be trained later.
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)
                parameter.register_hook(self._weighted)
                parameter.requires_grad_(is_trained)

    def _weighted(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._job.local_batch is None:
            return gradient
        weight = self._job.weight
        return gradient if weight == 1.0 else gradient * weight

    def _keep(self) -> None:
        """Move the gradients to the sums, so that the next micro-batch begins with none."""
        for parameter in self._parameters():
            if parameter.grad is None:
                continue
            kept = self._sums.get(parameter)
            # A copy: the gradient may be a part of a buffer that DDP fills again.
            self._sums[parameter] = parameter.grad.detach().clone() if kept is None else kept + parameter.grad.detach()
            parameter.grad = None

    def _add_kept(self) -> None:
        """Put the gradient of the whole global step in place."""
        for parameter in self._parameters():
            kept = self._sums.pop(parameter, None)
            if kept is not None:
                parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)

    def _tell(self, local: LocalBatch) -> None:
        if not self._has_told and self._job.master:
            self._has_told = True
            say(
                f"step {local.done.step} is left out: {self._taken} of its {local.number} micro-batches were stepped. "
                "GradScaler does that; otherwise call optimizer.step() after each one"
            )

    def _drop(self) -> None:
        """Forget the gradients of a step that is over, or was left in its middle."""
        self._sums.clear()
        self._taken = 0


class Scheduler:
    """A scheduler of learning rates that steps once per global step, however often its `step` is called."""

    def __init__(self, scheduler: Any, job: Job | None = None) -> None:  # noqa: ANN401 -- PyTorch has no public base of all
        self.scheduler = scheduler
        self._job = job or current_job()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever the scheduler has
        """Return what the scheduler has: `get_last_lr`, `state_dict`, `load_state_dict`."""
        if name == "scheduler":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 -- what the scheduler takes
        """Step with the last micro-batch of a global step, and outside of the loop over batches."""
        if self._job.local_batch is None or self._job.is_last:
            self.scheduler.step(*arguments, **options)


def any_process(flag: bool) -> bool:  # noqa: FBT001 -- the value that is exchanged
    """Return whether any process of the default group says True."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return flag
    device = torch.device("cuda") if distributed.get_backend() == "nccl" else torch.device("cpu")
    told = torch.tensor([int(flag)], device=device)
    distributed.all_reduce(told, op=distributed.ReduceOp.MAX)
    return bool(told.item())


def device_memory() -> int | None:
    """Return the bytes of the current device's memory; None without one."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


class DataLoaderSource:
    """Samples of a DataLoader's data set, loaded as it does: its workers, its collate_fn, its pinned memory."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if isinstance(loader.dataset, IterableDataset):
            raise UsageError(
                "cannot take batches from an IterableDataset: it has no samples by index, so it cannot be resumed",
                "use a data set with __len__ and __getitem__",
            )
        self._loader = loader
        self.length = len(loader.dataset)

    def order(self, *, shuffle: bool | None, seed: int) -> Order:
        """Return the order of the samples; with None it is shuffled if the DataLoader was made to."""
        if shuffle is None:
            sampler = self._loader.sampler
            shuffle = isinstance(sampler, RandomSampler) or bool(getattr(sampler, "shuffle", False))
            if not isinstance(sampler, (DistributedSampler, RandomSampler, SequentialSampler)):
                raise UsageError(
                    f"cannot resume the order of a {type(sampler).__name__}: it is not known after a restart",
                    "give job.batches(loader, order=...): a function of the epoch that returns indices",
                )
        return shuffled(self.length, seed) if shuffle else in_order(self.length)

    def batches(self, local_batches: Iterable[LocalBatch]) -> Iterator[tuple[LocalBatch, Any]]:
        """Yield each local batch with its batch; workers are ahead of the training as ever."""
        loader, ahead = self._loader, deque[LocalBatch]()
        options: dict[str, Any] = {}
        if loader.num_workers:
            options = {
                "prefetch_factor": loader.prefetch_factor,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        again = DataLoader(
            loader.dataset,
            batch_sampler=_Recorded(local_batches, ahead),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=_Undisturbed(loader.worker_init_fn),
            generator=loader.generator,
            **options,
        )
        for batch in again:
            yield ahead.popleft(), batch


class _Recorded:
    """Gives a DataLoader the indices of each local batch, and remembers which ones it has taken."""

    def __init__(self, local_batches: Iterable[LocalBatch], taken: deque[LocalBatch]) -> None:
        self._batches = local_batches
        self._taken = taken

    def __iter__(self) -> Iterator[list[int]]:
        for local in self._batches:
            self._taken.append(local)
            yield list(local.indices)


class _Undisturbed:
    """Starts a worker that leaves notices to its parent, so that it loads data until the training yields."""

    def __init__(self, begin: Callable[[int], object] | None) -> None:
        self._begin = begin

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        if self._begin is not None:
            self._begin(worker)
