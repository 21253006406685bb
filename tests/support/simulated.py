"""Simulated machines under the real pynvml."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pynvml

from mig_agent.simulator import STATE_FILE, Simulator, create_machine, open_library


def machine(folder: Path, gpus: str, *, mig_mode: bool = True, driver_version: str = "580.95.05") -> Simulator:
    """A machine whose calls take no time."""
    return create_machine(
        folder / STATE_FILE,
        gpus,
        mig_mode=mig_mode,
        create_seconds=0,
        destroy_seconds=0,
        driver_version=driver_version,
    )


def put_under_pynvml(simulator: Simulator, *, without: Collection[str] = ()) -> None:
    """Makes the machine the one that pynvml speaks to, and initialises pynvml."""
    pynvml.nvmlLib = open_library(simulator.state_file, without=without)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlInit()
