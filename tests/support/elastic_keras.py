"""Checks of elastic training with Keras 3, in a process that has it: `python elastic_keras.py FOLDER` runs them all."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["JAX_ENABLE_X64"] = "1"

import keras
import numpy as np

from mig_agent import elastic
from mig_agent.elastic.keras import Model
from support.elastic_checks import run

keras.config.set_floatx("float64")
SAMPLES, GLOBAL_BATCH = 29, 8
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01),
}


def data() -> tuple[Any, Any]:
    inputs = np.random.default_rng(3).normal(size=(SAMPLES, 3))
    return inputs, np.tanh(inputs.sum(1, keepdims=True))


def network(kind: str) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=OPTIMIZERS[kind](), loss="mse")
    return model


def trained(kind: str, most: int, epochs: int = 3) -> Any:
    elastic.init(GLOBAL_BATCH, most)
    model = Model(network(kind))
    assert len(model.fit(*data(), epochs=epochs)) == epochs
    return model


def near(found: Any, expected: Any) -> None:
    """To what Keras computes with sample weights: not to float64, whatever its floatx."""
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        difference = np.abs(one - other).max()
        assert difference < 1e-6, difference


def check_each_shape(_folder: Path) -> None:
    for kind in OPTIMIZERS:
        expected = trained(kind, GLOBAL_BATCH)
        for most in (3, 5):
            near(trained(kind, most), expected)


def check_it_is_what_keras_does_with_whole_batches(_folder: Path) -> None:
    job = elastic.init(GLOBAL_BATCH, GLOBAL_BATCH)
    model, (x, y) = network("Adam"), data()
    for _ in job.epochs(3):
        for indices in job.batches(range(SAMPLES), shuffle=True):
            model.train_on_batch(x[indices], y[indices])
    near(trained("Adam", 3), model)


def check_it_goes_on_from_a_checkpoint_in_another_shape(folder: Path) -> None:
    os.environ["MIG_AGENT_CHECKPOINTS"] = str(folder)
    expected = trained("Adam", GLOBAL_BATCH)
    steps = list[int]()

    class Ender(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert logs
            steps.append(batch)
            if len(steps) in {2, 7}:
                os.kill(os.getpid(), signal.SIGTERM)

    for most, ends in ((3, True), (8, True), (4, False)):
        job = elastic.init(GLOBAL_BATCH, most)
        model = Model(network("Adam"))
        job.checkpoint(model.save, model.load)
        try:
            model.fit(*data(), epochs=3, callbacks=[Ender()])
        except elastic.Yielded:
            assert ends
        job.close()
        if not ends:
            near(model, expected)
    assert steps == list(range(12))


def check_mistakes_are_told_in_words(_folder: Path) -> None:
    job = elastic.init(GLOBAL_BATCH, 2, devices=2)
    single = elastic.init(GLOBAL_BATCH, 2)
    used = network("SGD")
    used.train_on_batch(*data())
    for model, where, words in (
        (network("SGD"), job, "on 2 devices"),
        (keras.Sequential([keras.layers.Dense(1)]), single, "it has no optimizer yet"),
        (used, single, "it has been trained already"),
    ):
        try:
            Model(model, where)
        except elastic.UsageError as error:
            told = str(error)
        else:
            told = ""
        assert words in told, told


if __name__ == "__main__":
    run(globals(), Path(sys.argv[1]))
