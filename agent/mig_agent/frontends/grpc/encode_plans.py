"""Encodes dry runs as messages of the API: plans with their steps, refusals and explanations."""

from __future__ import annotations

from collections.abc import Iterable

from mig_agent.adapters.grpc_errors import detail_of
from mig_agent.core.errors import Refusal
from mig_agent.core.model import NodeView
from mig_agent.core.planning.plan import (
    CreateInstance,
    DevicePlan,
    Outcome,
    Plan,
    ReuseInstance,
    Step,
    StepTimes,
    expected_seconds,
)
from mig_agent.core.texts import visible
from mig_agent.frontends.grpc.encode import FRAME_BYTES, place
from mig_agent.frontends.grpc.encode_shares import enforcement, promise
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


def outcome(each: Outcome, view: NodeView, pace: StepTimes) -> pb.PlanOutcome:
    """Encode the plan or the refusal of one request; `pace` gives the expected duration of its steps."""
    if isinstance(each, Refusal):
        return pb.PlanOutcome(refusal=detail_of(each))
    return pb.PlanOutcome(plan=_plan(each, view, pace))


def explain(outcomes: Iterable[pb.PlanOutcome], explained: Iterable[Iterable[str]], most_bytes: int) -> None:
    """Add an explanation to each outcome until the next one would exceed `most_bytes`."""
    bytes_left = most_bytes
    for each, lines in zip(outcomes, explained, strict=True):
        text = pb.PlanOutcome(explanation=map(visible, lines))
        bytes_left -= text.ByteSize() + FRAME_BYTES
        if bytes_left < 0:
            return
        each.MergeFrom(text)


def _plan(each: Plan, view: NodeView, pace: StepTimes) -> pb.PlannedRequest:
    return pb.PlannedRequest(
        devices=[_planned_device(one, view) for one in each.devices],
        steps=[_step(one, view) for one in each.steps],
        score=each.score,
        notes=map(visible, each.notes),
        expected_seconds=expected_seconds(each, pace),
        wasted_mib=each.wasted_mib,
        capacity_lost=each.capacity_lost,
        creation_cost=each.creation_cost,
    )


def _planned_device(each: DevicePlan, view: NodeView) -> pb.PlannedDevice:
    reused = each.serve.instance if isinstance(each.serve, ReuseInstance) else None
    gpu, profile = view.by_uuid[each.gpu], each.slot.profile
    terms = gpu.layout.shares if profile.kind.shares_memory else None
    enforced_by = None
    if terms is not None:  # a dry run hands no process over
        enforced_by = terms.way(has_process=False, limits_compute=profile.compute_percent is not None)
        enforced_by = enforced_by or terms.enforced_by
    return pb.PlannedDevice(
        gpu=each.gpu,
        gpu_index=gpu.index,
        profile=profile.name,
        memory_mib=profile.memory_mib,
        placement=place(each.slot),
        reused=reused is not None,
        uuid=reused.uuid if reused else "",
        kind=profile.kind.name,
        enforced_by=enforcement(enforced_by),
        promise=promise(enforced_by),
        compute_percent=profile.compute_percent,
    )


def _step(each: Step, view: NodeView) -> pb.Step:
    if isinstance(each, CreateInstance):
        kind, slot, uuid = pb.STEP_KIND_CREATE, each.slot, ""
    else:
        kind = pb.STEP_KIND_REUSE if isinstance(each, ReuseInstance) else pb.STEP_KIND_DESTROY
        slot, uuid = each.instance.slot, each.instance.uuid
    return pb.Step(
        kind=kind,
        gpu=slot.gpu,
        gpu_index=view.by_uuid[slot.gpu].index,
        profile=slot.profile.name,
        placement=place(slot),
        uuid=uuid,
        message=visible(each.describe()),
    )
