"""The programs of the simulated machine's `usr/bin`: NVIDIA's for MPS, and one that uses CUDA."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from types import MappingProxyType

PROGRAMS = MappingProxyType(
    {
        "nvidia-cuda-mps-control": "mps.control",
        "nvidia-cuda-mps-server": "mps.server",
        "simulated-cuda": "cuda_program",
    }
)
"""Modules that are run, by the program's name."""


def write_programs(folder: Path, state_file: Path) -> None:
    """Write the programs into a folder, for this Python and the machine of this file."""
    folder.mkdir(parents=True, exist_ok=True)
    package = Path(__file__).resolve().parents[2]
    for name, module in PROGRAMS.items():
        script = (
            "#!/bin/sh\n"
            f"PYTHONPATH={shlex.quote(str(package))} exec {shlex.quote(sys.executable)} "
            f'-m mig_agent.simulator.{module} {shlex.quote(str(state_file.absolute()))} "$@"\n'
        )
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != script:
            temporary = path.with_name(f"{name}.new")  # replaced at once: somebody may be starting it
            temporary.write_text(script, encoding="utf-8")
            temporary.chmod(0o755)
            temporary.replace(path)
