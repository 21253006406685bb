"""Decodes messages of the API into the values of `types`. Makes no decisions."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.descriptor import EnumDescriptor

from mig_agent.client import types
from mig_agent.core.errors import Blocker
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


def grant(message: pb.Granted) -> types.Grant:
    """Decode a lease with its token."""
    lease = message.lease
    return types.Grant(
        id=lease.id,
        token=message.token,
        devices=devices(lease.devices),
        env=dict(sorted(message.env.items())),
        expires_at=lease.expires_at if lease.HasField("expires_at") else None,
        request_id=lease.request_id,
        notes=tuple(message.notes),
        revision=message.revision,
        confirm_by=message.confirm_by if message.HasField("confirm_by") else None,
    )


def devices(messages: Iterable[pb.Device]) -> tuple[types.Device, ...]:
    """Decode the devices of a lease."""
    return tuple(
        types.Device(
            uuid=each.uuid,
            gpu=each.gpu,
            gpu_index=each.gpu_index,
            profile=each.profile,
            memory_mib=each.memory_mib,
            placement=_placement(each),
            gpu_instance_id=each.gpu_instance_id if each.HasField("gpu_instance_id") else None,
            compute_instance_id=each.compute_instance_id if each.HasField("compute_instance_id") else None,
            reused=each.reused,
            kind=each.kind,
            enforced_by=each.enforced_by,
            promise=each.promise,
            compute_percent=_compute_percent(each),
        )
        for each in messages
    )


def lease(message: pb.Lease) -> types.LeaseInfo:
    """Decode a lease as everybody may see it."""
    return types.LeaseInfo(
        id=message.id,
        holder=message.holder.name,
        tenant=message.holder.tenant,
        devices=devices(message.devices),
        created_at=message.created_at,
        expires_at=message.expires_at if message.HasField("expires_at") else None,
        pid=message.pid if message.HasField("pid") else None,
        hold=message.hold,
        unused=message.unused,
        holder_uid=message.holder.uid if message.holder.HasField("uid") else None,
        holder_pid=message.holder.pid if message.holder.HasField("pid") else None,
        pod=_pod(message.pod) if message.HasField("pod") else None,
        # An older agent reports a pod only by the kubelet's devices.
        arrived=message.arrived or bool(message.kubelet_devices),
        kubelet_devices=tuple(
            types.KubeletDevice(resource=each.resource, id=each.id) for each in message.kubelet_devices
        ),
        warning=message.warning,
        idle_since=message.idle_since if message.HasField("idle_since") else None,
        request_id=message.request_id,
    )


def status(message: pb.StatusResponse) -> types.Status:
    """Decode the node's state."""
    return types.Status(
        node=message.node,
        revision=message.revision,
        gpus=tuple(gpu(each) for each in message.gpus),
        leases=tuple(lease(each) for each in message.leases),
        queue=tuple(waiting(each) for each in message.queue),
        started_at=message.started_at,
        ledger_error=message.ledger_error,
        version=message.version,
        driver_version=message.driver_version,
        strict_fifo=message.strict_fifo,
        reservation_after=message.reservation_after_seconds or None,
        paused=tuple(message.paused),
        missing_gpus={each.index: each.reason for each in message.missing_gpus},
        ledger_doubt=_doubt(message.ledger_doubt) if message.HasField("ledger_doubt") else None,
        socket_problems=tuple(message.socket_problems),
        problems=tuple(message.problems),
        boot_id=message.boot_id,
        available=tuple(
            types.Available(profile=each.profile, memory_mib=each.memory_mib, count=each.count)
            for each in message.available
        ),
        largest_share_mib=message.largest_share_mib,
    )


def _doubt(message: pb.LedgerDoubt) -> types.LedgerDoubt:
    return types.LedgerDoubt(
        since=message.since,
        why=message.why,
        kept_as=message.kept_as,
        restored=message.restored,
        recoverable=message.recoverable,
    )


def recovered(message: pb.RecoverResponse) -> types.Recovered:
    """Decode a restored lease."""
    return types.Recovered(lease=lease(message.lease), anew=message.recovered, notes=tuple(message.notes))


