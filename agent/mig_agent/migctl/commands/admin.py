"""The verbs of administrators: `migctl reclaim`, `cordon`, `uncordon`, `mode` and `adopt`."""

from __future__ import annotations

from collections.abc import Iterable

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown
from mig_agent.core.requests import parse_gpu, parse_reason
from mig_agent.migctl import failures
from mig_agent.migctl.gpu_names import find_gpus
from mig_agent.migctl.options import Common, completer_of, split, verb
from mig_agent.migctl.printing import gpu_state, print_json, slices


@verb()
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    multiple=True,
    shell_complete=completer_of("gpu"),
    help="Only on this GPU, by index or UUID. Repeatable.",
)
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
@click.argument("named", metavar="[GPU]...", nargs=-1, shell_complete=completer_of("gpu"))
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    multiple=True,
    shell_complete=completer_of("gpu"),
    help="By index, as `migctl status` shows it, or UUID.",
)
@click.option("--reason", metavar="TEXT", default="", help="For people who ask why.")
def cordon(common: Common, *, named: tuple[str, ...], gpus: tuple[str, ...], reason: str) -> int:
    """Keep new leases off a GPU; what is leased goes on. For administrators."""
    return _cordon(common, _some_gpus((*named, *gpus), "cordon"), on=True, reason=parse_reason(reason))


@verb()
@click.argument("named", metavar="[GPU]...", nargs=-1, shell_complete=completer_of("gpu"))
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    multiple=True,
    shell_complete=completer_of("gpu"),
    help="By index, as `migctl status` shows it, or UUID.",
)
def uncordon(common: Common, *, named: tuple[str, ...], gpus: tuple[str, ...]) -> int:
    """Allow new leases on a GPU again. For administrators."""
    return _cordon(common, _some_gpus((*named, *gpus), "uncordon"), on=False)


@verb()
@click.argument("mode", metavar="enable|disable", shell_complete=completer_of("mode"))
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    multiple=True,
    shell_complete=completer_of("gpu"),
    help="By index, as `migctl status` shows it, or UUID.",
)
def mode(common: Common, *, mode: str, gpus: tuple[str, ...]) -> int:
    """Switch a GPU's MIG mode on or off. For administrators.

    Refused while anything runs on the GPU or is leased. Says when a reset or a reboot is needed.
    """
    output = common.wants()
    if mode not in {"enable", "disable"}:
        raise UsageError(f"cannot set MIG mode to {shown(mode)}", "write enable or disable")
    named = _some_gpus(gpus, f"{mode} MIG mode of")
    if len(named) > 1:
        raise UsageError(f"cannot {mode} MIG mode of several GPUs at once", "name one; call it once for each")
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        change = client.set_mig_mode(named[0], enable=mode == "enable")
    if output == "json":
        print_json(to_json.encode(change))
    else:
        print(change.message)
    return failures.DONE


@verb(short_help="Take over foreign instances, as idle ones.")
@click.argument("uuids", metavar="[UUID]...", nargs=-1)
@click.option(
    "--gpu",
    "gpus",
    metavar="GPU",
    multiple=True,
    shell_complete=completer_of("gpu"),
    help="All on this GPU, by index or UUID. Repeatable.",
)
@click.option("--all", "everything", is_flag=True, help="All, and the ledger is not in doubt any more.")
def adopt(common: Common, *, uuids: tuple[str, ...], gpus: tuple[str, ...], everything: bool) -> int:
    """Take over foreign instances, as idle ones that the next request may get. For administrators.

    After the ledger was damaged or restored these are the instances that it does not account for. Adopt what nobody
    counts on any more; what is in use is blocked until it is not.
    """
    output = common.wants()
    chosen = [parse_gpu(each) for each in split(gpus)]
    if not all(each.strip() for each in uuids):
        raise UsageError("cannot take an empty text as the UUID of an instance", "`migctl status -o json` shows them")
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


def _cordon(common: Common, gpus: list[str], *, on: bool, reason: str = "") -> int:
    output = common.wants()
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    after = []
    with common.client() as client:
        if len(gpus) > 1:  # a mistake in one of them changes none
            find_gpus(client.status(), gpus)
        for gpu in gpus:
            after.append(client.cordon(gpu, reason) if on else client.uncordon(gpu))
            if output == "text":
                print(failures.one_line(gpu_state(after[-1])))
    if output == "json":
        print_json(to_json.encode(after[0]) if len(after) == 1 else {"gpus": [to_json.encode(each) for each in after]})
    return failures.DONE


def _some_gpus(named: Iterable[str], what: str) -> list[str]:
    """Return the GPUs that were named, each once. Raises UsageError."""
    given = [parse_gpu(each) for each in split(tuple(named))]
    if not given:
        raise UsageError(f"cannot {what} a GPU without its name", "give --gpu with its index or UUID")
    return list(dict.fromkeys(given))
