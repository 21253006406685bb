"""What Prometheus reads, from a real node."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mig_agent.core.errors import DriverErrorKind
from mig_agent.core.model import Holder
from mig_agent.frontends.metrics import Metrics
from support.engine import ADMIN, engine


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sum of the samples that have these labels; None when there is none."""
    found = [
        number
        for (sample, has), number in samples(metrics).items()
        if sample == name and set(labels.items()) <= set(has)
    ]
    return sum(found) if found else None


async def test_the_gauges_show_the_node(tmp_path: Path) -> None:
    metrics = Metrics()
    async with engine(tmp_path, "a100-40gb:1,h100-80gb:1") as node:
        metrics.watch(lambda: node.manager.published)
        granted = await node.acquire("4G", gpus=("0",), name="alice", tenant="team-a")
        idle = await node.acquire("2g.20gb", gpus=("1",))
        await node.release(idle)
        uuid = node.gpu(0).uuid
        assert value(metrics, "mig_agent_leases") == 1
        assert value(metrics, "mig_agent_instances", profile="1g.5gb", state="leased") == 1
        assert value(metrics, "mig_agent_instances", profile="2g.20gb", state="idle") == 1
        assert value(metrics, "mig_agent_memory_slices", gpu_uuid=uuid, state="leased") == 1
        assert value(metrics, "mig_agent_memory_slices", gpu_uuid=uuid, state="free") == 6
        # Slice 7: every placement that reaches it also takes slice 6.
        assert value(metrics, "mig_agent_memory_slices", gpu_uuid=uuid, state="unusable") == 1
        assert value(metrics, "mig_agent_memory_slices", gpu_uuid=node.gpu(1).uuid) == 8
        assert value(metrics, "mig_agent_gpus", state="ready") == 2
        assert value(metrics, "mig_agent_ledger_writable") == 1
        assert value(metrics, "mig_agent_reservation_after_seconds") == 150, "after one lease of no length"
        device = granted.devices[0]
        assert (
            value(
                metrics,
                "mig_agent_lease_instance",
                lease=granted.lease.id,
                holder="alice",
                tenant="team-a",
                gpu_uuid=uuid,
                gpu_instance_id=str(device.gpu_instance_id),
                profile="1g.5gb",
                uuid=device.uuid,
            )
            == 1
        )
        await node.release(granted)
        assert value(metrics, "mig_agent_lease_instance") is None
        assert value(metrics, "mig_agent_paused") == 0
        await node.manager.pause("", ADMIN, lasting=True)
        assert value(metrics, "mig_agent_paused") == 1
        assert value(metrics, "mig_agent_gpus", state="ready") == 2


async def test_a_tenants_leases_are_weighed_and_the_longest_wait_is_dated(tmp_path: Path) -> None:
    metrics = Metrics()
    async with engine(tmp_path, "a100-40gb:1") as node:
        metrics.watch(lambda: node.manager.published)
        assert value(metrics, "mig_agent_queue_oldest_timestamp_seconds") is None
        await node.acquire("3g.20gb", holder=Holder(name="alice", tenant="team-a"))
        await node.acquire("2g.10gb", holder=Holder(name="bob", tenant="team-b"))
        memory = node.gpu().layout.by_name["3g.20gb"].memory_mib << 20
        assert value(metrics, "mig_agent_leased_memory_bytes", tenant="team-a") == memory
        assert value(metrics, "mig_agent_leased_memory_slices", tenant="team-a") == 4
        assert value(metrics, "mig_agent_leased_memory_slices", tenant="team-b") == 2
        began = node.clock.now()
        waiting = node.start(node.acquire("7g.40gb", wait_seconds=1e6))
        await node.until(lambda: len(node.manager.snapshot.queue) == 1)
        node.clock.advance(10)
        urgent = node.start(node.acquire("7g.40gb", wait_seconds=1e6, priority=5))
        await node.until(lambda: len(node.manager.snapshot.queue) == 2)
        assert value(metrics, "mig_agent_queue_oldest_timestamp_seconds") == began
        for each in (waiting, urgent):
            each.cancel()
        await node.until(lambda: not node.manager.snapshot.queue)
        assert value(metrics, "mig_agent_queue_oldest_timestamp_seconds") is None