def waiting(message: pb.QueuedRequest) -> types.Waiting:
    """Decode a request in the queue."""
    return types.Waiting(
        request_id=message.request_id,
        holder=message.holder.name,
        tenant=message.holder.tenant,
        priority=message.priority,
        position=message.position,
        since=message.since,
        wants=message.wants,
        estimate=_start_estimate(message),
        blockers=blockers(message.blockers),
        limit=message.limit,
        holder_uid=message.holder.uid if message.holder.HasField("uid") else None,
        caller=message.caller,
        reserved_gpus=tuple(message.reserved_gpus),
    )


def gpu(message: pb.Gpu) -> types.Gpu:
    """Decode a GPU with its instances."""
    return types.Gpu(
        index=message.index,
        uuid=message.uuid,
        model=message.model,
        mig=mig_mode(message.mig),
        state=_word(pb.GpuState.DESCRIPTOR, message.state, "GPU_STATE_"),
        reason=message.reason,
        memory_slices=message.memory_slices,
        memory_mib=message.memory_mib,
        instances=tuple(instance(each) for each in message.instances),
        draining=message.draining,
        drain_deadline=message.drain_deadline if message.HasField("drain_deadline") else None,
        unusable_slices=tuple(message.unusable_slices),
        shared_memory=_shared_memory(message),
    )


def drained(message: pb.DrainResponse) -> types.Drained:
    """Decode the GPUs that are being drained, with the leases that are still there."""
    return types.Drained(
        gpus=tuple(gpu(each) for each in message.gpus), leases=tuple(lease(each) for each in message.leases)
    )


def mig_mode(message: pb.MigMode) -> types.MigMode:
    """Decode a MIG mode."""
    return types.MigMode(capable=message.capable, current=message.current, pending=message.pending)


def instance(message: pb.Instance) -> types.Instance:
    """Decode an instance."""
    return types.Instance(
        uuid=message.uuid,
        generation=message.generation,
        profile=message.profile,
        memory_mib=message.memory_mib,
        placement=_placement(message),
        gpu_instance_id=message.gpu_instance_id if message.HasField("gpu_instance_id") else None,
        compute_instance_id=message.compute_instance_id if message.HasField("compute_instance_id") else None,
        state=_word(pb.InstanceState.DESCRIPTOR, message.state, "INSTANCE_STATE_"),
        lease=message.lease,
        holder=message.holder,
        tenant=message.tenant,
        since=message.since,
        reason=message.reason,
        gpu=message.gpu,
        gpu_index=message.gpu_index,
        kind=message.kind,
        enforced_by=message.enforced_by,
        compute_percent=_compute_percent(message),
    )


def models(message: pb.ProfilesResponse) -> tuple[types.GpuModel, ...]:
    """Decode the profiles of all GPU models."""
    return tuple(
        types.GpuModel(
            model=each.model,
            gpus=tuple(each.gpus),
            memory_slices=each.memory_slices,
            memory_mib=each.memory_mib,
            profiles=tuple(_profile(one) for one in each.profiles),
            shared_memory=_shared_memory(each),
        )
        for each in message.models
    )


def outcome(message: pb.PlanOutcome, revision: int) -> types.Plan | types.NoPlan:
    """Decode the plan or the refusal of one request."""
    if message.HasField("refusal"):
        refusal = message.refusal
        return types.NoPlan(
            reason=refusal.reason,
            message=refusal.message,
            hint=refusal.hint,
            retryable=refusal.retryable,
            blockers=blockers(refusal.blockers),
            explanation=tuple(message.explanation),
            estimate=_start_estimate(message),
            revision=refusal.revision if refusal.HasField("revision") else None,
            changed=tuple(refusal.changed),
        )
    plan = message.plan
    return types.Plan(
        devices=tuple(
            types.PlannedDevice(
                gpu=each.gpu,
                gpu_index=each.gpu_index,
                profile=each.profile,
                memory_mib=each.memory_mib,
                placement=_placement(each),
                reused=each.reused,
                uuid=each.uuid,
                kind=each.kind,
                enforced_by=each.enforced_by,
                promise=each.promise,
                compute_percent=_compute_percent(each),
            )
            for each in plan.devices
        ),
        steps=tuple(
            types.Step(
                kind=_word(pb.StepKind.DESCRIPTOR, each.kind, "STEP_KIND_"),
                gpu=each.gpu,
                gpu_index=each.gpu_index,
                profile=each.profile,
                placement=_placement(each),
                uuid=each.uuid,
                message=each.message,
            )
            for each in plan.steps
        ),
        score=plan.score,
        notes=tuple(plan.notes),
        revision=revision,
        explanation=tuple(message.explanation),
        expected_seconds=plan.expected_seconds if plan.HasField("expected_seconds") else None,
        wasted_mib=plan.wasted_mib if plan.HasField("wasted_mib") else None,
        capacity_lost=plan.capacity_lost if plan.HasField("capacity_lost") else None,
        creation_cost=plan.creation_cost if plan.HasField("creation_cost") else None,
    )


