"""Answers as JSON, written by hand so that they stay as documented whatever the wire does. Keys are never renamed.

Moments are RFC 3339 texts in UTC; null is what is not known or not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeAlias

from mig_agent.client import types
from mig_agent.core.errors import Blocker
from mig_agent.core.texts import visible

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


def shown(value: Json) -> Json:
    """Make a shape fit to be printed: an older agent may send texts with characters that hide or move others."""
    match value:
        case str():
            return visible(value)
        case list():
            return [shown(each) for each in value]
        case dict():
            return {visible(name): shown(each) for name, each in value.items()}
        case _:
            return value


def lease(grant: types.Grant) -> Json:
    """A lease as it was given to this caller, with its token."""
    return {
        "lease": grant.id,
        "token": grant.token,
        "devices": [device(each) for each in grant.devices],
        "env": dict(grant.env),
        "expires_at": moment(grant.expires_at),
        "request_id": grant.request_id,
        "notes": list(grant.notes),
        "revision": grant.revision,
    }


def device(each: types.Device) -> Json:
    """One device of a lease."""
    return {
        "uuid": each.uuid,
        "gpu": each.gpu,
        "gpu_index": each.gpu_index,
        "profile": each.profile,
        "memory_mib": each.memory_mib,
        "placement": placement(each.placement),
        "gpu_instance_id": each.gpu_instance_id,
        "compute_instance_id": each.compute_instance_id,
        "reused": each.reused,
    }


def lease_info(each: types.LeaseInfo) -> Json:
    """A lease as everybody may see it."""
    return {
        "lease": each.id,
        "holder": each.holder,
        "tenant": each.tenant,
        "holder_uid": each.holder_uid,
        "holder_pid": each.holder_pid,
        "devices": [device(one) for one in each.devices],
        "created_at": moment(each.created_at),
        "expires_at": moment(each.expires_at),
        "pid": each.pid,
        "hold": each.hold,
        "unused": each.unused,
        **({} if each.pod is None else {"pod": pod(each.pod), "arrived": each.arrived}),
        **(
            {"kubelet_devices": [{"resource": one.resource, "id": one.id} for one in each.kubelet_devices]}
            if each.kubelet_devices
            else {}
        ),
    }


def pod(each: types.Pod) -> Json:
    """The pod that holds a lease; the keys of pods are there only where there is one."""
    return {"namespace": each.namespace, "name": each.name, "uid": each.uid or None}


def placement(each: types.Placement | None) -> Json:
    """A window on a GPU's slices."""
    return None if each is None else {"start": each.start, "size": each.size}


def status(each: types.Status) -> Json:
    """The node."""
    return {
        "node": each.node,
        "revision": each.revision,
        "gpus": [gpu(one) for one in each.gpus],
        "leases": [lease_info(one) for one in each.leases],
        "queue": [
            {
                "request_id": one.request_id,
                "holder": one.holder,
                "tenant": one.tenant,
                "priority": one.priority,
                "position": one.position,
                "since": moment(one.since),
                "wants": one.wants,
            }
            for one in each.queue
        ],
        "started_at": moment(each.started_at),
        "ledger_error": each.ledger_error,
        "version": each.version,
        "driver_version": each.driver_version,
        "strict_fifo": each.strict_fifo,
        "reservation_after_seconds": each.reservation_after,
        "paused": list(each.paused),
        "missing_gpus": [{"index": index, "reason": reason} for index, reason in each.missing_gpus.items()],
        "socket_problems": list(each.socket_problems),
        "ledger_doubt": None
        if each.ledger_doubt is None
        else {
            "since": moment(each.ledger_doubt.since),
            "why": each.ledger_doubt.why,
            "kept_as": each.ledger_doubt.kept_as,
            "restored": each.ledger_doubt.restored,
            "recoverable": each.ledger_doubt.recoverable,
        },
    }


def gpu(each: types.Gpu) -> Json:
    """A GPU with its instances."""
    return {
        "index": each.index,
        "uuid": each.uuid,
        "model": each.model,
        "mig": mig_mode(each.mig),
        "state": each.state,
        "reason": each.reason,
        "memory_slices": each.memory_slices,
        "memory_mib": each.memory_mib,
        "instances": [instance(one) for one in each.instances],
    }


def mig_mode(each: types.MigMode) -> Json:
    """MIG mode."""
    return {"current": each.current, "pending": each.pending, "capable": each.capable}


def instance(each: types.Instance) -> dict[str, Json]:
    """An instance of a GPU."""
    return {
        "uuid": each.uuid,
        "profile": each.profile,
        "memory_mib": each.memory_mib,
        "placement": placement(each.placement),
        "gpu_instance_id": each.gpu_instance_id,
        "compute_instance_id": each.compute_instance_id,
        "state": each.state,
        "lease": each.lease or None,
        "holder": each.holder or None,
        "tenant": each.tenant or None,
        "since": moment(each.since),
        "reason": each.reason,
        "generation": each.generation,
    }


def recovered(each: types.Recovered) -> Json:
    """A lease of before that is there again."""
    return {"lease": lease_info(each.lease), "anew": each.anew, "notes": list(each.notes)}


