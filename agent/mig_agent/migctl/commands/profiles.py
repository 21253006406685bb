"""`migctl profiles`: shows what the GPUs can be cut into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mig_agent.core.quantities import counted
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, verb
from mig_agent.migctl.printing import memory, print_json, table

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
            memory(one.memory_mib),
            str(one.compute_slices),
            str(one.memory_slices),
            str(len(one.placements)),
            " ".join(str(place.start) for place in one.placements),
        )
        for one in each.profiles
    ]
    header = ("PROFILE", "MEMORY", "COMPUTE", "SLICES", "PLACES", "STARTS AT")
    head = f"{each.model} (GPU {indices}), {counted(each.memory_slices, 'memory slice')}"
    return f"{head}\n{table(header, rows)}"
