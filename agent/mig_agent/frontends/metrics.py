"""Metrics for Prometheus: counters fed by the engine's events, and gauges read from the last published node view.

Nothing here calls the manager or the driver, so a scrape never waits for them. A scrape runs on a thread of its own and
reads one immutable value that the event loop has published.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mig_agent import __version__
from mig_agent.core.accounting import TenantTotal
from mig_agent.core.errors import DriverErrorKind
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Gpu, GpuState, Instance, InstanceState, NodeView
from mig_agent.core.observation import SM_PERCENT_OF
from mig_agent.core.planning.feasibility import unusable_mask
from mig_agent.core.planning.shares import shared_mib, shares_of
from mig_agent.core.texts import visible
from mig_agent.engine.results import Published

GRANTED = frozenset({"reused", "created"})
"""Outcomes of a request that was granted."""

_BYTES_IN_MIB = 1 << 20
_PLAN_BUCKETS = (10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3)
_CALL_BUCKETS = (5e-6, 20e-6, 100e-6, 500e-6, 2e-3, 10e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)
_ACQUIRE_BUCKETS = (0.5e-3, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 600.0)


class Metrics:
    """All metrics of the agent, in a registry of their own. It is the engine's Telemetry and an observer of events."""

    def __init__(self, lines_dropped: Callable[[], int] = lambda: 0) -> None:
        """Create all series. `lines_dropped` returns how many log lines were dropped so far; called by each scrape."""
        # `_created` series double the number of series; the library can only switch them off for the whole process.
        disable_created_metrics()  # type: ignore[no-untyped-call] # the library gives this one no types
        self.registry = CollectorRegistry()
        """The registry that the HTTP server serves."""
        self._gauges = _NodeGauges()
        self.registry.register(self._gauges)
        self._requests = Counter(
            "mig_agent_requests",
            "Requests by outcome (granted or refused) and, for refused ones, the reason.",
            ("outcome", "reason"),
            registry=self.registry,
        )
        self._acquire = Histogram(
            "mig_agent_acquire_seconds",
            "From the arrival of a request to its lease, waiting included.",
            ("served_by",),
            buckets=_ACQUIRE_BUCKETS,
            registry=self.registry,
        )
        self._plan = Histogram(
            "mig_agent_plan_seconds", "One run of the planner.", buckets=_PLAN_BUCKETS, registry=self.registry
        )
        self._calls = Histogram(
            "mig_agent_nvml_call_seconds",
            "One call of the driver.",
            ("call",),
            buckets=_CALL_BUCKETS,
            registry=self.registry,
        )
        self._call_errors = Counter(
            "mig_agent_nvml_call_errors", "Calls of the driver that failed.", ("call", "error"), registry=self.registry
        )
        self._events = Counter("mig_agent_events", "What happened, by kind.", ("kind",), registry=self.registry)
        # Their few series are found in a dictionary; `labels` takes a lock and makes texts of its arguments.
        self._requests_of, self._acquire_of = cache(self._requests.labels), cache(self._acquire.labels)
        self._calls_of, self._events_of = cache(self._calls.labels), cache(self._events.labels)
        self._reused = Counter(
            "mig_agent_creations_avoided", "Devices served by an idle instance.", registry=self.registry
        )
        self._created = Counter("mig_agent_instances_created", "Instances created.", registry=self.registry)
        self._destroyed = Counter("mig_agent_instances_destroyed", "Instances destroyed.", registry=self.registry)
        self.registry.register(_LogLines(lines_dropped))
        self._counted = {
            EventKind.INSTANCE_REUSED: self._reused,
            EventKind.INSTANCE_CREATED: self._created,
            EventKind.INSTANCE_DESTROYED: self._destroyed,
        }

    def watch(self, published: Callable[[], Published]) -> None:
        """Read the gauges from the value that `published` returns; it is called on the thread of each scrape."""
        self._gauges.watch(published)

    def observe(self, event: Event) -> None:
        """Count an event."""
        self._events_of(event.kind.value).inc()
        counter = self._counted.get(event.kind)
        if counter is not None:
            counter.inc()

    def planned(self, seconds: float) -> None:
        """Record one run of the planner."""
        self._plan.observe(seconds)

    def acquired(self, seconds: float, outcome: str) -> None:
        """Record one request; `seconds` from its arrival to its answer.

        `outcome` is `reused`, `created`, or the reason of the refusal.
        """
        if outcome in GRANTED:
            self._requests_of("granted", "").inc()
            self._acquire_of(outcome).observe(seconds)
        else:
            self._requests_of("refused", outcome).inc()

    def nvml_call(self, call: str, seconds: float, error: DriverErrorKind | None) -> None:
        """Record one call of the driver; called on the thread that made it."""
        self._calls_of(call).observe(seconds)
        if error is not None:
            self._call_errors.labels(call, error.value).inc()