def blockers(messages: Iterable[pb.Blocker]) -> tuple[Blocker, ...]:
    """Decode blockers."""
    return tuple(
        Blocker(
            gpu_index=each.gpu_index,
            what=each.what,
            state=each.state,
            lease=each.lease,
            holder=each.holder,
            expires_at=each.expires_at if each.HasField("expires_at") else None,
        )
        for each in messages
    )


def queue_position(message: pb.Queued) -> types.QueuePosition:
    """Decode what the client of a waiting request is told."""
    return types.QueuePosition(message.position, _start_estimate(message), blockers(message.blockers), message.limit)


def _start_estimate(message: pb.Queued | pb.QueuedRequest | pb.PlanOutcome) -> types.StartEstimate | None:
    if not message.HasField("estimate"):
        return None
    estimate = message.estimate
    return types.StartEstimate(
        earliest=estimate.earliest if estimate.HasField("earliest") else None,
        median=estimate.median if estimate.HasField("median") else None,
        latest=estimate.latest if estimate.HasField("latest") else None,
        basis=_word(pb.EstimateBasis.DESCRIPTOR, estimate.basis, "ESTIMATE_BASIS_"),
        leases=estimate.leases,
    )


def event(message: pb.Event) -> types.Event:
    """Decode an event."""
    return types.Event(
        kind=message.kind,
        at=message.at,
        revision=message.revision,
        message=message.message,
        gpu=message.gpu,
        gpu_index=message.gpu_index if message.HasField("gpu_index") else None,
        lease=message.lease,
        generation=message.generation if message.HasField("generation") else None,
        holder=message.holder,
        data={name: _fact(value) for name, value in sorted(message.data.items())},
        number=message.number,
    )


def event_page(message: pb.EventsResponse) -> types.EventPage:
    """Decode recorded events."""
    return types.EventPage(events=tuple(event(each) for each in message.events), earlier=message.earlier)


def usage(message: pb.InstanceUsage) -> types.Usage:
    """Decode the usage of one instance."""
    return types.Usage(
        generation=message.generation,
        memory_used_mib=message.memory_used_mib if message.HasField("memory_used_mib") else None,
        memory_total_mib=message.memory_total_mib if message.HasField("memory_total_mib") else None,
        utilization_percent=message.utilization_percent if message.HasField("utilization_percent") else None,
        processes=tuple(message.processes.pids) if message.HasField("processes") else None,
        process_details=tuple(
            types.ProcessUsage(
                pid=each.pid,
                uid=each.uid if each.HasField("uid") else None,
                command=each.command,
                memory_used_mib=each.memory_used_mib if each.HasField("memory_used_mib") else None,
            )
            for each in message.processes.details
        ),
        compute=_compute_usage(message.compute) if message.HasField("compute") else None,
    )


def _compute_usage(message: pb.ComputeUsage) -> types.ComputeUsage:
    bandwidth = message.memory_bandwidth_percent if message.HasField("memory_bandwidth_percent") else None
    return types.ComputeUsage(
        seconds=message.seconds,
        sm_percent=message.sm_percent,
        tensor_percent=message.tensor_percent if message.HasField("tensor_percent") else None,
        memory_bandwidth_percent=bandwidth,
    )


