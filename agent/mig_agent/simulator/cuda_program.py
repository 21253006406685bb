"""`simulated-cuda`: a program that uses a simulated GPU step by step, in place of one that is linked with libcuda."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from mig_agent.simulator.cuda import CudaProcess
from mig_agent.simulator.cuda_codes import CudaError

USAGE = """usage: simulated-cuda STEP...

Initialises CUDA, creates a context on device 0 and takes the steps in order, each with one line of output:
  alloc=SIZE     allocate device memory; SIZE is MiB, or 3G, 512M
  managed=SIZE   allocate managed memory
  free=SIZE      free device memory
  info           print the free and total memory that cuMemGetInfo shows
  busy, idle     have work on the GPU, or no longer
  fault          cause a fatal fault on the GPU
  sleep=SECONDS  keep what it has
  hold           keep what it has until the end of standard input
Ends with 0, or with 1 after the first step that fails; --all takes the other steps, too."""
_SIZE = re.compile(r"([0-9]+)([MG]?)")
_MIB = 1 << 20


def main(state_file: str, arguments: Sequence[str]) -> int:
    """Take the steps. Returns the exit status: 2 for steps that there are not."""
    goes_on = "--all" in arguments
    steps = [each for each in arguments if each != "--all"]
    unknown = next((each for each in steps if not _is_step(each)), None)
    if unknown is not None:
        _say(f"simulated-cuda: cannot take the step {unknown!r}\n{USAGE}", sys.stderr)
        return 2
    process = CudaProcess(Path(state_file), os.environ)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    status = 0
    for step in ("init", *steps):
        try:
            said = _take(process, step)
        except CudaError as error:
            _say(f"{step}: {error} ({int(error.code)})")
            status = 1
            if not goes_on or step == "init":
                break
        else:
            _say(f"{step}: {said}")
    return status


def _is_step(step: str) -> bool:
    name, _, value = step.partition("=")
    if name in _SIZED:
        return _SIZE.fullmatch(value) is not None
    return re.fullmatch(r"[0-9.]+", value) is not None if name == "sleep" else step in _PLAIN


def _init(process: CudaProcess) -> str:
    process.init()
    process.create_context()
    return f"ok, pid {os.getpid()}, {'MPS' if process.uses_mps else 'no MPS'}"


def _info(process: CudaProcess) -> str:
    free, total = process.memory_info()
    return f"free {free // _MIB} MiB, total {total // _MIB} MiB"


def _hold(_process: CudaProcess) -> str:
    sys.stdin.read()
    return "ok"


def _done(step: Callable[[CudaProcess], None]) -> Callable[[CudaProcess], str]:
    def run(process: CudaProcess) -> str:
        step(process)
        return "ok"

    return run


_PLAIN: Mapping[str, Callable[[CudaProcess], str]] = MappingProxyType(
    {
        "init": _init,
        "info": _info,
        "hold": _hold,
        "busy": _done(lambda process: process.begin_work(busy=True)),
        "idle": _done(lambda process: process.begin_work(busy=False)),
        "fault": _done(CudaProcess.fault),
    }
)
_SIZED: Mapping[str, Callable[[CudaProcess, int], None]] = MappingProxyType(
    {"alloc": CudaProcess.allocate, "managed": CudaProcess.allocate_managed, "free": CudaProcess.free}
)


def _take(process: CudaProcess, step: str) -> str:
    name, _, value = step.partition("=")
    if name == "sleep":
        time.sleep(float(value))
    elif name in _SIZED:
        number, unit = _SIZE.fullmatch(value).groups()  # type: ignore[union-attr] # `main` has looked
        _SIZED[name](process, int(number) * _MIB * (1024 if unit == "G" else 1))
    else:
        return _PLAIN[name](process)
    return "ok"


def _say(text: str, to: TextIO | None = None) -> None:
    print(text, file=to, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
