"""Labels that say what GPUs a node has, with the names and meanings of NVIDIA's GPU feature discovery; pure.

They are the labels of its `mixed` MIG strategy, as far as the agent knows the facts: not the GPU's family, its compute
capability or the CUDA version. One thing differs on purpose: feature discovery counts the MIG devices that exist, the
agent makes them on request, so `nvidia.com/mig-1g.10gb.count` is how many the node can have. So the labels do not
change with every pod, and a pod may select nodes by them before its device exists.

Where feature discovery runs, the node carries its timestamp, and the agent removes its own labels. An annotation lists
the labels that the agent wrote; labels of other writers are never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from mig_agent.adapters.kubeapi import NodeFacts
from mig_agent.core.model import NodeView, Profile, Want
from mig_agent.core.planning.capacity import servable
from mig_agent.frontends.kubernetes.node.conditions import has_mig

TIMESTAMP: Final = "nvidia.com/gfd.timestamp"
"""The label that GPU feature discovery writes together with its other labels."""
OURS: Final = "mig-agent.io/feature-labels"
"""The annotation with the names of the labels that the agent wrote, separated by commas."""
NODE_FEATURE_DISCOVERY: Final = "nfd.node.kubernetes.io/feature-labels"
"""The annotation with the labels of node feature discovery, through which GPU feature discovery writes."""
_LONGEST_VALUE: Final = 63
_LONGEST_NAME: Final = 63
_PARTS_OF_A_VERSION: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Labels and annotations to write on the node; None removes one."""

    labels: Mapping[str, str | None] = field(default_factory=dict)
    annotations: Mapping[str, str | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.labels or self.annotations)


def feature_labels(view: NodeView, driver_version: str, resource_of: Callable[[str], str]) -> Mapping[str, str]:
    """Return the feature labels of a node; none for a node without MIG.

    `resource_of` returns the extended resource for a profile's name: `nvidia.com/mig-1g.10gb.me` for `1g.10gb+me`.
    """
    if not has_mig(view):
        return {}
    # With several models, one of them has the labels that name no model; feature discovery does the same.
    first = next(gpu for gpu in view.gpus if gpu.mode.capable).layout
    alike = [gpu for gpu in view.gpus if gpu.layout.model == first.model]
    whole = any(not gpu.mode.current for gpu in alike)
    labels = {
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "mixed",
        "nvidia.com/mps.capable": "false",
        "nvidia.com/gpu.product": first.model,
        "nvidia.com/gpu.memory": str(first.memory_mib),
        "nvidia.com/gpu.count": str(len(alike)),
        "nvidia.com/gpu.replicas": "1" if whole else "0",
        **_driver_labels(driver_version),
    }
    profiles: dict[str, tuple[Profile, str]] = {}
    for gpu in view.gpus:
        for profile in gpu.layout.profiles:
            if profile.kind.needs_mig_mode:
                profiles.setdefault(profile.name, (profile, gpu.layout.model))
    for profile, model in profiles.values():
        labels |= _profile_labels(view, profile, model, resource_of(profile.name))
    return {name: _value(text) for name, text in labels.items() if len(name.rpartition("/")[2]) <= _LONGEST_NAME}


def changes(wanted: Mapping[str, str], facts: NodeFacts) -> Changes:
    """Return what changes the node's labels to those wanted. Where feature discovery runs, none are wanted."""
    ours = _names(facts.annotations.get(OURS, ""))
    theirs: frozenset[str] = frozenset()
    if TIMESTAMP in facts.labels:
        wanted, theirs = {}, _names(facts.annotations.get(NODE_FEATURE_DISCOVERY, ""))
    have = facts.labels
    kept = {name for name in wanted if name in ours or name not in have}
    labels: dict[str, str | None] = {name: wanted[name] for name in sorted(kept) if have.get(name) != wanted[name]}
    labels |= {name: None for name in sorted(ours - kept - theirs) if name in have}
    text = ",".join(sorted(kept)) or None
    annotations = {} if facts.annotations.get(OURS) == text else {OURS: text}
    return Changes(labels=labels, annotations=annotations)


def _profile_labels(view: NodeView, profile: Profile, model: str, resource: str) -> Mapping[str, str]:
    engines = profile.engines
    plain = profile.name.replace("+", ".")
    facts = {
        "count": servable(view, Want(profile=profile.name, attributes=profile.attributes)),
        "replicas": 1,
        "sharing-strategy": "none",
        "product": f"{model}-MIG-{plain}",
        "memory": profile.memory_mib,
        "multiprocessors": engines.multiprocessors,
        "slices.gi": profile.compute_slices,
        "slices.ci": profile.compute_slices,
        "engines.copy": engines.copy,
        "engines.decoder": engines.decoders,
        "engines.encoder": engines.encoders,
        "engines.jpeg": engines.jpeg,
        "engines.ofa": engines.ofa,
    }
    return {f"{resource}.{name}": str(fact) for name, fact in facts.items()} if facts["count"] else {}


def _driver_labels(version: str) -> Mapping[str, str]:
    """Return the labels of a driver version such as `550.54.15`, with old and new names, as feature discovery does."""
    major, minor, revision, *_ = [*version.split("."), *[""] * _PARTS_OF_A_VERSION]
    if not major.isdigit():
        return {}
    return {
        "nvidia.com/cuda.driver.major": major,
        "nvidia.com/cuda.driver.minor": minor,
        "nvidia.com/cuda.driver.rev": revision,
        "nvidia.com/cuda.driver-version.major": major,
        "nvidia.com/cuda.driver-version.minor": minor,
        "nvidia.com/cuda.driver-version.revision": revision,
        "nvidia.com/cuda.driver-version.full": version,
    }


def _value(text: str) -> str:
    """Return a valid label value: at most 63 letters, digits, `-`, `_` and `.`, no punctuation at either end."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_LONGEST_VALUE].strip("-_.")


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, text.split(",")))
