"""Loads the settings from all sources, with messages for mistakes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mig_agent.config import sources
from mig_agent.config.settings import ROWS, Settings
from mig_agent.config.sources import Given
from mig_agent.core.errors import ConfigError, UsageError


def load(
    file: Path | None = None,
    flags: Mapping[str, str | tuple[str, ...] | None] | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Return the settings of the file, the environment and the flags; later ones win.

    `flags` holds texts by the setting's name, None if not given. Raises ConfigError, which names the place of the first
    mistake and what would be right.
    """
    given: dict[str, Given] = {
        **(sources.from_file(file) if file is not None else {}),
        **sources.from_environment(environment),
        **sources.from_flags(flags or {}),
    }
    # CUDA_VISIBLE_DEVICES is about real GPUs, not simulated ones.
    if "gpus" not in given and not (given.get("simulate") and given["simulate"].value):
        given |= sources.from_cuda(environment)
    values: dict[str, Any] = {name: _read(name, each) for name, each in given.items()}
    return Settings(**values, given=frozenset(values))


def _read(name: str, given: Given) -> object:
    try:
        return ROWS[name].kind.read(given.value)
    except UsageError as error:
        raise ConfigError(f"cannot use {given.where}: {error.message}", error.hint) from error
