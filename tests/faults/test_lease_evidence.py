"""The evidence beside the ledger, damaged in every way: it never tells of a lease that was not live."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from mig_agent.adapters.ledger.lease_evidence import EvidentLease, evidence_of, read_evidence
from mig_agent.adapters.ledger.lease_evidence_writer import LeaseEvidenceWriter
from mig_agent.adapters.ledger.records import Change, EndLease, PutBootId, PutInstance, PutLease, RenewLease
from mig_agent.adapters.ledger.store import LEDGER_FILE, Entry, Ledger
from mig_agent.core.errors import LedgerError
from mig_agent.core.model import (
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
    Slot,
)
from support.figures import Figure

HUNDREDS = int(os.environ.get("EVIDENCE_DAMAGES", "800"))
PATIENCE_SECONDS = 60.0
SLOTS = 5
GPU = GpuUuid("GPU-1")
PROFILE = Profile(
    id=19, name="1g.5gb", compute_slices=1, memory_slices=1, memory_mib=4864, placements=(Placement(6, 1),)
)


class Writing:
    """A record that is waited for."""

    def __init__(self, *changes: Change) -> None:
        self.record = changes
        self.done = threading.Event()


def settled(entries: Sequence[Entry], error: LedgerError | None) -> None:
    assert error is None
    for each in entries:
        assert isinstance(each, Writing)
        each.done.set()


def instance(slot: int) -> Instance:
    return Instance(
        slot=Slot(GPU, PROFILE, Placement(slot, 1)),
        generation=Generation(slot),
        state=InstanceState.LEASED,
        gpu_instance_id=slot,
        compute_instance_id=0,
        uuid=f"MIG-{slot}",
    )


def lease(number: int, slot: int) -> Lease:
    return Lease(
        id=LeaseId(f"lease-{number}"),
        request_id=RequestId(f"request-{number}"),
        holder=Holder(tenant=f"team {number}", name="alice", uid=1000 + number),
        instances=(Generation(slot),),
        created_at=float(number),
        reused=(False,),
        caller_id=CallerId("uid 1000"),
    )


def write(ledger: Ledger, *changes: Change) -> None:
    entry = Writing(*changes)
    ledger.submit(entry)
    assert entry.done.wait(PATIENCE_SECONDS)


def history(path: Path, leases: int) -> None:
    """Each instance goes from one holder to the next; left as by a kill."""
    ledger = Ledger.open(path)
    ledger.start(settled)
    write(ledger, PutBootId("boot"))
    for slot in range(SLOTS):
        write(ledger, PutInstance(instance(slot)))
    for number in range(leases):
        slot = number % SLOTS
        if number >= SLOTS:
            write(ledger, EndLease(LeaseId(f"lease-{number - SLOTS}"), 99.0, "released"))
        write(ledger, PutLease(lease(number, slot), "digest"))
        if number % 3 == 0:
            write(ledger, RenewLease(LeaseId(f"lease-{number}"), 1e12 + number))
    ledger.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / LEDGER_FILE
    history(path, 40)
    return evidence_of(path)


def known(path: Path) -> dict[LeaseId, EvidentLease]:
    evidence = read_evidence(path)
    return {} if evidence is None else {each.lease.id: each for each in evidence.recoverable}


def test_it_tells_the_live_leases_as_they_are(made: Path) -> None:
    there = known(made)
    assert set(there) == {f"lease-{number}" for number in range(35, 40)}
    for number in range(35, 40):
        each = there[LeaseId(f"lease-{number}")]
        assert each.lease.holder == lease(number, 0).holder
        assert each.lease.expires_at == (1e12 + number if number % 3 == 0 else None)
        assert (set(each.uuids), each.boot_id) == ({f"MIG-{number % SLOTS}"}, "boot")


def test_random_damage_never_makes_a_lease(made: Path, tmp_path: Path, figure: Figure) -> None:
    """Bits and bytes flipped, cut, torn, zeroed; lines lost, doubled and exchanged; one to three of them."""
    draw = random.Random(1112)  # noqa: S311 -- the same damage each time
    truth, whole, path = known(made), made.read_bytes(), tmp_path / "damaged"
    some = 0
    for number in range(HUNDREDS):
        data = whole
        done = []
        for _ in range(draw.randint(1, 3)):
            data, what = damaged(data, draw)
            done.append(what)
        path.write_bytes(data)
        found = known(path)
        assert found.items() <= truth.items(), (number, done)
        some += bool(found)
    assert some > HUNDREDS // 10
    figure("lease evidence damaged at random", HUNDREDS)


def damaged(data: bytes, draw: random.Random) -> tuple[bytes, str]:  # noqa: C901 -- a list of cases
    if len(data) < 2:
        return data, "nothing is left"
    kind = draw.choice(["bit", "bit", "byte", "block", "zeros", "cut", "longer", "line lost", "doubled", "exchanged"])
    at = draw.randrange(len(data))
    lines = data.splitlines(keepends=True)
    one, two = sorted((draw.randrange(len(lines)), draw.randrange(len(lines))))
    match kind:
        case "bit":
            data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        case "byte":
            data = data[:at] + draw.randbytes(1) + data[at + 1 :]
        case "block":
            new = draw.randbytes(draw.randint(1, 3000))
            data = data[:at] + new + data[at + len(new) :]
        case "zeros":
            length = min(draw.randint(1, 4096), len(data) - at)
            data = data[:at] + bytes(length) + data[at + length :]
        case "cut":
            data = data[:at]
        case "longer":
            data += draw.randbytes(draw.randint(1, 500))
        case "line lost":
            data = b"".join(lines[:one] + lines[two:])
        case "doubled":
            data = b"".join(lines[:two] + lines[one:])
        case "exchanged":
            lines[one], lines[two] = lines[two], lines[one]
            data = b"".join(lines)
    return data, f"{kind} {at} {one} {two}"


def test_it_does_not_grow_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mig_agent.adapters.ledger.lease_evidence_writer._LONG_BYTES", 20_000)
    path = tmp_path / LEDGER_FILE
    history(path, 600)
    assert evidence_of(path).stat().st_size < 100_000
    assert set(known(evidence_of(path))) == {f"lease-{number}" for number in range(595, 600)}


def test_one_that_is_removed_under_the_agent_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    ledger = Ledger.open(path)
    ledger.start(settled)
    write(ledger, PutBootId("boot"), PutInstance(instance(0)), PutLease(lease(0, 0), "digest"))
    evidence_of(path).unlink()
    for _ in range(600):  # until the log is folded in
        write(ledger, PutBootId("boot"))
    ledger.close()
    assert set(known(evidence_of(path))) == {"lease-0"}


def test_one_that_cannot_be_written_is_removed_rather_than_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / LEDGER_FILE
    ledger = Ledger.open(path)
    errors: list[LedgerError | None] = []

    def heard(entries: Sequence[Entry], error: LedgerError | None) -> None:
        errors.append(error)
        settled(entries, None)

    ledger.start(heard)
    write(ledger, PutBootId("boot"), PutInstance(instance(0)), PutLease(lease(0, 0), "digest"))
    real, descriptor = os.pwrite, ledger._trail.descriptor

    def full(file: int, data: bytes, offset: int) -> int:
        return real(file, data[:5], offset) if file == descriptor else real(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        write(ledger, EndLease(LeaseId("lease-0"), 1.0, "released"))
        assert not evidence_of(path).exists()
        patch.setattr(LeaseEvidenceWriter, "rewrite", lambda self, _count, **_: self.give_up())
        write(ledger, PutLease(lease(1, 0), "digest"))
    assert not evidence_of(path).exists()
    write(ledger, RenewLease(LeaseId("lease-1"), 1.0))
    ledger.close()
    assert errors == [None] * len(errors)  # no commit failed for it
    assert set(known(evidence_of(path))) == {"lease-1"}


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {faults!r}]
import test_lease_evidence as made
write, left = os.pwrite, [int(sys.argv[2])]
def killed(*arguments):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
os.pwrite = killed
made.history(Path(sys.argv[1]), 7)
"""


@pytest.mark.parametrize("after", range(1, 46, 4))
def test_killed_at_a_write_it_lacks_at_most_the_last_commit(tmp_path: Path, after: int) -> None:
    path = tmp_path / LEDGER_FILE
    here = Path(__file__).parent
    script = KILLED.format(tests=str(here.parent), faults=str(here))
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(after)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    told = set(known(evidence_of(path)))
    ledger = Ledger.open(path)
    live = {each.lease.id for each in ledger.contents.leases if each.ended_at is None}
    ledger.close()
    assert len(told ^ live) <= 1
    assert set(known(evidence_of(path))) == live
