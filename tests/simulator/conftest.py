from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mig_agent.simulator import Simulator
from support.simulated import machine, put_under_pynvml


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Simulator]:
    """Makes a machine and puts pynvml on it: `simulate("a100-40gb:1")`."""

    def make(gpus: str, *, mig_mode: bool = True, driver_version: str = "580.95.05") -> Simulator:
        simulator = machine(tmp_path, gpus, mig_mode=mig_mode, driver_version=driver_version)
        put_under_pynvml(simulator)
        return simulator

    return make
