"""Accounting in the ledger: one row for each device of an ended lease, all-time totals by tenant, and their bounds.

A row is added in the transaction that ends the lease; until then the account of a lease is a column of the lease's own
row, so a crash loses nothing but the last samples of its peak. Rows are kept for a time and up to a number. Beyond the
number the oldest are merged by day, user, tenant and profile: names and single leases are lost then, sums are not.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mig_agent.core.accounting import (
    AccountedDevice,
    AccountedUse,
    By,
    LeaseAccount,
    Peak,
    Period,
    Reader,
    TenantTotal,
    Use,
    leased_ms,
    waited_ms,
)
from mig_agent.core.model import Lease, LeaseId, Want

if TYPE_CHECKING:
    from mig_agent.adapters.ledger.records import Statement

MOST_ROWS = 100_000
"""Number of devices of ended leases that are kept one by one: about 0.3 KiB each."""
MOST_MERGED = 100_000
"""Number of merged rows that are kept."""
_MOST_FORGOTTEN = 5000
"""Number of rows that one trim deletes for their age: a commit must not take long."""
SINCE = "accounting_since"
"""The name of the fact that says since when every lease is accounted, in seconds since the epoch."""

_WANT_FIELDS = ("memory_bytes", "profile", "fraction", "whole_gpu", "text")
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode


def encode_account(account: LeaseAccount) -> str:
    """Return an account as the ledger keeps it with its lease: a short text, since each grant writes one."""
    devices = [
        (each.profile, each.model, each.memory_mib, each.slices, _want_fields(each.want)) for each in account.devices
    ]
    return _COMPACT((account.user, account.asked_at, account.priority, account.gpus, devices))


def decode_account(text: str) -> LeaseAccount:
    """Return the account of a lease; an empty one for the lease of an earlier version."""
    if not text:
        return LeaseAccount()
    user, asked_at, priority, gpus, devices = json.loads(text)
    return LeaseAccount(
        user=user,
        asked_at=asked_at,
        priority=priority,
        gpus=tuple(gpus),
        devices=tuple(
            AccountedDevice(profile=profile, model=model, memory_mib=mib, slices=slices, want=_want(want))
            for profile, model, mib, slices, want in devices
        ),
    )


def _want_fields(want: Want | None) -> dict[str, object] | None:
    """Return the fields of a want that differ from their defaults."""
    if want is None:
        return None
    fields: dict[str, object] = {each: getattr(want, each) for each in _WANT_FIELDS if getattr(want, each)}
    if want.min_compute_slices != 1:
        fields["min_compute_slices"] = want.min_compute_slices
    if want.attributes:
        fields["attributes"] = sorted(want.attributes)
    return fields


def _want(found: dict[str, Any] | None) -> Want | None:
    if found is None:
        return None
    attributes = frozenset(found.pop("attributes", ()))
    return Want(**found, attributes=attributes)


def encode_peaks(peaks: Sequence[Peak | None]) -> str:
    """Return the peaks of a lease's devices as the ledger keeps them with the lease."""
    return json.dumps([None if each is None else [each.used_mib, each.samples] for each in peaks])


def decode_peaks(text: str) -> tuple[Peak | None, ...]:
    """Return the peaks of a lease's devices; none where there was no sample."""
    found = json.loads(text) if text else ()
    return tuple(None if each is None else Peak(used_mib=each[0], samples=each[1]) for each in found)


# Changes

