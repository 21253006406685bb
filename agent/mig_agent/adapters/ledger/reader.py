"""Reads the ledger: at startup all its contents, later single requests and recent events."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mig_agent.adapters.ledger.accounting import SINCE, decode_account, decode_peaks, read_totals
from mig_agent.adapters.ledger.digest import Head
from mig_agent.adapters.ledger.lease_evidence import EvidentLease
from mig_agent.adapters.ledger.schema import DRAIN, UNCONFIRMED
from mig_agent.core.accounting import NO_ACCOUNT, LeaseAccount, Peak, TenantTotal
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import (
    DEVICE_KINDS,
    CallerId,
    Generation,
    GpuUuid,
    Holder,
    Instance,
    InstanceState,
    Lease,
    LeaseId,
    Placement,
    Profile,
    RequestId,
    RequestKey,
    Slot,
)
from mig_agent.core.owner import decode
from mig_agent.core.shares import Enforcement

_STATE = {
    "creating": InstanceState.CREATING,
    "present": InstanceState.IDLE,
    "destroying": InstanceState.DESTROYING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLease:
    """A lease with what the ledger records about it besides."""

    lease: Lease
    digest: str
    """The digest of the request that created it."""
    ended_at: float | None = None
    """None while it is active."""
    end_reason: str = ""
    account: LeaseAccount = NO_ACCOUNT
    """What it counts for; empty once it has ended, and for a lease of an earlier version."""
    peaks: tuple[Peak | None, ...] = ()
    """The peaks of its devices, as last recorded; empty once it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """Why nothing new is placed on a GPU, and since when."""

    reason: str
    since: float
    draining: bool = False
    """True if it is cordoned to become empty."""
    drain_until: float | None = None
    """Time at which what is leased there ends at the latest; None: by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Why the ledger does not account for everything that may be leased, until an administrator settles it."""

    at: float
    """When the ledger was quarantined or restored."""
    boot_id: str = ""
    """The boot of the first start after that, empty until then; no earlier lease survives a later boot."""
    why: str
    """The reason, as the rest of a sentence: "the ledger ..."."""
    kept_as: str
    """The path of the former ledger; empty if there was nothing to keep."""
    restored: bool = False
    """True if an administrator restored an older ledger."""
    generation: int = 0
    """Instances up to this number are from before the gap of a restored ledger: each may have another holder now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The contents of the ledger at startup. Instances are leased, idle, creating or destroying."""

    boot_id: str = ""
    instances: tuple[Instance, ...] = ()
    leases: tuple[RecordedLease, ...] = ()
    """All active leases, and those that ended last."""
    more_ended: bool = False
    """Whether the ledger has more ended leases than are listed here."""
    cordons: Mapping[GpuUuid, Cordon] = field(default_factory=dict)
    last_generation: int = 0
    last_revision: int = 0
    gpus: Mapping[GpuUuid, str] = field(default_factory=dict)
    """The last known state of the GPUs, as texts of `gpu_cache`."""
    paused: str = ""
    """Why an administrator paused the agent; empty: not paused."""
    unconfirmed: frozenset[LeaseId] = frozenset()
    """Leases, also some that have ended, whose clients had not confirmed them."""
    doubt: Doubt | None = None
    """None: the ledger accounts for everything."""
    former: tuple[EvidentLease, ...] = ()
    """With a doubt, the leases that were active in former ledgers by the lease evidence; a token may recover one."""
    totals: Mapping[str, TenantTotal] = field(default_factory=dict)
    """What each tenant has leased with all leases that have ended."""
    is_accounting: bool = False
    """True if it is recorded since when every lease is accounted."""


def count_active(connection: sqlite3.Connection) -> int:
    """Return how many leases are active, also in a ledger of an earlier version. Raises sqlite3.Error."""
    return int(connection.execute("SELECT count(*) FROM lease WHERE ended_at IS NULL").fetchone()[0])


