"""Metrics of the device plugin: gauges and counts as the plugin last showed them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mig_agent.frontends.kubernetes.device_plugin.plugin import Plugin
from mig_agent.frontends.kubernetes.metrics import device_metrics


class PluginMetrics(Collector):
    """Exports the numbers of the device plugin. Thread-safe: it reads one value, which the plugin replaces whole."""

    def __init__(self, plugin: Plugin) -> None:
        self._plugin = plugin

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the names are known without collecting."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        shown = self._plugin.shown
        yield GaugeMetricFamily(
            "mig_agent_pods_waiting", "Pods that wait for devices to start with.", shown.pods_waiting
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
        for name, resource in shown.resources.items():
            listed.add_metric((name,), resource.listed)
            connected.add_metric((name,), int(resource.is_listened_to))
            registrations.add_metric((name,), resource.registrations)
        yield from (listed, connected, registrations)
        yield from device_metrics({name: resource.devices for name, resource in shown.resources.items()})