_ADD = (
    "INSERT INTO accounting (merged, lease, device, tenant, user, uid, name, profile, model, memory_mib, slices,"
    " asked_at, granted_at, ended_at, seconds, waited, leases, devices, measured_seconds, peak_mib, peak_mib_seconds,"
    " samples, asked)"
)
_ADD_ROW = f"{_ADD} VALUES (0, {', '.join('?' * 22)})"
_ADD_TOTAL = (
    "INSERT INTO tenant_total (tenant, mib_ms, slice_ms, waited_ms, leases) VALUES (?, ?, ?, ?, 1)"
    " ON CONFLICT (tenant) DO UPDATE SET mib_ms = mib_ms + excluded.mib_ms, slice_ms = slice_ms + excluded.slice_ms,"
    " waited_ms = waited_ms + excluded.waited_ms, leases = leases + 1"
)
_PUT_PEAKS = "UPDATE lease SET peaks = ? WHERE id = ?"
_CUT = (
    "merged = 0 AND ended_at <="
    " (SELECT ended_at FROM accounting WHERE merged = 0 ORDER BY ended_at DESC LIMIT 1 OFFSET ?)"
)
_MERGE = (
    f"{_ADD} SELECT 1, '', 0, tenant, user, uid, '', profile, model, memory_mib, slices, min(asked_at),"  # noqa: S608 -- of constants
    " min(granted_at), max(ended_at), sum(seconds), sum(waited), sum(leases), sum(devices), sum(measured_seconds),"
    f" max(peak_mib), sum(peak_mib_seconds), sum(samples), '' FROM accounting WHERE {_CUT}"
    " GROUP BY tenant, user, uid, profile, model, memory_mib, slices, CAST(ended_at / 86400 AS INTEGER)"
)
_DROP_MERGED = f"DELETE FROM accounting WHERE {_CUT}"  # noqa: S608 -- of constants
_OLD = "(SELECT number FROM accounting WHERE merged IN (0, 1) AND ended_at < ? ORDER BY ended_at LIMIT ?)"
_SURPLUS = "(SELECT number FROM accounting WHERE merged = 1 ORDER BY ended_at DESC LIMIT -1 OFFSET ?)"
_CUT_SINCE = (
    "UPDATE fact SET value = (SELECT max(CAST(fact.value AS REAL), max(ended_at)) FROM accounting WHERE number IN {})"
    " WHERE name = 'accounting_since' AND EXISTS (SELECT 1 FROM accounting WHERE number IN {})"
)
_PUT_SINCE = "INSERT INTO fact (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddAccounting:
    """Adds the records of a lease that ends, and adds it to its tenant's total."""

    lease: Lease
    account: LeaseAccount
    peaks: tuple[Peak | None, ...]
    ended_at: float
    total: str
    """The tenant in whose total the lease counts."""

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        for use in uses_of(self.lease, self.account, self.peaks, self.ended_at):
            device, peak = use.device, use.peak
            yield (
                _ADD_ROW,
                (
                    use.lease,
                    use.number,
                    use.tenant,
                    use.user,
                    use.uid,
                    use.name,
                    device.profile,
                    device.model,
                    device.memory_mib,
                    device.slices,
                    use.asked_at,
                    use.granted_at,
                    use.ended_at,
                    use.seconds,
                    use.waited_seconds,
                    int(not use.number),
                    1,
                    0.0 if peak is None else use.seconds,
                    None if peak is None else peak.used_mib,
                    0.0 if peak is None else peak.used_mib * use.seconds,
                    0 if peak is None else peak.samples,
                    _encode_asked(use),
                ),
            )
        mib_ms, slice_ms = leased_ms(self.account, self.lease.created_at, self.ended_at)
        yield _ADD_TOTAL, (self.total, mib_ms, slice_ms, waited_ms(self.account, self.lease.created_at))


@dataclass(frozen=True, slots=True)
class PutPeaks:
    """Sets the peaks of a lease that goes on."""

    lease: LeaseId
    peaks: tuple[Peak | None, ...]

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_PEAKS, (encode_peaks(self.peaks), self.lease)


@dataclass(frozen=True, slots=True)
class PutAccountingSince:
    """Sets since when every lease is accounted, unless it is set."""

    moment: float

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _PUT_SINCE, (SINCE, repr(self.moment))


@dataclass(frozen=True, slots=True)
class TrimAccounting:
    """Deletes records that ended before this time, and merges the oldest where there are more than `most`."""

    before: float
    most: int = MOST_ROWS
    most_merged: int = MOST_MERGED

    def statements(self) -> Iterator[Statement]:
        """Yield the SQL statements of this change, with their values."""
        yield _MERGE, (self.most,)
        yield _DROP_MERGED, (self.most,)
        for which, values in ((_OLD, (self.before, _MOST_FORGOTTEN)), (_SURPLUS, (self.most_merged,))):
            yield _CUT_SINCE.format(which, which), (*values, *values)
            yield f"DELETE FROM accounting WHERE number IN {which}", values  # noqa: S608 -- of constants


def uses_of(
    lease: Lease, account: LeaseAccount, peaks: Sequence[Peak | None], ended_at: float
) -> tuple[AccountedUse, ...]:
    """Return the records of a lease that ended, or would end, at this time: one for each device."""
    holder = lease.holder
    return tuple(
        AccountedUse(
            lease=lease.id,
            number=number,
            tenant=holder.tenant,
            user=account.user or holder.tenant or str(holder),
            uid=holder.uid,
            name=str(holder),
            device=device,
            asked_at=account.asked_at,
            granted_at=lease.created_at,
            ended_at=max(ended_at, lease.created_at),
            peak=peaks[number] if number < len(peaks) else None,
            priority=account.priority,
            gpus=account.gpus,
        )
        for number, device in enumerate(account.devices)
    )


def _encode_asked(use: AccountedUse) -> str:
    return _COMPACT((_want_fields(use.device.want), use.priority, use.gpus))


# Reading