def read_contents(connection: sqlite3.Connection, head: Head, most_ended: int) -> Contents:
    """Return everything except the events, with at most `most_ended` ended leases. Raises READING_ERRORS."""
    facts: dict[str, str] = dict(connection.execute("SELECT name, value FROM fact"))
    active = tuple(_lease(row) for row in connection.execute(_ACTIVE))
    ended = tuple(_lease(row) for row in connection.execute(_ENDED, (most_ended + 1,)))
    held = {generation: each.lease.id for each in active for generation in each.lease.instances}
    instances = tuple(_instance(row, held) for row in connection.execute(_INSTANCES))
    generations = [int(facts.get("last_generation", "0")), *(each.generation for each in instances), *held]
    return Contents(
        boot_id=facts.get("boot_id", ""),
        instances=instances,
        leases=(*active, *ended[:most_ended][::-1]),
        more_ended=len(ended) > most_ended,
        cordons={
            GpuUuid(gpu): _cordon(reason, since, facts.get(f"{DRAIN}{gpu}"))
            for gpu, reason, since in connection.execute("SELECT gpu, reason, since FROM cordon")
        },
        last_generation=max(generations),
        last_revision=head.revision,
        gpus={GpuUuid(uuid): text for uuid, text in connection.execute("SELECT uuid, text FROM gpu")},
        paused=facts.get("paused", ""),
        unconfirmed=frozenset(
            LeaseId(name.removeprefix(UNCONFIRMED)) for name in facts if name.startswith(UNCONFIRMED)
        ),
        doubt=Doubt(**json.loads(facts["doubt"])) if "doubt" in facts else None,
        totals=read_totals(connection),
        is_accounting=SINCE in facts,
    )


def _cordon(reason: str, since: float, drain: str | None) -> Cordon:
    begun, until = json.loads(drain) if drain else (None, None)
    if begun != since:
        return Cordon(reason=reason, since=since)  # an older version has cordoned the GPU anew, and left the drain
    return Cordon(reason=reason, since=since, draining=True, drain_until=until)


_INSTANCES = (
    "SELECT generation, gpu, kind, profile_id, profile_name, compute_slices, memory_slices, memory_mib, start, size,"
    " state, gpu_instance_id, compute_instance_id, uuid, since, last_tenant, enforced_by, compute_percent"
    " FROM instance ORDER BY generation"
)
_LEASE_COLUMNS = (
    "id, request_id, digest, tenant, holder, holder_uid, holder_pid, created_at, expires_at, owner,"
    " devices, ended_at, end_reason, asker, account, peaks"
)
_ACTIVE = f"SELECT {_LEASE_COLUMNS} FROM lease WHERE ended_at IS NULL ORDER BY created_at, id"  # noqa: S608 -- of constants
_ENDED = f"SELECT {_LEASE_COLUMNS} FROM lease WHERE ended_at IS NOT NULL ORDER BY ended_at DESC LIMIT ?"  # noqa: S608 -- of constants
_BY_REQUEST = f"SELECT {_LEASE_COLUMNS} FROM lease WHERE request_id = ? AND asker = ?"  # noqa: S608 -- of constants
_WANTED_EVENTS = (
    "FROM event WHERE at >= ? AND (? = '' OR gpu = ? OR CAST(gpu_index AS TEXT) = ?) AND (? = '' OR lease = ?)"
    " AND (? = 0 OR number < ?)"
)
_EVENTS = (
    "SELECT number, at, revision, kind, words, gpu, gpu_index, lease, generation, holder, data FROM"  # noqa: S608 -- of constants
    f" (SELECT * {_WANTED_EVENTS} ORDER BY number DESC LIMIT ?) ORDER BY number"
)
_NUMBER_OF_EVENTS = f"SELECT count(*) {_WANTED_EVENTS}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which of the recorded events are wanted: all that match every condition."""

    since: float = 0.0
    """In seconds since the epoch."""
    gpu: str = ""
    """An index or UUID; empty: any GPU or none."""
    lease: str = ""
    """Empty: any lease or none."""
    before: int = 0
    """Only events with a smaller number; 0: up to the newest."""

    @property
    def parameters(self) -> tuple[float | str, ...]:
        """The values for the placeholders of _WANTED_EVENTS."""
        return (self.since, *(self.gpu,) * 3, *(self.lease,) * 2, *(self.before,) * 2)


def _instance(row: tuple[object, ...], held: Mapping[Generation, LeaseId]) -> Instance:
    generation, gpu, kind, profile_id, name, compute, memory, mib, *rest = row
    start, size, state, gi, ci, uuid, since, tenant, enforced_by, percent = rest
    placement = Placement(_int(start), _int(size))
    # Engines and other placements are in the GPU's layout, not in the record.
    profile = Profile(
        id=_int(profile_id),
        name=str(name),
        compute_slices=_int(compute),
        memory_slices=_int(memory),
        memory_mib=_int(mib),
        placements=(placement,),
        kind=DEVICE_KINDS[str(kind)],
        compute_percent=None if percent is None else _int(percent),
    )
    lease = held.get(Generation(_int(generation)))
    return Instance(
        slot=Slot(GpuUuid(str(gpu)), profile, placement),
        generation=Generation(_int(generation)),
        state=InstanceState.LEASED if lease is not None else _STATE[str(state)],
        gpu_instance_id=None if gi is None else _int(gi),
        compute_instance_id=None if ci is None else _int(ci),
        uuid=str(uuid),
        lease=lease,
        since=_float(since),
        last_tenant=None if tenant is None else str(tenant),
        enforced_by=None if enforced_by is None else Enforcement(str(enforced_by)),
    )


