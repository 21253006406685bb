"""Who used what: the sums over all tenants are what the node had leased, to the second, whatever was killed."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mig_agent.core.accounting import OTHERS, Account, By, Use
from mig_agent.core.advice import Verdict
from mig_agent.core.errors import RefusedError
from mig_agent.core.model import Holder, InstanceState
from mig_agent.core.observation import InstanceUsage
from mig_agent.engine import accounting as accounting_module
from mig_agent.engine.callers import Caller
from mig_agent.engine.peaks import PeakSampler
from mig_agent.engine.results import Granted
from support.clock import VirtualClock
from support.engine import ADMIN, ANYBODY, Node, engine, killed, start

GPUS = "a100-40gb,a30"
HOUR = 3600.0
A_MOMENT = 4.0
"""In MiB seconds: a millisecond of the smallest device, for what the clock's floats round off."""
ALICE = Caller(name="alice", uid=1000)
BOB = Caller(name="bob", uid=1001)


async def account(
    node: Node, since: float = 0.0, until: float | None = None, *, by: By = By.TENANT, caller: Caller = ADMIN
) -> Account:
    return await node.manager.history.account(since, until, by, caller)


async def lease(node: Node, caller: Caller, want: str, name: str = "", tenant: str = "") -> Granted:
    holder = Holder(name=f"{caller} ({name})" if name else str(caller), tenant=tenant or str(caller), uid=caller.uid)
    granted = await node.manager.acquire(node.request(want, holder=holder, wait_seconds=1e6), caller)
    node.manager.delivered(granted.lease.id)
    return granted


async def sampled(node: Node, times: int = 1) -> None:
    for _ in range(times):
        await PeakSampler(node.manager._context).sample()


async def test_a_lease_counts_by_its_part_in_the_window(tmp_path: Path) -> None:
    async with engine(tmp_path, GPUS) as node:
        began = node.clock.now()
        granted = await lease(node, ALICE, "1g.5gb", "train")
        mib = granted.devices[0].memory_mib
        node.clock.advance(3 * HOUR)
        active = await account(node)
        await node.release(granted)
        node.clock.advance(HOUR)
        ended = await account(node)
        for each in (active, ended):
            assert each.rows["alice"] == Use(
                leases=1, devices=1, memory_mib_seconds=mib * 3 * HOUR, slice_seconds=3 * HOUR
            )
        part = await account(node, began + HOUR, began + 2 * HOUR, by=By.PROFILE)
        assert part.rows["1g.5gb"].memory_mib_seconds == mib * HOUR
        assert not (await account(node, began - HOUR, began)).rows
        assert not (await account(node, began + 3.5 * HOUR)).rows


async def test_what_was_waited_counts_from_asking(tmp_path: Path) -> None:
    async with engine(tmp_path, "a30") as node:
        began = node.clock.now()
        first = await lease(node, ALICE, "4g.24gb")
        waiting = node.start(lease(node, BOB, "4g.24gb"))
        await node.until(lambda: node.manager.snapshot.queue)
        node.clock.advance(2 * HOUR)
        await node.release(first)
        second = await waiting
        rows = (await account(node)).rows
        assert (rows["alice"].waited_seconds, rows["bob"].waited_seconds) == (0, 2 * HOUR)
        await node.release(second)
        assert (await account(node)).rows["bob"].waited_seconds == 2 * HOUR
        assert (await account(node, began + HOUR, began + 1.5 * HOUR)).rows["bob"].waited_seconds == HOUR / 2


async def test_a_peak_that_was_never_measured_is_unknown_and_never_0(tmp_path: Path) -> None:
    async with engine(tmp_path, GPUS) as node:
        measured, unmeasured = await lease(node, ALICE, "1g.5gb"), await lease(node, BOB, "1g.5gb", tenant="other")
        first = node.where(measured)
        node.simulator.fail("nvmlDeviceGetMemoryInfo", 3, times=None)
        await sampled(node)
        assert not (await account(node)).total.measured_mib_seconds
        node.simulator.clear()
        await node.release(unmeasured)
        pid = node.simulator.occupy(first, used_mib=1500)
        await sampled(node)
        node.simulator.vacate(pid)
        await sampled(node)
        node.clock.advance(100.0)
        await node.release(measured)
        rows = (await account(node)).rows
        assert rows["alice"].peak_mib_seconds == pytest.approx(1500 * 100.0, rel=0.1)
        assert rows["alice"].measured_mib_seconds == rows["alice"].memory_mib_seconds
        assert rows["other"].measured_mib_seconds == 0


