"""Controls the simulated machine: plays what people, workloads, other tools and failures do to it."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mig_agent.simulator import faults, memory, operations
from mig_agent.simulator.codes import Failure, SimulatorError, name_of
from mig_agent.simulator.models import Window
from mig_agent.simulator.programs import write_programs
from mig_agent.simulator.state import (
    DEFAULT_SM_PERCENT,
    DRIVER_VERSION,
    KERNEL_VERSION,
    ComputeInstance,
    Fault,
    FaultKind,
    Gpu,
    GpuInstance,
    GpuSpec,
    Machine,
    MachineSpec,
    Process,
    mig_uuid,
    model_of,
    new_machine,
    parse_machine,
    profile_of,
)
from mig_agent.simulator.store import Store

STATE_FILE = "simulated-gpus.json"
_FIRST_MADE_UP_PID = 5_000_000
"""Above Linux's highest pid, so that a made-up process is never mistaken for a real one."""


def create_machine(
    state_file: Path,
    gpus: str | Sequence[GpuSpec],
    *,
    mig_mode: bool = True,
    create_seconds: float = 0.16,
    destroy_seconds: float = 0.10,
    driver_version: str = DRIVER_VERSION,
    kernel_version: str = KERNEL_VERSION,
) -> Simulator:
    """Create a machine with these GPUs (`a100-40gb:1,h100-80gb:2`) in a new file; `mig_mode=False`: off on all GPUs.

    The seconds are how long creating and destroying a GPU instance take. Raises SimulatorError if the text cannot be
    read or the file already holds a machine.
    """
    asked = _spec(gpus)
    specs = asked.gpus
    if not mig_mode:
        specs = tuple(GpuSpec(model=s.model, mig_mode=False, halves_swapped=s.halves_swapped) for s in specs)
    machine = new_machine(
        specs,
        create_seconds=create_seconds,
        destroy_seconds=destroy_seconds,
        driver_version=asked.driver_version or driver_version,
        kernel_version=asked.kernel_version or kernel_version,
    )
    store = Store(state_file)
    store.create(machine)
    write_programs(store.host.root / "usr/bin", state_file)
    return Simulator(state_file)


def open_or_create_machine(
    state_file: Path, gpus: str | Sequence[GpuSpec], *, create_seconds: float = 0.16, destroy_seconds: float = 0.10
) -> Simulator:
    """Return the machine in this file, or create one.

    Raises SimulatorError if the file holds other GPUs than asked for.
    """
    asked = _spec(gpus)
    if not state_file.exists():
        return create_machine(state_file, gpus, create_seconds=create_seconds, destroy_seconds=destroy_seconds)
    simulator = Simulator(state_file)
    machine = simulator.machine()
    there = [gpu["model"] for gpu in machine["gpus"]]
    wanted = [spec.model for spec in asked.gpus]
    versions = (("driver", asked.driver_version), ("kernel", asked.kernel_version))
    for name, version in versions:
        found = machine.get(f"{name}_version", KERNEL_VERSION)
        if version is not None and version != found:
            wanted.append(f"{name}={version}")
            there.append(f"{name}={found}")
    if there != wanted:
        raise SimulatorError(
            f"cannot simulate {', '.join(wanted)} in {state_file}: it holds {', '.join(there)}; "
            f"remove {state_file.parent} or give another state directory"
        )
    return simulator


