"""The verbs of administrators: `migctl reclaim`, `cordon`, `uncordon`, `mode` and `adopt`."""

from __future__ import annotations

from collections.abc import Iterable

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
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        destroyed = client.reclaim(*chosen)
    if output == "json":
        print_json(to_json.reclaimed(destroyed))
        return failures.DONE
    for each in destroyed:
        print(f"destroyed {each.profile} on GPU {each.gpu_index}, {slices(each.placement)}")
    if not destroyed:
        print("nothing is idle")
    return failures.DONE


@verb()
@click.argument("gpu", metavar="[GPU]", required=False)
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="By index, as `migctl status` shows it, or UUID.")
@click.option("--reason", metavar="TEXT", default="", help="For people who ask why.")
def cordon(common: Common, *, gpu: str | None, gpus: tuple[str, ...], reason: str) -> int:
    """Keep new leases off a GPU; what is leased goes on. For administrators."""
    return _cordon(common, _one_gpu((gpu, *gpus), "cordon"), on=True, reason=reason)


@verb()
@click.argument("gpu", metavar="[GPU]", required=False)
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="By index, as `migctl status` shows it, or UUID.")
def uncordon(common: Common, *, gpu: str | None, gpus: tuple[str, ...]) -> int:
    """Allow new leases on a GPU again. For administrators."""
    return _cordon(common, _one_gpu((gpu, *gpus), "uncordon"), on=False)


@verb()
@click.argument("mode", metavar="enable|disable")
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="By index, as `migctl status` shows it, or UUID.")
def mode(common: Common, *, mode: str, gpus: tuple[str, ...]) -> int:
    """Switch a GPU's MIG mode on or off. For administrators.

    Refused while anything runs on the GPU or is leased. Says when a reset or a reboot is needed.
    """
    output = common.wants()
    if mode not in {"enable", "disable"}:
        raise UsageError(f"cannot {failures.one_line(mode[:40])} MIG mode", "write enable or disable")
    gpu = _one_gpu(gpus, f"{mode} MIG mode of")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        change = client.set_mig_mode(gpu, enable=mode == "enable")
    if output == "json":
        print_json(to_json.encode(change))
    else:
        print(change.message)
    return failures.DONE


@verb()
@click.argument("uuids", metavar="[UUID]...", nargs=-1)
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="All on this GPU, by index or UUID. Repeatable.")
@click.option("--all", "everything", is_flag=True, help="All, and the ledger is not in doubt any more.")
def adopt(common: Common, *, uuids: tuple[str, ...], gpus: tuple[str, ...], everything: bool) -> int:
    """Take over foreign instances, as idle ones that the next request may get. For administrators.

    After the ledger was damaged or restored these are the instances that it does not account for. Adopt what nobody
    counts on any more; what is in use is blocked until it is not.
    """
    output = common.wants()
    chosen = [parse_gpu(each) for each in split(gpus)]
    if everything and (uuids or chosen):
        raise UsageError("cannot adopt all and only some", "give --all, or UUIDs and --gpu")
    if not (everything or uuids or chosen):
        raise UsageError("cannot adopt without being told what", "give UUIDs, --gpu or --all; see `migctl status`")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        adopted = client.adopt(*uuids, gpus=chosen, everything=everything)
    if output == "json":
        print_json(to_json.adopted(adopted))
        return failures.DONE
    for each in adopted:
        where = slices(each.placement) if each.placement is not None else "whole"
        print(f"adopted {each.profile} on GPU {each.gpu_index}, {where}: {each.state}")
    if not adopted:
        print("nothing is foreign")
    return failures.DONE


def _cordon(common: Common, gpu: str, *, on: bool, reason: str = "") -> int:
    output = common.wants()
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        after = client.cordon(gpu, reason) if on else client.uncordon(gpu)
    if output == "json":
        print_json(to_json.encode(after))
    else:
        print(f"GPU {after.index} is {after.state}" + (f": {after.reason}" if after.reason else ""))
    return failures.DONE


def _one_gpu(named: Iterable[str | None], what: str) -> str:
    given = [each for each in named if each is not None]
    if len(given) > 1:
        raise UsageError(f"cannot {what} two GPUs at once", "name one; call it once for each")
    if not given:
        raise UsageError(f"cannot {what} a GPU without its name", "give --gpu with its index or UUID")
    return parse_gpu(given[0])
