"""The ledger: what is committed is there after any end, what is not is not, and no version reads what it cannot."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mig_agent.adapters.catalog_files import load
from mig_agent.adapters.ledger import reader
from mig_agent.adapters.ledger import store as ledger_module
from mig_agent.adapters.ledger.gpu_cache import gpu_of, text_of
from mig_agent.adapters.ledger.reader import Contents, Cordon
from mig_agent.adapters.ledger.records import (
    AddEvent,
    BindLease,
    Change,
    DropCordon,
    DropInstance,
    DropPause,
    EndLease,
    ForgetLeases,
    PutBootId,
    PutCordon,
    PutGpus,
    PutInstance,
    PutLastGeneration,
    PutLease,
    PutPause,
    Record,
    RenewLease,
)
from mig_agent.adapters.ledger.schema import PATCHES, Patch
from mig_agent.adapters.ledger.store import LEDGER_FILE, Entry, Ledger
from mig_agent.adapters.ledger.verification import make_ledger
from mig_agent.core.errors import LedgerError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import (
    CallerId,
    Generation,
    GpuUuid,
    Holder,
    Instance,
    InstanceState,
    Lease,
    LeaseId,
    MigMode,
    Placement,
    Profile,
    RequestId,
    RequestKey,
    Slot,
)
from mig_agent.core.observation import ObservedGpu
from mig_agent.core.owner import KubeletDevice, Pod, PodOwner, ProcessOwner, StreamOwner
from mig_agent.core.planning.shares import share_profile
from mig_agent.core.shares import Enforcement

PATIENCE_SECONDS = 30.0
GPU = GpuUuid("GPU-1")
PROFILE = Profile(
    id=19, name="1g.5gb", compute_slices=1, memory_slices=1, memory_mib=4864, placements=(Placement(6, 1),)
)


@dataclass
class Written:
    """A record, and what became of it."""

    record: Record
    done: threading.Event = field(default_factory=threading.Event)
    error: LedgerError | None = None


class Writer:
    """A ledger whose writes can be waited for."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger.open(folder / LEDGER_FILE)
        self.batches: list[list[Written]] = []
        self.ledger.start(self.settled)

    def settled(self, entries: Sequence[Entry], error: LedgerError | None) -> None:
        written = [entry for entry in entries if isinstance(entry, Written)]
        self.batches.append(written)
        for each in written:
            each.error = error
            each.done.set()

    def submit(self, *changes: Change) -> Written:
        written = Written(changes)
        self.ledger.submit(written)
        return written

    def write(self, *changes: Change) -> None:
        written = self.submit(*changes)
        assert written.done.wait(PATIENCE_SECONDS)
        if written.error is not None:
            raise written.error


def contents(folder: Path) -> Contents:
    """As a new process finds them."""
    ledger = Ledger.open(folder / LEDGER_FILE)
    ledger.close()
    return ledger.contents


def instance(generation: int, state: InstanceState = InstanceState.IDLE) -> Instance:
    return Instance(
        slot=Slot(GPU, PROFILE, Placement(6, 1)),
        generation=Generation(generation),
        state=state,
        gpu_instance_id=13,
        compute_instance_id=0,
        uuid="MIG-1",
        since=5.0,
    )


def lease(number: int, *generations: int) -> Lease:
    return Lease(
        id=LeaseId(f"lease-{number}"),
        request_id=RequestId(f"request-{number}"),
        holder=Holder(tenant="team", name="alice", uid=1000, pid=77),
        instances=tuple(map(Generation, generations)),
        created_at=10.0 + number,
        caller_id=CallerId("name slurm"),
        expires_at=99.0,
        owner=StreamOwner(process=ProcessOwner(pid=4711, started=123456)),
        reused=tuple(generation % 2 == 0 for generation in generations),
    )


def pods_lease(number: int, *generations: int) -> Lease:
    devices = tuple(
        KubeletDevice(resource="nvidia.com/mig-1g.5gb", id=f"mig-agent-{each}") for each in range(len(generations))
    )
    pod = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
    holder = Holder(tenant="team", name=str(pod))
    return replace(lease(number, *generations), holder=holder, owner=PodOwner(pod=pod, devices=devices, is_bound=True))


