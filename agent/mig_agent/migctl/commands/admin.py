"""What administrators do: `migctl reclaim`, `cordon`, `uncordon` and `mode`."""

from __future__ import annotations

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.requests import parse_gpu
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, split, verb
from mig_agent.migctl.printing import print_json, slices


@verb()
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="Only on this GPU, by index or UUID. Repeatable.")
def reclaim(common: Common, *, gpus: tuple[str, ...]) -> int:
    """Destroy the idle instances, to leave GPUs empty. For administrators.

    Nothing needs this to place a request: idle instances in its way go by themselves.
    """
    output = common.wants()
    chosen = [parse_gpu(each) for each in split(gpus)]
    from mig_agent.client import shapes  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        destroyed = client.reclaim(*chosen)
    if output == "json":
        print_json(shapes.reclaimed(destroyed))
        return failures.DONE
    for each in destroyed:
        print(f"destroyed {each.profile} on GPU {each.gpu_index}, {slices(each.placement)}")
    if not destroyed:
        print("nothing is idle")
    return failures.DONE


@verb()
@click.argument("gpu", metavar="[GPU]", required=False)
@click.option("--gpu", "gpu_option", metavar="GPU", help="By index or UUID, as `migctl status` shows them.")
@click.option("--reason", metavar="TEXT", default="", help="For people who ask why.")
def cordon(common: Common, *, gpu: str | None, gpu_option: str | None, reason: str) -> int:
    """Keep new leases off a GPU; what is leased goes on. For administrators."""
    return _cordon(common, _one_gpu(gpu, gpu_option, "cordon"), on=True, reason=reason)


@verb()
@click.argument("gpu", metavar="[GPU]", required=False)
@click.option("--gpu", "gpu_option", metavar="GPU", help="By index or UUID, as `migctl status` shows them.")
def uncordon(common: Common, *, gpu: str | None, gpu_option: str | None) -> int:
    """Allow new leases on a GPU again. For administrators."""
    return _cordon(common, _one_gpu(gpu, gpu_option, "uncordon"), on=False)


@verb()
@click.argument("mode", metavar="enable|disable")
@click.option("--gpu", "gpu_option", metavar="GPU", help="By index or UUID, as `migctl status` shows them.")
def mode(common: Common, *, mode: str, gpu_option: str | None) -> int:
    """Switch a GPU's MIG mode on or off. For administrators.

    Refused while anything runs on the GPU or is leased. Says when a reset or a reboot is needed.
    """
    output = common.wants()
    if mode not in {"enable", "disable"}:
        raise UsageError(f"cannot {failures.one_line(mode[:40])} MIG mode", "write enable or disable")
    gpu = _one_gpu(None, gpu_option, f"{mode} MIG mode of")
    from mig_agent.client import shapes  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        change = client.set_mig_mode(gpu, enable=mode == "enable")
    if output == "json":
        print_json(shapes.mode_change(change))
    else:
        print(change.words)
    return failures.DONE


def _cordon(common: Common, gpu: str, *, on: bool, reason: str = "") -> int:
    output = common.wants()
    from mig_agent.client import shapes  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        after = client.cordon(gpu, reason) if on else client.uncordon(gpu)
    if output == "json":
        print_json(shapes.gpu(after))
    else:
        print(f"GPU {after.index} is {after.state}" + (f": {after.reason}" if after.reason else ""))
    return failures.DONE


def _one_gpu(argument: str | None, option: str | None, what: str) -> str:
    if argument is not None and option is not None:
        raise UsageError(f"cannot {what} two GPUs at once", "name one")
    given = argument if argument is not None else option
    if given is None:
        raise UsageError(f"cannot {what} a GPU without its name", "give --gpu with its index or UUID")
    return parse_gpu(given)
