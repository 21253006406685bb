"""Accounting: what each active lease counts for, its peak use, and the sums that clients and metrics read.

The engine's other parts report grants and ends to `Accounting`; the record of an ended lease is in the transaction that
ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from mig_agent.adapters.ledger.accounting import AddAccounting, PutAccountingSince, PutPeaks, TrimAccounting, uses_of
from mig_agent.adapters.ledger.reader import Contents
from mig_agent.adapters.ledger.records import Change
from mig_agent.core.accounting import (
    OTHERS,
    AccountedDevice,
    AccountedUse,
    LeaseAccount,
    Peak,
    TenantTotal,
)
from mig_agent.core.catalog import Catalog
from mig_agent.core.model import Generation, Instance, Lease, LeaseId, Request, Want
from mig_agent.core.observation import InstanceUsage
from mig_agent.engine.callers import Caller

MOST_TENANTS = 256
"""Number of tenants that have a total of their own; further ones share one."""
FIRST_TRIM_SECONDS = 600.0
"""From the start to the first trim of the records, in seconds."""
TRIM_SECONDS = 3600.0
"""The pause between two trims of the records, in seconds ..."""
TRIM_AFTER_LEASES = 1000
"""... and so many leases that have ended bring the next one forward."""


class Accounting:
    """Accounts leases. Not thread-safe; use from the event loop."""

    def __init__(self, contents: Contents, catalog: Catalog) -> None:
        self._catalog = catalog
        self._active: dict[LeaseId, tuple[Lease, LeaseAccount]] = {}
        self._peaks: dict[LeaseId, list[Peak | None]] = {}
        self._unrecorded: set[LeaseId] = set()
        """The leases whose peaks have changed since they were recorded."""
        self._totals = dict(contents.totals)
        self.totals: Mapping[str, TenantTotal] = MappingProxyType(dict(self._totals))
        """What each tenant has leased so far: a finished value, which any thread may read."""
        self._is_accounting = contents.is_accounting
        self._trim_at: float | None = None
        self._ended_since_trim = 0
        instances = {each.generation: each for each in contents.instances}
        for recorded in sorted(contents.leases, key=lambda each: each.lease.created_at):
            if recorded.ended_at is None:
                found = (instances.get(each) for each in recorded.lease.instances)
                account = recorded.account if recorded.account.devices else self.recovered_account(found)
                self.granted(recorded.lease, account)
                self._peaks[recorded.lease.id] = [*recorded.peaks, *self._peaks[recorded.lease.id]][
                    : len(account.devices)
                ]

    # What leases count for

    def account(
        self, request: Request, caller: Caller, devices: Sequence[Instance], asked_at: float, models: Iterable[str]
    ) -> LeaseAccount:
        """Return the account of a lease that is about to be granted; `models` are the names of its devices' GPUs."""
        for_others = caller.acts_for_others or caller.inside
        return LeaseAccount(
            user=(request.holder.tenant if for_others else "") or str(caller),
            asked_at=asked_at,
            priority=request.priority,
            gpus=request.gpus,
            devices=tuple(
                self._device(instance, model, want)
                for instance, model, want in zip(devices, models, request.wants, strict=True)
            ),
        )

    def recovered_account(self, devices: Iterable[Instance | None]) -> LeaseAccount:
        """Return the account of a lease of which only its devices are known; a lost device counts for nothing."""
        return LeaseAccount(
            devices=tuple(
                AccountedDevice(profile="unknown", model="", memory_mib=0, slices=0)
                if each is None
                else self._device(each, "", None)
                for each in devices
            )
        )

    def _device(self, instance: Instance, model: str, want: Want | None) -> AccountedDevice:
        profile = instance.slot.profile
        slices = profile.memory_slices
        if instance.kind.takes_whole_gpu and not instance.kind.needs_mig_mode:
            layout = self._catalog.layout(model, profile.memory_mib)
            slices = slices if layout is None else layout.memory_slices
        return AccountedDevice(
            profile=profile.name, model=model, memory_mib=profile.memory_mib, slices=slices, want=want
        )

    def granted(self, lease: Lease, account: LeaseAccount) -> None:
        """Count a lease that was granted or recovered, from its beginning on."""
        self._active[lease.id] = (lease, account)
        self._peaks[lease.id] = [None] * len(account.devices)
        key = self._total_of(lease)
        self._set_total(key, self._totals.get(key, TenantTotal()).with_grant(account, lease.created_at))

    def end(self, lease: LeaseId, at: float) -> tuple[Change, ...]:
        """Return the changes that account a lease that ends now; they belong to the transaction that ends it."""
        known = self._active.get(lease)
        if known is None:
            return ()
        peaks = tuple(self._peaks[lease])
        total = self._total_of(known[0])
        return (AddAccounting(lease=known[0], account=known[1], peaks=peaks, ended_at=at, total=total),)

    def ended(self, lease: LeaseId, at: float) -> None:
        """Stop counting a lease: its end at this time is recorded."""
        known = self._active.pop(lease, None)
        self._peaks.pop(lease, None)
        self._unrecorded.discard(lease)
        if known is not None:
            key = self._total_of(known[0])
            self._set_total(key, self._totals[key].with_end(known[1], known[0].created_at, at))
            self._ended_since_trim += 1

    def _total_of(self, lease: Lease) -> str:
        tenant = lease.holder.tenant
        return tenant if tenant in self._totals or len(self._totals) < MOST_TENANTS else OTHERS

    def _set_total(self, tenant: str, total: TenantTotal) -> None:
        self._totals[tenant] = total
        self.totals = MappingProxyType(dict(self._totals))

    # Peaks

    @property
    def leases(self) -> frozenset[LeaseId]:
        """The leases that are active."""
        return frozenset(self._active)

    def sampled(self, readings: Mapping[Generation, InstanceUsage], leases: frozenset[LeaseId]) -> None:
        """Take readings of the memory in use; what the driver did not report is no sample.

        `leases` were active before the reading began: what was read may be of an earlier lease of the same instance.
        """
        for identity, (lease, _) in self._active.items():
            if identity not in leases:
                continue
            peaks = self._peaks[identity]
            for number, generation in enumerate(lease.instances[: len(peaks)]):
                usage = readings.get(generation)
                if usage is None or usage.memory_used_mib is None:
                    continue
                before, used = peaks[number], usage.memory_used_mib
                peaks[number] = Peak(used_mib=used, samples=1) if before is None else before.with_sample(used)
                self._unrecorded.add(identity)

    def peak_changes(self) -> tuple[Change, ...]:
        """Return the changes that record all peaks of active leases that are not recorded yet."""
        changed, self._unrecorded = self._unrecorded, set()
        return tuple(PutPeaks(each, tuple(self._peaks[each])) for each in sorted(changed))

    # Keeping

    def begin_changes(self, now: float) -> tuple[Change, ...]:
        """Return the changes of a start: since when every lease is accounted, where that is not recorded."""
        return () if self._is_accounting else (PutAccountingSince(now),)

    def trim_changes(self, now: float, keep_seconds: float) -> tuple[Change, ...]:
        """Return the changes that keep the records within their bounds; none while that is not due."""
        if self._trim_at is None:
            self._trim_at = now + FIRST_TRIM_SECONDS
        if now < self._trim_at and self._ended_since_trim < TRIM_AFTER_LEASES:
            return ()
        self._trim_at, self._ended_since_trim = now + TRIM_SECONDS, 0
        return (TrimAccounting(before=now - keep_seconds),)

    # Reading

    def active(self, now: float) -> tuple[AccountedUse, ...]:
        """Return the records of the active leases as if they ended now."""
        return tuple(
            use
            for identity, (lease, account) in self._active.items()
            for use in uses_of(lease, account, self._peaks[identity], now)
        )
