"""Accounting: what a lease counts for, and how much of it falls into a period.

A device counts from the grant of its lease to the end of it, also while it is lost. Peaks are measured by samples:
`None` where there was no sample. Everything here is frozen, and nothing reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from mig_agent.core.model import Want

LEAST_SAMPLES = 3
"""The fewest samples that make a peak a basis for advice: one sample may come before a program has loaded its data."""
OTHERS = "(others)"
"""The key of everything that is not listed by itself."""


class By(StrEnum):
    """The keys by which accounting can be grouped."""

    USER = "user"
    TENANT = "tenant"
    NAME = "name"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedDevice:
    """One device of a lease, as it is accounted."""

    profile: str
    model: str
    """The GPU's product name; empty where it is not known."""
    memory_mib: int
    slices: int
    """Memory slices: all of the GPU's for a whole GPU, where the catalog knows the model."""
    want: Want | None = None
    """What was asked for; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAccount:
    """Facts about a lease that accounting needs beside its holder and times."""

    user: str = ""
    """Who asked, as the transport identified it; the tenant where a scheduler or administrator asked for others."""
    asked_at: float | None = None
    """Time at which the request arrived; None where it is not known."""
    priority: int = 0
    gpus: tuple[str, ...] = ()
    """The GPUs that the request allowed; empty: any."""
    devices: tuple[AccountedDevice, ...] = ()


NO_ACCOUNT: Final = LeaseAccount()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory that was seen in use on a device."""

    used_mib: int
    samples: int
    """Number of times that it was read."""

    def with_sample(self, used_mib: int) -> Peak:
        """Return the peak after one more reading."""
        return Peak(used_mib=max(self.used_mib, used_mib), samples=self.samples + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Sums over leases: what was leased, waited for and used at peak."""

    leases: int = 0
    devices: int = 0
    memory_mib_seconds: float = 0.0
    slice_seconds: float = 0.0
    waited_seconds: float = 0.0
    """From asking to having the lease."""
    measured_mib_seconds: float = 0.0
    """The part of `memory_mib_seconds` on devices whose use was measured."""
    peak_mib_seconds: float = 0.0
    """The peak of each measured device, over the time that it was leased."""

    def __add__(self, other: Use) -> Use:
        """Return the sums of both."""
        return Use(
            leases=self.leases + other.leases,
            devices=self.devices + other.devices,
            memory_mib_seconds=self.memory_mib_seconds + other.memory_mib_seconds,
            slice_seconds=self.slice_seconds + other.slice_seconds,
            waited_seconds=self.waited_seconds + other.waited_seconds,
            measured_mib_seconds=self.measured_mib_seconds + other.measured_mib_seconds,
            peak_mib_seconds=self.peak_mib_seconds + other.peak_mib_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountedUse:
    """One device of a lease over the whole time that it was leased: one record of accounting."""

    lease: str
    number: int
    """The device's place in the lease, from 0. What counts once for a lease is in the first."""
    tenant: str
    user: str
    uid: int | None
    name: str
    """The holder as messages name it: `alice (train)`."""
    device: AccountedDevice
    asked_at: float | None
    granted_at: float
    ended_at: float
    peak: Peak | None
    priority: int = 0
    gpus: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The time that it was leased; 0 if the clock was set back meanwhile."""
        return max(0.0, self.ended_at - self.granted_at)

    @property
    def waited_seconds(self) -> float:
        """The time from asking to the grant; 0 in all but the first device of a lease, and where it is not known."""
        return max(0.0, self.granted_at - self.asked_at) if self.asked_at is not None and not self.number else 0.0

    def within(self, period: Period) -> Use:
        """Return the part that falls into a period."""
        since, until = period.since, period.until
        seconds = overlap(self.granted_at, self.ended_at, since, until)
        is_in = self.ended_at >= since and self.granted_at < until
        waited = overlap(self.granted_at - self.waited_seconds, self.granted_at, since, until)
        measured = seconds if self.peak is not None else 0.0
        return Use(
            leases=int(is_in and not self.number),
            devices=int(is_in),
            memory_mib_seconds=self.device.memory_mib * seconds,
            slice_seconds=self.device.slices * seconds,
            waited_seconds=waited,
            measured_mib_seconds=self.device.memory_mib * measured,
            peak_mib_seconds=0.0 if self.peak is None else self.peak.used_mib * measured,
        )


@dataclass(frozen=True, slots=True)
class Period:
    """A span of time, in seconds since the epoch."""

    since: float
    until: float


def overlap(start: float, end: float, since: float, until: float) -> float:
    """Return how many seconds two spans of time have in common."""
    return max(0.0, min(end, until) - max(start, since))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The reader of accounting: own names are shown, names of others only as their users'."""

    uid: int | None = None
    user: str = ""
    everything: bool = False

    def owns(self, uid: int | None, user: str) -> bool:
        """Return whether the names of this user's leases may be shown."""
        if self.everything or (self.uid is not None and self.uid == uid):
            return True
        return self.uid is None and uid is None and bool(self.user) and self.user == user


def key_of(use: AccountedUse, by: By, reader: Reader) -> str:
    """Return the group that a record belongs to, as this reader may see it."""
    match by:
        case By.USER:
            return use.user
        case By.TENANT:
            return use.tenant
        case By.NAME:
            return use.name if use.name and reader.owns(use.uid, use.user) else use.user
        case By.PROFILE:
            return use.device.profile


def grouped(uses: Iterable[tuple[str, Use]], *, most: int) -> Mapping[str, Use]:
    """Return the sums by key, the largest first; what exceeds `most` keys is summed up as OTHERS."""
    sums: dict[str, Use] = {}
    for key, use in uses:
        sums[key] = sums.get(key, _NOTHING) + use
    ordered = sorted(sums.items(), key=lambda item: (-item[1].memory_mib_seconds, item[0]))
    found = dict(ordered[:most])
    for _, use in ordered[most:]:
        found[OTHERS] = found.get(OTHERS, _NOTHING) + use
    return found


_NOTHING = Use()


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTotal:
    """All that one tenant has ever leased, exact in milliseconds, as a linear function of time."""

    ended_mib_ms: int = 0
    ended_slice_ms: int = 0
    waited_ms: int = 0
    leases: int = 0
    mib: int = 0
    """What is leased now."""
    slices: int = 0
    mib_offset: int = 0
    """The sum of memory times the moment of the grant, over what is leased now."""
    slice_offset: int = 0

    def memory_mib_seconds(self, now: float) -> float:
        """Return the memory leased until now, times the seconds that it was leased for."""
        return (self.ended_mib_ms + self.mib * _ms(now) - self.mib_offset) / 1000

    def slice_seconds(self, now: float) -> float:
        """Return the memory slices leased until now, times the seconds that they were leased for."""
        return (self.ended_slice_ms + self.slices * _ms(now) - self.slice_offset) / 1000

    @property
    def waited_seconds(self) -> float:
        """The seconds from asking to having, over all leases."""
        return self.waited_ms / 1000

    def with_grant(self, account: LeaseAccount, granted_at: float) -> TenantTotal:
        """Return the total once a lease is granted."""
        mib, slices, start = *_sizes(account), _ms(granted_at)
        return TenantTotal(
            ended_mib_ms=self.ended_mib_ms,
            ended_slice_ms=self.ended_slice_ms,
            waited_ms=self.waited_ms + waited_ms(account, granted_at),
            leases=self.leases + 1,
            mib=self.mib + mib,
            slices=self.slices + slices,
            mib_offset=self.mib_offset + mib * start,
            slice_offset=self.slice_offset + slices * start,
        )

    def with_end(self, account: LeaseAccount, granted_at: float, ended_at: float) -> TenantTotal:
        """Return the total once a granted lease has ended."""
        mib, slices, start = *_sizes(account), _ms(granted_at)
        mib_ms, slice_ms = leased_ms(account, granted_at, ended_at)
        return TenantTotal(
            ended_mib_ms=self.ended_mib_ms + mib_ms,
            ended_slice_ms=self.ended_slice_ms + slice_ms,
            waited_ms=self.waited_ms,
            leases=self.leases,
            mib=self.mib - mib,
            slices=self.slices - slices,
            mib_offset=self.mib_offset - mib * start,
            slice_offset=self.slice_offset - slices * start,
        )


def leased_ms(account: LeaseAccount, granted_at: float, ended_at: float) -> tuple[int, int]:
    """Return MiB and memory slices of a lease, times the milliseconds that it lasted."""
    (mib, slices), lasted = _sizes(account), max(0, _ms(ended_at) - _ms(granted_at))
    return mib * lasted, slices * lasted


def waited_ms(account: LeaseAccount, granted_at: float) -> int:
    """Return the milliseconds from asking to the grant; 0 where it is not known."""
    return 0 if account.asked_at is None else max(0, _ms(granted_at) - _ms(account.asked_at))


def _sizes(account: LeaseAccount) -> tuple[int, int]:
    return sum(each.memory_mib for each in account.devices), sum(each.slices for each in account.devices)


def _ms(moment: float) -> int:
    return round(moment * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An answer of accounting: who used what in a period."""

    rows: Mapping[str, Use] = field(default_factory=dict)
    """The sums by key, the largest first."""
    period: Period
    complete_since: float | None = None
    """Since when every lease is accounted; None where that is not recorded."""

    @property
    def total(self) -> Use:
        """The sum over all rows."""
        total = _NOTHING
        for each in self.rows.values():
            total += each
        return total
