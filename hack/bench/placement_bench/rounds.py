"""A trace of pods in rounds: in each, some end, and then others arrive.

A round has no length: a replay, on a real cluster for example, waits until all of it has happened. So the outcome does
not depend on how quick a machine is.

As a file it is CSV with the columns `round` (in which the pod comes, from 0), `pod` (its name), `memory` (what it
requests: `5G`, `9.5Gi`) and `lasts` (how many rounds it runs). Pods of one round request in the order of the file.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mig_agent.core.errors import UsageError
from mig_agent.core.model import Want
from mig_agent.core.requests import memory_want

SHARES = {"5G": 0.5, "10G": 0.25, "20G": 0.15, "40G": 0.07, "80G": 0.03}
"""For made-up traces: the share of pods that request each amount."""
_LASTS = (1, 1, 1, 1, 1, 3)
"""Rounds that a pod runs, each as likely."""
_COLUMNS = ("round", "pod", "memory", "lasts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A pod that arrives in a round, and ends at the beginning of another."""

    name: str
    memory: str
    """The amount as people write it: `5G`."""
    comes: int
    ends: int

    @property
    def want(self) -> Want:
        """The pod's request as a want."""
        return memory_want(self.memory)

    @property
    def memory_bytes(self) -> int:
        """The bytes that the pod requests."""
        return self.want.memory_bytes or 0


Rounds = Sequence[Sequence[Asked]]
"""The pods by round, in the order in which they request."""


def made_up(pods: int, a_round: int, seed: int) -> Rounds:
    """Return a made-up trace of `pods` pods, `a_round` in each round."""
    chance = random.Random(seed)  # noqa: S311 -- the same one every time
    names, weights = list(SHARES), list(SHARES.values())
    asked = [
        Asked(
            name=f"p{number:03}",
            memory=chance.choices(names, weights)[0],
            comes=number // a_round,
            ends=number // a_round + chance.choice(_LASTS),
        )
        for number in range(pods)
    ]
    return in_rounds(asked)


def in_rounds(asked: Sequence[Asked]) -> Rounds:
    """Return the pods by the round in which they come; a round may be empty."""
    last = max((each.comes for each in asked), default=-1)
    return [[each for each in asked if each.comes == number] for number in range(last + 1)]


def write(path: Path, rounds: Rounds) -> None:
    """Write the trace as a file that `read` reads."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(_COLUMNS)
        out.writerows((each.comes, each.name, each.memory, each.ends - each.comes) for row in rounds for each in row)


def read(path: Path) -> Rounds:
    """Read a trace from a file. Raises ValueError naming the line that cannot be understood."""
    found: dict[str, Asked] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                asked = _asked(row)
            except (KeyError, TypeError, ValueError, UsageError) as error:
                message = (
                    f"cannot read {path}, line {number}: it needs {', '.join(_COLUMNS)}, such as 0, train-1, 5G, 2"
                )
                raise ValueError(message) from error
            if asked.name in found:
                message = f"cannot read {path}, line {number}: there is a pod {asked.name} already"
                raise ValueError(message)
            found[asked.name] = asked
    return in_rounds(list(found.values()))


def _asked(row: dict[str, str]) -> Asked:
    comes, lasts = int(row["round"]), int(row["lasts"])
    asked = Asked(name=row["pod"], memory=row["memory"], comes=comes, ends=comes + lasts)
    if comes < 0 or lasts < 1 or not asked.name or not asked.memory_bytes:
        raise ValueError(row)
    return asked