def account(message: pb.AccountingResponse) -> types.Account:
    """Decode who leased how much."""
    return types.Account(
        rows=tuple(_account_row(each) for each in message.rows),
        total=_account_row(message.total),
        since=message.since if message.HasField("since") else None,
        until=message.until,
        complete_since=message.complete_since if message.HasField("complete_since") else None,
    )


def _account_row(message: pb.AccountingRow) -> types.AccountRow:
    return types.AccountRow(
        key=message.key,
        leases=message.leases,
        devices=message.devices,
        memory_mib_seconds=message.memory_mib_seconds,
        slice_seconds=message.slice_seconds,
        waited_seconds=message.waited_seconds,
        measured_mib_seconds=message.measured_mib_seconds,
        peak_mib_seconds=message.peak_mib_seconds if message.HasField("peak_mib_seconds") else None,
    )


def advice(message: pb.Advice) -> types.Advice:
    """Decode the advice on leases of one name."""
    return types.Advice(
        name=message.name,
        user=message.user,
        verdict=message.verdict,
        message=message.message,
        runs=message.runs,
        measured_runs=message.measured_runs,
        asked=message.asked,
        peak_mib=message.peak_mib if message.HasField("peak_mib") else None,
        suggestion=message.suggestion,
        replayed=message.replayed,
        waited_seconds=message.waited_seconds if message.HasField("waited_seconds") else None,
        waited_less_seconds=message.waited_less_seconds if message.HasField("waited_less_seconds") else None,
    )


def mode_change(message: pb.SetMigModeResponse) -> types.ModeChange:
    """Decode the result of a switch of MIG mode."""
    needs = _word(pb.ModeNeeds.DESCRIPTOR, message.needs, "MODE_NEEDS_")
    return types.ModeChange(
        gpu=message.gpu, mig=mig_mode(message.mig), needs="" if needs == "nothing" else needs, message=message.message
    )


def paused(message: pb.PauseResponse | pb.ResumeResponse) -> types.Paused:
    """Decode the result of pausing or resuming."""
    return types.Paused(paused=tuple(message.paused), driver_released=message.driver_released, message=message.message)


def _pod(message: pb.Pod) -> types.Pod:
    return types.Pod(namespace=message.namespace, name=message.name, uid=message.uid)


def _profile(message: pb.Profile) -> types.Profile:
    return types.Profile(
        id=message.id,
        name=message.name,
        compute_slices=message.compute_slices,
        memory_slices=message.memory_slices,
        memory_mib=message.memory_mib,
        placements=tuple(types.Placement(each.start, each.size) for each in message.placements),
        attributes=tuple(message.attributes),
    )


def _shared_memory(message: pb.Gpu | pb.GpuModel) -> types.SharedMemory | None:
    if not message.HasField("shared_memory"):
        return None
    memory = message.shared_memory
    return types.SharedMemory(
        enforced_by=memory.enforced_by,
        usable_mib=memory.usable_mib,
        taken_mib=memory.taken_mib,
        overhead_mib=memory.overhead_mib,
        least_mib=memory.least_mib,
        promise=memory.promise,
        others_mib=memory.others_mib,
        without_process=memory.without_process,
    )


def _compute_percent(message: pb.Device | pb.Instance | pb.PlannedDevice) -> int | None:
    return message.compute_percent if message.HasField("compute_percent") else None


def _placement(message: pb.Device | pb.Instance | pb.PlannedDevice | pb.Step) -> types.Placement | None:
    if not message.HasField("placement"):
        return None
    return types.Placement(message.placement.start, message.placement.size)


def _word(descriptor: EnumDescriptor, number: int, prefix: str) -> str:
    """Return an enum value as the word that people read: `leased`; its number if this version does not know it."""
    value = descriptor.values_by_number.get(number)
    return str(number) if value is None else value.name.removeprefix(prefix).lower()


def _fact(message: pb.Fact) -> str | int | float | bool:
    match message.WhichOneof("value"):
        case "integer":
            return message.integer
        case "number":
            return message.number
        case "flag":
            return message.flag
        case _:
            return message.text
