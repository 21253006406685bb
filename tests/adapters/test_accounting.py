"""Accounting in the ledger: what SQL sums up is what the core says, and a ledger of before has a place for it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.adapters.ledger.accounting import AddAccounting, TrimAccounting, read_history, read_uses, uses_of
from mig_agent.adapters.ledger.records import PutLease
from mig_agent.adapters.ledger.schema import PATCHES, prepare
from mig_agent.adapters.ledger.store import LEDGER_FILE, Ledger
from mig_agent.adapters.ledger.verification import make_ledger
from mig_agent.core.accounting import (
    AccountedDevice,
    AccountedUse,
    By,
    LeaseAccount,
    Peak,
    Period,
    Reader,
    Use,
    grouped,
    key_of,
)
from mig_agent.core.model import Generation, Holder, Lease, LeaseId, RequestId, Want
from support.ledgers import rewritten

MOST = 1000
MOMENT = st.integers(0, 1000).map(float)
DEVICES = tuple(
    AccountedDevice(profile=name, model="NVIDIA A30", memory_mib=mib, slices=slices, want=Want(memory_bytes=mib << 20))
    for name, mib, slices in (("1g.6gb", 5952, 1), ("2g.12gb", 12032, 2))
)
PEAK = st.one_of(st.none(), st.builds(Peak, used_mib=st.integers(0, 5000), samples=st.integers(1, 9)))


@st.composite
def accounted(draw: st.DrawFn) -> tuple[Lease, LeaseAccount, tuple[Peak | None, ...], float]:
    asked, granted, ended = sorted(draw(st.tuples(MOMENT, MOMENT, MOMENT)))
    user = draw(st.sampled_from(["alice", "bob"]))
    devices = tuple(draw(st.lists(st.sampled_from(DEVICES), min_size=1, max_size=3)))
    lease = Lease(
        id=LeaseId(f"lease-{draw(st.integers(0, 10**12))}"),
        request_id=RequestId("r"),
        holder=Holder(
            tenant=draw(st.sampled_from(["a", "b"])),
            name=f"{user} ({draw(st.sampled_from(['x', 'y']))})",
            uid=draw(st.sampled_from([None, 1000, 1001])),
        ),
        instances=tuple(Generation(each) for each in range(len(devices))),
        created_at=granted,
    )
    known = draw(st.booleans())
    account = LeaseAccount(user=user, asked_at=asked if known else None, priority=3, gpus=("0",), devices=devices)
    return lease, account, tuple(draw(PEAK) for _ in devices), ended


def executed(connection: sqlite3.Connection, changes: Sequence[AddAccounting | TrimAccounting]) -> None:
    for change in changes:
        for sql, values in change.statements():
            connection.execute(sql, values)


def database(leases: Sequence[tuple[Lease, LeaseAccount, tuple[Peak | None, ...], float]]) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    prepare(connection)
    executed(
        connection,
        [
            AddAccounting(lease=lease, account=account, peaks=peaks, ended_at=ended, total=lease.holder.tenant)
            for lease, account, peaks, ended in leases
        ],
    )
    return connection


def rows_of(uses: Sequence[tuple[str, Use]]) -> dict[str, list[object]]:
    return {
        key: [use.leases, use.devices, *(pytest.approx(each, abs=1e-6) for each in numbers(use))]
        for key, use in grouped(uses, most=MOST).items()
        if use.devices or use.waited_seconds
    }


def numbers(use: Use) -> tuple[float, ...]:
    return (
        use.memory_mib_seconds,
        use.slice_seconds,
        use.waited_seconds,
        use.measured_mib_seconds,
        use.peak_mib_seconds,
    )


@settings(max_examples=40)
@given(
    leases=st.lists(accounted(), max_size=8, unique_by=lambda each: each[0].id),
    edges=st.tuples(MOMENT, MOMENT).map(sorted),
    by=st.sampled_from(By),
    reader=st.sampled_from(
        [Reader(everything=True), Reader(uid=1000, user="alice"), Reader(user="bob"), Reader(user=""), Reader(uid=7)]
    ),
)
def test_sql_sums_up_what_the_core_does(
    leases: list[tuple[Lease, LeaseAccount, tuple[Peak | None, ...], float]],
    edges: list[float],
    by: By,
    reader: Reader,
) -> None:
    period = Period(*edges)
    uses = [use for each in leases for use in uses_of(*each)]
    with closing(database(leases)) as connection:
        found, _ = read_uses(connection, period, by, reader, ())
        assert sorted(read_history(connection, 0.0, MOST, ()), key=order) == sorted(uses, key=order)
        without = [lease.id for lease, *_ in leases]
        assert read_uses(connection, period, by, reader, without) == ([], None)
    expected = [(key_of(use, by, reader), use.within(period)) for use in uses]
    assert {
        key: [use.leases, use.devices, *numbers(use)]
        for key, use in grouped(found, most=MOST).items()
        if use.devices or use.waited_seconds
    } == rows_of(expected)


@settings(max_examples=25)
@given(leases=st.lists(accounted(), max_size=12, unique_by=lambda each: each[0].id), most=st.integers(0, 5))
def test_merging_keeps_the_sums(
    leases: list[tuple[Lease, LeaseAccount, tuple[Peak | None, ...], float]], most: int
) -> None:
    whole, admin = Period(-1.0, 2000.0), Reader(everything=True)
    with closing(database(leases)) as connection:
        before, _ = read_uses(connection, whole, By.TENANT, admin, ())
        executed(connection, [TrimAccounting(before=-1.0, most=most)])
        after, _ = read_uses(connection, whole, By.TENANT, admin, ())
        # A wait before the first grant of what was merged is spread over what was merged; the rest is as it was.
        assert {key: [use.leases, use.devices, *numbers(use)] for key, use in after} == rows_of(before)
        kept = connection.execute("SELECT count(*) FROM accounting WHERE NOT merged").fetchone()[0]
    assert kept <= most


def order(use: AccountedUse) -> tuple[str, int]:
    return (use.lease, use.number)


def test_a_ledger_of_the_version_before_is_upgraded_with_its_leases(tmp_path: Path) -> None:
    make_ledger(tmp_path / LEDGER_FILE, "", PATCHES[:1])
    with rewritten(tmp_path / LEDGER_FILE) as connection:
        connection.execute(
            "INSERT INTO lease (id, request_id, asker, digest, tenant, holder, created_at, owner, devices)"
            " VALUES ('l', 'r', 'uid 1', 'd', 't', 'alice', 5.0, json_array('token'), '[[1, false]]')"
        )
    ledger = Ledger.open(tmp_path / LEDGER_FILE)
    ledger.close()
    (found,) = ledger.contents.leases
    assert (found.lease.id, found.account, found.peaks) == ("l", LeaseAccount(), ())
    assert not ledger.contents.is_accounting


def test_an_account_is_read_as_it_was_written(tmp_path: Path) -> None:
    account = LeaseAccount(user="alice", asked_at=1.5, priority=-1, gpus=("0", "GPU-1"), devices=DEVICES)
    lease = Lease(
        id=LeaseId("l"),
        request_id=RequestId("r"),
        holder=Holder(),
        instances=(Generation(1),),
        created_at=2.0,
        reused=(True,),
    )
    path = tmp_path / LEDGER_FILE
    Ledger.open(path).close()
    with rewritten(path) as connection:
        for sql, values in PutLease(lease, "d", account).statements():
            connection.execute(sql, values)
    ledger = Ledger.open(path)
    ledger.close()
    assert ledger.contents.leases[0].account == account
