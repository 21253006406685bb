"""The Kubernetes API server: what the agent reads there and the few things it changes."""

from mig_agent.adapters.kubeapi.client import KubeClient
from mig_agent.adapters.kubeapi.informer import InformerSubscription
from mig_agent.adapters.kubeapi.node_affinity import selects
from mig_agent.adapters.kubeapi.objects import (
    NO_ANSWER,
    AllocatedDevice,
    ClaimFacts,
    DaemonSetFacts,
    Json,
    KubeApiError,
    NodeCondition,
    NodeFacts,
    PodFacts,
    PodName,
)

__all__ = [
    "NO_ANSWER",
    "AllocatedDevice",
    "ClaimFacts",
    "DaemonSetFacts",
    "InformerSubscription",
    "Json",
    "KubeApiError",
    "KubeClient",
    "NodeCondition",
    "NodeFacts",
    "PodFacts",
    "PodName",
    "selects",
]
