"""The kubelet of this node: registration, its pod resources API, and its checkpoint of pods' devices."""

from mig_agent.adapters.kubelet.checkpoint import CheckpointEntry, DeviceCheckpoint
from mig_agent.adapters.kubelet.driver_sockets import DriverSockets
from mig_agent.adapters.kubelet.podresources import ListedContainer, ListedPod, PodResources
from mig_agent.adapters.kubelet.registration import Identity, KubeletError, KubeletPaths, register
from mig_agent.adapters.kubelet.sockets import PluginSocket, remove_stale_sockets

__all__ = [
    "CheckpointEntry",
    "DeviceCheckpoint",
    "DriverSockets",
    "Identity",
    "KubeletError",
    "KubeletPaths",
    "ListedContainer",
    "ListedPod",
    "PluginSocket",
    "PodResources",
    "register",
    "remove_stale_sockets",
]