def key(request: str, caller_id: str = "name slurm") -> RequestKey:
    return RequestKey(CallerId(caller_id), RequestId(request))


def event(number: int, gpu_index: int = 0) -> Event:
    return Event(
        kind=EventKind.LEASE_GRANTED,
        at=float(number),
        revision=number,
        message=f"event {number}",
        gpu=GpuUuid(f"GPU-{gpu_index}"),
        gpu_index=gpu_index,
        lease=LeaseId("lease-1"),
        generation=Generation(3),
        holder="alice",
        data={"reason": "example", "count": 3, "share": 0.5, "yes": True},
    )


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(
        PutBootId("boot-1"),
        PutInstance(instance(1)),
        PutInstance(instance(2, InstanceState.CREATING)),
        PutInstance(instance(3, InstanceState.DESTROYING)),
        PutInstance(instance(4, InstanceState.BLOCKED)),
        PutLease(lease(1, 1, 4), "digest"),
        PutCordon(GPU, "fan", 7.0),
        AddEvent(event(41)),
    )
    writer.ledger.close()
    found = contents(tmp_path)
    assert found.boot_id == "boot-1"
    states = [(each.generation, each.state.value, each.lease) for each in found.instances]
    assert states == [
        (1, "leased", "lease-1"),
        (2, "creating", None),
        (3, "destroying", None),
        (4, "leased", "lease-1"),
    ]
    assert found.instances[0].slot == Slot(GPU, PROFILE, Placement(6, 1))
    assert (found.instances[0].gpu_instance_id, found.instances[0].compute_instance_id) == (13, 0)
    assert [each.lease for each in found.leases] == [lease(1, 1, 4)]
    assert (found.leases[0].digest, found.leases[0].ended_at) == ("digest", None)
    assert found.cordons == {GPU: Cordon(reason="fan", since=7.0)}
    assert (found.last_generation, found.last_revision) == (4, 41)


def test_what_changes_is_changed(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutInstance(instance(1, InstanceState.CREATING)), PutInstance(instance(2)), PutCordon(GPU, "a", 1.0))
    writer.write(PutInstance(replace(instance(1), uuid="MIG-9", gpu_instance_id=7)), PutCordon(GPU, "b", 2.0))
    writer.write(PutLease(lease(1, 1), "d1"), PutLease(lease(2, 2), "d2"))
    writer.write(RenewLease(LeaseId("lease-1"), None), EndLease(LeaseId("lease-2"), 50.0, "released"))
    writer.write(
        EndLease(LeaseId("lease-2"), 60.0, "again"), DropInstance(Generation(2)), PutLastGeneration(Generation(8))
    )
    writer.ledger.close()
    found = contents(tmp_path)
    assert [(each.uuid, each.gpu_instance_id, each.state.value) for each in found.instances] == [("MIG-9", 7, "leased")]
    assert [(each.lease.id, each.ended_at, each.end_reason) for each in found.leases] == [
        ("lease-1", None, ""),
        ("lease-2", 50.0, "released"),
    ]
    assert found.leases[0].lease.expires_at is None
    assert found.cordons[GPU].reason == "b"
    assert found.last_generation == 8


def test_what_is_dropped_is_gone(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutCordon(GPU, "a", 1.0), PutLease(lease(1, 1), "d"), EndLease(LeaseId("lease-1"), 50.0, "released"))
    writer.write(PutLease(lease(2, 2), "d"), DropCordon(GPU), ForgetLeases(51.0))
    writer.ledger.close()
    found = contents(tmp_path)
    assert [each.lease.id for each in found.leases] == ["lease-2"]
    assert found.cordons == {}
    reader = Ledger.open(tmp_path / LEDGER_FILE)
    assert reader.find_request(key("request-1")) is None
    standing = reader.find_request(key("request-2"))
    assert standing is not None
    assert standing.lease == lease(2, 2)
    reader.close()