class Simulator:
    """One simulated machine. Several of these may use the same file, in any process."""

    def __init__(self, state_file: Path) -> None:
        self.state_file = state_file
        self._store = Store(state_file)
        self._store.read()

    @property
    def host_root(self) -> Path:
        """The folder that is used as `/` for the driver's files."""
        return self._store.host.root

    def machine(self) -> Machine:
        """Return a copy of the whole state."""
        return copy.deepcopy(self._store.read())

    def leaked_guarantees(self) -> dict[str, dict[str, int]]:
        """Return by GPU, then by cgroup, the bytes of `dmem.min` that are left of cgroups which are gone."""
        with self._store.edit() as machine:
            faults.forget_ended_processes(machine)
            for gpu in machine["gpus"]:
                memory.forget_removed(gpu, self._store.cgroups.exists)
            leaked = {gpu["uuid"]: memory.leaked_guarantees(gpu) for gpu in machine["gpus"]}
        return {uuid: each for uuid, each in leaked.items() if each}

    def calls(self, function: str) -> int:
        """Return how often a function that changes something was called, failed calls included."""
        return self._store.read()["calls"].get(function, 0)

    def set_latency(self, *, create_seconds: float, destroy_seconds: float) -> None:
        """Set how long creating and destroying a GPU instance takes."""
        with self._store.edit() as machine:
            machine["create_seconds"], machine["destroy_seconds"] = create_seconds, destroy_seconds

    def reboot(self, *, keep_mig_mode: bool = False) -> None:
        """Reboot: removes instances, processes and cgroups, and MIG mode on GPUs later than Ampere unless kept."""
        with self._store.edit() as machine:
            operations.reboot(machine, str(uuid.uuid4()), keep_mig_mode=keep_mig_mode)
            self._store.cgroups.remove_all()

    def reset_gpu(self, gpu: int) -> None:
        """Reset a GPU as `nvidia-smi --gpu-reset` does, but even if it is in use."""
        with self._store.edit() as machine:
            operations.reset_gpu(_gpu(machine, gpu))

    def lose_gpu(self, gpu: int) -> None:
        """Drop a GPU off the bus: every call about it answers GPU_IS_LOST."""
        with self._store.edit() as machine:
            _gpu(machine, gpu)["lost"] = True

    def set_mig_mode(self, gpu: int, *, on: bool) -> int:
        """Switch MIG mode as `nvidia-smi -mig` does; return the activation status."""
        with self._answers() as machine:
            return operations.set_mig_mode(_gpu(machine, gpu), on=on)

    def occupy(
        self,
        where: str,
        *,
        pid: int | None = None,
        name: str = "python train.py",
        used_mib: int | None = 1024,
        container: str = "",
        sm_percent: float = DEFAULT_SM_PERCENT,
    ) -> int:
        """Run a workload on `GPU/GI`, `GPU/GI/CI`, a MIG UUID, or a GPU without MIG mode; return its pid.

        Without a pid one is made up. The pid of a real process ties the workload to it: it ends with that process.
        It keeps `sm_percent` of the multiprocessors of its instance busy.
        """
        with self._store.edit() as machine:
            process = _process(machine, pid, name, used_mib=used_mib, container=container)
            process["sm_percent"] = sm_percent
            gpu, instance, compute = _find(machine, where)
            if instance is None:
                if gpu["mig_current"]:
                    raise SimulatorError(f"cannot run on {where}: the GPU is in MIG mode, name an instance as GPU/GI")
                gpu["processes"].append(process)
            elif compute is None:
                raise SimulatorError(f"cannot run on {where}: it has no compute instance")
            else:
                compute["processes"].append(process)
            return process["pid"]

    def hold(
        self,
        where: str,
        *,
        pid: int | None = None,
        name: str = "dcgm-exporter",
        gpu_instance_only: bool = False,
        container: str = "",
    ) -> int:
        """Keep an instance in use by a process that is listed only in /proc; return its pid.

        With `gpu_instance_only` the compute instances can be destroyed, but not the GPU instance.
        """
        with self._store.edit() as machine:
            process = _process(machine, pid, name, used_mib=None, container=container)
            _, instance, compute = _find(machine, where)
            if instance is None:
                raise SimulatorError(f"cannot hold {where}: name an instance as GPU/GI")
            if gpu_instance_only or compute is None:
                instance["holders"].append(process)
            else:
                compute["holders"].append(process)
            return process["pid"]

    def vacate(self, pid: int) -> None:
        """End the process."""
        with self._store.edit() as machine:
            found = False
            for processes in faults.process_lists(machine):
                kept = [process for process in processes if process["pid"] != pid]
                found = found or len(kept) < len(processes)
                processes[:] = kept
            if not found:
                raise SimulatorError(f"cannot end process {pid}: it is on no GPU")

    def create_foreign(
        self, gpu: int, profile: str, *, start: int | None = None, with_compute: bool = True
    ) -> tuple[int, int | None]:
        """Create an instance as `nvidia-smi mig -cgi PROFILE -C` does; return its GPU-instance and compute-instance id.

        Without a start the driver chooses. Without compute the second id is None.
        """
        with self._answers() as machine:
            found = _gpu(machine, gpu)
            row = next((each for each in model_of(found).profiles if each.name == profile), None)
            if row is None:
                names = ", ".join(each.name for each in model_of(found).profiles)
                raise SimulatorError(f"cannot create {profile} on GPU {gpu}: it offers {names or 'no profiles'}")
            window = None if start is None else Window(start, row.windows[0].size)
            instance = operations.create_gpu_instance(machine, found, row.id, window)
            if not with_compute:
                return instance["id"], None
            full = next(each for each in row.compute_profiles if each.slices == row.slices)
            compute = operations.create_compute_instance(machine, found, instance, full.id, None)
            return instance["id"], compute["id"]

    def destroy_foreign(self, where: str) -> None:
        """Destroy an instance as `nvidia-smi mig -dci` and `-dgi` do; refused while something runs on it."""
        with self._answers() as machine:
            gpu, instance, _ = _find(machine, where)
            if instance is None:
                raise SimulatorError(f"cannot destroy {where}: name an instance as GPU/GI")
            for compute in tuple(instance["compute"]):
                operations.destroy_compute_instance(machine, gpu, instance, compute)
            operations.destroy_gpu_instance(machine, gpu, instance)

    def fail(self, function: str, code: int, *, nth: int = 1, times: int | None = 1, gpu: int | None = None) -> int:
        """Make `times` calls of a function, the first after `nth` - 1 more, answer with a code; return the fault's id.

        `times` None: until the fault is cleared.
        """
        return self._inject("fail", function, code=code, skip=nth - 1, times=times, gpu=gpu)

    def hang(self, function: str, *, gpu: int | None = None) -> int:
        """Make calls of the function hang until the fault is cleared; return its id."""
        return self._inject("hang", function, times=None, gpu=gpu)

    def leave_remnant(self, *, gpu: int | None = None, times: int | None = 1) -> int:
        """Make destroying a GPU instance report success and leave the instance; return the fault's id."""
        return self._inject("remnant", "nvmlGpuInstanceDestroy", times=times, gpu=gpu)

    def list_stale(self, *, gpu: int | None = None, times: int | None = None) -> int:
        """Keep deleted MIG devices listed until the library is initialised again; return the fault's id."""
        return self._inject("stale", "nvmlComputeInstanceDestroy", times=times, gpu=gpu)

    def clear(self, fault: int | None = None) -> None:
        """End one fault, or all."""
        with self._store.edit() as machine:
            kept = [each for each in machine["faults"] if fault is not None and each["id"] != fault]
            if fault is not None and len(kept) == len(machine["faults"]):
                raise SimulatorError(f"cannot clear fault {fault}: there is none with that number")
            machine["faults"] = kept

    def _inject(
        self, kind: FaultKind, function: str, *, times: int | None, gpu: int | None, code: int = 0, skip: int = 0
    ) -> int:
        with self._store.edit() as machine:
            if gpu is not None:
                _gpu(machine, gpu)
            number = machine["next_serial"]
            machine["next_serial"] += 1
            machine["faults"].append(
                Fault(id=number, kind=kind, function=function, gpu=gpu, code=code, skip=skip, times=times)
            )
            return number

    @contextmanager
    def _answers(self) -> Iterator[Machine]:
        try:
            with self._store.edit() as machine:
                faults.forget_ended_processes(machine)
                yield machine
        except Failure as failure:
            raise SimulatorError(f"cannot do that: the driver answers {failure.code}") from failure


