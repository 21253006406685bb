"""The API server: what the agent reads there and the little that it changes. The only import of `kubernetes`.

`KubeApi.connect` imports that library, so that an agent without Kubernetes does not pay for it.
"""

from mig_agent.adapters.kubeapi.api import KubeApi
from mig_agent.adapters.kubeapi.facts import (
    NO_ANSWER,
    DaemonSetFacts,
    KubeApiError,
    NodeCondition,
    NodeFacts,
    PodFacts,
    PodName,
)
from mig_agent.adapters.kubeapi.following import Following
from mig_agent.adapters.kubeapi.selecting import selects

__all__ = [
    "NO_ANSWER",
    "DaemonSetFacts",
    "Following",
    "KubeApi",
    "KubeApiError",
    "NodeCondition",
    "NodeFacts",
    "PodFacts",
    "PodName",
    "selects",
]
