"""Metrics of the device plugin: gauges and counts read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mig_agent.frontends.devicemetrics import Devices, device_metrics
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
        connected = GaugeMetricFamily(
            "mig_agent_kubelet_connected", "1 while the kubelet listens, by resource.", labels=("resource",)
        )
        registrations = CounterMetricFamily(
            "mig_agent_kubelet_registrations", "Registrations with the kubelet, by resource.", labels=("resource",)
        )
        everything = tuple(plugin.served.items())
        for name, served in everything:
            listed.add_metric((name,), len(served.service.ids))
            offer = plugin.registering.offers[name]
            connected.add_metric((name,), int(offer.is_listened_to))
            registrations.add_metric((name,), offer.registrations)
        yield from (listed, connected, registrations)
        yield from device_metrics(
            {
                name: Devices(possible=served.target, allocated=served.allocated, promised=served.promised)
                for name, served in everything
            }
        )
