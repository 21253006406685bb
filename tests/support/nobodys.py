"""A node of Kubernetes where neither the kubelet nor the API server is there (yet), for agents as processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

_KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}],
    "contexts": [{"name": "none", "context": {"cluster": "none", "user": "none"}}],
    "users": [{"name": "none", "user": {}}],
    "current-context": "none",
}


def flags(folder: Path) -> Sequence[str]:
    """For `mig-agent serve`; what they name is in this folder."""
    kubelet, kubeconfig = folder / "kubelet", folder / "kubeconfig"
    (kubelet / "device-plugins").mkdir(parents=True, exist_ok=True)
    kubeconfig.write_text(json.dumps(_KUBECONFIG))
    return [
        "--kubernetes",
        *("--kubelet-dir", str(kubelet)),
        *("--kubeconfig", str(kubeconfig)),
        *("--cdi-dir", str(folder / "cdi")),
    ]
