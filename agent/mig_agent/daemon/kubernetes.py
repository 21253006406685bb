"""The agent on a node of Kubernetes: the device plugin, the node object and the API server around the manager.

Imported only where the setting `kubernetes` is on, since the libraries below it cost time and memory.
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
from mig_agent.adapters.kubeapi import KubeApiError, KubeClient, PodInformer
from mig_agent.adapters.kubelet import KubeletPaths
from mig_agent.config import Settings
from mig_agent.daemon.hardware import Hardware
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.device_plugin.metrics import PluginMetrics
from mig_agent.frontends.kubernetes.device_plugin.plugin import Plugin, PluginSettings
from mig_agent.frontends.kubernetes.device_plugin.registration import Readiness
from mig_agent.frontends.kubernetes.node.controller import NodeFrontend, NodeSettings, first_pauses
from mig_agent.frontends.kubernetes.node.uninstall import is_leaving, leave
from mig_agent.frontends.kubernetes.node_resources.controller import NodeStatus, NodeStatusSettings
from mig_agent.frontends.kubernetes.node_resources.metrics import NodeStatusMetrics
from mig_agent.frontends.kubernetes.pods.tracker import PodTracker
from mig_agent.frontends.kubernetes.resources import Naming

_NAMESPACE = "POD_NAMESPACE"
_POD = "POD_NAME"
"""By the downward API: the agent's own pod, which tells whether it is being uninstalled."""
_CLEAR_SECONDS = 3.0
"""An API server that does not answer keeps no pod from being served."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Kubernetes:
    """Connected to the API server; serves pods from `start` to `stop`."""

    settings: Settings
    api: KubeClient
    node_settings: NodeSettings
    paused: tuple[str, ...]
    """Why the agent must not even open the driver when it starts."""
    _plugin: Plugin | None = None
    _node: NodeFrontend | None = None
    _pods: PodTracker | None = None
    _numbers: NodeStatus | None = None
    _manager: Manager | None = None
    _followings: list[PodInformer] = field(default_factory=list)

    @classmethod
    async def connect(cls, settings: Settings) -> Kubernetes:
        """Before the manager is started. Raises ConfigError where it cannot be told how to reach the API server."""
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
        tell_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Serves pods. `tell_ready` hears whether pods that are bound to the node now would be taken."""
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
            # What was shown without a plugin would be believed until the plugin is there.
            with contextlib.suppress(KubeApiError, TimeoutError):
                await asyncio.wait_for(self._numbers.clear(), _CLEAR_SECONDS)
            plugin = await self._serve_kubelet(manager, hardware, registry, self._pods)
            plugin.registering.follow_up(Readiness(plugin.registering, tell_ready).look)
        else:
            await tell_ready(True)

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
        self._followings.append(api.follow_node(plugin.node_showed, plugin.node_unknown))
        await plugin.start()
        registry.register(PluginMetrics(plugin))
        return plugin

    async def _cdi_folder(self, manager: Manager, hardware: Hardware) -> CdiFolder:
        settings, api = self.settings, self.api
        loop = asyncio.get_running_loop()

        def tell(words: str) -> None:
            """In any thread."""
            _log.warning(words)
            loop.call_soon_threadsafe(lambda: loop.create_task(api.tell(None, "DriverLibraries", words, warning=True)))

        libraries = None if settings.simulate else DriverLibraries(hardware.host, tell)
        folder = CdiFolder(
            settings.cdi_dir, CDI_KIND, hardware.host, simulated=bool(settings.simulate), libraries=libraries
        )
        if libraries is not None:

            def rest() -> None:
                libraries.resting = bool(manager.paused)

            rest()
            manager.on_view.append(rest)
        try:
            await asyncio.to_thread(folder.prepare)
        except CdiError as error:
            _log.error(error.message, hint=error.hint)
        if not manager.paused:
            await asyncio.to_thread(folder.warm_up)
        return folder

    async def stop(self) -> None:
        """Before the manager is closed: running pods keep what they have."""
        if self._plugin is not None:
            await self._plugin.drain()
        for following in self._followings:
            following.close()
        if self._pods is not None:
            await self._pods.close()
        if self._node is not None:
            await self._node.close()
        if self._numbers is not None and self._manager is not None:
            namespace, pod = os.environ.get(_NAMESPACE, ""), os.environ.get(_POD, "")
            leaves = await is_leaving(self.api, namespace, pod, self.settings.node_label)
            await self._numbers.close()
            if self._plugin is not None:
                await self._plugin.close()
            if leaves:
                served = () if self._plugin is None else tuple(self._plugin.served)
                files = () if self._plugin is None else (self._plugin.remove_files,)
                await leave(self.api, self._manager, served, (self._numbers.clear, *files))
        self.api.close()


def advertised_by(settings: Settings) -> Literal["device-plugin", "node-status", "none"]:
    """How the node shows what it can give: as configured, or by a device plugin where there is a kubelet."""
    if settings.advertise is not None:
        return settings.advertise
    if settings.kubelet_dir.is_dir():
        return "device-plugin"
    _log.warning(
        f"there is no kubelet in {settings.kubelet_dir}: the node does not show what it can give",
        hint="give kubelet_dir, or say how: advertise",
    )
    return "none"