class _LogLines(Collector):
    """Collects the number of log lines that were dropped."""

    def __init__(self, dropped: Callable[[], int]) -> None:
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        words = "Lines of the log that were dropped because nothing could be written, or not as fast as they came."
        yield CounterMetricFamily("mig_agent_log_lines_dropped", words, self._dropped())


class _NodeGauges(Collector):
    """Collects the gauges of the last published node view."""

    def __init__(self) -> None:
        self._published: Callable[[], Published] | None = None
        self._tenants = _TenantCounters()

    def watch(self, published: Callable[[], Published]) -> None:
        """Read the node from the value that this function returns."""
        self._published = published

    def describe(self) -> Iterator[Metric]:
        """Yield nothing, so that registering does not collect."""
        yield from ()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        info = GaugeMetricFamily("mig_agent_info", "Always 1.", labels=("version", "node"))
        if self._published is None:
            info.add_metric((__version__, ""), 1)
            yield info
            return
        node = self._published()
        view = node.view
        info.add_metric((__version__, visible(view.node)), 1)
        yield info
        yield GaugeMetricFamily("mig_agent_revision", "Of the node; rises with every change.", view.revision)
        yield GaugeMetricFamily("mig_agent_start_time_seconds", "Since the epoch.", node.started_at)
        yield GaugeMetricFamily("mig_agent_queue_length", "Requests that wait.", node.queue_length)
        if node.oldest_waiting_since is not None:
            yield GaugeMetricFamily(
                "mig_agent_queue_oldest_timestamp_seconds",
                "When the request that waits longest arrived, since the epoch; no sample while none waits.",
                node.oldest_waiting_since,
            )
        yield GaugeMetricFamily(
            "mig_agent_reservation_after_seconds",
            "How long a request waits before GPUs are kept for it.",
            node.reservation_after_seconds,
        )
        yield GaugeMetricFamily(
            "mig_agent_ledger_writable", "1 while leases can be written down.", 0 if node.ledger_error else 1
        )
        yield GaugeMetricFamily(
            "mig_agent_ledger_in_doubt",
            "1 after the ledger was damaged or restored, until that is settled: it does not account for everything.",
            1 if node.in_doubt else 0,
        )
        yield GaugeMetricFamily(
            "mig_agent_sockets_missing",
            "Unix sockets of the agent that were removed or replaced and cannot be bound again for now.",
            node.sockets_missing,
        )
        yield _problems(node)
        yield GaugeMetricFamily(
            "mig_agent_paused", "1 while nothing is granted and the driver is released.", 1 if node.paused else 0
        )
        yield GaugeMetricFamily("mig_agent_leases", "Leases.", len(view.leases))
        yield GaugeMetricFamily(
            "mig_agent_leases_unused",
            "Leases with a device on which no process was seen for `idle_after`.",
            len(node.unused & view.leases.keys()),
        )
        idle = len(node.idle & view.leases.keys())
        yield GaugeMetricFamily(
            "mig_agent_leases_idle",
            "Leases with no process on any device for `idle_after`, as found when the driver was read last (each"
            " `reread`).",
            idle,
        )
        draining = sum(each.draining for each in view.gpus)
        yield GaugeMetricFamily("mig_agent_gpus_draining", "GPUs that are cordoned to become empty.", draining)
        yield _gpus(view)
        yield _each_gpu(view)
        yield _instances(view)
        yield _slices(view)
        yield from _shared_memory(view)
        yield _lease_instances(view)
        yield _compute(node, time.time())
        yield from _leased_by_tenant(view)
        yield from self._tenants.collect(node.tenants, time.time())


