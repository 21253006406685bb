"""`migctl drain` and `migctl undrain`: have GPUs become empty, and use them again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from mig_agent.core.quantities import counted, format_duration, parse_duration
from mig_agent.core.requests import parse_gpu, parse_reason
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, split, verb
from mig_agent.migctl.printing import gpu_state, print_json

if TYPE_CHECKING:
    from mig_agent.client.types import Drained, Gpu


@verb()
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="Only this GPU, by index or UUID. Repeatable.")
@click.option("--deadline", metavar="TIME", help="End what is still leased there after this time: 2h.")
@click.option("--reason", metavar="TEXT", default="", help="For people who ask why.")
def drain(common: Common, *, gpus: tuple[str, ...], deadline: str | None, reason: str) -> int:
    """Have a GPU, or the whole node, become empty. For administrators.

    Nothing new is leased there. What is leased ends by itself, or at the deadline; its holders are warned. The lease of
    a pod never ends by this: evict the pod (`kubectl drain`). Outlives the agent; `migctl undrain` ends it.
    """
    output, words = common.wants(), parse_reason(reason)
    chosen = [parse_gpu(each) for each in split(gpus)]
    seconds = None if deadline is None else parse_duration(deadline)
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        drained = client.drain(*chosen, deadline=seconds, reason=words)
    if output == "json":
        print_json(to_json.encode(drained))
    else:
        _print(drained)
    return failures.DONE


@verb(short_help="Allow new leases again on GPUs that are drained.")
@click.option("--gpu", "gpus", metavar="GPU", multiple=True, help="Only this GPU, by index or UUID. Repeatable.")
def undrain(common: Common, *, gpus: tuple[str, ...]) -> int:
    """Allow new leases again on a GPU that is drained, or on all of them. For administrators.

    A GPU that was cordoned by `migctl cordon` stays so.
    """
    output = common.wants()
    chosen = [parse_gpu(each) for each in split(gpus)]
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        after = client.undrain(*chosen)
    if output == "json":
        print_json({"gpus": to_json.encode(after)})
        return failures.DONE
    for each in after:
        print(_line(each))
    if not after:
        print("no GPU is drained")
    return failures.DONE


def _print(drained: Drained) -> None:
    for each in drained.gpus:
        print(_line(each))
    for lease in drained.leases:
        print(failures.one_line(f"  lease {lease.id} of {lease.holder} is still there{_pod(lease.arrived)}"))
    if not drained.leases:
        print("nothing is leased there")
    else:
        print(f"{counted(len(drained.leases), 'lease')} left; `migctl events -f` tells when each GPU is drained")


def _pod(arrived: bool) -> str:  # noqa: FBT001 -- a fact of the lease
    return ", and ends with its pod only" if arrived else ""


def _line(gpu: Gpu) -> str:
    ends = ""
    if gpu.drain_deadline is not None and any(each.lease for each in gpu.instances):
        left = max(gpu.drain_deadline - time.time(), 1.0)
        ends = f"; what is leased there ends in {format_duration(float(round(left)))}"
    return failures.one_line(gpu_state(gpu) + ends)
