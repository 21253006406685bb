"""Node selectors and required node affinity, decided as the scheduler and the DaemonSet controller do; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]


def selects(pod_spec: Json, labels: Mapping[str, str], node: str) -> bool:
    """Return True if `nodeSelector` and the required node affinity of a pod allow a node with these labels and name.

    What cannot be understood counts as allowed. Taints and resources are not checked.
    """
    wanted = pod_spec.get("nodeSelector") or {}
    affinity = (pod_spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms")
    return all(labels.get(name) == value for name, value in wanted.items()) and (
        terms is None or any(_term(term, labels, {"metadata.name": node}) for term in terms)
    )


def _term(term: Json, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    expressions, of_fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    # A term without any requirement selects nothing.
    return bool(expressions or of_fields) and all(
        _holds(each, having)
        for each, having in (*((e, labels) for e in expressions), *((f, fields) for f in of_fields))
    )


def _holds(requirement: Json, having: Mapping[str, str]) -> bool:
    value, values = having.get(requirement.get("key", "")), requirement.get("values") or ()
    match requirement.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return True