def test_of_very_many_that_ended_the_oldest_are_forgotten(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number in range(1, 7):
        writer.write(PutLease(lease(number, number), "d"))
    for number in (3, 1, 5, 2):
        writer.write(EndLease(LeaseId(f"lease-{number}"), 50.0 + number, "released"))
    writer.write(ForgetLeases(0.0, most=4))
    assert writer.ledger.find_request(key("request-1"))
    writer.write(ForgetLeases(0.0, most=2))
    writer.ledger.close()
    assert [each.lease.id for each in contents(tmp_path).leases] == ["lease-4", "lease-6", "lease-3", "lease-5"]


def test_what_has_ended_is_found_without_reading_all_leases(tmp_path: Path) -> None:
    """There may be a million of them, and commits wait meanwhile."""
    writer = Writer(tmp_path)
    writer.ledger.close()
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as connection:
        for statement, values in (*ForgetLeases(1.0).statements(), (reader._ACTIVE, ())):
            plans = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", values)]
            assert [each for each in plans if each.startswith("SCAN") and "INDEX" not in each] == []


def test_generations_are_not_forgotten_with_their_instances(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutInstance(instance(9)), PutLastGeneration(Generation(9)))
    writer.write(DropInstance(Generation(9)))
    writer.ledger.close()
    assert contents(tmp_path).last_generation == 9


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutLease(lease(1, 1), "d"))
    with pytest.raises(LedgerError, match="cannot write the ledger"):
        writer.write(PutCordon(GPU, "half", 1.0), PutLease(lease(1, 1), "the same again"))
    with pytest.raises(LedgerError):
        writer.write(PutCordon(GPU, "half", 1.0), PutLease(replace(lease(2, 1), holder=Holder(uid=2**70)), "too large"))
    writer.write(PutBootId("it goes on"))
    writer.ledger.close()
    found = contents(tmp_path)
    assert found.cordons == {}
    assert [each.lease.id for each in found.leases] == ["lease-1"]
    assert found.boot_id == "it goes on"


def test_what_gathers_is_committed_together_and_in_order(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    original, gate, entered = writer.ledger._commit, threading.Event(), threading.Event()

    def slow(batch: Sequence[Entry]) -> None:
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)
        original(batch)

    writer.ledger._commit = slow  # type: ignore[method-assign] # a slow disk
    first = writer.submit(PutBootId("0"))
    assert entered.wait(PATIENCE_SECONDS)
    later = [writer.submit(PutBootId(str(number))) for number in range(1, 20)]
    gate.set()
    assert later[-1].done.wait(PATIENCE_SECONDS)
    assert writer.batches == [[first], later]
    writer.ledger.close()
    assert contents(tmp_path).boot_id == "19"


def test_a_failed_commit_takes_all_behind_it_along_newest_first(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    original, gate, entered = writer.ledger._commit, threading.Event(), threading.Event()

    def fails(_batch: Sequence[Entry]) -> None:
        entered.set()
        assert gate.wait(PATIENCE_SECONDS)
        raise sqlite3.OperationalError("database or disk is full")

    writer.ledger._commit = fails  # type: ignore[method-assign, assignment] # a full disk
    entries = [writer.submit(PutBootId("0"))]
    assert entered.wait(PATIENCE_SECONDS)
    entries += [writer.submit(PutBootId(str(number))) for number in range(1, 4)]
    gate.set()
    for each in entries:
        assert each.done.wait(PATIENCE_SECONDS)
        assert "disk is full" in str(each.error)
    assert writer.batches == [entries[::-1]]
    writer.ledger._commit = original  # type: ignore[method-assign] # there is room again
    writer.write(PutBootId("after"))
    writer.ledger.close()
    assert contents(tmp_path).boot_id == "after"


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutLease(lease(1, 1), "d"))
    connection = writer.ledger._connection
    assert connection is not None
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="full"):
        writer.write(*(PutLease(lease(number, 1), "d" * 500) for number in range(2, 400)))
    writer.write(PutBootId("with room again"))  # by a fresh connection, which has no limit
    writer.ledger.close()
    assert contents(tmp_path).leases[0].lease.id == "lease-1"


def test_events_are_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_TRIM_EVERY", 10)
    ledger = Ledger.open(tmp_path / LEDGER_FILE, keep_events=50)
    written: list[Entry] = []
    ledger.start(lambda entries, _error: written.extend(entries))
    for number in range(300):
        ledger.submit(Written((AddEvent(event(number)),)))
    ledger.close()
    assert len(written) == 300
    reader = Ledger.open(tmp_path / LEDGER_FILE)
    kept = [each.revision for each in reader.events(0.0)]
    reader.close()
    assert kept == list(range(300 - len(kept), 300))
    assert 50 <= len(kept) <= 60


