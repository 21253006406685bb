"""Compute use of instances: from the driver's counters to what clients and Prometheus read; never a wrong figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mig_agent.client import decode
from mig_agent.core.model import GpuState
from mig_agent.core.observation import ComputeUsage
from mig_agent.engine.peaks import PeakSampler
from mig_agent.engine.results import Granted
from mig_agent.frontends.grpc import encode
from mig_agent.frontends.metrics import Metrics
from support.engine import ADMIN, Node, engine

GAUGE = "mig_agent_instance_compute_utilization_ratio"
WHY = "for a test"


def turned_by_hand(node: Node) -> None:
    """Make driver and meter go by the clock of the engine."""
    library: Any = node.driver._nvml._library
    library.monotonic = node.driver._meter._monotonic = node.clock.now


async def compute(node: Node, granted: Granted, *, after: float = 2.0) -> ComputeUsage | None:
    node.clock.advance(after)
    return (await node.manager.usage())[granted.devices[0].generation].compute


def scraped(node: Node) -> dict[str, float]:
    """Return what a scrape shows, by UUID."""
    metrics = Metrics()
    metrics.watch(lambda: node.manager.published)
    families = {each.name: each for each in metrics.registry.collect()}
    return {sample.labels["uuid"]: sample.value for sample in families[GAUGE].samples}


def unfreed(node: Node) -> int:
    library: Any = node.driver._nvml._library
    return len(library.gpm_samples)


async def test_a_lease_sees_its_own_load_alone(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        turned_by_hand(node)
        first = await node.acquire("1g.10gb")
        pid = node.simulator.occupy(node.where(first), sm_percent=60)
        assert await compute(node, first) is None
        busy = await compute(node, first)
        assert busy is not None
        assert busy.sm_percent == pytest.approx(60)
        assert busy.seconds == pytest.approx(2)
        assert scraped(node) == {first.devices[0].uuid: pytest.approx(0.6)}
        node.simulator.vacate(pid)
        await node.release(first)
        assert not scraped(node), "the load of a lease that has ended is not that of the idle instance"
        again = await node.acquire("1g.10gb")
        assert again.devices[0].generation == first.devices[0].generation, "it is reused"
        assert not scraped(node)
        assert await compute(node, again) is None
        idle = await compute(node, again)
        assert idle is not None
        assert idle.sm_percent == 0.0
        assert scraped(node) == {again.devices[0].uuid: 0.0}
        assert unfreed(node) == 1


async def test_it_is_absent_and_not_zero_where_the_driver_does_not_report_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb,h100-80gb:1:off") as node:
        turned_by_hand(node)
        granted = await node.acquire("1g.5gb")
        node.simulator.occupy(node.where(granted))
        for _ in range(3):
            assert await compute(node, granted) is None
        assert not scraped(node)


async def test_the_sampler_measures_what_is_leased(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        turned_by_hand(node)
        granted = await node.acquire("1g.10gb")
        node.simulator.occupy(node.where(granted), sm_percent=40)
        sampler = PeakSampler(node.manager._context)
        for _ in range(2):
            node.clock.advance(30)
            await sampler.sample()
        assert scraped(node) == {granted.devices[0].uuid: pytest.approx(0.4)}


async def test_a_pause_drops_the_samples_and_the_figures(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        turned_by_hand(node)
        granted = await node.acquire("1g.10gb")
        await compute(node, granted)
        assert await compute(node, granted) is not None
        await node.manager.pause(WHY, ADMIN)
        assert unfreed(node) == 0
        assert not scraped(node)
        assert await compute(node, granted) is None
        await node.manager.resume(WHY, ADMIN)
        assert not node.manager.published.compute
        assert await compute(node, granted) is None, "the first reading after it"
        assert not scraped(node)
        assert await compute(node, granted) is not None


async def test_a_lost_gpu_has_no_figure(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:2") as node:
        turned_by_hand(node)
        lost, well = [await node.acquire("1g.10gb", gpus=(gpu,)) for gpu in ("0", "1")]
        await compute(node, lost)
        await compute(node, lost)
        assert len(scraped(node)) == 2
        node.simulator.lose_gpu(0)
        assert await compute(node, lost) is None
        assert await compute(node, well) is not None
        assert set(scraped(node)) == {well.devices[0].uuid}


async def test_an_instance_that_is_destroyed_leaves_no_sample(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        turned_by_hand(node)
        granted = await node.acquire("1g.10gb")
        await compute(node, granted)
        await compute(node, granted)
        await node.release(granted)
        await node.manager.reclaim((), ADMIN)
        assert unfreed(node) == 0
        await node.manager.usage()
        assert not node.manager.published.compute


async def test_an_error_of_the_counters_takes_nothing_from_the_rest(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        turned_by_hand(node)
        granted = await node.acquire("1g.10gb")
        pid = node.simulator.occupy(node.where(granted), used_mib=500)
        await compute(node, granted)
        node.simulator.fail("nvmlGpmMetricsGet", 999, times=None)
        node.clock.advance(2)
        usage = (await node.manager.usage())[granted.devices[0].generation]
        assert usage.compute is None
        assert usage.memory_used_mib is not None
        assert [each.pid for each in usage.processes or ()] == [pid]


async def test_a_client_reads_what_was_measured(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb,a100-40gb") as node:
        turned_by_hand(node)
        busy, unknown = [await node.acquire("4G", gpus=(gpu,)) for gpu in ("0", "1")]
        node.simulator.occupy(node.where(busy), sm_percent=60)
        await compute(node, busy)
        node.clock.advance(2)
        messages = encode.usage(await node.manager.usage(), ADMIN)
        read = {each.generation: decode.usage(each).compute for each in messages}
        measured = read[busy.devices[0].generation]
        assert measured is not None
        assert measured.seconds == pytest.approx(2)
        assert measured.sm_percent == pytest.approx(60)
        assert measured.tensor_percent == pytest.approx(30)
        assert measured.memory_bandwidth_percent == pytest.approx(48)
        assert read[unknown.devices[0].generation] is None


async def test_counters_that_hang_keep_nobody_waiting(tmp_path: Path) -> None:
    async with engine(tmp_path, "h100-80gb:2") as node:
        turned_by_hand(node)
        stuck, well = [await node.acquire("1g.10gb", gpus=(gpu,)) for gpu in ("0", "1")]
        await compute(node, well)
        node.clock.advance(2)
        node.simulator.hang("nvmlGpmMigSampleGet", gpu=0)
        reading = node.start(node.manager.usage())
        library: Any = node.driver._nvml._library
        await node.until(lambda: library.hanging)
        reader = node.manager._context.gpu_workers[node.gpu(1).uuid]._reader
        await node.until(lambda: not reader._in_flight)
        node.clock.advance(31)
        usage = await reading
        assert usage[stuck.devices[0].generation].compute is None
        assert usage[well.devices[0].generation].compute is not None
        assert node.gpu(0).state is GpuState.CORDONED
        node.simulator.clear()
        await node.until(lambda: node.gpu(0).state is GpuState.READY)
        await compute(node, stuck)
        assert await compute(node, stuck) is not None


async def test_an_old_reading_is_not_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "h100-80gb") as node:
        turned_by_hand(node)
        granted = await node.acquire("1g.10gb")
        await compute(node, granted)
        await compute(node, granted)
        assert scraped(node)
        later = node.clock.now() + 61
        monkeypatch.setattr("mig_agent.frontends.metrics.time.time", lambda: later)
        assert not scraped(node)
