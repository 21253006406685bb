"""The stand-in for nvidia-cuda-mps-server: the process that NVML lists, started by the daemon alone."""

from __future__ import annotations

import datetime as dt
import os
import sys
from pathlib import Path

from mig_agent.simulator import cuda_devices, faults, memory
from mig_agent.simulator.mps.wire import LOG_VARIABLE, PIPE_VARIABLE, connect
from mig_agent.simulator.operations import ComputeMode
from mig_agent.simulator.state import Machine, Process
from mig_agent.simulator.store import Store

NAME = "nvidia-cuda-mps-server"


def main(state_file: str) -> int:
    """Take the GPUs that are visible and serve until the daemon ends the connection. Returns the exit status."""
    _log("Startup")
    store = Store(Path(state_file))
    pipe = Path(os.environ.get(PIPE_VARIABLE, ""))
    _log(f"Connecting to control daemon on socket: {pipe / 'control'}")
    try:
        link = connect(pipe)
    except OSError:
        return 1
    _log("Initializing server process")
    with store.edit() as machine:
        faults.forget_ended_processes(machine)
        devices = _take(machine)
    if not devices:
        _log("Driver initialization failed with: no CUDA-capable device is detected")
        _log("Failed to start : no CUDA-capable device is detected")
        return 1
    link.send({"kind": "server", "devices": devices})
    while link.receive() is not None:
        pass
    return 0


def _take(machine: Machine) -> list[str]:
    """Put this process on the visible devices; return their UUIDs. None if another has one of them for itself."""
    found = cuda_devices.visible(cuda_devices.devices(machine), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for device in found:
        mode = device.gpu.get("compute_mode", ComputeMode.DEFAULT)
        if mode == ComputeMode.PROHIBITED or (mode == ComputeMode.EXCLUSIVE_PROCESS and device.processes):
            return []
    for device in found:
        device.processes.append(
            Process(
                pid=os.getpid(),
                name=NAME,
                used_mib=memory.SERVER_MIB,
                container="",
                started=faults.start_time(os.getpid()),
                mps="server",
            )
        )
    return [device.uuid for device in found]


def _log(text: str) -> None:
    now = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    try:
        with (Path(os.environ.get(LOG_VARIABLE, "")) / "server.log").open("a", encoding="utf-8") as file:
            file.write(f"[{now} Other {os.getpid():5}] {text}\n")
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
