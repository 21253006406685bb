"""Metrics of the numbers of devices on the node, under the same names for the device plugin and for node resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Numbers of devices of one extended resource, as the node shows them."""

    possible: int
    """Devices that pods have, that are reserved for pods, or that could be created now."""
    allocated: int
    """Devices that pods have."""
    promised: int
    """Devices that are reserved for pods that have not started."""


def device_metrics(shown: Mapping[str, Devices]) -> Iterator[Metric]:
    """Yield the metrics of one scrape; `shown` is by name of the resource."""
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