async def test_a_kill_costs_only_the_latest_samples(tmp_path: Path) -> None:
    node = await start(tmp_path, GPUS)
    granted = await lease(node, ALICE, "1g.5gb")
    node.simulator.occupy(node.where(granted), used_mib=1500)
    sampler = PeakSampler(node.manager._context)
    await sampler.sample()
    node.clock.advance(1000.0)
    await sampler.sample()
    await killed(node)
    async with engine(tmp_path, clock=VirtualClock(node.clock.now() + 1000.0)) as node:
        used = (await account(node)).rows["alice"]
        assert used.peak_mib_seconds == pytest.approx(1500 * 2000.0, rel=0.1)
        assert used.memory_mib_seconds == granted.devices[0].memory_mib * 2000.0


async def test_a_restart_keeps_all_samples(tmp_path: Path) -> None:
    node = await start(tmp_path, GPUS)
    granted = await lease(node, ALICE, "1g.5gb")
    node.simulator.occupy(node.where(granted), used_mib=1500)
    await sampled(node)
    await node.manager.close()
    async with engine(tmp_path, clock=VirtualClock(node.clock.now() + 10.0)) as node:
        used = (await account(node)).rows["alice"]
        assert used.peak_mib_seconds == pytest.approx(1500 * 10.0, rel=0.1)


async def test_names_of_others_are_not_shown(tmp_path: Path) -> None:
    async with engine(tmp_path, GPUS) as node:
        for each in (await lease(node, ALICE, "1g.5gb", "secret"), await lease(node, BOB, "1g.5gb", "train")):
            node.clock.advance(60.0)
            await node.release(each)
        await lease(node, ALICE, "1g.5gb", "later")
        node.clock.advance(60.0)
        assert set((await account(node, by=By.NAME, caller=BOB)).rows) == {"alice", "bob (train)"}
        assert set((await account(node, by=By.NAME)).rows) == {"alice (secret)", "alice (later)", "bob (train)"}
        for by in (By.USER, By.TENANT, By.PROFILE):
            assert (await account(node, by=by, caller=BOB)).rows == (await account(node, by=by)).rows
        assert {each.name for each in await node.manager.history.advise(0.0, "", BOB)} == {"bob (train)"}


async def test_a_large_history_is_merged_and_sums_stay(tmp_path: Path) -> None:
    async with engine(tmp_path, GPUS) as node:
        for number in range(12):
            granted = await lease(node, ALICE if number % 2 else BOB, "1g.5gb", f"run-{number}")
            node.clock.advance(60.0)
            await node.release(granted)
        before = await account(node)
        from mig_agent.adapters.ledger.accounting import TrimAccounting  # noqa: PLC0415 -- used here alone

        journal = node.manager._context.journal
        await journal.commit((TrimAccounting(before=0.0, most=4),))
        after = await account(node)
        assert after.rows == before.rows
        names = (await account(node, by=By.NAME)).rows
        assert set(names) == {"alice", "bob", *(f"{'alice' if n % 2 else 'bob'} (run-{n})" for n in range(8, 12))}
        assert after.complete_since == before.complete_since
        await journal.commit((TrimAccounting(before=0.0, most=4, most_merged=0),))
        cut = await account(node)
        assert cut.total.memory_mib_seconds == before.total.memory_mib_seconds / 3
        assert cut.complete_since is not None
        assert cut.complete_since > (before.complete_since or 0)
        await journal.commit((TrimAccounting(before=node.clock.now() + 1),))
        assert not (await account(node)).rows


async def test_counters_by_tenant_go_on_after_a_restart(tmp_path: Path) -> None:
    node = await start(tmp_path, GPUS)
    first = await lease(node, ALICE, "1g.5gb")
    second = await lease(node, BOB, "1g.5gb")
    mib = first.devices[0].memory_mib
    node.clock.advance(100.0)
    await node.release(first)
    node.clock.advance(100.0)
    await killed(node)
    async with engine(tmp_path, clock=VirtualClock(node.clock.now() + 100.0)) as node:
        totals = node.manager.published.tenants
        now = node.clock.now()
        assert totals["alice"].memory_mib_seconds(now) == mib * 100.0
        assert totals["bob"].memory_mib_seconds(now) == mib * 300.0
        await node.release(second)
        node.clock.advance(50.0)
        assert node.manager.published.tenants["bob"].memory_mib_seconds(node.clock.now()) == mib * 300.0
        assert node.manager.published.tenants["bob"].leases == 1