def _lease(row: tuple[Any, ...]) -> RecordedLease:
    name, request, digest, tenant, holder, uid, holder_pid, created, expires, *rest = row
    owner, devices_text, ended, reason, caller_id, account, peaks = rest
    devices = json.loads(devices_text)
    lease = Lease(
        id=LeaseId(name),
        request_id=RequestId(request),
        holder=Holder(tenant=tenant, name=holder, uid=uid, pid=holder_pid),
        instances=tuple(Generation(generation) for generation, _ in devices),
        created_at=created,
        expires_at=expires,
        owner=decode(owner),
        reused=tuple(bool(reused) for _, reused in devices),
        caller_id=CallerId(caller_id),
    )
    if ended is not None:
        return RecordedLease(lease=lease, digest=digest, ended_at=ended, end_reason=reason)
    return RecordedLease(lease=lease, digest=digest, account=decode_account(account), peaks=decode_peaks(peaks))


def find_request(connection: sqlite3.Connection, request: RequestKey) -> RecordedLease | None:
    """Return the lease that a request led to, active or ended; None if there is none. Raises READING_ERRORS."""
    row = connection.execute(_BY_REQUEST, (request.id, request.caller_id)).fetchone()
    return None if row is None else _lease(row)


def read_events(connection: sqlite3.Connection, query: EventQuery, limit: int) -> tuple[Event, ...]:
    """Return the latest `limit` of the wanted events, the oldest first.

    Damaged events are left out: nothing depends on them.
    """
    connection.text_factory = _readable
    return tuple(filter(None, map(_event, connection.execute(_EVENTS, (*query.parameters, limit)))))


def count_events(connection: sqlite3.Connection, query: EventQuery) -> int:
    """Return how many of the recorded events are wanted."""
    return _int(connection.execute(_NUMBER_OF_EVENTS, query.parameters).fetchone()[0])


_KINDS = frozenset(kind.value for kind in EventKind)


_NAMED_LEASE = (
    # `alice (train)` is called so, `train` and `alice`; an id also by its beginning.
    "SELECT lease FROM event WHERE lease = :name OR lease IS NOT NULL AND (substr(lease, 1, :length) = :name"
    " OR holder = :name OR holder LIKE '% (%)' AND (substr(holder, -:length - 3) = ' (' || :name || ')'"
    " OR substr(holder, 1, :length + 2) = :name || ' ('))"
    " ORDER BY lease = :name DESC, number DESC LIMIT 1"
)


def find_lease(connection: sqlite3.Connection, name: str) -> LeaseId | None:
    """Return the latest lease of the recorded events that is meant by its id, its beginning or a name of its holder."""
    row = connection.execute(_NAMED_LEASE, {"name": name, "length": len(name)}).fetchone()
    return None if row is None else LeaseId(str(row[0]))


def _readable(text: bytes) -> str:
    return text.decode(errors="replace")


def _event(row: tuple[Any, ...]) -> Event | None:
    number, at, revision, kind, words, uuid, index, lease, generation, holder, data = row
    if kind not in _KINDS:
        return None  # a newer version may have written kinds that this one does not know
    try:
        return Event(
            kind=EventKind(kind),
            at=_float(at),
            revision=_int(revision),
            message=str(words),
            gpu=None if uuid is None else GpuUuid(str(uuid)),
            gpu_index=None if index is None else _int(index),
            lease=None if lease is None else LeaseId(str(lease)),
            generation=None if generation is None else Generation(_int(generation)),
            holder=str(holder),
            data=_facts(json.loads(data)),
            number=_int(number),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def _facts(data: object) -> dict[str, str | float | bool]:
    if not isinstance(data, dict) or not all(isinstance(each, (str, int, float)) for each in data.values()):
        raise TypeError(f"{data!r} is no set of facts")
    return data


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no number")
    return value


def _float(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)
