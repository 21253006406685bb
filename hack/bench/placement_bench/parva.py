"""Six deployments of ParvaGPU (its scenarios S1 to S6): how many GPUs one plan of all their devices needs."""

from __future__ import annotations

import time
from collections.abc import Mapping

from mig_agent.core.model import Request, Want
from mig_agent.core.planning.plan import DEFAULT_POLICY, Plan
from mig_agent.core.planning.planner import plan
from placement_bench.agent import AgentCluster, node
from placement_bench.clusters import fewest_gpus
from placement_bench.mixes import NAMES
from placement_bench.options import Options
from placement_bench.results import Check, Json, Report, Table

_KINDS = ("1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb")
DEPLOYMENTS: tuple[tuple[tuple[int, ...], int], ...] = (
    ((3, 2, 1, 0, 0), 2),
    ((3, 7, 1, 0, 0), 3),
    ((8, 5, 5, 0, 0), 5),
    ((11, 8, 7, 0, 0), 7),
    ((28, 13, 12, 0, 0), 13),
    ((40, 4, 14, 2, 2), 16),
)
"""Instances of each of the kinds above, and the GPUs that the paper needs."""


def run(options: Options) -> Report:
    """Plan each deployment as one request, on more and more GPUs until it fits."""
    rows = []
    data: list[Mapping[str, Json]] = []
    checks = []
    for number, (counts, published) in enumerate(DEPLOYMENTS, 1):
        together, milliseconds = _together(counts)
        one_by_one = _one_by_one(counts)
        least = fewest_gpus([counts[_KINDS.index(name)] if name in _KINDS else 0 for name in NAMES])
        rows.append(
            (
                f"S{number}: {', '.join(map(str, counts))}",
                str(published),
                str(least),
                str(together),
                str(one_by_one),
                f"{milliseconds:.0f}",
            )
        )
        data.append(
            {
                "deployment": f"S{number}",
                "instances": dict(zip(_KINDS, counts, strict=True)),
                "published": published,
                "fewest": least,
                "planned_together": together,
                "one_by_one": one_by_one,
                "plan_milliseconds": milliseconds,
            }
        )
        checks.append(Check(what=f"GPUs for ParvaGPU's S{number}", measured=together, bound=published))
    table = Table(
        "GPUs needed for a deployment of (1g, 2g, 3g, 4g, 7g)",
        (
            "deployment",
            "ParvaGPU",
            "fewest possible",
            "one plan of all",
            "one by one, largest first",
            "ms for the plan",
        ),
        tuple(rows),
    )
    return Report(part="parva", seed=options.seed, tables=(table,), data=data, checks=tuple(checks))


def _together(counts: tuple[int, ...]) -> tuple[int, float]:
    """Return the fewest GPUs with which `plan` answers a plan, and how long that one took in milliseconds."""
    wants = tuple(Want(profile=name) for name, count in zip(_KINDS, counts, strict=True) for _ in range(count))
    gpus = 1
    while True:
        began = time.perf_counter()
        outcome = plan(node(gpus), Request(wants=wants))
        if isinstance(outcome, Plan):
            return gpus, 1000 * (time.perf_counter() - began)
        gpus += 1


def _one_by_one(counts: tuple[int, ...]) -> int:
    """Return the fewest GPUs on which the devices fit when requested one by one, the largest first."""
    gpus = 1
    while True:
        cluster = AgentCluster(gpus, DEFAULT_POLICY)
        kinds = [NAMES.index(name) for name, count in zip(_KINDS, counts, strict=True) for _ in range(count)]
        if all(cluster.place(kind, 0.0) is not None for kind in reversed(kinds)):
            return gpus
        gpus += 1
