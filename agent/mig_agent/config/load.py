"""Loads the settings from all sources, with messages for mistakes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mig_agent.config import sources
from mig_agent.config.problems import InvalidConfigError, Problem
from mig_agent.config.settings import ROWS, Settings
from mig_agent.config.sources import Found, Given
from mig_agent.core.errors import UsageError

Flags = Mapping[str, "str | tuple[str, ...] | None"]
"""Texts of the command line by the setting's name, None if not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The values of all sources together."""

    settings: Settings | None
    """None if there are problems."""
    problems: tuple[Problem, ...]
    """All mistakes, in the order of their sources."""
    given: Mapping[str, Given]
    """The settings that any source gives, each as it was written last."""


def load(
    file: Path | None = None, flags: Flags | None = None, *, environment: Mapping[str, str] = os.environ
) -> Settings:
    """Return the settings of the file, the environment and the flags; later ones win.

    Raises InvalidConfigError, a ConfigError with all mistakes; each message names the place and what would be right.
    """
    reading = read(file, flags, environment=environment)
    if reading.settings is None:
        raise InvalidConfigError(reading.problems)
    return reading.settings


def read(
    file: Path | None = None, flags: Flags | None = None, *, environment: Mapping[str, str] = os.environ
) -> Reading:
    """Read all sources as `load` does, and return all mistakes instead of raising an error."""
    found = (
        sources.from_file(file) if file is not None else Found(),
        sources.from_environment(environment),
        sources.from_flags(flags or {}),
    )
    problems = [problem for each in found for problem in each.problems]
    given = {name: value for each in found for name, value in each.given.items()}
    # CUDA_VISIBLE_DEVICES is about real GPUs, not simulated ones.
    if "gpus" not in given and not (given.get("simulate") and given["simulate"].value):
        cuda = sources.from_cuda(environment)
        problems += cuda.problems
        given |= cuda.given
    values: dict[str, Any] = {}
    for name, each in given.items():
        try:
            values[name] = ROWS[name].read(each.value)
        except InvalidConfigError as error:  # of entries in a section, which name their own lines
            problems += [replace(one, setting=name, file=each.file) for one in error.problems]
        except UsageError as error:
            words = f"cannot use {each.where}: {error.message}"
            problems.append(Problem(message=words, hint=error.hint, setting=name, file=each.file, line=each.line))
    problems += _contradictions(values, given, {each.setting for each in problems})
    settings = None if problems else Settings(**values)
    return Reading(settings=settings, problems=tuple(problems), given=given)


class _Unchecked(Settings):
    """Settings that may contradict each other."""

    def __post_init__(self) -> None:
        """Check nothing."""


def _contradictions(values: Mapping[str, Any], given: Mapping[str, Given], mistaken: set[str]) -> list[Problem]:
    """Return the contradictions with their places; none that involves a setting which is mistaken by itself."""
    return [
        _placed(each, given)
        for each in _Unchecked(**values).contradictions()
        if mistaken.isdisjoint((each.setting, *each.involved))
    ]


def _placed(problem: Problem, given: Mapping[str, Given]) -> Problem:
    """Return the problem with the place of its setting, or of the first involved one that was given."""
    for name in (problem.setting, *problem.involved):
        if name in given:
            place = given[name]
            return replace(
                problem, message=f"{problem.message} ({place.where})", setting=name, file=place.file, line=place.line
            )
    return problem
