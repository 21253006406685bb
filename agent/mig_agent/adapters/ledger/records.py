"""Changes of the ledger, each with its own SQL. A record is a tuple of changes that is committed whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from mig_agent.adapters.ledger.accounting import (
    AddAccounting,
    PutAccountingSince,
    PutPeaks,
    TrimAccounting,
    encode_account,
)
from mig_agent.adapters.ledger.reader import Doubt
from mig_agent.adapters.ledger.schema import DRAIN, FIRST_WITH_SHARES, UNCONFIRMED
from mig_agent.core.accounting import NO_ACCOUNT, LeaseAccount
from mig_agent.core.events import Event
from mig_agent.core.model import Generation, GpuUuid, Instance, InstanceState, Lease, LeaseId
from mig_agent.core.owner import encode

Statement = tuple[str, tuple[str | int | float | None, ...]]

_PUT_INSTANCE = (
    "INSERT INTO instance (generation, gpu, kind, profile_id, profile_name, compute_slices, memory_slices, memory_mib,"
    " start, size, state, gpu_instance_id, compute_instance_id, uuid, since, last_tenant, enforced_by,"
    " compute_percent)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (generation) DO UPDATE SET state = excluded.state, gpu_instance_id = excluded.gpu_instance_id,"
    " compute_instance_id = excluded.compute_instance_id, uuid = excluded.uuid, since = excluded.since,"
    " last_tenant = excluded.last_tenant"
)
_DROP_INSTANCE = "DELETE FROM instance WHERE generation = ?"
MOST_ENDED = 1_000_000
"""How many ended leases the ledger keeps, to answer late retries of their requests: about 0.3 KiB each."""
_PUT_LEASE = (
    "INSERT INTO lease (id, request_id, asker, digest, tenant, holder, holder_uid, holder_pid, created_at, expires_at,"
    " owner, devices, account) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_RENEW_LEASE = "UPDATE lease SET expires_at = ? WHERE id = ?"
_BIND_LEASE = "UPDATE lease SET owner = ?, expires_at = NULL WHERE id = ?"
_END_LEASE = "UPDATE lease SET ended_at = ?, end_reason = ? WHERE id = ? AND ended_at IS NULL"
_FORGET_LEASES = "DELETE FROM lease WHERE ended_at < ?"
_FORGET_MORE_LEASES = (
    "DELETE FROM lease WHERE ended_at <= (SELECT ended_at FROM lease WHERE ended_at IS NOT NULL"
    " ORDER BY ended_at DESC LIMIT 1 OFFSET ?)"
)
_PUT_CORDON = (
    "INSERT INTO cordon (gpu, reason, since) VALUES (?, ?, ?)"
    " ON CONFLICT (gpu) DO UPDATE SET reason = excluded.reason, since = excluded.since"
)
_DROP_CORDON = "DELETE FROM cordon WHERE gpu = ?"
_PUT_FACT = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value"
_DROP_FACT = "DELETE FROM fact WHERE name = ?"
_ADD_EVENT = (
    "INSERT INTO event (at, revision, kind, words, gpu, gpu_index, lease, generation, holder, data)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

_RECORDED_STATE = {InstanceState.CREATING: "creating", InstanceState.DESTROYING: "destroying"}


@dataclass(frozen=True, slots=True)
class PutInstance:
    """Adds or updates an instance. Leased, idle and blocked are all `present`: the leases show which are leased."""

    instance: Instance

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        instance, slot = self.instance, self.instance.slot
        profile, placement = slot.profile, slot.placement
        yield (
            _PUT_INSTANCE,
            (
                instance.generation,
                slot.gpu,
                profile.kind.name,
                profile.id,
                profile.name,
                profile.compute_slices,
                profile.memory_slices,
                profile.memory_mib,
                placement.start,
                placement.size,
                _RECORDED_STATE.get(instance.state, "present"),
                instance.gpu_instance_id,
                instance.compute_instance_id,
                instance.uuid,
                instance.since,
                instance.last_tenant,
                instance.enforced_by,
                profile.compute_percent,
            ),
        )
        if profile.kind.shares_memory:
            yield _PUT_FACT, ("least_reader", str(FIRST_WITH_SHARES))


@dataclass(frozen=True, slots=True)
class DropInstance:
    """Removes an instance that no longer exists."""

    generation: Generation

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _DROP_INSTANCE, (self.generation,)


@dataclass(frozen=True, slots=True)
class PutLease:
    """Adds a lease, with the digest of its request and what it counts for."""

    lease: Lease
    digest: str
    account: LeaseAccount = NO_ACCOUNT

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        lease, holder = self.lease, self.lease.holder
        yield (
            _PUT_LEASE,
            (
                lease.id,
                lease.request_id,
                lease.caller_id,
                self.digest,
                holder.tenant,
                holder.name,
                holder.uid,
                holder.pid,
                lease.created_at,
                lease.expires_at,
                encode(lease.owner),
                # Pairs of generation and whether it was reused: one row for a lease keeps its commit small.
                json.dumps(list(zip(lease.instances, lease.reused, strict=True))),
                encode_account(self.account) if self.account.devices else "",
            ),
        )


@dataclass(frozen=True, slots=True)
class BindLease:
    """Binds a reserved lease to its owner, and removes its deadline."""

    lease: Lease
    """The lease as it is once bound."""

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _BIND_LEASE, (encode(self.lease.owner), self.lease.id)


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Sets another deadline of a lease; None removes it."""

    lease: LeaseId
    expires_at: float | None

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _RENEW_LEASE, (self.expires_at, self.lease)


