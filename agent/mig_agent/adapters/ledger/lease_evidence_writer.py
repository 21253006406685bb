"""Writes the lease evidence: which lines each commit appends, and when the file is rewritten."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.commit_counter import Count
from mig_agent.adapters.ledger.lease_evidence import (
    ENDED,
    LIVE,
    VOID,
    EvidentDevice,
    EvidentLease,
    encode_file,
    encode_head,
    encode_line,
    voided,
)
from mig_agent.adapters.ledger.reader import Contents
from mig_agent.adapters.ledger.records import (
    BindLease,
    Change,
    DropDoubt,
    DropInstance,
    EndLease,
    PutBootId,
    PutDoubt,
    PutInstance,
    PutLease,
    Record,
    RenewLease,
    VoidEvidence,
)
from mig_agent.core.model import Generation, Instance, Lease, LeaseId

_LONG_BYTES = 1 << 18
_TIMES = 4
"""The file is rewritten when it exceeds _LONG_BYTES and this many times its size after the last rewrite."""
TAKEN_OVER = "was taken over meanwhile, and may be another's by now"


class LeaseEvidenceWriter:
    """Follows the commits of one ledger. Use only from the thread that writes the ledger.

    `follow` returns what to write and `descriptor` is where; -1 if the file could not be written. Then there is no
    file, since one that lacks an end would bring back an ended lease.
    """

    def __init__(self, path: Path, contents: Contents) -> None:
        self._path = path
        self.descriptor = -1
        self._lines = 0
        self._size = 0
        self._made_with = 0
        self._boot_id = contents.boot_id
        self._doubtful = 0 if contents.doubt is None else contents.doubt.generation
        self._instances: dict[Generation, Instance] = {each.generation: each for each in contents.instances}
        self._live: dict[LeaseId, EvidentLease] = {}
        self._lease_of: dict[Generation, LeaseId] = {}
        self._former: dict[LeaseId, EvidentLease] = {each.lease.id: each for each in contents.former}
        for each in contents.leases:
            if each.ended_at is None:
                self._add(each.lease, each.digest)
        for instance in contents.instances:
            if instance.generation > self._doubtful:
                self._void(instance.uuid, TAKEN_OVER)
        self._handlers: Final[dict[type, Callable[[Any], bytes]]] = {
            PutInstance: self._put_instance,
            DropInstance: self._drop_instance,
            PutLease: self._put_lease,
            BindLease: self._bind,
            RenewLease: self._renew,
            EndLease: self._end,
            PutBootId: self._boot,
            PutDoubt: self._doubt,
            DropDoubt: self._settled,
            VoidEvidence: self._void_device,
        }

    @property
    def live(self) -> tuple[EvidentLease, ...]:
        """The leases that are active in the ledger."""
        return tuple(self._live.values())

    @property
    def former(self) -> tuple[EvidentLease, ...]:
        """The leases that were active when former ledgers were lost."""
        return tuple(self._former.values())

    def follow(self, records: Iterable[Record], count: Count) -> list[tuple[bytes, int]]:
        """Take in committed records; return the pieces to write, each with its offset, in order."""
        handlers, pieces = self._handlers, []
        for record in records:
            for change in record:
                handler = handlers.get(type(change))
                if handler is not None and (line := handler(change)):
                    pieces.append(line)
        writes = []
        if pieces:
            data = b"".join(pieces)
            writes.append((data, self._size))
            self._size += len(data)
        return [*writes, (encode_head(count, self._lines), 0)]

    def is_due(self) -> bool:
        """Return True if the file has grown too long or is missing."""
        if self.descriptor < 0 or (self._size > _LONG_BYTES and self._size > _TIMES * self._made_with):
            return True
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self.descriptor))
        except OSError:
            return True

    def rewrite(self, count: Count, *, keep: bool = False) -> None:
        """Rewrite the file as short as possible. If that fails, remove it, or with `keep` leave the old one.

        The old one may be kept until something is committed that it lacks.
        """
        data, lines = encode_file(count, self._live.values(), self._former.values())
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            with FAILPOINTS.around("lease-evidence"):
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    if os.write(descriptor, data) != len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 -- as the rest would be
                    temporary.rename(self._path)
                except BaseException:
                    os.close(descriptor)
                    raise
        except OSError:
            with contextlib.suppress(OSError), FAILPOINTS.around("lease-evidence"):
                temporary.unlink(missing_ok=True)
            if not keep:
                self.give_up()
            return
        self.close()
        self.descriptor = descriptor
        self._lines, self._size, self._made_with = lines, len(data), len(data)

    def give_up(self) -> None:
        """Remove the file, since an incomplete one is worse than none."""
        self.close()
        with contextlib.suppress(OSError), FAILPOINTS.around("lease-evidence"):
            self._path.unlink(missing_ok=True)
            return
        with contextlib.suppress(OSError), FAILPOINTS.around("lease-evidence"):
            os.truncate(self._path, 0)

    def close(self) -> None:
        """Close the file."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # The lines of each kind of change

    def _line(self, mark: str, text: str) -> bytes:
        self._lines += 1
        return encode_line(self._lines, mark, text)

    def _add(self, lease: Lease, digest: str) -> EvidentLease:
        devices = tuple(
            None if instance is None or not instance.uuid else EvidentDevice.of(instance)
            for instance in map(self._instances.get, lease.instances)
        )
        known = EvidentLease(lease=lease, digest=digest, boot_id=self._boot_id, devices=devices)
        self._live[lease.id] = known
        self._lease_of.update(dict.fromkeys(lease.instances, lease.id))
        self._former.pop(lease.id, None)
        return known

    def _put_lease(self, change: PutLease) -> bytes:
        return self._line(LIVE, self._add(change.lease, change.digest).encode())

    def _put_instance(self, change: PutInstance) -> bytes:
        instance = change.instance
        self._instances[instance.generation] = instance
        line = self._changed(instance.generation, EvidentDevice.of(instance))
        if self._former and instance.generation > self._doubtful and instance.lease not in self._former:
            line += self._void(instance.uuid, TAKEN_OVER)
        return line

    def _drop_instance(self, change: DropInstance) -> bytes:
        self._instances.pop(change.generation, None)
        return self._changed(change.generation, None)

    def _changed(self, generation: Generation, device: EvidentDevice | None) -> bytes:
        known = self._live.get(self._lease_of.get(generation, LeaseId("")))
        if known is None:
            return b""
        devices = tuple(
            device if number == generation else each
            for number, each in zip(known.lease.instances, known.devices, strict=True)
        )
        return b"" if devices == known.devices else self._update(replace(known, devices=devices))

    def _bind(self, change: BindLease) -> bytes:
        known = self._live.get(change.lease.id)
        return b"" if known is None else self._update(replace(known, lease=change.lease))

    def _renew(self, change: RenewLease) -> bytes:
        known = self._live.get(change.lease)
        if known is None:
            return b""
        return self._update(replace(known, lease=replace(known.lease, expires_at=change.expires_at)))

    def _update(self, known: EvidentLease) -> bytes:
        self._live[known.lease.id] = known
        return self._line(LIVE, known.encode())

    def _end(self, change: EndLease) -> bytes:
        known = self._live.pop(change.lease, None)
        if known is None:
            return b""
        for generation in known.lease.instances:
            self._lease_of.pop(generation, None)
        return self._line(ENDED, change.lease)

    def _boot(self, change: PutBootId) -> bytes:
        self._boot_id = change.boot_id
        return b""

    def _doubt(self, change: PutDoubt) -> bytes:
        self._doubtful = change.doubt.generation
        return b""

    def _settled(self, _change: Change) -> bytes:
        former, self._former = tuple(self._former), {}
        return b"".join(self._line(ENDED, each) for each in former)

    def _void_device(self, change: VoidEvidence) -> bytes:
        return self._void(change.uuid, change.why)

    def _void(self, uuid: str, why: str) -> bytes:
        lines = []
        for each in tuple(voided(self._former.values(), uuid, f"its device {uuid} {why}")):
            self._former[each.lease.id] = each
            lines.append(self._line(VOID, f"{each.lease.id} {each.void}"))
        return b"".join(lines)
