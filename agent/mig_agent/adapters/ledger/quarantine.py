"""Replaces a ledger with another one; the former is kept under another name with all its files.

A crash at any step leaves what the next start needs to go on: the new ledger is completed under another name first,
then an order records what is to be done, and each step of it can be repeated.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.ledger.commit_counter import SUFFIX, Count, counter_of, read_regular, sync_folder, write_counter
from mig_agent.adapters.ledger.lease_evidence import EvidentLease, encode_file, evidence_of

DAMAGED = "damaged"
REPLACED = "replaced"
"""Replaced by a ledger that an administrator restored."""
MOST_KEPT = 10
"""Number of ledgers kept aside: the first, which held what mattered, and the latest ones."""
FILES = ("-wal", "-shm", "-journal", SUFFIX, "")
"""Suffixes of the files that belong to a ledger."""
_MOST_ORDER_BYTES = 4096
_NUMBER = re.compile(rf"\.(?:{DAMAGED}|{REPLACED})-(\d+)(?:-\w+)?$")


@dataclass(frozen=True, slots=True)
class _Order:
    """A replacement in progress."""

    aside: str
    """Name in the same folder under which the former files are kept."""
    count: Count
    """Commit counter of the new ledger."""


def replace_ledger(
    path: Path,
    kind: str,
    make: Callable[[Path, Path], Count],
    *,
    live: Iterable[EvidentLease] = (),
    former: Iterable[EvidentLease] = (),
) -> Path:
    """Set aside the ledger's files and put in place what `make` creates; return where the former ledger is kept.

    `make` gets the path of the new ledger's file, and the path where the former ledger will be. The lease evidence of
    the new one lists these leases as live, or as of a former ledger. Raises OSError, and what `make` raises.
    """
    new, aside = _new(path), _next_name(path, kind)
    _remove_incomplete(path)
    order = _Order(aside.name, make(new, aside))
    with FAILPOINTS.around("ledger-file"):
        evidence_of(new).write_bytes(encode_file(order.count, live, former)[0])
    _write_order(path, order)
    finish_replacing(path)
    return aside


def finish_replacing(path: Path) -> None:
    """Finish a replacement in progress, if there is one. Raises OSError."""
    order = _read_order(path)
    if order is None:
        _remove_incomplete(path)
        return
    new = _new(path)
    if new.exists():  # otherwise it was renamed already
        aside = path.with_name(order.aside)
        for ending in FILES:
            part = path.with_name(path.name + ending)
            if _exists(part):
                with FAILPOINTS.around("ledger-aside"):
                    part.rename(aside.with_name(aside.name + ending))
        _replace_evidence(path, new, aside)
        with FAILPOINTS.around("ledger-file"):
            new.rename(path)
        sync_folder(path.parent)
    write_counter(counter_of(path), order.count)
    with FAILPOINTS.around("ledger-order"):
        _order_file(path).unlink()
    sync_folder(path.parent)
    _forget_most(path)


def _replace_evidence(path: Path, new: Path, aside: Path) -> None:
    fresh, part = evidence_of(new), evidence_of(path)
    if not fresh.exists():
        return  # it was renamed already
    if _exists(part):
        with FAILPOINTS.around("ledger-aside"):
            part.rename(evidence_of(aside))
    with FAILPOINTS.around("ledger-file"):
        fresh.rename(part)


def kept_aside(path: Path) -> dict[int, list[Path]]:
    """Return the files of the ledgers set aside, by number."""
    found: dict[int, list[Path]] = {}
    for each in path.parent.iterdir():
        match = _NUMBER.search(each.name)
        if match is not None and each.name[: match.start()] == path.name:
            found.setdefault(int(match[1]), []).append(each)
    return dict(sorted(found.items()))


def any_file_exists(path: Path) -> bool:
    """Return True if any file of a ledger exists at this path."""
    return any(_exists(each) for each in (*(path.with_name(path.name + ending) for ending in FILES), evidence_of(path)))


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _order_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.replacing")


def _next_name(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{max(kept_aside(path), default=0) + 1}")


def _forget_most(path: Path) -> None:
    numbers = list(kept_aside(path))
    for number in numbers[1 : max(len(numbers) - MOST_KEPT, 0) + 1]:
        for each in kept_aside(path)[number]:
            with FAILPOINTS.around("ledger-aside"):
                each.unlink()


def _remove_incomplete(path: Path) -> None:
    new = _new(path)
    for part in (*(new.with_name(new.name + ending) for ending in ("", "-wal", "-shm", "-journal")), evidence_of(new)):
        if part.exists():
            with FAILPOINTS.around("ledger-file"):
                part.unlink()


def _write_order(path: Path, order: _Order) -> None:
    text = json.dumps({"aside": order.aside, "ledger": order.count.ledger, "number": order.count.number})
    temporary = path.with_name(f".{path.name}.replacing")
    with FAILPOINTS.around("ledger-order"):
        temporary.unlink(missing_ok=True)  # whatever it is: opening a pipe would block for ever
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(_order_file(path))
    sync_folder(path.parent)


def _read_order(path: Path) -> _Order | None:
    """Return the replacement in progress; None if there is none, or the order is unreadable.

    With an unreadable order the files are taken as they are.
    """
    try:
        known = json.loads(read_regular(_order_file(path), _MOST_ORDER_BYTES))
        order = _Order(str(known["aside"]), Count(str(known["ledger"]), int(known["number"])))
        order.count.encode()
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, ArithmeticError):
        return None
    return order if Path(order.aside).name == order.aside else None
