"""Several whole GPUs of one request: all of one model, unless no model will ever have enough of them.

A program on GPUs of unlike speed and memory goes at the pace of the slowest. GPUs that are cordoned or lost, and those
with a foreign instance, do not count; a request that names its GPUs has only these to choose from, so it can ask for
unlike ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from mig_agent.core.model import Gpu, GpuUuid, InstanceState, Want
from mig_agent.core.planning.profiles import smallest_profile

GpuSet = Sequence[Gpu]


@dataclass(frozen=True, slots=True)
class GpuSets:
    """The sets of GPUs, each alike, that can serve all wants of a request once leases end."""

    of_one_kind: tuple[GpuSet, ...]
    """GPUs of one model, and all with MIG mode or all without it: these go first."""
    of_one_model: tuple[GpuSet, ...]

    def without(self, reserved: frozenset[GpuUuid]) -> GpuSets:
        """Return the sets without GPUs that are reserved for other requests."""
        if not reserved:
            return self
        return GpuSets(_without(self.of_one_kind, reserved), _without(self.of_one_model, reserved))


def alike(gpus: Sequence[Gpu], wants: Sequence[Want]) -> GpuSets | None:
    """Return the sets from which the wants are to be served; None where any GPUs will do.

    `gpus` are those on which something may be placed for this request, reserved ones included.
    """
    if not wants_alike(wants):
        return None
    able = [gpu for gpu in gpus if _can_be_whole(gpu, wants)]
    of_one_model = _sets((gpu.layout.model, gpu) for gpu in able)
    enough = tuple(each for each in of_one_model if len(each) >= len(wants))
    if not enough:
        return None
    kinds = _sets((gpu.layout, gpu) for gpu in able)
    return GpuSets(tuple(each for each in kinds if len(each) >= len(wants)), enough)


def wants_alike(wants: Sequence[Want]) -> bool:
    """Return True for several whole GPUs whose choice is left to the planner."""
    return len(wants) > 1 and all(want.whole_gpu and want.slot is None for want in wants)


def models_of(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return the models of GPUs, each once, in their order."""
    return tuple(dict.fromkeys(gpu.layout.model for gpu in gpus))


def mixed_note(gpus: Iterable[Gpu], wants: Sequence[Want]) -> tuple[str, ...]:
    """Return what the user is told of whole GPUs of several models, or nothing."""
    models = models_of(gpus) if wants_alike(wants) else ()
    return (f"the GPUs are of unlike models ({', '.join(models)})",) if len(models) > 1 else ()


def _can_be_whole(gpu: Gpu, wants: Sequence[Want]) -> bool:
    foreign = any(each.state is InstanceState.FOREIGN for each in gpu.instances)
    return not foreign and all(smallest_profile(want, gpu.layout) is not None for want in wants)


def _sets(keyed: Iterable[tuple[Hashable, Gpu]]) -> list[list[Gpu]]:
    found: dict[Hashable, list[Gpu]] = {}
    for key, gpu in keyed:
        found.setdefault(key, []).append(gpu)
    return list(found.values())


def _without(sets: Iterable[GpuSet], reserved: frozenset[GpuUuid]) -> tuple[GpuSet, ...]:
    return tuple([gpu for gpu in each if gpu.uuid not in reserved] for each in sets)