def _spec(gpus: str | Sequence[GpuSpec]) -> MachineSpec:
    return parse_machine(gpus) if isinstance(gpus, str) else MachineSpec(gpus=tuple(gpus))


def _gpu(machine: Machine, index: int) -> Gpu:
    if not 0 <= index < len(machine["gpus"]):
        raise SimulatorError(f"cannot find GPU {index}: there are {len(machine['gpus'])}, from 0")
    return machine["gpus"][index]


_Place = tuple[Gpu, GpuInstance | None, ComputeInstance | None]


def _places(machine: Machine) -> Iterator[tuple[set[str], _Place]]:
    for index, gpu in enumerate(machine["gpus"]):
        yield {str(index), gpu["uuid"]}, (gpu, None, None)
        for instance in gpu["instances"]:
            first = instance["compute"][0] if instance["compute"] else None
            yield {f"{index}/{instance['id']}"}, (gpu, instance, first)
            for compute in instance["compute"]:
                names = {f"{index}/{instance['id']}/{compute['id']}", mig_uuid(gpu, instance["id"], compute["id"])}
                yield names, (gpu, instance, compute)


def _find(machine: Machine, where: str) -> _Place:
    for names, place in _places(machine):
        if where in names:
            return place
    raise SimulatorError(f"cannot find {where}: name a GPU (0), an instance (0/13, as GPU/GI) or a UUID")


