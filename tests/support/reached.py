"""Doors that each kind of request, start and end goes through: what is killed there is counted by this table.

`tests/faults/test_failpoints.py` fails where the agent reaches others, docs/reference/reliability.md shows it.
"""

from __future__ import annotations

COMMIT = "commit"
NODE = "device-node"
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
CREATE_COMPUTE = "nvmlGpuInstanceCreateComputeInstance"
DESTROY = "nvmlGpuInstanceDestroy"
DESTROY_COMPUTE = "nvmlComputeInstanceDestroy"
MODE = "nvmlDeviceSetMigMode"
LIMIT = "nvmlDeviceSetMemoryLimits_v1"

_MAKING = frozenset({COMMIT, NODE, CREATE, CREATE_COMPUTE})
_REMOVING = frozenset({COMMIT, DESTROY, DESTROY_COMPUTE})
_ALWAYS = frozenset(
    {COMMIT, "state-folder", "private-folder", "lock-file", "lock-owner"}
    | {"socket-folder", "socket-mode", "ledger-counter", "lease-evidence"}
)
_NEW_LEDGER = frozenset({"ledger-file", "ledger-schema-patches", "ledger-order"})
_AGAIN = frozenset({"socket-take-over"})

REACHED: dict[str, frozenset[str]] = {
    "create": _MAKING,
    "reuse": frozenset({COMMIT}),
    "victims destroyed": _MAKING | _REMOVING,
    "several devices": _MAKING | _REMOVING,
    "whole GPU": frozenset({COMMIT}),
    "waited for": frozenset({COMMIT}),
    "creation undone": _MAKING | {DESTROY},
    "hold": _MAKING,
    "hold ended": frozenset({COMMIT}),
    "share": frozenset({COMMIT, "mps-folder", "mps-program", "mps-access"}),
    "share ended": frozenset({COMMIT, "mps-program", "mps-removal"}),
    "release": frozenset({COMMIT}),
    "renew": frozenset({COMMIT}),
    "reclaim": _REMOVING,
    "cordon": frozenset({COMMIT}),
    "drain": frozenset({COMMIT}),
    "pause": frozenset({COMMIT}),
    "resume": frozenset({COMMIT}),
    "MIG mode on": frozenset({COMMIT, MODE}),
    "MIG mode off": _REMOVING | {MODE},
    "first start": _ALWAYS | _NEW_LEDGER | {"token-key"},
    "start after a crash": _ALWAYS | _AGAIN | {DESTROY},
    "start after an upgrade": _ALWAYS | _AGAIN | {DESTROY, "private-folder-mode", "lock-mode"},
    "start after a reboot": _ALWAYS | _AGAIN,
    "start while paused": _ALWAYS | _AGAIN,
    "start on a damaged ledger": _ALWAYS | _AGAIN | _NEW_LEDGER | {"ledger-aside"},
    "stop": frozenset({COMMIT, "ledger-checkpoint", "socket-removal"}),
    "ledger backed up": frozenset({"ledger-backup"}),
    "ledger restored": frozenset({"ledger-file", "ledger-order", "ledger-aside", "ledger-counter"}),
    "socket bound again": frozenset({"socket-folder", "socket-again"}),
    "CDI file": frozenset({"cdi-folder", "cdi-file"}),
    "CDI file removed": frozenset({"cdi-removal"}),
    "kubelet's plugin": frozenset({"plugin-socket", "plugin-socket-removal"}),
    "kubelet's plugin of a dead agent": frozenset({"stale-plugin-socket"}),
    "DRA driver": frozenset({"driver-folder", "driver-socket", "driver-socket-removal"}),
    "DRA driver of a dead agent": frozenset({"stale-driver-socket"}),
    "MPS daemon": frozenset({"mps-folder", "mps-program", "mps-access"}),
    "MPS daemon ended": frozenset({"mps-program", "mps-removal"}),
    "cgroup of a share": frozenset({"cgroup-controller", "cgroup-folder", LIMIT, "cgroup-join"}),
    "cgroup of a share ended": frozenset({"cgroup-kill", LIMIT, "cgroup-removal"}),
    "web page's tokens": frozenset({"web-token", "web-token-rename"}),
    "web page off": frozenset({"web-token-removal"}),
    "contexts written": frozenset({"contexts-folder", "contexts-lock", "contexts-file", "contexts-rename"}),
    "node shown": frozenset({"node-status", "node-labels"}),
    "event on Kubernetes": frozenset({"event", "event-again"}),
    "uninstalled": frozenset({"daemon-set"}),
    "elastic checkpoint": frozenset(
        {f"checkpoint-{each}" for each in ("folder", "lock", "begun", "state", "manifest", "rename", "removal")}
    ),
    "batch size remembered": frozenset({"batch-size-folder", "batch-size-file", "batch-size-rename"}),
    "slices published": frozenset({"resource-slice", "resource-slice-again", "resource-slice-removal"}),
}

LEDGER = ("ledger backed up", "ledger restored")
"""Killed in `tests/faults/test_ledger_backup.py`: no agent does these."""

SOCKET = ("socket bound again",)
"""Killed in `tests/faults/test_sockets_removed.py`: no request makes the agent do it."""

CDI = ("CDI file", "CDI file removed")
"""Killed in `tests/faults/test_cdi_files.py`: only a kubelet makes the agent write them."""

KUBELET = ("kubelet's plugin", "kubelet's plugin of a dead agent")
"""Killed in `tests/faults/test_plugin_sockets.py`: only for a kubelet does the agent make them."""

DRIVER = ("DRA driver", "DRA driver of a dead agent")
"""Kinds that `tests/faults/test_driver_sockets.py` kills: only for a kubelet does the agent make these sockets."""

API_SERVER = ("node shown", "event on Kubernetes", "uninstalled", "slices published")
"""Killed in `tests/faults/test_api_server.py`: only with Kubernetes does the agent change anything there."""

MPS = ("MPS daemon", "MPS daemon ended")
"""Kinds that `tests/faults/test_mps_daemons.py` kills beside those of shares: the adapter alone, which is quicker."""

CGROUP = ("cgroup of a share", "cgroup of a share ended")
"""Kinds that `tests/faults/test_cgroup_shares.py` kills: the enforcer alone, which the agent uses for `migctl run`."""

WEB = ("web page's tokens", "web page off")
"""Kinds that `tests/faults/test_web_tokens.py` kills: only with the web page does the agent write tokens."""

ELASTIC = ("elastic checkpoint", "batch size remembered")
"""Killed in `tests/elastic`: a training does these, in a process of its own."""

CONTEXTS = ("contexts written",)
"""Killed in `tests/faults/test_context_files.py`: `migctl context` does it, and no agent."""

KILLS = 2 * sum(map(len, REACHED.values()))
"""Places and kinds that reach them: one before each door, one after it."""