async def test_a_reading_from_before_the_grant_is_no_sample(tmp_path: Path) -> None:
    """It is of whoever had the instance before."""
    async with engine(tmp_path, "a30") as node:
        first = await lease(node, ALICE, "1g.6gb")
        accounting = node.manager._context.accounting
        before = accounting.leases
        reading = {first.devices[0].generation: InstanceUsage(memory_used_mib=5000, memory_total_mib=5952)}
        await node.release(first)
        again = await lease(node, BOB, "1g.6gb")
        assert again.devices[0].generation == first.devices[0].generation
        accounting.sampled(reading, before)
        assert not (await account(node)).total.measured_mib_seconds
        accounting.sampled(reading, accounting.leases)
        node.clock.advance(1.0)
        assert (await account(node)).rows["bob"].peak_mib_seconds == 5000


async def test_records_are_kept_for_their_time(tmp_path: Path) -> None:
    async with engine(tmp_path, "a30", keep_accounting_seconds=10 * HOUR) as node:
        for _ in range(3):
            granted = await lease(node, ALICE, "1g.6gb")
            node.clock.advance(4 * HOUR)
            await node.release(granted)
        await node.look()
        await node.quiet()
        kept = await account(node)
        assert kept.total.leases == 3, "a lease that ended within the time is kept whole"
        ended = node.clock.now() - 8 * HOUR
        node.clock.advance(4 * HOUR)
        await node.look()
        await node.quiet()
        kept = await account(node)
        assert kept.total.leases == 2
        assert kept.complete_since == pytest.approx(ended)


async def test_many_tenants_share_the_last_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting_module, "MOST_TENANTS", 2)
    node = await start(tmp_path, "a30")
    for number in range(4):
        await lease(node, ALICE, "1g.6gb", tenant=f"team-{number}")
        node.clock.advance(1.0)
    assert set(node.manager.published.tenants) == {"team-0", "team-1", OTHERS}
    before = {key: each.memory_mib_seconds(0.0) for key, each in node.manager.published.tenants.items()}
    await killed(node)
    async with engine(tmp_path, clock=VirtualClock(node.clock.now())) as node:
        after = {key: each.memory_mib_seconds(0.0) for key, each in node.manager.published.tenants.items()}
        assert after == before


# The property

SECONDS = st.floats(0.001, 1e5)
STEP = st.one_of(
    *(st.tuples(st.just("acquire"), st.integers(0, 30), SECONDS) for _ in range(3)),
    *(st.tuples(st.just("release"), st.integers(0, 30), SECONDS) for _ in range(2)),
    st.tuples(st.just("kill"), st.just(0), SECONDS),
    st.tuples(st.just("restart"), st.just(0), SECONDS),
    st.tuples(st.just("destroy"), st.integers(0, 30), SECONDS),
    st.tuples(st.just("reboot"), st.just(0), SECONDS),
)
WANTS = ("1g.5gb", "2g.10gb", "1g.6gb", "3g.20gb", "2g.12gb")


@dataclass
class History:
    """What the node has leased is watched from outside: by its instances, between two steps."""

    folder: Path
    node: Node
    held: list[Granted] = field(default_factory=list)
    spans: list[tuple[str, float, float, int]] = field(default_factory=list)
    """Of each leased instance between two steps: its tenant, the two moments, and its memory."""

    async def step(self, what: str, number: int, seconds: float) -> None:
        node = self.node
        await node.quiet()
        now, leases = node.clock.now(), node.leases
        for instance in node.instances(InstanceState.LEASED):
            assert instance.lease is not None
            tenant = leases[instance.lease].holder.tenant
            self.spans.append((tenant, now, now + seconds, instance.slot.profile.memory_mib))
        if what in {"kill", "restart", "reboot"}:
            await (killed(node) if what == "kill" else node.manager.close())
            if what == "reboot":
                node.simulator.reboot(keep_mig_mode=True)
            self.node = await start(self.folder, clock=VirtualClock(now + seconds))
            return
        node.clock.advance(seconds)
        await node.quiet()
        with contextlib.suppress(RefusedError):
            await getattr(self, what)(number)

    async def acquire(self, number: int) -> None:
        holder = Holder(name="x", tenant=f"team-{number % 3}")
        wants = (WANTS[number % len(WANTS)],) * (1 + number % 2)
        self.held.append(await self.node.acquire(*wants, holder=holder))

    async def release(self, number: int) -> None:
        if self.held:
            await self.node.release(self.held.pop(number % len(self.held)))

    async def destroy(self, number: int) -> None:
        """Somebody destroys a leased instance."""
        there = self.node.instances(InstanceState.LEASED)
        if there:
            gone = there[number % len(there)]
            index = self.node.manager.view.by_uuid[gone.slot.gpu].index
            self.node.simulator.destroy_foreign(f"{index}/{gone.gpu_instance_id}")
            await self.node.look()

    def leased(self, since: float, until: float) -> dict[str, float]:
        found: dict[str, float] = {}
        for tenant, start_, end, mib in self.spans:
            found[tenant] = found.get(tenant, 0.0) + mib * max(0.0, min(end, until) - max(start_, since))
        return {tenant: mib_seconds for tenant, mib_seconds in found.items() if mib_seconds}


