"""Finds the GPUs that `--gpu` names, before anything is done to one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from mig_agent.core.quantities import shown

if TYPE_CHECKING:
    from mig_agent.client.types import Gpu, Status


def find_gpus(node: Status, names: Iterable[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with these indices or UUIDs, each once, by index. Raises Refused for a name that is none."""
    from mig_agent.client import Refused  # noqa: PLC0415 -- the client is imported by now

    found: dict[str, Gpu] = {}
    for name in names:
        gpu = next((each for each in node.gpus if name.casefold() in {str(each.index), each.uuid.casefold()}), None)
        if gpu is None:
            listed = ", ".join(str(each.index) for each in node.gpus)
            silent = ", ".join(map(str, node.missing_gpus))
            raise Refused(
                reason="unknown-gpu",
                message=f"cannot find GPU {shown(name)} on {node.node}",
                hint=(f"it has GPU {listed}" if listed else "it has none")
                + (f"; no answer came yet from {silent}" if silent else ""),
            )
        found[gpu.uuid] = gpu
    return tuple(sorted(found.values(), key=lambda each: each.index))
