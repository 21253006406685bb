"""The lease evidence: a text file beside the ledger that says which active lease has which devices.

It creates no lease by itself. When the ledger is lost, it shows whether the lease of a token was active then, and on
which devices: a token does not contain that, and UUIDs are reused. It is written after a commit and never waited for: a
kill loses nothing that the kernel has, and a power cut, which may, leaves no instance. So each entry names its boot.

The first line names the ledger, the commit and how many lines there must be at least; one line for each change follows,
with its number and a CRC. A line that cannot be read voids all lines before it, since it may have ended any lease.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mig_agent.adapters.ledger.commit_counter import Count, counter_of, read_counter, read_regular
from mig_agent.adapters.ledger.damage import DamagedError
from mig_agent.core.model import (
    CallerId,
    Generation,
    GpuUuid,
    Holder,
    Instance,
    Lease,
    LeaseId,
    Placement,
    RequestId,
)
from mig_agent.core.owner import decode, encode

SUFFIX = "-leases"
_HEAD_BYTES = 103
_HEAD = re.compile(rb"mig-agent-leases 1 ([0-9a-f]{32}) ([0-9]{20}) ([0-9]{20}) ([0-9a-f]{8})\n")
_LINE = re.compile(rb"([0-9a-f]{8}) (([0-9]+) ([+?~-]) (.*))")
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode
LIVE, FORMER, VOID, ENDED = "+", "?", "~", "-"
"""What a line says of a lease: it is active; it was when a former ledger was lost; why no token can recover that one;
it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidentDevice:
    """One device of a lease, with what is needed to identify it later."""

    generation: Generation
    gpu: GpuUuid
    profile_id: int
    placement: Placement
    gpu_instance_id: int | None
    uuid: str

    @classmethod
    def of(cls, instance: Instance) -> EvidentDevice:
        """Return the description of an instance."""
        slot = instance.slot
        return cls(
            generation=instance.generation,
            gpu=slot.gpu,
            profile_id=slot.profile.id,
            placement=slot.placement,
            gpu_instance_id=instance.gpu_instance_id,
            uuid=instance.uuid,
        )

    def is_same_as(self, instance: Instance) -> bool:
        """Return whether an instance is this device, whatever its generation is now."""
        return replace(self, generation=instance.generation) == EvidentDevice.of(instance)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidentLease:
    """A lease in its last known active state."""

    lease: Lease
    digest: str
    boot_id: str
    devices: tuple[EvidentDevice | None, ...]
    """One for each device of the lease; None for a lost one."""
    void: str = ""
    """Why its token cannot recover it, as a message; empty if it can."""

    @property
    def uuids(self) -> frozenset[str]:
        """The UUIDs of its devices."""
        return frozenset(each.uuid for each in self.devices if each is not None)

    def encode(self) -> str:
        """Return the lease as one line of JSON."""
        lease, holder = self.lease, self.lease.holder
        return _COMPACT(
            [
                (lease.id, lease.request_id, lease.caller_id, self.digest, self.boot_id, self.void),
                (lease.created_at, lease.expires_at, encode(lease.owner)),
                (holder.tenant, holder.name, holder.uid, holder.pid),
                (lease.instances, lease.reused),
                [None if each is None else _device_row(each) for each in self.devices],
            ]
        )

    @classmethod
    def decode(cls, text: bytes) -> EvidentLease:
        """Read what `encode` wrote. Raises ValueError, TypeError."""
        names, lasts, who, made_of, devices = json.loads(text)
        id_, request, caller_id, digest, boot_id, void = names
        created, expires, owner = lasts
        tenant, name, uid, holder_pid = who
        instances, reused = made_of
        lease = Lease(
            id=LeaseId(id_),
            request_id=RequestId(request),
            holder=Holder(tenant=tenant, name=name, uid=uid, pid=holder_pid),
            instances=tuple(Generation(each) for each in instances),
            created_at=created,
            expires_at=expires,
            owner=decode(owner),
            reused=tuple(reused),
            caller_id=CallerId(caller_id),
        )
        return cls(
            lease=lease,
            digest=digest,
            boot_id=boot_id,
            devices=tuple(None if each is None else _device(each) for each in devices),
            void=void,
        )


def _device_row(device: EvidentDevice) -> tuple[int, str, int, int, int, int | None, str]:
    place = device.placement
    return (
        *(device.generation, device.gpu, device.profile_id, place.start, place.size),
        *(device.gpu_instance_id, device.uuid),
    )