def adopted(instances: Iterable[types.Instance]) -> Json:
    """The instances that were adopted."""
    return {"adopted": [instance(each) for each in instances]}


def reclaimed(instances: Iterable[types.Instance]) -> Json:
    """The instances that were destroyed."""
    return {
        "destroyed": [
            {
                "uuid": each.uuid,
                "gpu": each.gpu,
                "gpu_index": each.gpu_index,
                "profile": each.profile,
                "memory_mib": each.memory_mib,
                "placement": placement(each.placement),
                "generation": each.generation,
            }
            for each in instances
        ]
    }


def profiles(models: Iterable[types.GpuModel]) -> Json:
    """What the GPUs can be cut into."""
    return {
        "models": [
            {
                "model": model.model,
                "gpus": list(model.gpus),
                "memory_slices": model.memory_slices,
                "memory_mib": model.memory_mib,
                "profiles": [
                    {
                        "id": each.id,
                        "profile": each.name,
                        "compute_slices": each.compute_slices,
                        "memory_slices": each.memory_slices,
                        "memory_mib": each.memory_mib,
                        "placements": [placement(one) for one in each.placements],
                        "attributes": list(each.attributes),
                    }
                    for each in model.profiles
                ],
            }
            for model in models
        ]
    }


def plan(each: types.Plan) -> Json:
    """How a request would be served."""
    return {
        "devices": [
            {
                "gpu": one.gpu,
                "gpu_index": one.gpu_index,
                "profile": one.profile,
                "memory_mib": one.memory_mib,
                "placement": placement(one.placement),
                "reused": one.reused,
                "uuid": one.uuid or None,
            }
            for one in each.devices
        ],
        "steps": [
            {
                "kind": one.kind,
                "gpu": one.gpu,
                "gpu_index": one.gpu_index,
                "profile": one.profile,
                "placement": placement(one.placement),
                "uuid": one.uuid or None,
                "message": one.message,
            }
            for one in each.steps
        ],
        "score": each.score,
        "notes": list(each.notes),
        "revision": each.revision,
        "expected_seconds": each.expected_seconds,
        "wasted_mib": each.wasted_mib,
        "capacity_lost": each.capacity_lost,
        "creation_cost": each.creation_cost,
        **_explanation(each.explanation),
    }


def event(each: types.Event) -> Json:
    """Something that happened."""
    return {
        "kind": each.kind,
        "at": moment(each.at),
        "revision": each.revision,
        "message": each.message,
        "gpu": each.gpu or None,
        "gpu_index": each.gpu_index,
        "lease": each.lease or None,
        "generation": each.generation,
        "holder": each.holder or None,
        "data": dict(each.data),
    }


def usage(each: types.Usage | None) -> Json:
    """What is used on an instance; null for each thing that is not known."""
    known = each or types.Usage(
        generation=0, memory_used_mib=None, memory_total_mib=None, utilization_percent=None, processes=None
    )
    return {
        "memory_used_mib": known.memory_used_mib,
        "memory_total_mib": known.memory_total_mib,
        "utilization_percent": known.utilization_percent,
        "processes": None if known.processes is None else list(known.processes),
    }


def top(node: types.Status, readings: Mapping[int, types.Usage]) -> Json:
    """Every instance of the node, with what is used on it."""
    unused = {each.id for each in node.leases if each.unused}
    return {
        "node": node.node,
        "revision": node.revision,
        "instances": [
            instance(each)
            | {
                "gpu": gpu.uuid,
                "gpu_index": gpu.index,
                "unused": each.lease in unused,
                "usage": usage(readings.get(each.generation)),
            }
            for gpu in node.gpus
            for each in gpu.instances
        ],
    }


def mode_change(each: types.ModeChange) -> Json:
    """How a switch of MIG mode went."""
    return {"gpu": each.gpu, "mig": mig_mode(each.mig), "needs": each.needs or None, "message": each.message}


def paused(each: types.Paused) -> Json:
    """How pausing or resuming went."""
    return {"paused": list(each.paused), "driver_released": each.driver_released, "message": each.message}


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
) -> Json:
    """What stands in the place of an answer when there is none."""
    return {
        "error": {
            "reason": reason,
            "message": message,
            "hint": hint,
            "retryable": retryable,
            "blockers": [
                {
                    "gpu_index": each.gpu_index,
                    "what": each.what,
                    "state": each.state,
                    "lease": each.lease or None,
                    "holder": each.holder or None,
                }
                for each in blockers
            ],
            **_explanation(explanation),
            # Only where a revision is what it is about.
            **({} if revision is None else {"revision": revision, "changed": list(changed)}),
        }
    }


def _explanation(lines: Sequence[str]) -> dict[str, Json]:
    """Only where there is one: it is for those who asked."""
    return {"explanation": list(lines)} if lines else {}


def moment(at: float | None) -> str | None:
    """Seconds since the epoch as RFC 3339 in UTC, to the millisecond; None for what is no moment."""
    if at is None:
        return None
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return None
