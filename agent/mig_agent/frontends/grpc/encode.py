"""Encodes the engine's results as messages of the API. Makes no decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mig_agent.adapters.grpc_errors import encode_blocker, shortened
from mig_agent.core.accounting import Account, Use
from mig_agent.core.advice import Advice
from mig_agent.core.events import Event
from mig_agent.core.forecast import Basis, StartEstimate
from mig_agent.core.model import (
    Generation,
    Gpu,
    GpuState,
    Holder,
    Instance,
    InstanceState,
    Layout,
    Lease,
    LeaseId,
    MigMode,
    NodeView,
    Placement,
    Profile,
    Slot,
    live_devices,
    slices_in,
)
from mig_agent.core.observation import ComputeUsage, InstanceUsage, ProcessUsage
from mig_agent.core.owner import Pod, PodOwner
from mig_agent.core.planning.feasibility import unusable_mask
from mig_agent.core.texts import visible
from mig_agent.engine.callers import Caller
from mig_agent.engine.results import Device, Granted, ModeAnswer, QueueEntry, QueuePlace, Snapshot
from mig_agent.frontends.grpc.encode_shares import account_of_shares, enforcement, promise, shared_memory
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

_LONGEST_WANTS = 256
"""The most characters of the text of what a waiting request wants."""
FRAME_BYTES = 8
"""The most bytes that tag and length of a nested message need."""
_INSTANCE_STATES = {state: pb.InstanceState.Value(f"INSTANCE_STATE_{state.name}") for state in InstanceState}
_BASES = {basis: pb.EstimateBasis.Value(f"ESTIMATE_BASIS_{basis.name}") for basis in Basis}
_MODE_NEEDS = {"": pb.MODE_NEEDS_NOTHING, "reset": pb.MODE_NEEDS_RESET, "reboot": pb.MODE_NEEDS_REBOOT}
_GPU_STATES = {state: pb.GpuState.Value(f"GPU_STATE_{state.name}") for state in GpuState}


def granted(answer: Granted) -> pb.Granted:
    """Encode a granted request: the lease, its token, and the environment variables that a process needs."""
    devices = [device(each) for each in answer.devices]
    return pb.Granted(
        lease=lease(answer.lease, devices),
        token=answer.token,
        env=answer.environment,
        notes=map(visible, answer.notes),
        revision=answer.revision,
        confirm_by=answer.confirm_by,
    )


def device(each: Device) -> pb.Device:
    """Encode one device of a lease, as it was granted."""
    return pb.Device(
        uuid=each.uuid,
        gpu=each.gpu,
        gpu_index=each.gpu_index,
        profile=each.profile,
        memory_mib=each.memory_mib,
        placement=placement(each.placement) if each.placement is not None else None,
        gpu_instance_id=each.gpu_instance_id,
        compute_instance_id=each.compute_instance_id,
        reused=each.reused,
        generation=each.generation,
        kind=each.kind.name,
        enforced_by=enforcement(each.enforced_by),
        promise=promise(each.enforced_by),
        compute_percent=each.compute_percent,
    )


def leased_devices(each: Lease, view: NodeView) -> list[pb.Device]:
    """Encode a lease's devices as they are now: a lost one has no UUID, a removed one only its generation."""
    return [
        _leased_device(
            generation, view, lost=instance is None, reused=each.reused[index] if index < len(each.reused) else False
        )
        for index, (generation, instance) in enumerate(zip(each.instances, live_devices(view, each), strict=True))
    ]


def lease(
    each: Lease,
    devices: Iterable[pb.Device],
    *,
    unused: bool = False,
    in_full: bool = True,
    left: bool = False,
    warning: str = "",
    idle_since: float | None = None,
) -> pb.Lease:
    """Encode a lease with its devices.

    `in_full`: include the request id, which lets a client repeat the request: for the holder only. `left`: the holder's
    process has ended, and its pid is omitted.
    """
    owner = each.owner
    of_pod = owner if isinstance(owner, PodOwner) else None
    return pb.Lease(
        id=each.id,
        request_id=visible(each.request_id) if in_full else "",
        holder=holder(each.holder, left=left),
        devices=devices,
        created_at=each.created_at,
        expires_at=each.expires_at,
        pid=None if owner.process is None else owner.process.pid,
        hold=owner.ends_with_stream,
        unused=unused,
        pod=None if of_pod is None else pod(of_pod.pod),
        kubelet_devices=[
            pb.KubeletDevice(resource=visible(one.resource), id=visible(one.id))
            for one in (() if of_pod is None else of_pod.devices)
        ],
        arrived=owner.is_bound,
        warning=visible(warning),
        idle_since=idle_since,
    )


