"""The placement benchmark: `hack/bench/placement.py` runs all of it, `hack/bench/placement.py sweep` a part.

It measures the agent's own planner and queue against others; docs/placement.md has what it printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from placement_bench import dra, page, parva, queueing, regret, replay, reuse, sweep, trace, wait_estimates
from placement_bench.options import Options
from placement_bench.results import Report, checks_table

PARTS: Mapping[str, Callable[[Options], Report]] = {
    "regret": regret.run,
    "sweep": sweep.run,
    "reuse": reuse.run,
    "queue": queueing.run,
    "waits": wait_estimates.run,
    "parva": parva.run,
    "trace": trace.run,
    "rounds": replay.run,
    "dra": dra.run,
}
_DOCS = Path(__file__).resolve().parents[2] / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 with `--check` when the planner misses a figure that it is held to."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.trace and {"trace", "rounds"} <= set(given.parts or PARTS):
        parser.error("cannot read one file both for trace and for rounds, whose columns are unlike: name one of them")
    options = Options(
        seed=given.seed,
        requests=given.requests,
        repeats=given.repeats,
        gpus=tuple(given.gpus) if given.gpus else None,
        loads=tuple(given.loads) if given.loads else None,
        trace=given.trace,
        write_trace=given.write_trace,
        gpu_models=tuple(given.gpu_models) if given.gpu_models else None,
        jobs=given.jobs,
    )
    reports = []
    for name in given.parts or PARTS:
        began = time.perf_counter()
        try:
            report = PARTS[name](options)
        except (OSError, ValueError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        reports.append(report)
        if given.output == "table":
            for table in report.tables:
                print(f"{table}\n")
            print(f"({name} took {time.perf_counter() - began:.0f} s)\n", flush=True)
    checks = [check for report in reports for check in report.checks]
    if given.output == "json":
        print(json.dumps([report.as_json() for report in reports], indent=2))
    elif checks:
        print(checks_table(checks))
    if given.figures:
        page.write_figures(given.figures, reports)
    if given.docs:
        page.write(_DOCS, reports)
    return 1 if given.check and not all(check.met for check in checks) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hack/bench/placement.py", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", choices=(*PARTS, []), help=f"of {', '.join(PARTS)}; all by default"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--seed", type=int, default=1, help="of the first repetition; those after take the next ones")
    parser.add_argument("--requests", type=_positive, help="in each run")
    parser.add_argument("--repeats", type=_positive, help="repetitions of each run; random mixes for regret")
    parser.add_argument("--gpus", type=_positive, nargs="+", help="numbers of GPUs; parts that take one take the first")
    parser.add_argument("--loads", type=float, nargs="+", help="slices asked for / slices there are")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="CSV",
        help="a trace of your own: columns at, lasts, profile for trace; round, pod, memory, lasts for rounds",
    )
    parser.add_argument("--write-trace", type=Path, metavar="CSV", help="write the trace of rounds there, too")
    parser.add_argument(
        "--gpu-models", nargs="+", metavar="MODEL", help="the GPUs of rounds, one by one, as profiles/ names them"
    )
    parser.add_argument("--jobs", type=_positive, default=min(8, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="write the figures there as SVG")
    parser.add_argument("--docs", action="store_true", help="write tables and figures into docs/placement.md")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 when a figure that the planner is held to is missed"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main())
