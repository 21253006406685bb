"""A CUDA process over simulated GPUs: finds MPS as libcuda does, and takes memory within whatever limits it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mig_agent.simulator import cuda_devices, faults, memory
from mig_agent.simulator.cuda_codes import CudaCode, CudaError
from mig_agent.simulator.cuda_devices import Device
from mig_agent.simulator.mps.values import read_mib
from mig_agent.simulator.mps.wire import DEFAULT_PIPE, PIPE_VARIABLE, Link, Message, connect
from mig_agent.simulator.operations import ComputeMode
from mig_agent.simulator.state import Machine, Process, has_dmem
from mig_agent.simulator.store import Store

LIMIT_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


class CudaProcess:
    """This process as CUDA sees it. All methods raise CudaError; sizes are in bytes."""

    def __init__(self, state_file: Path, environment: Mapping[str, str]) -> None:
        self._store = Store(state_file)
        self._environment = environment
        self._mps: Link | None = None
        self._visible: list[str] = []
        self._limits: dict[str, int] = {}
        """Limits of MPS, in bytes by the UUID of the device."""
        self._failed: CudaCode | None = None
        """A fatal error: every later call answers it."""

    @property
    def uses_mps(self) -> bool:
        """True if a daemon was found; without one there is no limit of MPS, and nothing says so."""
        return self._mps is not None

    def init(self) -> None:
        """Look for the daemon and for devices, as cuInit does. Waits as long as a stopped daemon does not answer."""
        variable = self._environment.get("CUDA_VISIBLE_DEVICES")
        found = [each.uuid for each in cuda_devices.visible(cuda_devices.devices(self._store.read()), variable)]
        try:
            link = connect(Path(self._environment.get(PIPE_VARIABLE) or self._store.host.root / DEFAULT_PIPE))
        except OSError:
            self._visible = found
        else:
            link.send({"kind": "client"})
            self._visible = self._admitted(link, link.receive(), variable)
        if not self._visible:
            raise CudaError(CudaCode.NO_DEVICE)

    def create_context(self, device: int = 0) -> None:
        """Take a device's context, which needs memory of its own and a compute mode that lets this process in."""
        self._check()
        with self._store.edit() as machine:
            faults.forget_ended_processes(machine)
            place = self._place(machine, device)
            if self._own(place) is not None:
                return
            self._check_compute_mode(place)
            cgroup = self._cgroup(machine)
            process = Process(
                pid=os.getpid(),
                name=" ".join(Path("/proc/self/cmdline").read_text(encoding="utf-8").rstrip("\0").split("\0")),
                used_mib=0,
                container="",
                started=faults.start_time(os.getpid()),
            )
            if cgroup is not None:
                process["cgroup"] = cgroup
            if self._mps is not None:
                process["mps"] = "client"
            place.processes.append(process)
            if self._left(machine, place) < memory.CONTEXT_MIB * memory.MIB:
                place.processes.remove(process)
                raise CudaError(CudaCode.OUT_OF_MEMORY)
            process["used_mib"] = memory.CONTEXT_MIB

    def allocate(self, size: int, device: int = 0) -> None:
        """Allocate device memory, as cuMemAlloc does."""
        self._check()
        mib = -(-size // memory.MIB)
        with self._store.edit() as machine:
            faults.forget_ended_processes(machine)
            place = self._place(machine, device)
            process = self._own(place)
            if process is None:
                raise CudaError(CudaCode.INVALID_CONTEXT)
            if self._left(machine, place) < mib * memory.MIB:
                raise CudaError(CudaCode.OUT_OF_MEMORY)
            process["used_mib"] = (process["used_mib"] or 0) + mib

    def allocate_managed(self, size: int, device: int = 0) -> None:
        """Allocate managed memory, which no limit holds for: it is moved to the host where a device has no more."""
        self._check()
        del size
        self._place(self._store.read(), device)

    def free(self, size: int, device: int = 0) -> None:
        """Free device memory."""
        self._check()
        with self._store.edit() as machine:
            process = self._own(self._place(machine, device))
            if process is None:
                raise CudaError(CudaCode.INVALID_CONTEXT)
            process["used_mib"] = max((process["used_mib"] or 0) - -(-size // memory.MIB), memory.CONTEXT_MIB)

    def memory_info(self, device: int = 0) -> tuple[int, int]:
        """Return what cuMemGetInfo answers: free and total.

        Under MPS the free memory is what the limit leaves and the total the whole GPU; the limit of the process's own
        cgroup is the total, too, but one of an ancestor is not.
        """
        self._check()
        machine = self._store.read()
        place = self._place(machine, device)
        total = place.total_bytes
        cgroup = self._cgroup(machine)
        limit = memory.limit_of(place.gpu, cgroup) if cgroup is not None else None
        if limit is not None:
            total = min(total, limit["hard"])
        return min(self._left(machine, place), total), total

    def begin_work(self, *, busy: bool) -> None:
        """Have work on the GPU, or no longer: killed with it, a client of MPS takes the others with it."""
        self._check()
        if self._mps is not None:
            self._mps.send({"busy": busy})

    def fault(self) -> None:
        """Cause a fatal fault on the GPU, such as an illegal address: all clients of the MPS server get the error."""
        self._check()
        if self._mps is not None:
            self._mps.send({"fault": True})
        self._failed = CudaCode.ILLEGAL_ADDRESS
        raise CudaError(self._failed)

    def close(self) -> None:
        """End the use of all devices, as the end of the process does."""
        with self._store.edit() as machine:
            for processes in faults.process_lists(machine):
                processes[:] = [each for each in processes if each["pid"] != os.getpid()]
        if self._mps is not None:
            self._mps.close()

    def _admitted(self, link: Link, answer: Message | None, variable: str | None) -> list[str]:
        """Take the daemon's answer; return the UUIDs of the devices."""
        code = CudaCode.MPS_CONNECTION_FAILED if answer is None else CudaCode(int(str(answer["code"])))
        if answer is None or code is not CudaCode.SUCCESS:
            link.close()
            raise CudaError(code)
        self._mps = link
        served = answer["devices"]
        limits = answer["limits_mib"]
        if not isinstance(served, list) or not isinstance(limits, dict):
            raise CudaError(CudaCode.MPS_RPC_FAILURE)
        # An ordinal counts the devices of the server, not those of the machine.
        offered = [each for each in cuda_devices.devices(self._store.read()) if each.uuid in served]
        offered.sort(key=lambda each: served.index(each.uuid))
        if variable is not None and not all(each.strip().isdigit() for each in variable.split(",")):
            offered = cuda_devices.visible(offered, variable)
        elif variable is not None:
            offered = [offered[int(each)] for each in variable.split(",") if int(each) < len(offered)]
        self._limits = {served[int(each)]: mib * memory.MIB for each, mib in limits.items() if int(each) < len(served)}
        self._lower_limits([each.uuid for each in offered])
        return [each.uuid for each in offered]

    def _lower_limits(self, devices: list[str]) -> None:
        """Apply the process's own variable, which only lowers limits; an entry of another device drops all of them."""
        text = self._environment.get(LIMIT_VARIABLE, "")
        for entry in filter(None, text.split(",")):
            name, _, value = entry.partition("=")
            name = name.strip()
            uuid = devices[int(name)] if name.isdigit() and int(name) < len(devices) else name
            if uuid not in devices:
                self._limits = {}
                return
            limit = read_mib(value) * memory.MIB
            if limit:
                self._limits[uuid] = min(limit, self._limits.get(uuid, limit))

    def _check(self) -> None:
        """Raise the fatal error that the daemon has told meanwhile, or CudaError without `init`."""
        if not self._visible:
            raise CudaError(CudaCode.NOT_INITIALIZED)
        if self._failed is None and self._mps is not None and self._mps.has_news():
            news = self._mps.receive()
            self._failed = CudaCode.MPS_RPC_FAILURE if news is None else CudaCode(int(str(news["code"])))
        if self._failed is not None:
            raise CudaError(self._failed)

    def _place(self, machine: Machine, device: int) -> Device:
        found = {each.uuid: each for each in cuda_devices.devices(machine)}
        if device >= len(self._visible) or self._visible[device] not in found:
            raise CudaError(CudaCode.INVALID_DEVICE)
        return found[self._visible[device]]

    def _own(self, place: Device) -> Process | None:
        return next((each for each in place.processes if each["pid"] == os.getpid()), None)

    def _check_compute_mode(self, place: Device) -> None:
        mode = place.gpu.get("compute_mode", ComputeMode.DEFAULT)
        others = [each for each in place.processes if self._mps is None or "mps" not in each]
        if mode == ComputeMode.PROHIBITED or (mode == ComputeMode.EXCLUSIVE_PROCESS and others):
            raise CudaError(CudaCode.DEVICE_UNAVAILABLE)

    def _cgroup(self, machine: Machine) -> str | None:
        own = (each for gpu in machine["gpus"] for each in gpu["processes"] if each["pid"] == os.getpid())
        charged = next((each.get("cgroup") for each in own), None)
        return charged or self._store.cgroups.of_process(os.getpid())

    def _left(self, machine: Machine, place: Device) -> int:
        """Return how many bytes this process may still take on a device."""
        process = self._own(place)
        left = place.free_bytes
        if place.uuid in self._limits:
            used = (process["used_mib"] or 0) * memory.MIB if process else 0
            left = min(left, max(self._limits[place.uuid] - used, 0))
        cgroup = self._cgroup(machine)
        allowed = None if cgroup is None else memory.left_in_cgroup(place.gpu, cgroup, dmem=has_dmem(machine))
        return left if allowed is None else min(left, allowed)
