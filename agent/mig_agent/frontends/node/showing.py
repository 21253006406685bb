"""What a node should show of its GPUs, from the view and the node as it is; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from mig_agent.adapters.kubeapi import NodeCondition, NodeFacts
from mig_agent.core.model import NodeView
from mig_agent.core.pod_resources import in_kubernetes
from mig_agent.frontends.deviceplugin.resources import Naming
from mig_agent.frontends.node.conditions import condition_of
from mig_agent.frontends.node.features import Changes, changes, feature_labels
from mig_agent.frontends.node.switch import carries


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What to write on the node."""

    condition: NodeCondition | None = None
    """To be shown if it is not yet; None: to be taken away where the node has one."""
    changes: Changes = field(default_factory=Changes)
    """Of labels and annotations."""


def shown(
    view: NodeView,
    facts: NodeFacts,
    *,
    label: str,
    features: bool,
    paused: bool,
    driver_version: str,
    naming: Naming,
) -> Shown | None:
    """What the node should show now; None: leave it as it is.

    An agent that was paused before it ever read its GPUs knows nothing of them, and what the node shows may be true.
    """
    if not carries(facts.labels, label):
        return nothing(facts)
    if paused and not view.gpus:
        return None
    wanted = feature_labels(view, driver_version, lambda profile: naming.profiles + in_kubernetes(profile))
    return Shown(condition=condition_of(view), changes=changes(wanted if features else {}, facts))


def nothing(facts: NodeFacts) -> Shown:
    """What an agent shows that has nothing to do with the node."""
    return Shown(changes=changes({}, facts))
