"""Whether the agent may serve its node, by the node's labels; pure.

Two things switch it off: the node does not carry the configured label, or the GPU operator has paused its components.
The operator does the latter before it unloads the driver (`paused-for-driver-upgrade`, by k8s-driver-manager) and
before its MIG manager changes the layout of the GPUs (`paused-for-mig-change`), on the labels `nvidia.com/gpu.deploy.*`
that stand for a component each, `client` for those of others among them. Any value that begins with `paused-for-` is
taken for a pause, whatever it is for: whoever asks the users of the GPUs to let go means the agent too. A component
that is switched off (`false`) is no pause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mig_agent.adapters.kubeapi import NodeFacts

OPERATOR_PREFIX: Final = "nvidia.com/gpu.deploy."
PAUSED_PREFIX: Final = "paused-for-"
NOT_READ_YET: Final = "labels of the node that have not been read yet"


def carries(labels: Mapping[str, str], label: str) -> bool:
    """Whether the labels have this one: `key=value`, or `key` with any value. No label at all is always carried."""
    key, equals, value = label.partition("=")
    if not label:
        return True
    return labels.get(key) == value if equals else key in labels


def unlabelled(facts: NodeFacts, label: str) -> str:
    """Why a node without the label is not served, in words."""
    return f"the missing label {label} of node {facts.name}"


def pauses(facts: NodeFacts | None, label: str) -> tuple[str, ...]:
    """Why the agent must not serve now; empty when it may. Words that stay the same while it is so, and name a thing.

    A node that has not been seen is not served where a label decides.
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