def pod(each: Pod) -> pb.Pod:
    """Encode a pod that has a lease."""
    return pb.Pod(namespace=visible(each.namespace), name=visible(each.name), uid=visible(each.uid))


def holder(each: Holder, *, left: bool = False) -> pb.Holder:
    """Encode the holder of a lease or request; without the pid if the process has ended (`left`)."""
    return pb.Holder(tenant=visible(each.tenant), name=visible(each.name), uid=each.uid, pid=None if left else each.pid)


def placement(each: Placement) -> pb.Placement:
    """Encode a placement."""
    return pb.Placement(start=each.start, size=each.size)


def place(slot: Slot) -> pb.Placement | None:
    """Encode the placement of a slot; None for a whole GPU and a share."""
    return placement(slot.placement) if slot.profile.kind.needs_mig_mode else None


def gpu(each: Gpu, leases: Mapping[LeaseId, Lease]) -> pb.Gpu:
    """Encode a GPU with its instances and, by `leases`, their holders."""
    return pb.Gpu(
        index=each.index,
        uuid=each.uuid,
        model=visible(each.layout.model),
        mig=mig_mode(each.mode),
        state=_GPU_STATES[each.state],
        reason=visible(each.reason),
        memory_slices=each.layout.memory_slices,
        memory_mib=each.layout.memory_mib,
        instances=[instance(one, each.index, leases) for one in each.instances],
        draining=each.draining,
        drain_deadline=each.drain_until,
        unusable_slices=slices_in(unusable_mask(each)),
        shared_memory=account_of_shares(each),
    )


def mig_mode(each: MigMode) -> pb.MigMode:
    """Encode the MIG mode, now and after a reset."""
    return pb.MigMode(capable=each.capable, current=each.current, pending=each.pending)


def instance(each: Instance, gpu_index: int, leases: Mapping[LeaseId, Lease]) -> pb.Instance:
    """Encode an instance and, by `leases`, its holder."""
    held = leases.get(each.lease) if each.lease is not None else None
    return pb.Instance(
        uuid=each.uuid,
        generation=each.generation,
        profile=each.slot.profile.name,
        memory_mib=each.slot.profile.memory_mib,
        placement=place(each.slot),
        gpu_instance_id=each.gpu_instance_id,
        compute_instance_id=each.compute_instance_id,
        state=_INSTANCE_STATES[each.state],
        lease=each.lease or "",
        holder=visible(str(held.holder)) if held else "",
        tenant=visible(held.holder.tenant) if held else "",
        since=each.since,
        reason=visible(each.reason),
        gpu=each.slot.gpu,
        gpu_index=gpu_index,
        kind=each.kind.name,
        enforced_by=enforcement(each.enforced_by),
        compute_percent=each.slot.profile.compute_percent,
    )


def queued(each: QueuePlace) -> pb.Queued:
    """Encode what a waiting request's client is told."""
    return pb.Queued(
        position=each.position,
        estimate=start_estimate(each.estimate, each.at),
        blockers=map(encode_blocker, each.blockers),
        limit=shortened(visible(each.limit), _LONGEST_WANTS),
    )


def start_estimate(each: StartEstimate | None, now: float) -> pb.StartEstimate | None:
    """Encode when a request is likely to start, in seconds from `now`; None if it is not known."""
    if each is None:
        return None

    def from_now(moment: float | None) -> float | None:
        return None if moment is None else max(moment - now, 0.0)

    return pb.StartEstimate(
        earliest=from_now(each.earliest),
        median=from_now(each.median),
        latest=from_now(each.latest),
        basis=_BASES[each.basis],
        leases=each.leases,
    )


def queued_request(each: QueueEntry, *, in_full: bool = True) -> pb.QueuedRequest:
    """Encode a waiting request; with its id and caller only if `in_full`, which is for its holder."""
    # A node full of waiting requests still fits into one message of gRPC's usual size.
    wants = shortened(visible(", ".join(want.text or "a device" for want in each.wants)), _LONGEST_WANTS)
    return pb.QueuedRequest(
        request_id=visible(each.request_id) if in_full else "",
        holder=holder(each.who),
        priority=each.priority,
        position=each.place.position,
        since=each.since,
        wants=wants if len(each.wants) == 1 else f"{len(each.wants)} devices: {wants}",
        estimate=start_estimate(each.place.estimate, each.place.at),
        blockers=map(encode_blocker, each.place.blockers),
        limit=shortened(visible(each.place.limit), _LONGEST_WANTS) if in_full else "",
        caller=visible(each.request.caller_id) if in_full else "",
        reserved_gpus=each.reserved,
    )


