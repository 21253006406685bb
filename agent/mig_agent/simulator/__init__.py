"""Simulated GPUs: libnvidia-ml in Python under the real pynvml, with its state in a file.

`create_machine(state_file, "a100-40gb:1,h100-80gb:2")` makes a machine, `pynvml.nvmlLib = open_library(state_file)`
makes pynvml use it, and `Simulator(state_file)` plays what workloads, other tools and failures do to it. Nothing of the
rest of this project is used.
"""

from mig_agent.simulator.codes import Code, SimulatorError
from mig_agent.simulator.control import STATE_FILE, Simulator, create_machine, open_or_create_machine
from mig_agent.simulator.library import open_library
from mig_agent.simulator.models import MODELS
from mig_agent.simulator.state import GpuSpec, MachineSpec, parse_gpus, parse_machine

__all__ = [
    "MODELS",
    "STATE_FILE",
    "Code",
    "GpuSpec",
    "MachineSpec",
    "Simulator",
    "SimulatorError",
    "create_machine",
    "open_library",
    "open_or_create_machine",
    "parse_gpus",
    "parse_machine",
]
