"""The setting of how single GPUs may be shared, read into `core.shares`."""

from __future__ import annotations

from typing import Final, TypeAlias

from mig_agent.config.problems import InvalidConfigError, Problem
from mig_agent.config.sections import Section, collecting
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.core.requests import parse_gpu
from mig_agent.core.shares import Fractions

SECTION: Final = "fractions_by_gpu"
EXAMPLE: Final = "{0: mps, 1: off}"
CHOICES: Final = ("auto", "cgroup", "mps", "off")
"""The ways that can be set: `preload` cannot, since no library can be named yet."""
FractionsByGpu: TypeAlias = "tuple[tuple[str, Fractions], ...]"
"""Indices or UUIDs of GPUs, each with how the GPU may be shared."""


def fractions_of(section: Section) -> FractionsByGpu:
    """Return how each named GPU may be shared. Raises InvalidConfigError, with all mistakes and their lines."""
    problems: list[Problem] = [*section.problems]
    found: dict[str, Fractions] = {}
    for name in section.entries:
        with collecting(problems):
            try:
                gpu = parse_gpu(name)
            except UsageError as error:
                raise section.mistake(name, error.message, "write indices or UUIDs of GPUs: 0, GPU-...") from error
            if gpu in found:
                raise section.mistake(name, f"GPU {gpu} is named twice", "remove one of them")
            word = section.text(name, "mps").strip().lower()
            word = "off" if word in {"false", "no"} else word  # YAML takes `off` for a boolean, Helm writes false
            if word not in CHOICES:
                raise section.mistake(
                    name, f"cannot take {shown(word) or 'an empty text'}", f"write one of {', '.join(CHOICES)}"
                )
            found[gpu] = Fractions(word)
    if problems:
        raise InvalidConfigError(sorted(problems, key=lambda each: each.line or 0))
    return tuple(found.items())


def show_fractions(value: object) -> str:
    """Return the ways by GPU as YAML on one line, as the environment and flags take them."""
    if not isinstance(value, tuple):
        return str(value)
    return f"{{{', '.join(f'{gpu}: {way}' for gpu, way in value)}}}"
