"""How many of each resource the node shows where no device plugin serves it. Pure.

A scheduler takes off what the pods on the node ask for. What it has left then is what could be made now, as with a
device plugin: what stands for a pod is added for every resource that the pod asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mig_agent.core.model import NodeView, Want
from mig_agent.frontends.deviceplugin.resources import Naming, resources_of
from mig_agent.frontends.promises import Asked, Kept, kept, promised


def numbers(
    view: NodeView, naming: Naming, creatable: Callable[[Want], int], asked: Asked, making: Iterable[Kept] = ()
) -> Mapping[str, int]:
    """By name of the resource. `creatable` tells how many more could be made, with only busy instances in the way.

    `making` is what is being made for pods at this moment.
    """
    # Names that pods were served under and that are configured no more are none to show.
    wants = {resource.name: resource.want for resource in resources_of(replace(view, leases={}), naming)}
    taken = Counter(promised((*kept(view), *making), view, wants, asked))
    # Of pods that were served by a device plugin before, and run on.
    taken.update(device.resource for lease in view.leases.values() for device in lease.kubelet_devices)
    return {name: taken[name] + creatable(want) for name, want in wants.items()}
