"""Elastic training with Keras 3, on any of its backends: one process and one device.

Keras adds up the gradients of micro-batches itself and divides by their number (`gradient_accumulation_steps`). Unequal
micro-batches get sample weights that make this the exact mean over the global batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from mig_agent.core.errors import UsageError
from mig_agent.elastic.job import Job
from mig_agent.elastic.start import current_job

_UNWEIGHTED = "mean_with_sample_weight"
"""A reduction that divides by the sum of the sample weights, so that these cancel."""


class Model:
    """A compiled model whose optimizer steps once per global step."""

    def __init__(self, model: Any, job: Job | None = None) -> None:  # noqa: ANN401 -- Keras is not there for the types
        """Wrap a model, before its first step. Raises UsageError.

        `job`: None: that of `elastic.init`. The loss must be a mean over the samples, as those of Keras are.
        """
        self.model = model
        self._job = job or current_job()
        if self._job.devices > 1:
            raise UsageError(
                f"cannot train a Keras model on {self._job.devices} devices: it is done on one",
                "ask for one larger device, or give elastic.init(devices=1)",
            )
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            raise UsageError("cannot wrap this model: it has no optimizer yet", "call model.compile(...) first")
        if optimizer.built:
            raise UsageError("cannot wrap this model: it has been trained already", "wrap it right after compile()")
        if getattr(keras.losses.get(model.loss), "reduction", "") == _UNWEIGHTED:
            raise UsageError(f"cannot weight micro-batches: the loss has the reduction {_UNWEIGHTED}")
        if self._job.steps > 1:
            optimizer.gradient_accumulation_steps = self._job.steps

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- whatever the model has
        """Return what the model has: `predict`, `evaluate`, `summary`."""
        if name == "model":  # not set yet, as in a copy
            raise AttributeError(name)
        return getattr(self.model, name)

    def fit(
        self,
        x: Any,  # noqa: ANN401 -- an array, or a structure of arrays
        y: Any,  # noqa: ANN401 -- the same
        *,
        epochs: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        callbacks: Iterable[Any] = (),
    ) -> list[Mapping[str, float]]:
        """Train from where the job is to the end of so many epochs; return the metrics of each epoch.

        Callbacks get a batch for each global step.
        """
        length = len(keras.tree.flatten(x)[0])
        listeners = keras.callbacks.CallbackList(list(callbacks), model=self.model)
        history = []
        listeners.on_train_begin()
        for epoch in self._job.epochs(epochs):
            listeners.on_epoch_begin(epoch)
            self.model.reset_metrics()
            logs: Mapping[str, float] = {}
            for indices in self._job.batches(range(length), shuffle=shuffle, seed=seed):
                logs = self._train(_taken(x, indices), _taken(y, indices))
                if self._job.is_last:
                    listeners.on_train_batch_end(self._job.position.step - 1, logs)
            listeners.on_epoch_end(epoch, logs)
            history.append(logs)
            if self.model.stop_training:
                break
        listeners.on_train_end(history[-1] if history else None)
        return history

    def save(self, path: Path) -> None:
        """Write the weights and the optimizer's state: for `job.checkpoint(model.save, model.load)`."""
        _, *kept = self._kept()
        steps = np.asarray(self._job.position.step)
        arrays = [*self.model.get_weights(), steps, *(keras.ops.convert_to_numpy(each.value) for each in kept)]
        with path.open("wb") as file:
            np.savez(file, *arrays)

    def load(self, path: Path) -> None:
        """Read what `save` wrote, also with another number of accumulation steps."""
        self._build()
        with np.load(path, allow_pickle=False) as saved:
            arrays = [saved[f"arr_{number}"] for number in range(len(saved.files))]
        count = len(self.model.get_weights())
        self.model.set_weights(arrays[:count])
        iterations, *kept = self._kept()
        iterations.assign(int(arrays[count]) * self._job.steps)
        for variable, value in zip(kept, arrays[count + 1 :], strict=True):
            variable.assign(value)

    def _train(self, x: Any, y: Any) -> Mapping[str, float]:  # noqa: ANN401 -- arrays
        """Train with a micro-batch, and with the last one of a step complete the number that Keras waits for."""
        local = self._job.local_batch
        if local is None:
            raise UsageError("cannot train: no micro-batch is at work")
        ones = np.ones(len(local.indices))
        logs: Mapping[str, float] = self.model.train_on_batch(
            x, y, sample_weight=ones * (local.weight * self._job.steps), return_dict=True
        )
        if local.is_last:
            for _ in range(self._job.steps - local.number):  # the last step of an epoch may need fewer
                self.model.train_on_batch(x, y, sample_weight=0 * ones)
        return logs

    def _build(self) -> None:
        if not self.model.built:
            raise UsageError("cannot load a checkpoint: the model is not built", "give its Input, or call build()")
        if not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)

    def _kept(self) -> list[Any]:
        """Return the optimizer's variables that belong in a checkpoint; the first counts micro-batches."""
        self._build()
        optimizer = self.model.optimizer
        sums = {id(each) for each in getattr(optimizer, "_accumulated_gradients", ())}
        return [each for each in optimizer.variables if id(each) not in sums]


def _taken(structure: Any, indices: list[int]) -> Any:  # noqa: ANN401 -- an array, or a structure of arrays
    return keras.tree.map_structure(lambda array: array[np.asarray(indices)], structure)
