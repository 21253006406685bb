"""The simulated machine from the command line: `python -m mig_agent.simulator --state-dir D COMMAND`."""

# ruff: noqa: FBT001, PLR0917 -- click passes options by name

from __future__ import annotations

import difflib
import json
import sys
from pathlib import Path

import click

from mig_agent.simulator.codes import Code, SimulatorError
from mig_agent.simulator.control import STATE_FILE, Simulator, create_machine, describe
from mig_agent.simulator.faults import same_function
from mig_agent.simulator.library import function_names
from mig_agent.simulator.state import DEFAULT_SM_PERCENT

_CODES = {code.name.lower().replace("_", "-"): int(code) for code in Code if code}


class _Group(click.Group):
    """Reports a SimulatorError as one line, with exit code 1."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SimulatorError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    envvar="MIG_AGENT_STATE_DIR",
    help="The folder that `mig-agent serve --simulate` was given.",
)
@click.pass_context
def main(ctx: click.Context, state_dir: Path) -> None:
    """Play what happens to a machine with simulated GPUs."""
    ctx.obj = state_dir / STATE_FILE


@main.command()
@click.argument("gpus")
@click.option("--latency/--no-latency", default=True, help="Whether creating and destroying take their time.")
@click.pass_obj
def create(state_file: Path, gpus: str, latency: bool) -> None:
    """Make a machine with GPUS: a100-40gb:1,h100-80gb:2,a30:1:off,t4."""
    simulator = create_machine(state_file, gpus)
    if not latency:
        simulator.set_latency(create_seconds=0.0, destroy_seconds=0.0)


@main.command()
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text")
@click.pass_obj
def show(state_file: Path, output: str) -> None:
    """Print the machine as it is."""
    machine = Simulator(state_file).machine()
    click.echo(json.dumps(machine, indent=1) if output == "json" else describe(machine))


@main.command()
@click.option("--keep-mig-mode", is_flag=True, help="MIG mode comes back on, as where a service sets it at boot.")
@click.pass_obj
def reboot(state_file: Path, keep_mig_mode: bool) -> None:
    """Reboot: instances and processes are gone, MIG mode too on GPUs later than Ampere."""
    Simulator(state_file).reboot(keep_mig_mode=keep_mig_mode)


@main.command()
@click.argument("where")
@click.option("--pid", type=click.IntRange(min=1), help="Of a real process, with which the workload ends.")
@click.option("--memory-mib", type=click.IntRange(min=0), default=1024, show_default=True)
@click.option("--name", default="python train.py", show_default=True, help="The command line that is shown.")
@click.option(
    "--sm-percent",
    type=click.FloatRange(0, 100),
    default=DEFAULT_SM_PERCENT,
    show_default=True,
    help="How much of its multiprocessors it keeps busy.",
)
@click.pass_obj
def occupy(state_file: Path, where: str, pid: int | None, memory_mib: int, name: str, sm_percent: float) -> None:
    """Run a workload on WHERE: GPU/GI, GPU/GI/CI, a MIG UUID, or a GPU without MIG mode. Prints its pid."""
    simulator = Simulator(state_file)
    click.echo(simulator.occupy(where, pid=pid, used_mib=memory_mib, name=name, sm_percent=sm_percent))


@main.command()
@click.argument("where")
@click.option("--pid", type=click.IntRange(min=1))
@click.option("--name", default="dcgm-exporter", show_default=True)
@click.option("--gpu-instance-only", is_flag=True, help="Let the compute instance go, and not the GPU instance.")
@click.pass_obj
def hold(state_file: Path, where: str, pid: int | None, name: str, gpu_instance_only: bool) -> None:
    """Keep WHERE in use with no process listed. Prints the pid of who does."""
    click.echo(Simulator(state_file).hold(where, pid=pid, name=name, gpu_instance_only=gpu_instance_only))


@main.command()
@click.argument("pid", type=int)
@click.pass_obj
def vacate(state_file: Path, pid: int) -> None:
    """End the workload or holder PID."""
    Simulator(state_file).vacate(pid)


@main.command()
@click.argument("gpu", type=click.IntRange(min=0))
@click.argument("profile")
@click.option("--start", type=click.IntRange(min=0), help="First memory slice; else the driver chooses.")
@click.option("--without-compute", is_flag=True, help="Only the GPU instance.")
@click.pass_obj
def create_foreign(state_file: Path, gpu: int, profile: str, start: int | None, without_compute: bool) -> None:
    """Create an instance of PROFILE on GPU as nvidia-smi would. Prints its name as GPU/GI."""
    gpu_instance, _ = Simulator(state_file).create_foreign(gpu, profile, start=start, with_compute=not without_compute)
    click.echo(f"{gpu}/{gpu_instance}")


@main.command()
@click.argument("where")
@click.pass_obj
def destroy_foreign(state_file: Path, where: str) -> None:
    """Destroy the instance WHERE (GPU/GI or a MIG UUID) as nvidia-smi would."""
    Simulator(state_file).destroy_foreign(where)


@main.group()
def inject() -> None:
    """Make something go wrong; prints the fault's number for `clear`."""


