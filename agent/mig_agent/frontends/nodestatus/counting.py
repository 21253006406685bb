"""How many of each resource the node shows where no device plugin serves it. Pure.

A scheduler takes off what the pods on the node ask for. What it has left then is what could be made now, as with a
device plugin: what stands for a pod is added for every resource that the pod asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mig_agent.core.model import NodeView, Want
from mig_agent.frontends.devicemetrics import Devices
from mig_agent.frontends.deviceplugin.resources import Naming, resources_of
from mig_agent.frontends.promises import Asked, Kept, kept, promised


def numbers(
    view: NodeView, naming: Naming, creatable: Callable[[Want], int], asked: Asked, making: Iterable[Kept] = ()
) -> Mapping[str, Devices]:
    """By name of the resource. `creatable` tells how many more could be made, with only busy instances in the way.

    `making` is what is being made for pods at this moment.
    """
    # Names that pods were served under and that are configured no more are none to show.
    wants = {resource.name: resource.want for resource in resources_of(replace(view, leases={}), naming)}
    taken = Counter(promised((*kept(view), *making), view, wants, asked))
    here = {name: lease for name, lease in view.leases.items() if lease.arrived or lease.kubelet_devices}
    arrived = replace(view, leases=here)
    allocated = Counter(promised(kept(arrived), arrived, wants, asked))
    # Of pods that were served by a device plugin before, and run on.
    by_plugin = Counter(device.resource for lease in here.values() for device in lease.kubelet_devices)
    return {
        name: Devices(
            possible=taken[name] + by_plugin[name] + creatable(want),
            allocated=allocated[name] + by_plugin[name],
            promised=max(taken[name] - allocated[name], 0),
        )
        for name, want in wants.items()
    }