async def test_what_does_not_work_is_one_by_its_part_and_zero_when_it_works_again(tmp_path: Path) -> None:
    metrics = Metrics()
    async with engine(tmp_path, "a100-40gb:1") as node:
        metrics.watch(lambda: node.manager.published)
        assert value(metrics, "mig_agent_problem") is None
        node.manager.report_problem("configuration", "the former one stays in use")
        assert value(metrics, "mig_agent_problem", part="configuration") == 1
        assert node.manager.snapshot.problems == ("configuration: the former one stays in use",)
        node.manager.report_problem("configuration", "")
        assert value(metrics, "mig_agent_problem", part="configuration") == 0
        assert not node.manager.snapshot.problems


async def test_events_are_counted(tmp_path: Path) -> None:
    metrics = Metrics()
    async with engine(tmp_path, "a100-40gb") as node:
        node.manager.observers.append(metrics.observe)
        await node.release(await node.acquire("4G"))
        await node.release(await node.acquire("4G"))
        assert value(metrics, "mig_agent_instances_created_total") == 1
        assert value(metrics, "mig_agent_creations_avoided_total") == 1
        await node.acquire("7g.40gb")
        assert value(metrics, "mig_agent_instances_destroyed_total") == 1
        assert value(metrics, "mig_agent_events_total", kind="lease-granted") == 3


def test_scrape_works_before_the_node_is_known() -> None:
    assert value(Metrics(), "mig_agent_info") == 1


def test_requests_are_counted_by_outcome_and_reason() -> None:
    metrics = Metrics()
    for outcome in ("reused", "created", "no-capacity", "no-capacity"):
        metrics.acquired(0.01, outcome)
    assert value(metrics, "mig_agent_requests_total", outcome="granted") == 2
    assert value(metrics, "mig_agent_requests_total", outcome="refused", reason="no-capacity") == 2
    assert value(metrics, "mig_agent_acquire_seconds_count") == 2
    assert value(metrics, "mig_agent_acquire_seconds_count", served_by="reused") == 1


def test_latencies_are_measured() -> None:
    metrics = Metrics()
    metrics.planned(30e-6)
    metrics.nvml_call("nvmlDeviceGetCount_v2", 10e-6, None)
    metrics.nvml_call("nvmlDeviceGetCount_v2", 10e-6, DriverErrorKind.GPU_LOST)
    assert value(metrics, "mig_agent_plan_seconds_count") == 1
    assert value(metrics, "mig_agent_nvml_call_seconds_count", call="nvmlDeviceGetCount_v2") == 2
    assert value(metrics, "mig_agent_nvml_call_errors_total", error="gpu-lost") == 1


def test_there_are_no_created_series() -> None:
    metrics = Metrics()
    metrics.acquired(0.01, "reused")
    assert not [name for name, _ in samples(metrics) if name.endswith("_created")]


async def test_what_a_tenant_leased_is_counted_and_never_goes_down(tmp_path: Path) -> None:
    metrics = Metrics()
    async with engine(tmp_path, "a100-40gb") as node:
        metrics.watch(lambda: node.manager.published)
        granted = await node.acquire("4G", tenant="team-a")
        node.clock.advance(10.0)
        await node.release(granted)
        expected = granted.devices[0].memory_mib * 1024**2 * 10.0
        assert value(metrics, "mig_agent_leased_memory_byte_seconds_total", tenant="team-a") == expected
        assert value(metrics, "mig_agent_leased_slice_seconds_total", tenant="team-a") == 10
        assert value(metrics, "mig_agent_leases_granted_total", tenant="team-a") == 1
        # The test's clock is ahead of the machine's, as if that had been set back.
        await node.acquire("4G", tenant="team-a")
        assert value(metrics, "mig_agent_leased_memory_byte_seconds_total", tenant="team-a") == expected