def mode_change(each: ModeAnswer) -> pb.SetMigModeResponse:
    """Encode the result of a switch of MIG mode."""
    return pb.SetMigModeResponse(
        gpu=each.gpu, mig=mig_mode(each.mode), needs=_MODE_NEEDS[each.needs], message=visible(each.message)
    )


def event(each: Event) -> pb.Event:
    """Encode an event."""
    return pb.Event(
        kind=each.kind.value,
        at=each.at,
        revision=each.revision,
        message=visible(each.message),
        gpu=each.gpu or "",
        gpu_index=each.gpu_index,
        lease=each.lease or "",
        generation=each.generation,
        holder=visible(each.holder),
        data={visible(name): _fact(value) for name, value in each.data.items()},
        number=each.number,
    )


def latest(events: Sequence[pb.Event], most_bytes: int) -> Sequence[pb.Event]:
    """Return the latest events that fit into `most_bytes`."""
    bytes_left = most_bytes
    for number, each in enumerate(reversed(events)):
        bytes_left -= each.ByteSize() + FRAME_BYTES
        if bytes_left < 0:
            return events[len(events) - number :]
    return events


def status(snapshot: Snapshot, version: str, reader: Caller) -> pb.StatusResponse:
    """Encode the node as last published, as far as the reader may see it."""
    view = snapshot.view
    return pb.StatusResponse(
        node=visible(view.node),
        revision=view.revision,
        gpus=[gpu(each, view.leases) for each in view.gpus],
        leases=[
            lease(
                each,
                leased_devices(each, view),
                unused=each.id in snapshot.unused,
                in_full=reader.may_see(each.holder),
                left=each.id in snapshot.left,
                warning=snapshot.warnings.get(each.id, ""),
                idle_since=snapshot.idle_since.get(each.id),
            )
            for each in view.leases.values()
        ],
        queue=[queued_request(each, in_full=reader.may_see(each.who)) for each in snapshot.queue],
        started_at=snapshot.started_at,
        ledger_error=visible(snapshot.ledger_error),
        version=version,
        driver_version=visible(snapshot.driver_version),
        strict_fifo=snapshot.strict_fifo,
        reservation_after_seconds=snapshot.reservation_after_seconds,
        paused=map(visible, snapshot.paused),
        missing_gpus=[
            pb.MissingGpu(index=index, reason=visible(why)) for index, why in sorted(snapshot.missing.items())
        ],
        ledger_doubt=_doubt(snapshot),
        socket_problems=map(visible, snapshot.socket_problems),
        problems=map(visible, snapshot.problems),
        boot_id=snapshot.boot_id,
        available=[
            pb.Available(profile=each.profile, memory_mib=each.memory_mib, count=each.count)
            for each in snapshot.available
        ],
        largest_share_mib=snapshot.largest_share_mib,
    )


def _doubt(snapshot: Snapshot) -> pb.LedgerDoubt | None:
    doubt = snapshot.doubt
    if doubt is None:
        return None
    return pb.LedgerDoubt(
        since=doubt.at,
        why=visible(doubt.why),
        kept_as=visible(doubt.kept_as),
        restored=doubt.restored,
        recoverable=snapshot.recoverable,
    )


def models(view: NodeView) -> list[pb.GpuModel]:
    """Encode the layouts of the node's GPUs, each layout once; a whole GPU has one profile."""
    gpus_by_layout: dict[Layout, list[int]] = {}
    for each in view.gpus:
        gpus_by_layout.setdefault(each.layout, []).append(each.index)
    return [
        pb.GpuModel(
            model=visible(layout.model),
            memory_slices=layout.memory_slices,
            memory_mib=layout.memory_mib,
            profiles=[_profile(each) for each in sorted(layout.profiles, key=_smallest_first)],
            gpus=indices,
            shared_memory=None if layout.shares is None else shared_memory(layout.shares),
        )
        for layout, indices in gpus_by_layout.items()
    ]


def usage(readings: Mapping[Generation, InstanceUsage], caller: Caller) -> list[pb.InstanceUsage]:
    """Encode the usage of each instance, by generation; values that the driver does not report are absent."""
    return [
        pb.InstanceUsage(
            generation=generation,
            memory_used_mib=each.memory_used_mib,
            memory_total_mib=each.memory_total_mib,
            utilization_percent=each.utilization_percent,
            compute=None if each.compute is None else _compute_usage(each.compute),
            processes=None if each.processes is None else _process_list(each.processes, caller),
        )
        for generation, each in sorted(readings.items())
    ]