def _process(machine: Machine, pid: int | None, name: str, *, used_mib: int | None, container: str) -> Process:
    started = None
    if pid is None:
        taken = {process["pid"] for processes in faults.process_lists(machine) for process in processes}
        pid = max(taken | {_FIRST_MADE_UP_PID - 1}) + 1
    elif pid < _FIRST_MADE_UP_PID:
        started = faults.start_time(pid)
    return Process(pid=pid, name=name, used_mib=used_mib, container=container, started=started)


def describe(machine: Machine) -> str:
    """Return the state of the machine as text for people."""
    lines = [f"driver {machine['driver_version']}, boot {machine['boot_id']}"]
    for index, gpu in enumerate(machine["gpus"]):
        mode = "lost" if gpu["lost"] else f"MIG {'on' if gpu['mig_current'] else 'off'}"
        lines.append(f"GPU {index}: {model_of(gpu).name} {gpu['uuid']} ({mode})")
        if gpu.get("compute_mode"):
            lines.append(f"  compute mode {operations.ComputeMode(gpu['compute_mode']).name}")
        lines += [f"  process {p['pid']} {p['name']} {p['used_mib']} MiB" for p in gpu["processes"]]
        lines += [
            f"  cgroup {each['cgroup']} soft {each['soft']} hard {each['hard']}"
            for each in gpu.get("memory_limits", ())
        ]
        for instance in sorted(gpu["instances"], key=lambda each: each["start"]):
            row = profile_of(gpu, instance)
            lines.append(f"  {index}/{instance['id']} {row.name} at {instance['start']}:{instance['size']}")
            for compute in instance["compute"]:
                lines.append(f"    CI {compute['id']} {mig_uuid(gpu, instance['id'], compute['id'])}")
                lines += [f"      process {p['pid']} {p['name']} {p['used_mib']} MiB" for p in compute["processes"]]
                lines += [f"      held by {p['pid']} {p['name']}" for p in compute["holders"]]
            lines += [f"    held by {p['pid']} {p['name']}" for p in instance["holders"]]
    lines += [
        f"fault {f['id']}: {f['kind']} {f['function']} gpu={f['gpu']} code={name_of(f['code'])}"
        for f in machine["faults"]
    ]
    return "\n".join(lines)
