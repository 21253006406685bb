"""The agent on a Kubernetes node: device plugin, node object and API server around the manager.

Imported only if the setting `kubernetes` is on, since its libraries cost time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry

from mig_agent.adapters.cdi import CDI_KIND, CdiError, CdiFolder
from mig_agent.adapters.clock import SystemClock
from mig_agent.adapters.driver_libraries import DriverLibraries
from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, KubeClient
from mig_agent.adapters.kubelet import KubeletPaths
from mig_agent.config import Settings
from mig_agent.daemon.hardware import Hardware
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.metrics import PluginMetrics
from mig_agent.frontends.kubernetes.device_plugin.plugin import Plugin, PluginSettings
from mig_agent.frontends.kubernetes.device_plugin.registration import Readiness
from mig_agent.frontends.kubernetes.dra.driver import KubeletDriver
from mig_agent.frontends.kubernetes.node.controller import NodeFrontend, NodeSettings, first_pauses
from mig_agent.frontends.kubernetes.node.uninstall import is_leaving, leave
from mig_agent.frontends.kubernetes.node_resources.controller import NodeStatus, NodeStatusSettings
from mig_agent.frontends.kubernetes.node_resources.metrics import NodeStatusMetrics
from mig_agent.frontends.kubernetes.pods.tracker import PodTracker
from mig_agent.frontends.kubernetes.resources import Naming

_NAMESPACE = "POD_NAMESPACE"
_POD = "POD_NAME"
"""The agent's own pod, from the downward API: it shows whether the agent is being uninstalled."""
_CLEAR_SECONDS = 3.0
"""Time limit for clearing old numbers, so that an unreachable API server does not keep pods waiting."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Kubernetes:
    """The Kubernetes side of an agent; serves pods from `start` to `stop`."""

    settings: Settings
    api: KubeClient
    node_settings: NodeSettings
    paused: tuple[str, ...]
    """Why the agent must not open the driver when it starts."""
    _plugin: Plugin | None = None
    _driver: KubeletDriver | None = None
    _node: NodeFrontend | None = None
    _pods: PodTracker | None = None
    _numbers: NodeStatus | None = None
    _manager: Manager | None = None
    _subscriptions: list[InformerSubscription] = field(default_factory=list)

    @classmethod
    async def connect(cls, settings: Settings) -> Kubernetes:
        """Connect before the manager starts. Raises ConfigError if the way to the API server is not configured."""
        api = KubeClient.connect(settings.kubeconfig, settings.node_name)
        node_settings = NodeSettings(
            label=settings.node_label,
            features=settings.feature_labels == "auto",
            naming=Naming(
                profiles=settings.resource_prefix,
                memory=settings.memory_resource_prefix,
                amounts=settings.memory_resources,
                whole_gpu=settings.whole_gpu_resource,
            ),
        )
        return cls(
            settings=settings, api=api, node_settings=node_settings, paused=await first_pauses(api, node_settings)
        )

    async def start(
        self,
        manager: Manager,
        hardware: Hardware,
        registry: CollectorRegistry,
        set_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Serve pods. `set_ready` is called with True while pods bound to the node would be admitted."""
        settings, api = self.settings, self.api
        advertise = advertised_by(settings)
        self._manager = manager
        self._pods = PodTracker(
            manager,
            api,
            node=settings.node_name,
            arrival_seconds=settings.pod_arrival,
            alone=advertise != "device-plugin",
            now=SystemClock().now,
        )
        node_settings = replace(self.node_settings, has_gpus=not hardware.absent)
        self._node = NodeFrontend(manager, api, node_settings, self.paused)
        self._node.start()
        self._numbers = NodeStatus(
            manager,
            api,
            KubeletPaths(settings.kubelet_dir),
            self._pods.asked,
            NodeStatusSettings(
                node=settings.node_name,
                shows=advertise == "node-status",
                label=settings.node_label,
                naming=self.node_settings.naming,
            ),
        )
        self._pods.on_change.append(self._numbers.refresh)
        self._numbers.start()
        if advertise == "node-status":
            registry.register(NodeStatusMetrics(self._numbers))
        self._pods.start()
        if advertise == "device-plugin":
            # Numbers shown without a plugin would be used to bind pods until the plugin runs.
            with contextlib.suppress(KubeApiError, TimeoutError):
                await asyncio.wait_for(self._numbers.clear(), _CLEAR_SECONDS)
            plugin = await self._serve_kubelet(manager, hardware, registry, self._pods)
            plugin.registration.follow_up(Readiness(plugin.registration, set_ready).check)
        elif advertise == "dra":
            with contextlib.suppress(KubeApiError, TimeoutError):
                await asyncio.wait_for(self._numbers.clear(), _CLEAR_SECONDS)
            self._driver = KubeletDriver(
                manager=manager,
                api=api,
                cdi=await self._cdi_folder(manager, hardware),
                paths=KubeletPaths(settings.kubelet_dir),
                node=settings.node_name,
                set_ready=set_ready,
            )
            self._driver.start()
        else:
            await set_ready(True)

    async def _serve_kubelet(
        self, manager: Manager, hardware: Hardware, registry: CollectorRegistry, pods: PodTracker
    ) -> Plugin:
        settings, api = self.settings, self.api
        plugin = Plugin(
            manager=manager,
            paths=KubeletPaths(settings.kubelet_dir),
            cdi=await self._cdi_folder(manager, hardware),
            api=api,
            settings=PluginSettings(
                node=settings.node_name,
                naming=self.node_settings.naming,
                start_deadline=settings.start_deadline,
            ),
            asked=pods.asked,
        )
        self._plugin = plugin
        pods.on_change.append(plugin.refresh)
        self._subscriptions.append(api.follow_node(plugin.node_changed, plugin.node_unknown))
        await plugin.start()
        registry.register(PluginMetrics(plugin))
        return plugin

    async def _cdi_folder(self, manager: Manager, hardware: Hardware) -> CdiFolder:
        settings, api = self.settings, self.api
        loop = asyncio.get_running_loop()

        def report(words: str) -> None:
            """Log the message and send an Event about the node; from any thread."""
            _log.warning(words)
            loop.call_soon_threadsafe(lambda: loop.create_task(api.tell(None, "DriverLibraries", words, warning=True)))

        libraries = None if settings.simulate else DriverLibraries(hardware.host, report)
        folder = CdiFolder(
            settings.cdi_dir, CDI_KIND, hardware.host, simulated=bool(settings.simulate), libraries=libraries
        )
        if libraries is not None:

            def update_released() -> None:
                libraries.driver_released = bool(manager.paused)

            update_released()
            manager.on_view.append(update_released)
        try:
            await asyncio.to_thread(folder.prepare)
        except CdiError as error:
            _log.error(error.message, hint=error.hint)
        if not manager.paused:
            await asyncio.to_thread(folder.warm_up)
        return folder

    async def stop(self) -> None:
        """Stop before the manager closes; running pods keep their devices."""
        if self._plugin is not None:
            await self._plugin.drain()
        if self._driver is not None:
            await self._driver.close()
        for subscription in self._subscriptions:
            subscription.close()
        if self._pods is not None:
            await self._pods.close()
        if self._node is not None:
            await self._node.close()
        if self._numbers is not None and self._manager is not None:
            namespace, pod = os.environ.get(_NAMESPACE, ""), os.environ.get(_POD, "")
            uninstalling = await is_leaving(self.api, namespace, pod, self.settings.node_label)
            await self._numbers.close()
            if self._plugin is not None:
                await self._plugin.close()
            if uninstalling:
                served = () if self._plugin is None else tuple(self._plugin.served)
                files = () if self._plugin is None else (self._plugin.remove_files,)
                await leave(self.api, self._manager, served, (self._numbers.clear, *files))
        self.api.close()


def advertised_by(settings: Settings) -> Literal["device-plugin", "dra", "node-status", "none"]:
    """Return how the node advertises its devices: as configured, or by a device plugin if there is a kubelet."""
    if settings.advertise is not None:
        return settings.advertise
    if settings.kubelet_dir.is_dir():
        return "device-plugin"
    _log.warning(
        f"there is no kubelet in {settings.kubelet_dir}: the node does not show what it can give",
        hint="give kubelet_dir, or say how: advertise",
    )
    return "none"