@dataclass(frozen=True, slots=True)
class AwaitConfirmation:
    """Marks a lease as not confirmed by its client: it ends by itself, also after a restart of the agent."""

    lease: LeaseId

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_FACT, (f"{UNCONFIRMED}{self.lease}", "1")


@dataclass(frozen=True, slots=True)
class ForgetConfirmation:
    """Removes that mark: the lease was confirmed, or has ended."""

    lease: LeaseId

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _DROP_FACT, (f"{UNCONFIRMED}{self.lease}",)


@dataclass(frozen=True, slots=True)
class EndLease:
    """Ends a lease. It stays in the ledger, so that a late retry of its request gets the right answer."""

    lease: LeaseId
    at: float
    reason: str

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _END_LEASE, (self.at, self.reason, self.lease)


@dataclass(frozen=True, slots=True)
class ForgetLeases:
    """Deletes leases that ended before this time, and the oldest ended ones if there are more than `most`."""

    before: float
    most: int = MOST_ENDED

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _FORGET_LEASES, (self.before,)
        yield _FORGET_MORE_LEASES, (self.most,)


@dataclass(frozen=True, slots=True)
class PutCordon:
    """Cordons a GPU: nothing new is placed on it."""

    gpu: GpuUuid
    reason: str
    since: float
    draining: bool = False
    drain_until: float | None = None

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_CORDON, (self.gpu, self.reason, self.since)
        if self.draining:
            yield _PUT_FACT, (f"{DRAIN}{self.gpu}", json.dumps((self.since, self.drain_until)))
        else:
            yield _DROP_FACT, (f"{DRAIN}{self.gpu}",)


@dataclass(frozen=True, slots=True)
class DropCordon:
    """Uncordons a GPU."""

    gpu: GpuUuid

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _DROP_CORDON, (self.gpu,)
        yield _DROP_FACT, (f"{DRAIN}{self.gpu}",)


@dataclass(frozen=True, slots=True)
class PutBootId:
    """Sets the id of the boot that the recorded instances belong to."""

    boot_id: str

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_FACT, ("boot_id", self.boot_id)


@dataclass(frozen=True, slots=True)
class PutGpus:
    """Replaces the descriptions of all managed GPUs: texts of `gpu_cache` by UUID."""

    gpus: Mapping[GpuUuid, str]

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield "DELETE FROM gpu", ()
        for uuid, text in self.gpus.items():
            yield "INSERT INTO gpu (uuid, text) VALUES (?, ?)", (uuid, text)


@dataclass(frozen=True, slots=True)
class PutPause:
    """Notes that an administrator paused the agent; `reason` says who and why, and is never empty."""

    reason: str

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_FACT, ("paused", self.reason)


@dataclass(frozen=True, slots=True)
class DropPause:
    """Removes an administrator's pause."""

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _DROP_FACT, ("paused",)


@dataclass(frozen=True, slots=True)
class PutDoubt:
    """Notes why the ledger does not account for everything."""

    doubt: Doubt

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_FACT, ("doubt", json.dumps(asdict(self.doubt)))


@dataclass(frozen=True, slots=True)
class DropDoubt:
    """Removes that note: an administrator has settled what the ledger did not account for."""

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _DROP_FACT, ("doubt",)


@dataclass(frozen=True, slots=True)
class VoidEvidence:
    """Notes that a device of a former ledger's lease is lost: the lease can no longer be recovered."""

    uuid: str
    why: str
    """The reason, as the rest of a sentence: "its device ..."."""

    def statements(self) -> Iterator[Statement]:
        """Yield nothing: only the lease evidence beside the ledger changes."""
        return iter(())


@dataclass(frozen=True, slots=True)
class PutLastGeneration:
    """Sets the highest generation assigned so far, including those of instances that are not recorded."""

    generation: Generation

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_FACT, ("last_generation", str(self.generation))


@dataclass(frozen=True, slots=True)
class AddEvent:
    """Adds an event."""

    event: Event

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        event = self.event
        yield (
            _ADD_EVENT,
            (
                event.at,
                event.revision,
                event.kind.value,
                event.message,
                event.gpu,
                event.gpu_index,
                event.lease,
                event.generation,
                event.holder,
                json.dumps(dict(event.data)) if event.data else "{}",
            ),
        )


Change = (
    PutInstance
    | DropInstance
    | PutLease
    | BindLease
    | RenewLease
    | AwaitConfirmation
    | ForgetConfirmation
    | EndLease
    | ForgetLeases
    | AddAccounting
    | PutPeaks
    | PutAccountingSince
    | TrimAccounting
    | PutCordon
    | DropCordon
    | PutBootId
    | PutGpus
    | PutPause
    | DropPause
    | PutDoubt
    | DropDoubt
    | VoidEvidence
    | PutLastGeneration
    | AddEvent
)
Record = tuple[Change, ...]
"""Changes that are committed all or none."""
