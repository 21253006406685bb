"""A training by hand, in float64 and with no framework: a network of two layers that learns a function of two numbers.

As a program it trains as the environment says: `ELASTIC_MAX` and `ELASTIC_DEVICES` are what a lease would decide.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mig_agent import elastic

SAMPLES, GLOBAL_BATCH, HIDDEN = 45, 12, 3
STEPS_AN_EPOCH = -(-SAMPLES // GLOBAL_BATCH)
_RATE, _MOMENTUM = 0.2, 0.9


def sample(index: int) -> tuple[float, float, float]:
    x, y = math.sin(1.7 * index), math.cos(2.3 * index)
    return x, y, math.tanh(x - 0.5 * y)


@dataclass
class Network:
    weights: list[float] = field(default_factory=lambda: [math.sin(3.1 * each + 1) for each in range(4 * HIDDEN + 1)])
    momentum: list[float] = field(default_factory=lambda: [0.0] * (4 * HIDDEN + 1))
    taken: list[int] = field(default_factory=list)
    """Every sample in the order in which it counted."""

    def gradient(self, indices: Sequence[int]) -> list[float]:
        """Of the mean squared error over these samples."""
        total = [0.0] * len(self.weights)
        for x, y, wanted in map(sample, indices):
            out, hidden = self.weights[-1], []
            for each in range(HIDDEN):
                a, b, c, d = self.weights[4 * each : 4 * each + 4]
                hidden.append(math.tanh(a * x + b * y + c))
                out += d * hidden[-1]
            error = 2 * (out - wanted) / len(indices)
            for each, h in enumerate(hidden):
                inner = error * self.weights[4 * each + 3] * (1 - h * h)
                for offset, part in enumerate((inner * x, inner * y, inner, error * h)):
                    total[4 * each + offset] += part
            total[-1] += error
        return total

    def step(self, gradient: Sequence[float]) -> None:
        self.momentum = [_MOMENTUM * m + g for m, g in zip(self.momentum, gradient, strict=True)]
        self.weights = [w - _RATE * m for w, m in zip(self.weights, self.momentum, strict=True)]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self)))

    def load(self, path: Path) -> None:
        vars(self).update(json.loads(path.read_text()))


def train(network: Network, job: elastic.Job, epochs: int, told: Callable[[int], object] = int) -> None:
    for _ in job.epochs(epochs):
        total, step = [0.0] * len(network.weights), list[int]()
        for indices in job.batches(range(SAMPLES), shuffle=True, seed=5):
            weighted = [job.weight * each for each in network.gradient(indices)]
            total = [a + b for a, b in zip(total, weighted, strict=True)]
            step += indices if job.weight else ()
            if job.is_last:
                network.step(total)
                network.taken += step
                total, step = [0.0] * len(network.weights), []
                told(job.position.step)


def main(epochs: int, every: int, log: str, pause: float) -> None:
    network = Network()
    job = elastic.init(GLOBAL_BATCH, int(os.environ["ELASTIC_MAX"]), devices=int(os.environ["ELASTIC_DEVICES"]))
    job.checkpoint(network.save, network.load, every=every)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def told(step: int) -> None:
        os.write(descriptor, f"{os.getpid()} {step}\n".encode())
        time.sleep(pause)

    train(network, job, epochs, told)
    job.save()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
