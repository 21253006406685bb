"""Nodes with unlike simulated GPUs under one DaemonSet, whose pods are all told of the same ones.

The API server itself changes the agent's pod for a node on its way in, as administrators do it where nodes differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from support.agent import eventually
from support.cluster.api import Api, ApiError, Json
from support.cluster.images import BUSYBOX

VARIABLE = "MIG_AGENT_SIMULATE"
"""Goes over what the chart's file says."""
_POLICIES = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
_BINDINGS = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings"
_PATIENCE_SECONDS = 60.0


def give(api: Api, gpus: Mapping[str, str], *, namespace: str, label: tuple[str, str]) -> None:
    """GPUs by the name of the node, for pods of that namespace which carry the label; returns when it is in effect.

    For agents whose pods are made from now on, instead of whatever was said of these nodes before.
    """
    for node, simulated in gpus.items():
        name = f"simulated-gpus-{node}"
        for path in (_BINDINGS, _POLICIES):
            api.delete(f"{path}/{name}")
        api.create(_POLICIES, _policy(name, node, simulated, namespace, label))
        api.create(_BINDINGS, {"metadata": {"name": name}, "spec": {"policyName": name}})
    for node, simulated in gpus.items():
        in_effect = partial(_is_seen, api, node, simulated, namespace, label)
        eventually(in_effect, f"the API server gives {simulated} to the agent of {node}", _PATIENCE_SECONDS)


def _policy(name: str, node: str, simulated: str, namespace: str, label: tuple[str, str]) -> Json:
    bound_for = (
        "object.spec.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms"
        ".orValue([]).exists(term, term.?matchFields.orValue([])"
        f".exists(field, field.key == 'metadata.name' && '{node}' in field.values))"
    )
    key, value = label
    return {
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "objectSelector": {"matchLabels": {key: value}},
                "resourceRules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
                ],
            },
            "matchConditions": [{"name": "the-nodes-own", "expression": bound_for}],
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "mutations": [
                {
                    "patchType": "JSONPatch",
                    "jsonPatch": {
                        "expression": '[JSONPatch{op: "add", path: "/spec/containers/0/env/-", '
                        f'value: Object.spec.containers.env{{name: "{VARIABLE}", value: "{simulated}"}}}}]'
                    },
                }
            ],
        },
    }


def _is_seen(api: Api, node: str, simulated: str, namespace: str, label: tuple[str, str]) -> bool:
    """Whether a pod would be told so that a DaemonSet made for the node."""
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    try:
        made = api.call(
            "POST",
            f"/api/v1/namespaces/{namespace}/pods",
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "tried-only", "labels": dict([label])},
                "spec": {
                    "containers": [{"name": "a", "image": BUSYBOX, "env": [{"name": "A", "value": "b"}]}],
                    "affinity": {
                        "nodeAffinity": {
                            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
                        }
                    },
                },
            },
            dryRun="All",
        )
    except ApiError:
        return False  # a policy that is not yet known for what it is, say
    return {"name": VARIABLE, "value": simulated} in made["spec"]["containers"][0]["env"]
