"""How long a pod takes to run, with and without a MIG device, on a real one-node Kubernetes over simulated GPUs.

`hack/bench/pods.sh [--rounds N] [-o json]`. Needs root; creates a cluster of its own and removes it again. All moments
are those at which a client that watches the API server gets an event: what is measured is what a user sees.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from mig_agent.client import Client
from mig_agent.config.settings import Settings
from support.cluster import cluster as clusters
from support.cluster import installed, programs
from support.cluster.api import Json
from support.cluster.layout import NODE
from support.cluster.pods import PROFILE, is_bound, is_running
from support.cluster.space import Space

GPUS = "h100-80gb:1"
SLICE = f"{PROFILE}1g.10gb"
WHOLE = f"{PROFILE}7g.80gb"
_WATCH_SECONDS = 3
"""Seconds that one watch lasts, and so how long the end waits for the last one."""
_TIMEOUT_SECONDS = 120.0
_KUBELETS_PERIOD_SECONDS = 12.0
"""Seconds that surely include a write of the node's status: the kubelet writes it at least every ten."""


class CannotMeasureError(Exception):
    """An event to be measured did not happen; the message starts with "cannot"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Durations of one kind of event in seconds, over some rounds."""

    what: str
    rounds: int
    median: float
    least: float
    most: float

    @classmethod
    def of(cls, what: str, seconds: Sequence[float]) -> Timing:
        return cls(
            what=what,
            rounds=len(seconds),
            median=statistics.median(seconds),
            least=min(seconds),
            most=max(seconds),
        )


class Heard:
    """The states of an object as a watcher received them, each with its moment."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._told: list[tuple[float, str, Json]] = []

    def tell(self, kind: str, found: Json) -> None:
        with self._changed:
            self._told.append((time.monotonic(), kind, found))
            self._changed.notify_all()

    def first(self, since: float, wanted: Callable[[str, Json], bool], what: str) -> float:
        """Return the first moment after `since` at which `wanted` was true. Raises CannotMeasureError."""
        with self._changed:
            found: list[float] = []

            def happened() -> bool:
                found[:] = [at for at, kind, each in self._told if at >= since and wanted(kind, each)][:1]
                return bool(found)

            if not self._changed.wait_for(happened, _TIMEOUT_SECONDS):
                raise CannotMeasureError(f"cannot measure: it did not happen that {what}")
            return found[0]

    def lasting(self, since: float, until: float, wanted: Callable[[Json], bool]) -> float:
        """Return for how many of these seconds `wanted` was true, as far as was received; true at the start."""
        with self._changed:
            total, at, so = 0.0, since, True
            for moment, _, found in self._told:
                if since <= moment <= until:
                    total += (moment - at) * so
                    at, so = moment, wanted(found)
            return total + (until - at) * so


class Bench:
    """Measures on one cluster with an agent, in a `with` statement."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._pods, self._nodes = Heard(), Heard()
        self._number = 0
        self._ended = threading.Event()
        followed = ((f"{space.path}/pods", self._pods), ("/api/v1/nodes", self._nodes))
        self._threads = [threading.Thread(target=self._follow, args=each) for each in followed]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, path: str, heard: Heard) -> None:
        api = self._space.cluster.api
        version = api.get(path)["metadata"]["resourceVersion"]
        while not self._ended.is_set():
            for kind, found in api.watch(path, seconds=_WATCH_SECONDS, resourceVersion=version):
                version = found["metadata"]["resourceVersion"]
                heard.tell(kind, found)

    @contextmanager
    def pod(self, limits: Mapping[str, int] | None = None) -> Iterator[tuple[str, float]]:
        """Run a pod; yield its name and the moment of its request. It is deleted afterwards, and its lease ends."""
        self._number += 1
        name, asked = f"p{self._number}", time.monotonic()
        self._space.pod(name, limits)
        self.running(name)
        yield name, asked
        self._space.delete(name)
        self._space.until(lambda _: not self._space.leases(), "its lease has ended")

    def running(self, name: str) -> float:
        """Return the moment at which the watcher received that the pod runs."""
        return self._pods.first(0, lambda _, pod: _named(pod, name) and is_running(pod), f"{name} runs")

    def start(self, limits: Mapping[str, int] | None = None) -> float:
        """Return the seconds from requesting a pod until it runs."""
        with self.pod(limits) as (name, asked):
            return self.running(name) - asked

    def window(self) -> tuple[float, float]:
        """Return for how many seconds the scheduler does not know that a pod took a slice, and that it freed it.

        The kubelet may write its own number back once: the pod lasts longer than the kubelet's period, and all the time
        counts during which the node showed too much.
        """
        self.until_whole()
        with self.pod({SLICE: 1}) as (name, asked):
            bound = self._pods.first(asked, lambda _, pod: _named(pod, name) and is_bound(pod), f"{name} is bound")
            time.sleep(_KUBELETS_PERIOD_SECONDS)
            told = time.monotonic()
            unknown = self._nodes.lasting(bound, told, lambda node: _shows(node, 1))
        gone = self._pods.first(bound, lambda kind, pod: _named(pod, name) and kind == "DELETED", f"{name} is gone")
        returned = self._nodes.first(told, lambda _, node: _shows(node, 1), "the node shows that it is back")
        return unknown, max(0.0, returned - gone)

    def until_whole(self) -> None:
        """Wait until only idle instances remain, so that the largest profile can be allocated."""
        self._space.until_allocatable(WHOLE, 1)

    def empty(self) -> None:
        """Destroy all idle instances."""
        self._space.agent.reclaim()