def test_events_are_found_by_time_and_gpu(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number in range(10):
        writer.write(AddEvent(event(number, gpu_index=number % 2)))
    ledger = writer.ledger
    assert ledger.events(0.0)[3] == event(3, gpu_index=1)
    assert [each.revision for each in ledger.events(6.0)] == [6, 7, 8, 9]
    assert [each.revision for each in ledger.events(0.0, "1")] == [1, 3, 5, 7, 9]
    assert [each.revision for each in ledger.events(0.0, "GPU-0", limit=2)] == [6, 8]
    ledger.close()


def test_a_kind_of_event_that_a_newer_version_wrote_is_left_out(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(AddEvent(event(1)))
    writer.ledger.close()
    with sqlite3.connect(tmp_path / LEDGER_FILE) as connection:
        connection.execute("UPDATE event SET kind = 'of-the-future'")
    connection.close()
    reader = Ledger.open(tmp_path / LEDGER_FILE)
    assert reader.events(0.0) == ()
    reader.close()


def test_only_the_latest_ended_leases_are_read_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path)
    for number in range(8):
        writer.write(PutLease(lease(number, 1), "d"), EndLease(LeaseId(f"lease-{number}"), 100.0 + number, "released"))
    writer.ledger.close()
    monkeypatch.setattr(ledger_module, "MOST_ENDED_IN_MEMORY", 3)
    reader = Ledger.open(tmp_path / LEDGER_FILE)
    assert [each.lease.id for each in reader.contents.leases] == ["lease-5", "lease-6", "lease-7"]
    assert reader.contents.more_ended
    old = reader.find_request(key("request-1"))
    assert old is not None
    assert (old.lease.id, old.end_reason) == ("lease-1", "released")
    reader.close()


# Files that are not as they should be


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    Ledger.open(tmp_path / LEDGER_FILE).close()
    assert (tmp_path / LEDGER_FILE).stat().st_mode & 0o077 == 0


def test_a_damaged_ledger_is_set_aside_and_kept(tmp_path: Path) -> None:
    path = tmp_path / LEDGER_FILE
    for number, rubbish in enumerate((b"rubbish " * 1000, b"more rubbish " * 1000), 1):
        path.write_bytes(rubbish)
        ledger = Ledger.open(path)
        aside = tmp_path / f"{LEDGER_FILE}.damaged-{number}"
        doubt = ledger.contents.doubt
        assert doubt is not None
        assert doubt.kept_as == str(aside)
        assert aside.read_bytes() == rubbish
        assert not ledger.contents.leases
        assert not ledger.contents.instances
        ledger.close()


def test_a_ledger_damaged_in_the_middle_is_noticed(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for number in range(200):
        writer.write(PutLease(lease(number, 1), "d" * 100))
    writer.ledger.close()
    path = tmp_path / LEDGER_FILE
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(path.read_bytes())
    data[8192:-4096] = os.urandom(len(data) - 8192 - 4096)
    path.write_bytes(data)
    ledger = Ledger.open(path)
    assert ledger.contents.doubt is not None
    ledger.close()


def test_another_programs_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / LEDGER_FILE) as connection:
        connection.execute("CREATE TABLE birds (name TEXT)")
    connection.close()
    with pytest.raises(LedgerError, match="another program's database"):
        Ledger.open(tmp_path / LEDGER_FILE)


def test_a_place_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        Ledger.open(tmp_path / "no such folder" / LEDGER_FILE)


def test_a_pods_lease_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutLease(pods_lease(1, 3, 4), "d"), PutLease(lease(2, 5), "d"))
    assert [each.lease for each in contents(tmp_path).leases] == [pods_lease(1, 3, 4), lease(2, 5)]
    found = writer.ledger.find_request(key("request-1"))
    assert found is not None
    assert found.lease == pods_lease(1, 3, 4)
    writer.ledger.close()


def test_a_pause_is_kept_until_it_is_taken_back(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutPause("by root"))
    assert contents(tmp_path).paused == "by root"
    writer.write(PutPause("by root: driver"))
    assert contents(tmp_path).paused == "by root: driver"
    writer.write(DropPause())
    writer.ledger.close()
    assert contents(tmp_path).paused == ""


