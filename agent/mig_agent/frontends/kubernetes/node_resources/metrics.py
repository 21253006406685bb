"""Metrics of the numbers in the node's status, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mig_agent.frontends.kubernetes.metrics import device_metrics
from mig_agent.frontends.kubernetes.node_resources.controller import NodeStatus


class NodeStatusMetrics(Collector):
    """May be read on any thread: it reads one finished value, which is replaced as a whole."""

    def __init__(self, numbers: NodeStatus) -> None:
        self._numbers = numbers

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known without collecting."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        yield from device_metrics(self._numbers.shown)
