"""Decides by the node's labels whether the agent may serve the node; pure.

Two things switch it off: the node does not carry the configured label, or the GPU operator has paused its components.
The operator does the latter before it unloads the driver (`paused-for-driver-upgrade`, by k8s-driver-manager) and
before its MIG manager changes the layout of the GPUs (`paused-for-mig-change`). It uses the labels
`nvidia.com/gpu.deploy.*`: one for each component, `client` for components of others. Any value that begins with
`paused-for-` counts as a pause, whatever its purpose: a request to release the GPUs applies to the agent, too. A
component that is switched off (`false`) is no pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mig_agent.adapters.kubeapi import NodeFacts

OPERATOR_PREFIX: Final = "nvidia.com/gpu.deploy."
PAUSED_PREFIX: Final = "paused-for-"
NOT_READ_YET: Final = "labels of the node that have not been read yet"


def carries(labels: Mapping[str, str], label: str) -> bool:
    """Return whether the labels include this one: `key=value`, or `key` with any value; True if `label` is empty."""
    key, equals, value = label.partition("=")
    if not label:
        return True
    return labels.get(key) == value if equals else key in labels


def unlabelled(facts: NodeFacts, label: str) -> str:
    """Return the pause reason for a node without the label."""
    return f"the missing label {label} of node {facts.name}"


def pauses(facts: NodeFacts | None, label: str) -> tuple[str, ...]:
    """Return the reasons why the agent must not serve now; empty when it may.

    A reason is a noun phrase, and its text does not change while it applies. `facts` is None while the node has not
    been read: then it is not served if a label is configured.
    """
    if facts is None:
        return (NOT_READ_YET,) if label else ()
    reasons = [] if carries(facts.labels, label) else [unlabelled(facts, label)]
    values = {
        value
        for key, value in facts.labels.items()
        if key.startswith(OPERATOR_PREFIX) and value.startswith(PAUSED_PREFIX)
    }
    reasons += [f"the GPU operator's pause of node {facts.name}: {value}" for value in sorted(values)]
    return tuple(reasons)