def _named(found: Json, name: str) -> bool:
    return bool(found["metadata"]["name"] == name)


def _shows(node: Json, count: int) -> bool:
    return node["metadata"]["name"] == NODE and int(node["status"]["allocatable"].get(WHOLE, 0)) == count


def measure(bench: Bench, rounds: int) -> Iterator[Timing]:
    """Yield the timings of one kind after the other; the first round of each only warms up."""
    defaults = Settings()
    create, destroy = defaults.simulate_create_seconds, defaults.simulate_destroy_seconds
    yield Timing.of("pod runs, no device", [bench.start() for _ in range(rounds + 1)][1:])
    yield Timing.of("pod runs, idle match", [bench.start({SLICE: 1}) for _ in range(rounds + 1)][1:])

    def from_nothing() -> float:
        bench.empty()
        return bench.start({SLICE: 1})

    created = [from_nothing() for _ in range(rounds)]
    yield Timing.of(f"pod runs, instance made (simulated driver: {create:g} s)", created)

    def over_another() -> float:
        bench.start({SLICE: 1})
        bench.until_whole()
        return bench.start({WHOLE: 1})

    replaced = [over_another() for _ in range(rounds)]
    yield Timing.of(f"pod runs, idle one destroyed ({destroy:g} s) and instance made", replaced)
    windows = [bench.window() for _ in range(rounds)]
    yield Timing.of("node shows too much after a pod was bound", [taken for taken, _ in windows])
    yield Timing.of("node shows too little after a pod is gone", [given for _, given in windows])


def table(timings: Sequence[Timing]) -> str:
    """Return the timings as a table in Markdown."""
    rows = [("what", "rounds", "median", "least", "most")]
    rows += [
        (each.what, str(each.rounds), f"{each.median:.2f} s", f"{each.least:.2f} s", f"{each.most:.2f} s")
        for each in timings
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench/pods.sh", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    chosen = parser.parse_args(arguments)
    cluster = clusters.start(Path(tempfile.mkdtemp(prefix="mig-agent-bench-")), programs.ensure())
    try:
        installed.label(cluster)
        installed.install(cluster, installed.load_image(cluster), gpus=GPUS)
        with Client(installed.address(cluster)) as agent:
            space = Space(cluster, agent, "bench")
            space.open()
            with Bench(space) as bench:
                timings = list(measure(bench, chosen.rounds))
    except CannotMeasureError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        cluster.stop()
    print(json.dumps([asdict(each) for each in timings], indent=2) if chosen.output == "json" else table(timings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
