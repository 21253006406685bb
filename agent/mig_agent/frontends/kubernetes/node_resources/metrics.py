"""Metrics of the numbers of devices in the node's status."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mig_agent.frontends.kubernetes.metrics import device_metrics
from mig_agent.frontends.kubernetes.node_resources.controller import NodeStatus


class NodeStatusMetrics(Collector):
    """Collects the numbers in the node's status. Thread-safe: it reads one value that is replaced as a whole."""

    def __init__(self, numbers: NodeStatus) -> None:
        self._numbers = numbers

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registering does not collect."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        yield from device_metrics(self._numbers.shown)
