"""`migctl profiles`: shows what the GPUs can be cut into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mig_agent.core.quantities import counted, format_mib
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import print_json, table

if TYPE_CHECKING:
    from mig_agent.client.types import GpuModel


@verb()
def profiles(common: Common) -> int:
    """Show what the GPUs can be cut into."""
    output = common.wants()
    from mig_agent.client import to_json  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

    with common.client() as client:
        models = client.profiles()
    if output == "json":
        print_json(to_json.profiles(models))
    else:
        print("\n\n".join(_model(each) for each in models) or "no GPUs")
    return failures.DONE


def _model(each: GpuModel) -> str:
    indices = ", ".join(map(str, each.gpus))
    rows = [
        (
            one.name,
            format_mib(one.memory_mib),
            str(one.compute_slices),
            str(one.memory_slices),
            str(len(one.placements)),
            " ".join(str(place.start) for place in one.placements),
        )
        for one in each.profiles
    ]
    header = ("PROFILE", "MEMORY", "COMPUTE", "SLICES", "PLACES", "STARTS AT")
    whole = all(one.name == "whole" for one in each.profiles)
    slices = "without MIG mode" if whole else counted(each.memory_slices, "memory slice")
    return "\n".join((f"{each.model} (GPU {indices}), {slices}", table(header, rows), *_shares(each)))


def _shares(each: GpuModel) -> tuple[str, ...]:
    """Return which shares there can be of such a GPU; nothing if there can be none."""
    memory = each.shared_memory
    if memory is None:
        return ()
    sizes = f"{format_mib(memory.least_mib)} to {format_mib(memory.largest_mib)}"
    shares = f"shares of {sizes}, {memory.promise}"
    if not memory.without_process:
        return (f"{shares}; only for `migctl run`",)
    if memory.without_process != memory.enforced_by:
        by = memory.without_process.upper() if memory.without_process == "mps" else memory.without_process
        return (f"{shares}; `migctl request` gets it by {by}",)
    return (shares,)