class _TenantCounters:
    """Counters of accounting by tenant. The sums are in the ledger, so they go on over restarts of the agent."""

    def __init__(self) -> None:
        self._highest: dict[tuple[str, str], float] = {}
        """The last value of each series: a clock that is set back must not look like a counter that began again."""

    def collect(self, tenants: Mapping[str, TenantTotal], now: float) -> Iterator[Metric]:
        """Yield the counters at this time, in seconds since the epoch."""
        memory = CounterMetricFamily(
            "mig_agent_leased_memory_byte_seconds",
            "Memory leased, times the seconds that it was leased for, by tenant.",
            labels=("tenant",),
        )
        slices = CounterMetricFamily(
            "mig_agent_leased_slice_seconds",
            "Memory slices leased, times the seconds that they were leased for, by tenant.",
            labels=("tenant",),
        )
        waited = CounterMetricFamily(
            "mig_agent_waited_seconds", "From asking for a lease to having it, by tenant.", labels=("tenant",)
        )
        leases = CounterMetricFamily("mig_agent_leases_granted", "Leases granted, by tenant.", labels=("tenant",))
        for tenant, total in sorted(tenants.items()):
            self._add(memory, tenant, total.memory_mib_seconds(now) * _BYTES_IN_MIB)
            self._add(slices, tenant, total.slice_seconds(now))
            self._add(waited, tenant, total.waited_seconds)
            self._add(leases, tenant, total.leases)
        yield from (memory, slices, waited, leases)

    def _add(self, family: CounterMetricFamily, tenant: str, value: float) -> None:
        highest = self._highest[family.name, tenant] = max(value, self._highest.get((family.name, tenant), 0.0))
        family.add_metric((visible(tenant),), highest)


def _problems(node: Published) -> Metric:
    family = GaugeMetricFamily(
        "mig_agent_problem", "1 while a part of the agent does not work, such as its configuration.", labels=("part",)
    )
    for part, words in node.problems.items():
        family.add_metric((part,), 1 if words else 0)
    return family


def _gpus(view: NodeView) -> Metric:
    family = GaugeMetricFamily("mig_agent_gpus", "GPUs by state.", labels=("state",))
    tally = Tally(each.state for each in view.gpus)
    for state in GpuState:
        family.add_metric((state.value,), tally[state])
    return family


def _each_gpu(view: NodeView) -> Metric:
    family = GaugeMetricFamily(
        "mig_agent_gpu",
        "Always 1: each GPU with its state and, where it is not used as it could be, the reason in words.",
        labels=("gpu", "gpu_uuid", "model", "state", "reason"),
    )
    for each in view.gpus:
        model, reason = visible(each.layout.model), visible(each.reason)
        family.add_metric((str(each.index), each.uuid, model, each.state.value, reason), 1)
    return family


def _instances(view: NodeView) -> Metric:
    family = GaugeMetricFamily(
        "mig_agent_instances", "Instances by GPU, profile and state.", labels=("gpu_uuid", "profile", "state")
    )
    tally = Tally((gpu.uuid, _profile_of(each), each.state) for gpu in view.gpus for each in gpu.instances)
    for (uuid, profile, state), number in sorted(tally.items()):
        family.add_metric((uuid, profile, state.value), number)
    return family


def _profile_of(instance: Instance) -> str:
    """Return the profile as a label; shares have one for all sizes, which would be too many series."""
    return instance.kind.name if instance.kind.shares_memory else instance.slot.profile.name


def _shared_memory(view: NodeView) -> Iterator[Metric]:
    """Yield the account of each GPU that is shared, or could be."""
    memory = GaugeMetricFamily(
        "mig_agent_shared_memory_bytes",
        "Memory that a GPU without MIG mode can share, by what has it: shares, processes outside of them (others), or"
        " nothing (free).",
        labels=("gpu_uuid", "state"),
    )
    shares = GaugeMetricFamily(
        "mig_agent_shares", "Shares of a GPU, by what enforces their memory limit.", labels=("gpu_uuid", "enforced_by")
    )
    for gpu in view.gpus:
        terms = gpu.layout.shares
        if terms is not None:
            taken = shared_mib(gpu)
            sizes = {"shares": taken - terms.others_mib, "others": terms.others_mib, "free": terms.usable_mib - taken}
            for state, mib in sizes.items():
                memory.add_metric((gpu.uuid, state), max(mib, 0) * _BYTES_IN_MIB)
        ways = Tally(each.enforced_by.value for each in shares_of(gpu.instances) if each.enforced_by is not None)
        for way, number in sorted(ways.items()):
            shares.add_metric((gpu.uuid, way), number)
    yield memory
    yield shares


