"""The numbers of devices that a node shows as metrics: by the same names, whichever way it shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Of one resource, as it is shown."""

    possible: int
    """That pods have, that are kept for them, or that could be made now."""
    allocated: int
    """That pods have."""
    promised: int
    """That are kept for pods on their way."""


def device_metrics(shown: Mapping[str, Devices]) -> Iterator[Metric]:
    """One scrape; `shown` is by name of the resource."""
    possible = GaugeMetricFamily(
        "mig_agent_kubelet_devices_possible",
        "Devices that pods have or could be given now, by resource; the node's status shows as many.",
        labels=("resource",),
    )
    allocated = GaugeMetricFamily(
        "mig_agent_kubelet_devices_allocated", "Devices that pods have, by resource.", labels=("resource",)
    )
    promised = GaugeMetricFamily(
        "mig_agent_kubelet_devices_promised",
        "Devices that are kept for pods on their way, by resource.",
        labels=("resource",),
    )
    for name, devices in shown.items():
        possible.add_metric((name,), devices.possible)
        allocated.add_metric((name,), devices.allocated)
        promised.add_metric((name,), devices.promised)
    yield from (possible, allocated, promised)
