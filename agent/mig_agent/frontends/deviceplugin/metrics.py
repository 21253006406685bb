"""Metrics of the device plugin: gauges and counts read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mig_agent.frontends.deviceplugin.plugin import Plugin


class PluginMetrics(Collector):
    """May be read on any thread: what it reads is replaced, never changed half."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names are known without collecting."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        plugin = self._plugin
        yield GaugeMetricFamily(
            "mig_agent_pods_waiting", "Pods that wait for devices to start with.", len(plugin.book.under_way())
        )
        listed = GaugeMetricFamily(
            "mig_agent_kubelet_devices", "Devices that the kubelet is shown, by resource.", labels=("resource",)
        )
        target = GaugeMetricFamily(
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
        connected = GaugeMetricFamily(
            "mig_agent_kubelet_connected", "1 while the kubelet listens, by resource.", labels=("resource",)
        )
        registrations = CounterMetricFamily(
            "mig_agent_kubelet_registrations", "Registrations with the kubelet, by resource.", labels=("resource",)
        )
        for name, served in tuple(plugin.served.items()):
            listed.add_metric((name,), len(served.service.ids))
            target.add_metric((name,), served.target)
            allocated.add_metric((name,), served.allocated)
            promised.add_metric((name,), served.promised)
            offer = plugin.registering.offers[name]
            connected.add_metric((name,), int(offer.is_listened_to))
            registrations.add_metric((name,), offer.registrations)
        yield from (listed, target, allocated, promised, connected, registrations)