def _device(row: Any) -> EvidentDevice:  # noqa: ANN401 -- of JSON
    generation, gpu, profile_id, start, size, gpu_instance_id, uuid = row
    return EvidentDevice(
        generation=Generation(generation),
        gpu=GpuUuid(gpu),
        profile_id=profile_id,
        placement=Placement(start, size),
        gpu_instance_id=gpu_instance_id,
        uuid=uuid,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The trusted contents of a file."""

    count: Count
    """The commit after which it was last written."""
    live: tuple[EvidentLease, ...]
    former: tuple[EvidentLease, ...]
    """Leases of former ledgers."""

    def fits(self, count: Count) -> bool:
        """Return whether it has all commits of this ledger, except perhaps the last: a kill may precede its write."""
        return self.count.ledger == count.ledger and self.count.number >= count.number - 1

    @property
    def recoverable(self) -> tuple[EvidentLease, ...]:
        """All leases that their tokens may recover when this ledger is lost."""
        return (*self.live, *(each for each in self.former if each.lease.id not in {one.lease.id for one in self.live}))


def evidence_of(ledger: Path) -> Path:
    """Return the path of a ledger's lease evidence."""
    return ledger.with_name(ledger.name + SUFFIX)


def encode_head(count: Count, lines: int) -> bytes:
    """Return the first line; its length is constant."""
    body = b"mig-agent-leases 1 %s %020d %020d" % (count.ledger.encode(), count.number, lines)
    return b"%s %08x\n" % (body, zlib.crc32(body))


def encode_line(number: int, mark: str, text: str) -> bytes:
    """Return one line: the CRC of the rest, its number, its mark and its text."""
    body = f"{number} {mark} {text}".encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def encode_file(count: Count, live: Iterable[EvidentLease], former: Iterable[EvidentLease]) -> tuple[bytes, int]:
    """Return a whole file, and how many lines follow its first."""
    marked = (*((FORMER, each) for each in former), *((LIVE, each) for each in live))
    lines = [encode_line(number, mark, each.encode()) for number, (mark, each) in enumerate(marked, 1)]
    return b"".join((encode_head(count, len(lines)), *lines)), len(lines)


def read_evidence(path: Path) -> Evidence | None:
    """Return the trusted contents of a file; None if there are none. Raises no error."""
    try:
        data = read_regular(path, -1)
    except OSError:
        return None
    head, count = _HEAD.match(data), _count_in(data)
    if head is None or count is None:
        return None
    live: dict[LeaseId, EvidentLease] = {}
    former: dict[LeaseId, EvidentLease] = {}
    least, last = int(head[3]), 0
    # What follows the last newline is an incomplete write.
    for line in data[head.end() :].split(b"\n")[:-1]:
        read = _read_line(line)
        if read is None or read[0] != last + 1:
            if last >= least:
                break  # after the last line that is known to be complete
            live, former = {}, {}
        if read is not None:
            last, mark, lease, text = read
            _follow(live, former, mark, lease, text)
    if last < least:
        return None
    return Evidence(count=count, live=tuple(live.values()), former=tuple(former.values()))


def read_count(path: Path) -> Count | None:
    """Return the commit after which a file was last written; None if it does not say. Raises OSError."""
    try:
        return _count_in(read_regular(path, _HEAD_BYTES))
    except FileNotFoundError:
        return None


def _count_in(data: bytes) -> Count | None:
    head = _HEAD.match(data)
    if head is None or encode_head(count := Count(head[1].decode(), int(head[2])), int(head[3])) != head[0]:
        return None
    return count


def recoverable_leases(ledger: Path) -> tuple[EvidentLease, ...]:
    """Return the leases that may be recovered when this ledger is quarantined, as far as the evidence is trusted."""
    evidence = read_evidence(evidence_of(ledger))
    if evidence is None:
        return ()
    try:
        counted = read_counter(counter_of(ledger))
    except (DamagedError, OSError):
        return evidence.recoverable  # the counter is damaged as well; the file itself is whole
    return evidence.recoverable if evidence.fits(counted) else ()


def _read_line(line: bytes) -> tuple[int, str, EvidentLease | None, str] | None:
    match = _LINE.fullmatch(line)
    if match is None or match[1] != b"%08x" % zlib.crc32(match[2]):
        return None
    mark = match[4].decode()
    try:
        if mark in {LIVE, FORMER}:
            return int(match[3]), mark, EvidentLease.decode(match[5]), ""
        return int(match[3]), mark, None, match[5].decode()
    except (ValueError, TypeError):
        return None


def _follow(
    live: dict[LeaseId, EvidentLease],
    former: dict[LeaseId, EvidentLease],
    mark: str,
    lease: EvidentLease | None,
    text: str,
) -> None:
    if lease is not None:
        if mark == FORMER:
            former[lease.lease.id] = lease
            return
        # A device has one lease at a time: the later line is right.
        for other in tuple(live.values()):
            if other.lease.id != lease.lease.id and not other.uuids.isdisjoint(lease.uuids):
                del live[other.lease.id]
        live[lease.lease.id] = lease
        former.pop(lease.lease.id, None)
    elif mark == ENDED:
        live.pop(LeaseId(text), None)
        former.pop(LeaseId(text), None)
    elif mark == VOID:
        id_, _, why = text.partition(" ")
        known = former.get(LeaseId(id_))
        if known is not None:
            former[known.lease.id] = replace(known, void=why)


def voided(leases: Iterable[EvidentLease], uuid: str, why: str) -> Iterator[EvidentLease]:
    """Yield the former leases that have this device, voided; void ones are left out."""
    for each in leases:
        if uuid and not each.void and uuid in each.uuids:
            yield replace(each, void=why)