def _compute_usage(usage: ComputeUsage) -> pb.ComputeUsage:
    return pb.ComputeUsage(
        seconds=usage.seconds,
        sm_percent=usage.sm_percent,
        tensor_percent=usage.tensor_percent,
        memory_bandwidth_percent=usage.memory_bandwidth_percent,
    )


def _process_list(processes: Sequence[ProcessUsage], caller: Caller) -> pb.ProcessList:
    # Users of this machine may see who runs what, callers from elsewhere may not.
    shown = processes if caller.admin or caller.uid is not None else ()
    return pb.ProcessList(
        pids=[each.pid for each in processes],
        details=[
            pb.ProcessUsage(
                pid=each.pid, uid=each.uid, command=_command_for(each, caller), memory_used_mib=each.used_mib
            )
            for each in shown
        ],
    )


def _command_for(process: ProcessUsage, caller: Caller) -> str:
    """Return the command line, or for another user the program alone: arguments can hold secrets (proc(5), hidepid)."""
    if caller.admin or (process.uid is not None and process.uid == caller.uid):
        return visible(process.command)
    return visible(process.command.partition(" ")[0])


def account(each: Account, *, has_since: bool) -> pb.AccountingResponse:
    """Encode who leased what; `has_since`: the caller has limited the beginning of the period."""
    return pb.AccountingResponse(
        rows=[_account_row(key, use) for key, use in each.rows.items()],
        total=_account_row("", each.total),
        since=each.period.since if has_since else None,
        until=each.period.until,
        complete_since=each.complete_since,
    )


def _account_row(key: str, use: Use) -> pb.AccountingRow:
    return pb.AccountingRow(
        key=visible(key),
        leases=use.leases,
        devices=use.devices,
        memory_mib_seconds=use.memory_mib_seconds,
        slice_seconds=use.slice_seconds,
        waited_seconds=use.waited_seconds,
        measured_mib_seconds=use.measured_mib_seconds,
        peak_mib_seconds=use.peak_mib_seconds if use.measured_mib_seconds else None,
    )


def advice(each: Advice) -> pb.Advice:
    """Encode the advice on leases of one name."""
    return pb.Advice(
        name=visible(each.name),
        user=visible(each.user),
        verdict=each.verdict.value,
        message=visible(each.message),
        runs=each.runs,
        measured_runs=each.measured_runs,
        asked=visible(each.asked),
        peak_mib=each.peak_mib,
        suggestion=each.suggestion,
        replayed=each.replayed,
        waited_seconds=each.waited_seconds,
        waited_less_seconds=each.waited_less_seconds,
    )


def _leased_device(generation: Generation, view: NodeView, *, lost: bool, reused: bool) -> pb.Device:
    each = view.instances.get(generation)
    if each is None:
        return pb.Device(generation=generation, reused=reused)
    return pb.Device(
        uuid="" if lost else each.uuid,
        gpu=each.slot.gpu,
        gpu_index=view.by_uuid[each.slot.gpu].index,
        profile=each.slot.profile.name,
        memory_mib=each.slot.profile.memory_mib,
        placement=place(each.slot),
        gpu_instance_id=each.gpu_instance_id,
        compute_instance_id=each.compute_instance_id,
        reused=reused,
        generation=generation,
        kind=each.kind.name,
        enforced_by=enforcement(each.enforced_by),
        promise=promise(each.enforced_by),
        compute_percent=each.slot.profile.compute_percent,
    )


def _profile(each: Profile) -> pb.Profile:
    engines = each.engines
    return pb.Profile(
        id=each.id,
        name=each.name,
        compute_slices=each.compute_slices,
        memory_slices=each.memory_slices,
        memory_mib=each.memory_mib,
        placements=[placement(one) for one in each.placements],
        engines=pb.Engines(
            multiprocessors=engines.multiprocessors,
            copy=engines.copy,
            decoders=engines.decoders,
            encoders=engines.encoders,
            jpeg=engines.jpeg,
            ofa=engines.ofa,
        ),
        attributes=sorted(each.attributes),
    )


def _smallest_first(each: Profile) -> tuple[int, int, bool, str]:
    return (each.memory_mib, each.compute_slices, bool(each.attributes), each.name)


def _fact(value: str | float | bool) -> pb.Fact:  # noqa: FBT001 -- a value, not a switch
    match value:
        case bool():
            return pb.Fact(flag=value)
        case int():
            return pb.Fact(integer=value)
        case float():
            return pb.Fact(number=value)
        case str():
            return pb.Fact(text=visible(value))