def _slices(view: NodeView) -> Metric:
    family = GaugeMetricFamily(
        "mig_agent_memory_slices",
        "Memory slices by GPU and state; unusable: free, but no profile fits there beside what is on the GPU.",
        labels=("gpu_uuid", "state"),
    )
    for gpu in view.gpus:
        for state, number in _slices_of(gpu).items():
            family.add_metric((gpu.uuid, state), number)
    return family


def _slices_of(gpu: Gpu) -> dict[str, int]:
    """Return the memory slices by state. All states are present, so that a graph falls to zero rather than ends."""
    sizes = dict.fromkeys((*(state.value for state in InstanceState), "free", "unusable"), 0)
    taken = 0
    # All shares of a GPU are on its one slice, beside the whole device, which is idle meanwhile.
    shares = shares_of(gpu.instances)
    for each in shares[:1] or gpu.instances:
        sizes[each.state.value] += each.slot.placement.size
        taken |= each.slot.placement.mask
    sizes["unusable"] = unusable_mask(gpu).bit_count()
    sizes["free"] = gpu.layout.memory_slices - taken.bit_count() - sizes["unusable"]
    return sizes


def _lease_instances(view: NodeView) -> Metric:
    family = GaugeMetricFamily(
        "mig_agent_lease_instance",
        "Always 1: which instance is held by which lease, for joining with metrics of the GPU itself.",
        labels=("lease", "holder", "tenant", "gpu_uuid", "gpu_instance_id", "profile", "uuid"),
    )
    instances = {each.generation: each for gpu in view.gpus for each in gpu.instances}
    for lease in view.leases.values():
        for generation in lease.instances:
            each = instances.get(generation)
            if each is not None:
                gi = "" if each.gpu_instance_id is None else str(each.gpu_instance_id)
                labels = (
                    lease.id,
                    visible(str(lease.holder)),
                    visible(lease.holder.tenant),
                    each.slot.gpu,
                    gi,
                    _profile_of(each),
                    each.uuid,
                )
                family.add_metric(labels, 1)
    return family


def _compute(node: Published, now: float) -> Metric:
    family = GaugeMetricFamily(
        "mig_agent_instance_compute_utilization_ratio",
        f"Busy multiprocessors (SMs) of an instance, of all those of {SM_PERCENT_OF}, between the last two readings; no"
        " sample where the driver does not report it, as on GPUs before Hopper.",
        # With the lease, so that a mean over time is never of two leases of one instance.
        labels=("lease", "gpu_uuid", "gpu_instance_id", "profile", "uuid"),
    )
    for each in (instance for gpu in node.view.gpus for instance in gpu.instances):
        reading = node.compute.get(each.generation)
        # A reading under another lease says nothing of this one.
        if reading is None or node.paused or reading.lease != each.lease or reading.fresh_until < now:
            continue
        gi = "" if each.gpu_instance_id is None else str(each.gpu_instance_id)
        labels = (each.lease or "", each.slot.gpu, gi, each.slot.profile.name, each.uuid)
        family.add_metric(labels, reading.usage.sm_percent / 100)
    return family


def _leased_by_tenant(view: NodeView) -> Iterator[Metric]:
    memory = GaugeMetricFamily("mig_agent_leased_memory_bytes", "Memory of leased devices.", labels=("tenant",))
    slices = GaugeMetricFamily("mig_agent_leased_memory_slices", "Memory slices of leased devices.", labels=("tenant",))
    mebibytes, numbers = Tally[str](), Tally[str]()
    for each in (instance for gpu in view.gpus for instance in gpu.instances):
        lease = None if each.lease is None else view.leases.get(each.lease)
        if lease is not None:
            tenant = visible(lease.holder.tenant)
            mebibytes[tenant] += each.slot.profile.memory_mib
            numbers[tenant] += each.slot.placement.size
    for tenant in sorted(mebibytes):
        memory.add_metric((tenant,), mebibytes[tenant] << 20)
        slices.add_metric((tenant,), numbers[tenant])
    yield memory
    yield slices