def _check_function(name: str) -> None:
    """Raise SimulatorError for a function that does not exist: the fault would never occur."""
    names = sorted(function_names())
    if not any(same_function(name, known) for known in names):
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise SimulatorError(f"cannot inject anything into {name}: there is no such function; did you mean {near[0]}?")


_gpu_option = click.option("--gpu", type=click.IntRange(min=0), help="Only on this GPU.")
_times_option = click.option("--times", type=click.IntRange(min=1), help="How often; else until cleared.")


@inject.command("fail")
@click.argument("function")
@click.argument("code", type=click.Choice(sorted(_CODES)))
@click.option("--nth", type=click.IntRange(min=1), default=1, show_default=True, help="From which call on.")
@_times_option
@_gpu_option
@click.pass_obj
def inject_fail(state_file: Path, function: str, code: str, nth: int, times: int | None, gpu: int | None) -> None:
    """Make calls of the NVML FUNCTION answer with CODE."""
    _check_function(function)
    click.echo(Simulator(state_file).fail(function, _CODES[code], nth=nth, times=times, gpu=gpu))


@inject.command("hang")
@click.argument("function")
@_gpu_option
@click.pass_obj
def inject_hang(state_file: Path, function: str, gpu: int | None) -> None:
    """Make calls of the NVML FUNCTION hang."""
    _check_function(function)
    click.echo(Simulator(state_file).hang(function, gpu=gpu))


@inject.command("remnant")
@_times_option
@_gpu_option
@click.pass_obj
def inject_remnant(state_file: Path, times: int | None, gpu: int | None) -> None:
    """Make destroying an instance report success and leave it."""
    click.echo(Simulator(state_file).leave_remnant(times=times, gpu=gpu))


@inject.command("stale")
@_times_option
@_gpu_option
@click.pass_obj
def inject_stale(state_file: Path, times: int | None, gpu: int | None) -> None:
    """Keep deleted MIG devices listed."""
    click.echo(Simulator(state_file).list_stale(times=times, gpu=gpu))


@main.command()
@click.argument("fault", type=int, required=False)
@click.pass_obj
def clear(state_file: Path, fault: int | None) -> None:
    """End the fault with this number, or all."""
    Simulator(state_file).clear(fault)


@main.command()
@click.argument("gpu", type=click.IntRange(min=0))
@click.pass_obj
def lose_gpu(state_file: Path, gpu: int) -> None:
    """Drop GPU off the bus."""
    Simulator(state_file).lose_gpu(gpu)


@main.command()
@click.argument("gpu", type=click.IntRange(min=0))
@click.pass_obj
def reset_gpu(state_file: Path, gpu: int) -> None:
    """Reset GPU: its instances are gone, a pending mode takes effect, a lost one is back."""
    Simulator(state_file).reset_gpu(gpu)


if __name__ == "__main__":
    sys.exit(main(prog_name="python -m mig_agent.simulator"))