async def check_history(folder: Path, steps: Sequence[tuple[str, int, float]]) -> None:
    history = History(folder, await start(folder, GPUS))
    began = history.node.clock.now()
    try:
        for step in steps:
            await history.step(*step)
        node = history.node
        await node.quiet()
        now = node.clock.now()
        for since, until in ((began, now), (began + (now - began) / 3, began + (now - began) * 2 / 3)):
            leased = history.leased(since, until)
            rows = (await account(node, since, until)).rows
            assert {key: use.memory_mib_seconds for key, use in rows.items() if use.memory_mib_seconds} == {
                key: pytest.approx(mib_seconds, abs=A_MOMENT) for key, mib_seconds in leased.items()
            }
            for by in By:
                total = (await account(node, since, until, by=by)).total.memory_mib_seconds
                assert total == pytest.approx(sum(leased.values()), abs=A_MOMENT)
        totals = node.manager.published.tenants
        counted = sum(each.memory_mib_seconds(now) for each in totals.values())
        assert counted == pytest.approx(sum(history.leased(began, now).values()), abs=100 * A_MOMENT)
    finally:
        await history.node.manager.close()


@settings(max_examples=8)
@given(steps=st.lists(STEP, min_size=5, max_size=25))
def test_the_sum_over_all_tenants_is_what_the_node_had_leased(steps: list[tuple[str, int, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(check_history(Path(folder), steps))


# Advice


async def test_advice_replays_the_history(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        for _ in range(4):
            for _ in range(3):
                node.start(lease(node, ALICE, "20G", "train"))
            await node.until(lambda: len(node.leases) == 2 and node.manager.snapshot.queue)
            for _ in range(3):
                await node.until(lambda: node.leases)
                await one_run(node)
        (advice,) = await node.manager.history.advise(0.0, "train", ALICE)
        assert advice.verdict is Verdict.SMALLER, advice
        assert (advice.asked, advice.suggestion, advice.runs) == ("20G", "4G", 12)
        assert advice.waited_seconds
        assert advice.waited_less_seconds == 0
        assert "asked 20G, peak 2.9Gi in 12 runs: 4G would not have waited" in advice.message
        assert not await node.manager.history.advise(0.0, "nothing", ALICE)
        assert not await node.manager.history.advise(0.0, "train", BOB)


async def one_run(node: Node) -> None:
    running = next(iter(node.leases.values()))
    instance = next(iter(node.manager._context.state.instances_of(running.id)))
    pid = node.simulator.occupy(f"0/{instance.gpu_instance_id}", used_mib=3000)
    await sampled(node, 3)
    node.simulator.vacate(pid)
    node.clock.advance(HOUR)
    token = node.manager._context.tokens.token(running.id)
    await node.manager.release(running.id, token, ANYBODY)


async def test_advice_says_when_it_knows_too_little(tmp_path: Path) -> None:
    async with engine(tmp_path, GPUS) as node:
        granted = await lease(node, ALICE, "20G", "train")
        node.clock.advance(HOUR)
        await node.release(granted)
        (advice,) = await node.manager.history.advise(0.0, "", ALICE)
        assert (advice.verdict, advice.peak_mib, advice.suggestion) == (Verdict.TOO_FEW_RUNS, None, "")
        words = "alice (train): asked 20G; a program's use was measured in 0 of 1 run, and advice takes 3"
        assert advice.message == words