def test_gpus_are_kept_as_they_were_last_known(tmp_path: Path) -> None:
    known = {
        observed.uuid: observed
        for number, layout in enumerate([None, *(entry.layout for entry in load().entries)])
        for observed in [
            ObservedGpu(
                index=number,
                uuid=GpuUuid(f"GPU-{number}"),
                minor=number + 1,
                model="A model" if layout is None else layout.model,
                memory_mib=1000 if layout is None else layout.memory_mib,
                mode=MigMode(capable=bool(number), current=bool(number), pending=number % 2 == 1),
                layout=layout,
            )
        ]
    }
    writer = Writer(tmp_path)
    writer.write(PutGpus({GpuUuid("GPU-old"): "{}"}))
    writer.write(PutGpus({uuid: text_of(gpu) for uuid, gpu in known.items()}))
    writer.ledger.close()
    found = contents(tmp_path).gpus
    assert {uuid: gpu_of(uuid, text) for uuid, text in found.items()} == known
    for damaged in ("", "{}", "[]", '{"index": 1, "mode": [1, 2]}'):
        with pytest.raises((ValueError, KeyError, TypeError)):
            gpu_of("GPU-1", damaged)


# Versions

NEXT = PATCHES[-1].number + 1
ADDITIVE = Patch(
    number=NEXT, least_reader=1, statements=("ALTER TABLE lease ADD COLUMN colour TEXT NOT NULL DEFAULT ''",)
)
BREAKING = Patch(number=NEXT + 1, least_reader=NEXT + 1, statements=("CREATE TABLE fence (gpu TEXT)",))