_KEYS: Mapping[By, str] = {
    By.USER: "user",
    By.TENANT: "tenant",
    By.PROFILE: "profile",
    By.NAME: (
        "CASE WHEN name <> '' AND (:everything OR (:uid IS NOT NULL AND uid = :uid)"
        " OR (:uid IS NULL AND uid IS NULL AND :user <> '' AND user = :user)) THEN name ELSE user END"
    ),
}
# A merged row spreads what it has evenly over the time that it covers.
_SUMS = (
    "sum(leases * is_in), sum(devices * is_in), sum(memory_mib * seconds * part),"
    " sum(slices * seconds * part), sum(waited * waited_part), sum(memory_mib * measured_seconds * part),"
    " sum(peak_mib_seconds * part) FROM (SELECT *, granted_at < :until AS is_in,"
    " CASE WHEN ended_at > granted_at"
    " THEN max(0.0, min(ended_at, :until) - max(granted_at, :since)) / (ended_at - granted_at) ELSE 0.0 END AS part,"
    " CASE WHEN merged AND ended_at > granted_at"
    " THEN max(0.0, min(ended_at, :until) - max(granted_at, :since)) / (ended_at - granted_at)"
    " WHEN waited > 0 THEN max(0.0, min(granted_at, :until) - max(granted_at - waited, :since)) / waited"
    " ELSE 0.0 END AS waited_part"
    " FROM accounting WHERE merged IN (0, 1) AND ended_at >= :since AND granted_at - waited < :until"
    " AND lease NOT IN (SELECT value FROM json_each(:without))) GROUP BY 1"
)
_HISTORY = (
    "SELECT lease, device, tenant, user, uid, name, profile, model, memory_mib, slices, asked_at, granted_at, ended_at,"
    " peak_mib, samples, asked FROM accounting WHERE merged = 0 AND ended_at >= ?"
    " AND lease NOT IN (SELECT value FROM json_each(?)) ORDER BY ended_at DESC LIMIT ?"
)


def read_uses(
    connection: sqlite3.Connection, period: Period, by: By, reader: Reader, without: Sequence[LeaseId]
) -> tuple[list[tuple[str, Use]], float | None]:
    """Return the sums of ended leases by key, in a period, and since when every lease is accounted.

    `without` are leases that the caller counts itself. Raises sqlite3.Error.
    """
    values = {
        "since": period.since,
        "until": period.until,
        "everything": reader.everything,
        "uid": reader.uid,
        "user": reader.user,
        "without": json.dumps(without),
    }
    rows = connection.execute(f"SELECT {_KEYS[by]}, {_SUMS}", values).fetchall()
    known = connection.execute("SELECT value FROM fact WHERE name = ?", (SINCE,)).fetchone()
    uses = [
        (
            str(key),
            Use(
                leases=int(leases),
                devices=int(devices),
                memory_mib_seconds=float(memory),
                slice_seconds=float(slices),
                waited_seconds=float(waited),
                measured_mib_seconds=float(measured),
                peak_mib_seconds=float(peak),
            ),
        )
        for key, leases, devices, memory, slices, waited, measured, peak in rows
    ]
    return uses, None if known is None else float(known[0])


def read_history(
    connection: sqlite3.Connection, since: float, most: int, without: Sequence[LeaseId]
) -> tuple[AccountedUse, ...]:
    """Return the latest `most` records of single leases that ended since a time, oldest first. Raises sqlite3.Error."""
    rows = connection.execute(_HISTORY, (since, json.dumps(without), most)).fetchall()
    return tuple(_accounted(row) for row in reversed(rows))


def _accounted(row: tuple[Any, ...]) -> AccountedUse:
    lease, number, tenant, user, uid, name, profile, model, mib, slices, asked_at, granted, ended, peak, *rest = row
    samples, asked = rest
    want, priority, gpus = json.loads(asked)
    return AccountedUse(
        lease=lease,
        number=number,
        tenant=tenant,
        user=user,
        uid=uid,
        name=name,
        device=AccountedDevice(profile=profile, model=model, memory_mib=mib, slices=slices, want=_want(want)),
        asked_at=asked_at,
        granted_at=granted,
        ended_at=ended,
        peak=None if peak is None else Peak(used_mib=peak, samples=samples),
        priority=priority,
        gpus=tuple(gpus),
    )


def read_totals(connection: sqlite3.Connection) -> dict[str, TenantTotal]:
    """Return what each tenant has leased with all leases that have ended. Raises sqlite3.Error."""
    return {
        str(tenant): TenantTotal(ended_mib_ms=mib_ms, ended_slice_ms=slice_ms, waited_ms=waited, leases=leases)
        for tenant, mib_ms, slice_ms, waited, leases in connection.execute(
            "SELECT tenant, mib_ms, slice_ms, waited_ms, leases FROM tenant_total"
        )
    }
