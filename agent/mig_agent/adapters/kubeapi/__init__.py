"""The API server: what the agent reads there and the little that it changes. `kubernetes` serves kubeconfigs."""

from mig_agent.adapters.kubeapi.client import KubeClient
from mig_agent.adapters.kubeapi.informer import PodInformer
from mig_agent.adapters.kubeapi.node_affinity import selects
from mig_agent.adapters.kubeapi.objects import (
    NO_ANSWER,
    DaemonSetFacts,
    KubeApiError,
    NodeCondition,
    NodeFacts,
    PodFacts,
    PodName,
)

__all__ = [
    "NO_ANSWER",
    "DaemonSetFacts",
    "KubeApiError",
    "KubeClient",
    "NodeCondition",
    "NodeFacts",
    "PodFacts",
    "PodInformer",
    "PodName",
    "selects",
]