def test_an_upgrade_keeps_everything(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.write(PutLease(lease(1, 1), "d"), PutInstance(instance(1)))
    writer.ledger.close()
    newer = Ledger.open(tmp_path / LEDGER_FILE, patches=(*PATCHES, ADDITIVE))
    assert newer.contents.leases[0].lease == lease(1, 1)
    newer.close()


def test_a_ledger_from_before_shares_opens_and_a_share_keeps_older_versions_out(tmp_path: Path) -> None:
    before = PATCHES[:-1]
    make_ledger(tmp_path / LEDGER_FILE, "", before)
    writer = Writer(tmp_path)
    share = replace(
        instance(1), slot=Slot(GPU, share_profile(4096), Placement(0, 1)), enforced_by=Enforcement.MPS, uuid=GPU
    )
    writer.write(PutInstance(instance(2)))
    writer.ledger.close()
    Ledger.open(tmp_path / LEDGER_FILE, patches=before).close()
    writer = Writer(tmp_path)
    writer.write(PutInstance(share))
    writer.ledger.close()
    found = {each.generation: each for each in contents(tmp_path).instances}
    assert found[Generation(1)].enforced_by is Enforcement.MPS
    assert found[Generation(1)].slot == share.slot
    assert found[Generation(2)].enforced_by is None
    with pytest.raises(LedgerError, match="a newer version of the agent wrote it"):
        Ledger.open(tmp_path / LEDGER_FILE, patches=before)


def test_the_version_before_can_work_with_an_additive_patch(tmp_path: Path) -> None:
    Ledger.open(tmp_path / LEDGER_FILE, patches=(*PATCHES, ADDITIVE)).close()
    writer = Writer(tmp_path)
    writer.write(PutLease(lease(1, 1), "d"))
    writer.ledger.close()
    again = Ledger.open(tmp_path / LEDGER_FILE, patches=(*PATCHES, ADDITIVE))
    assert again.contents.leases[0].lease == lease(1, 1)
    again.close()


def asked_by(number: int, caller_id: str) -> Lease:
    """All under one request id."""
    return replace(lease(number, number), request_id=RequestId("7f2c-1"), caller_id=CallerId(caller_id))


def test_of_two_callers_with_one_id_each_has_its_own_lease(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    slurm, kai, alice = asked_by(1, "name slurm"), asked_by(2, "name kai"), asked_by(3, "uid 1000")
    for each in (slurm, kai, alice):
        writer.write(PutLease(each, "d"))
    writer.write(EndLease(kai.id, 50.0, "released"))
    for each in (slurm, kai, alice):
        found = writer.ledger.find_request(each.request_key)
        assert found is not None
        assert (found.lease, found.ended_at) == (each, 50.0 if each is kai else None)
    assert writer.ledger.find_request(key("7f2c-1", "name bob")) is None
    writer.ledger.close()
    assert [each.lease for each in contents(tmp_path).leases] == [slurm, alice, kai]


def test_devices_are_handed_over_and_a_uid_is_learnt(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    whole = pods_lease(1, 3)
    reserved = PodOwner(pod=Pod(namespace="team-a", name="train-7f2c"))
    writer.write(PutLease(replace(whole, owner=reserved, expires_at=99.0), "d"))
    writer.write(BindLease(whole))
    writer.ledger.close()
    assert contents(tmp_path).leases[0].lease == replace(whole, expires_at=None)


def test_a_newer_ledger_is_refused_in_words_and_left_as_it_is(tmp_path: Path) -> None:
    Ledger.open(tmp_path / LEDGER_FILE, patches=(*PATCHES, ADDITIVE, BREAKING)).close()
    before = (tmp_path / LEDGER_FILE).read_bytes()
    with pytest.raises(LedgerError, match="a newer version of the agent wrote it"):
        Ledger.open(tmp_path / LEDGER_FILE)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before


def test_a_ledger_of_a_development_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """Set aside as damaged it would cost all its leases."""
    make_ledger(tmp_path / LEDGER_FILE, "", (replace(PATCHES[0], number=1, least_reader=1),))
    before = (tmp_path / LEDGER_FILE).read_bytes()
    with pytest.raises(LedgerError, match="a development version wrote it"):
        Ledger.open(tmp_path / LEDGER_FILE)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before


def test_a_patch_that_fails_leaves_the_ledger_as_it_was(tmp_path: Path) -> None:
    Ledger.open(tmp_path / LEDGER_FILE).close()
    broken = Patch(number=NEXT, least_reader=NEXT, statements=("CREATE TABLE extra (a)", "NOT SQL"))
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        Ledger.open(tmp_path / LEDGER_FILE, patches=(*PATCHES, broken))
    with sqlite3.connect(tmp_path / LEDGER_FILE) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'extra'").fetchone() == (0,)
    connection.close()
    writer = Writer(tmp_path)
    writer.write(PutBootId("fine"))
    writer.ledger.close()


def test_patches_are_numbered_one_after_the_other() -> None:
    assert [patch.number for patch in PATCHES] == list(range(2, len(PATCHES) + 2))
    assert all(patch.least_reader <= patch.number for patch in PATCHES)


# The end of the process


@pytest.mark.parametrize("point", ["before-commit", "after-commit"])
def test_a_process_killed_at_a_commit_has_written_it_or_has_not(tmp_path: Path, point: str) -> None:
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_ledger import Writer, PutBootId
writer = Writer(Path({str(tmp_path)!r}))
for number in range(1, 10):
    writer.write(PutBootId(str(number)))
    print(number, flush=True)
"""
    environment = {**os.environ, "MIG_AGENT_CRASH_AT": f"{point}:5"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.split() == ["1", "2", "3", "4"]
    assert contents(tmp_path).boot_id == ("4" if point == "before-commit" else "5")


def test_a_drain_is_of_the_cordon_that_it_was_recorded_with(tmp_path: Path) -> None:
    """A version that knows no drains may take the cordon away and make another one in between."""
    writer = Writer(tmp_path)
    writer.write(PutCordon(GPU, "fan", 7.0, draining=True, drain_until=99.5))
    writer.ledger.close()
    drained = Cordon(reason="fan", since=7.0, draining=True, drain_until=99.5)
    assert contents(tmp_path).cordons == {GPU: drained}
    writer = Writer(tmp_path)
    writer.write(PutCordon(GPU, "dust", 8.0, draining=True))
    writer.ledger.close()
    assert contents(tmp_path).cordons == {GPU: Cordon(reason="dust", since=8.0, draining=True)}
    writer = Writer(tmp_path)
    writer.write(DropCordon(GPU))
    writer.write(PutCordon(GPU, "mice", 9.0))
    writer.ledger.close()
    assert contents(tmp_path).cordons == {GPU: Cordon(reason="mice", since=9.0)}
    assert reader._cordon("rats", 10.0, "[9.0, 99.5]") == Cordon(reason="rats", since=10.0)
