"""Encodes answers as JSON. Keys and their order are defined here, and stay as documented if the wire changes.

Times are RFC 3339 strings in UTC; null is what is not known or not there. Keys are never renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final, TypeAlias

from mig_agent.client import types
from mig_agent.core.errors import Blocker
from mig_agent.core.texts import visible

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"

_WINDOWED: Final = "gpu gpu_index profile memory_mib placement"
_SHARED: Final = "kind- enforced_by- compute_percent-"
KEYS: Final[Mapping[type, str]] = {
    types.Placement: "start size",
    types.Device: f"uuid {_WINDOWED} gpu_instance_id compute_instance_id reused {_SHARED} promise-",
    types.Grant: "lease=id token devices env expires_at request_id notes revision",
    types.LeaseInfo: (
        "lease=id holder tenant holder_uid holder_pid devices created_at expires_at pid hold unused"
        " pod- arrived kubelet_devices- warning- idle_since-"
    ),
    types.Pod: "namespace name uid?",
    types.KubeletDevice: "resource id",
    types.Recovered: "lease anew notes",
    types.Status: (
        "node revision gpus leases queue started_at ledger_error version driver_version strict_fifo"
        " reservation_after_seconds=reservation_after paused missing_gpus socket_problems problems ledger_doubt"
        " available largest_share_mib-"
    ),
    types.SharedMemory: "enforced_by usable_mib taken_mib others_mib overhead_mib least_mib promise without_process?",
    types.Available: "profile memory_mib count",
    types.Waiting: (
        "request_id holder tenant priority position since wants estimate blockers limit- caller? reserved_gpus"
    ),
    types.StartEstimate: ("earliest_seconds=earliest median_seconds=median latest_seconds=latest basis leases"),
    types.LedgerDoubt: "since why kept_as restored recoverable",
    types.Gpu: (
        "index uuid model mig state reason memory_slices memory_mib instances unusable_slices draining- drain_deadline-"
        " shared_memory-"
    ),
    types.Drained: "gpus leases",
    types.MigMode: "current pending capable",
    types.Instance: (
        "uuid profile memory_mib placement gpu_instance_id compute_instance_id state lease? holder? tenant? since"
        f" reason generation {_SHARED}"
    ),
    types.GpuModel: "model gpus memory_slices memory_mib profiles shared_memory-",
    types.Profile: "id profile=name compute_slices memory_slices memory_mib placements attributes",
    types.Plan: (
        "devices steps score notes revision expected_seconds wasted_mib capacity_lost creation_cost explanation-"
    ),
    types.PlannedDevice: f"{_WINDOWED} reused uuid? {_SHARED} promise-",
    types.Step: "kind gpu gpu_index profile placement uuid? message",
    types.Event: "kind at revision message gpu? gpu_index lease? generation holder? data",
    types.Usage: "memory_used_mib memory_total_mib utilization_percent processes compute",
    types.ComputeUsage: "seconds sm_percent tensor_percent memory_bandwidth_percent",
    types.AccountRow: (
        "key leases devices memory_mib_seconds slice_seconds waited_seconds measured_mib_seconds peak_mib_seconds"
    ),
    types.Account: "rows total since until complete_since",
    types.Advice: (
        "name user verdict message runs measured_runs asked peak_mib suggestion? replayed waited_seconds"
        " waited_less_seconds"
    ),
    types.ModeChange: "gpu mig needs? message",
    types.Paused: "paused driver_released message",
    Blocker: "gpu_index what state lease? holder? expires_at",
}
"""The keys of each type, in order. `key=attribute` where the names differ; with `?` an empty value is null, with `-` it
is left out."""
TIMES: Final = frozenset(
    {"at", "complete_since", "created_at", "drain_deadline", "expires_at", "idle_since", "since", "started_at", "until"}
)
"""The keys whose values are times."""
_UNKNOWN: Final = types.Usage(
    generation=0, memory_used_mib=None, memory_total_mib=None, utilization_percent=None, processes=None
)


def encode(value: object) -> Json:
    """Encode an answer of the client. Raises TypeError for a type that has no keys here."""
    match value:
        case None | str() | int() | float():
            return value
        case list() | tuple():
            return [encode(each) for each in value]
        case Mapping():
            return {str(name): encode(each) for name, each in value.items()}
        case _:
            return _encode_fields(value, KEYS.get(type(value)))


def _encode_fields(value: object, keys: str | None) -> dict[str, Json]:
    if keys is None:
        raise TypeError(f"cannot encode {type(value).__name__} as JSON")
    found: dict[str, Json] = {}
    for each in keys.split():
        key, _, attribute = each.rstrip("?-").partition("=")
        part = getattr(value, attribute or key)
        if part or each[-1] not in "?-":
            found[key] = moment(part) if key in TIMES else encode(part)
        elif each[-1] == "?":
            found[key] = None
    if isinstance(value, types.LeaseInfo) and value.pod is None:
        del found["arrived"]
    if isinstance(value, types.Status):
        found["missing_gpus"] = [{"index": index, "reason": reason} for index, reason in value.missing_gpus.items()]
    return found


def shown(value: Json) -> Json:
    """Escape the characters in all texts that hide or move others; an older agent may send some."""
    match value:
        case str():
            return visible(value)
        case list():
            return [shown(each) for each in value]
        case dict():
            return {visible(name): shown(each) for name, each in value.items()}
        case _:
            return value


def events(page: types.EventPage) -> Json:
    """Encode recorded events, and whether older ones that match were left out, and how many."""
    return {
        "events": [encode(each) for each in page.events],
        "truncated": page.earlier > 0,
        "earlier": page.earlier,
    }


def adopted(instances: Iterable[types.Instance]) -> Json:
    """Encode the instances that were adopted."""
    return {"adopted": [encode(each) for each in instances]}


def cancelled(requests: Iterable[types.Waiting]) -> Json:
    """Encode the requests that were cancelled, as they waited."""
    return {"cancelled": [encode(each) for each in requests]}


def lease_in_full(lease: types.LeaseInfo, node: types.Status, readings: Mapping[int, types.Usage]) -> Json:
    """Encode a lease with the environment of its processes and what is used on each device; without its token."""
    # Shares have the UUID of their GPU.
    instances = {each.uuid: each for gpu in node.gpus for each in gpu.instances if each.lease == lease.id}
    usage = [
        encode(readings.get(instances[each.uuid].generation, _UNKNOWN) if each.uuid in instances else _UNKNOWN)
        for each in lease.devices
    ]
    shared = any(each.is_share for each in lease.devices)
    uuids = ",".join(each.uuid for each in lease.devices if each.uuid)
    visible_devices = {} if shared else {"CUDA_VISIBLE_DEVICES": uuids, "NVIDIA_VISIBLE_DEVICES": uuids}
    return {
        **_encode_fields(lease, KEYS[types.LeaseInfo]),
        "request_id": lease.request_id or None,
        # A process with no more than the device would use the share's GPU without a limit.
        "env": {**visible_devices, "MIG_AGENT_LEASE": lease.id},
        "usage": usage,
    }


def reclaimed(instances: Iterable[types.Instance]) -> Json:
    """Encode the instances that were destroyed: without state and holder, which no longer apply."""
    return {"destroyed": [_encode_fields(each, f"uuid {_WINDOWED} generation") for each in instances]}


def profiles(models: Iterable[types.GpuModel]) -> Json:
    """Encode what the GPUs can be cut into."""
    return {"models": [encode(each) for each in models]}


def account(each: types.Account) -> dict[str, Json]:
    """Encode who leased how much."""
    return _encode_fields(each, KEYS[types.Account])


def top(node: types.Status, readings: Mapping[int, types.Usage]) -> Json:
    """Encode every instance of the node, with what is used on it."""
    unused = {each.id for each in node.leases if each.unused}
    return {
        "node": node.node,
        "revision": node.revision,
        "instances": [
            _encode_fields(each, KEYS[types.Instance])
            | {
                "gpu": gpu.uuid,
                "gpu_index": gpu.index,
                "unused": each.lease in unused,
                "usage": encode(readings.get(each.generation, _UNKNOWN)),
            }
            for gpu in node.gpus
            for each in gpu.instances
        ],
    }


def failure(
    *,
    reason: str,
    message: str,
    hint: str = "",
    retryable: bool = False,
    blockers: Iterable[Blocker] = (),
    explanation: Sequence[str] = (),
    revision: int | None = None,
    changed: Sequence[str] = (),
    estimate: types.StartEstimate | None = None,
) -> Json:
    """Encode an error, which takes the place of an answer."""
    return {
        "error": {
            "reason": reason,
            "message": message,
            "hint": hint,
            "retryable": retryable,
            "blockers": [encode(each) for each in blockers],
            # Only for callers who asked for it.
            **({"explanation": list(explanation)} if explanation else {}),
            # Only where a revision is what it is about.
            **({} if revision is None else {"revision": revision, "changed": list(changed)}),
            # Only of a dry run.
            **({} if estimate is None else {"estimate": encode(estimate)}),
        }
    }


def moment(at: float | None) -> str | None:
    """Return seconds since the epoch as RFC 3339 in UTC, to the millisecond; None for what is no time."""
    if at is None:
        return None
    try:
        moment = datetime.fromtimestamp(at, timezone.utc)  # noqa: UP017 -- mig-agent-client is also for Python 3.10
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None
