"""The API over real sockets: what a caller in any language sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path
from typing import TypeVar

import grpc
import pytest

from mig_agent.core.model import Holder, InstanceState, LeaseId
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.engine.callers import Caller
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.acquire import asking
from support.owners import bound
from support.service import TIMEOUT, Service, ask, detail_of, service

_Message = TypeVar("_Message")


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Service]:
    async with service(tmp_path, "a100-40gb:1,h100-80gb:1") as running:
        yield running


async def first(call: AsyncIterable[_Message]) -> _Message:
    """The next message of a stream."""
    return await asyncio.wait_for(anext(aiter(call)), TIMEOUT)


async def fill(served: Service) -> pb.Granted:
    """Takes the whole of GPU 0."""
    return await served.acquire(profile="7g.40gb")


# ---------------------------------------------------------------- Acquire and Release


async def test_acquire_returns_token_and_environment(served: Service) -> None:
    granted = await served.acquire(memory="4G", gpus=["0"])
    (device,) = granted.lease.devices
    (there,) = served.node.instances(InstanceState.LEASED)
    assert device.uuid == there.uuid
    assert (device.profile, device.memory_mib, device.gpu_index) == ("1g.5gb", 4864, 0)
    assert device.gpu == served.node.gpu(0).uuid
    assert device.HasField("placement")
    assert device.gpu_instance_id == there.gpu_instance_id
    assert device.generation == there.generation
    assert not device.reused
    assert dict(granted.env) == {"CUDA_VISIBLE_DEVICES": device.uuid, "NVIDIA_VISIBLE_DEVICES": device.uuid}
    assert granted.token
    assert granted.lease.holder == pb.Holder(name="alice", tenant="team-a")
    assert not granted.lease.HasField("expires_at")
    assert granted.revision == served.node.manager.snapshot.view.revision


async def test_several_devices_are_one_lease(served: Service) -> None:
    granted = await served.acquire(memory="4G", profile="2g.20gb")
    assert [each.profile for each in granted.lease.devices] == ["1g.5gb", "2g.20gb"]
    assert granted.env["CUDA_VISIBLE_DEVICES"] == ",".join(each.uuid for each in granted.lease.devices)


async def test_released_instance_is_reused(served: Service) -> None:
    granted = await served.acquire(memory="4G", gpus=["0"])
    await served.users.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token), timeout=TIMEOUT)
    again = await served.acquire(memory="4G", gpus=["0"])
    assert again.lease.devices[0].uuid == granted.lease.devices[0].uuid
    assert again.lease.devices[0].reused
    assert served.node.creations() == 1


async def test_the_same_request_id_gives_the_same_answer(served: Service) -> None:
    granted = await served.acquire(memory="4G", request_id="one")
    again = await served.acquire(memory="4G", request_id="one")
    assert (again.lease.id, again.token) == (granted.lease.id, granted.token)
    with pytest.raises(grpc.RpcError) as refused:
        await served.acquire(memory="9G", request_id="one")
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    assert detail_of(refused.value).reason == "request-id-reused"


async def test_a_pods_lease_that_it_does_not_use_is_ended_by_an_administrators_force(tmp_path: Path) -> None:
    async with service(tmp_path, follows_pods=True) as served:
        pod = Pod(namespace="team-a", name="train", uid="7f2c")
        holder = pb.Holder(pod=pb.Pod(namespace=pod.namespace, name=pod.name, uid=pod.uid))
        granted = await served.acquire(memory="4G", holder=holder)
        await served.node.manager.bind(LeaseId(granted.lease.id), bound(pod))
        for stub, force, reason in (
            (served.users, True, "not-permitted"),
            (served.admins, False, "in-use"),
        ):
            release = pb.ReleaseRequest(lease=granted.lease.id, token=granted.token, force=force)
            with pytest.raises(grpc.RpcError) as refused:
                await stub.Release(release, timeout=TIMEOUT)
            assert detail_of(refused.value).reason == reason
        await served.admins.Release(pb.ReleaseRequest(lease=granted.lease.id, force=True), timeout=TIMEOUT)
        assert not served.node.leases


async def test_without_a_request_id_every_call_is_another_request(served: Service) -> None:
    leases = {(await served.acquire(memory="4G")).lease.id for _ in range(3)}
    assert len(leases) == 3


async def test_refusal_has_reason_blockers_and_retryability(served: Service) -> None:
    await fill(served)
    with pytest.raises(grpc.RpcError) as refused:
        await served.acquire(profile="1g.5gb", gpus=["0"])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    detail = detail_of(refused.value)
    assert detail.reason == "no-capacity"
    assert detail.message.startswith("cannot ")
    assert refused.value.details() == detail.message
    assert detail.retryable
    assert "alice" in {each.holder for each in detail.blockers}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.Request(), "invalid-request"),
        (pb.Request(wants=[pb.Want()]), "invalid-request"),
        (pb.Request(wants=[pb.Want(memory="4")]), "invalid-request"),
        (pb.Request(wants=[pb.Want(whole_gpu=False)]), "invalid-request"),
        (pb.Request(wants=[pb.Want(gpu_fraction=float("nan"))]), "invalid-request"),
        (ask(memory="4G", wait_seconds=-1), "invalid-request"),
        (ask(memory="4G", ttl_seconds=float("inf")), "invalid-request"),
        (ask(memory="4G", gpus=["0.5"]), "invalid-request"),
        (ask(memory="900G"), "too-large"),
        (ask(profile="9g.99gb"), "unknown-profile"),
        (ask(memory="4G", gpus=["7"]), "unknown-gpu"),
    ],
)
async def test_impossible_request_is_refused_permanently(served: Service, request_: pb.Request, reason: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        async for _ in served.users.Acquire(asking(request_), timeout=TIMEOUT):
            pass
    detail = detail_of(refused.value)
    assert detail.reason == reason
    assert not detail.retryable
    assert not served.node.leases


async def test_release_takes_the_right_token(served: Service) -> None:
    granted = await served.acquire(memory="4G")
    wrong = granted.token[::-1]
    with pytest.raises(grpc.RpcError) as refused:
        await served.users.Release(pb.ReleaseRequest(lease=granted.lease.id, token=wrong), timeout=TIMEOUT)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert detail_of(refused.value).reason == "wrong-token"
    with pytest.raises(grpc.RpcError) as refused:
        await served.users.Release(pb.ReleaseRequest(lease=granted.lease.id), timeout=TIMEOUT)
    assert detail_of(refused.value).reason == "not-permitted"
    assert granted.lease.id in served.node.leases
    right = pb.ReleaseRequest(lease=granted.lease.id, token=granted.token)
    await served.users.Release(right, timeout=TIMEOUT)
    await served.users.Release(right, timeout=TIMEOUT)  # once more is no error
    assert not served.node.leases


async def test_an_administrator_needs_no_token(served: Service) -> None:
    granted = await served.acquire(memory="4G")
    await served.admins.Release(pb.ReleaseRequest(lease=granted.lease.id), timeout=TIMEOUT)
    assert not served.node.leases


async def test_renew_sets_and_takes_away_a_deadline(served: Service) -> None:
    granted = await served.acquire(memory="4G", ttl_seconds=60)
    now = served.node.clock.now()
    assert granted.lease.expires_at == pytest.approx(now + 60)
    request = pb.RenewRequest(lease=granted.lease.id, token=granted.token, ttl_seconds=600)
    renewed = (await served.users.Renew(request, timeout=TIMEOUT)).lease
    assert renewed.expires_at == pytest.approx(now + 600)
    assert renewed.devices[0].uuid == granted.lease.devices[0].uuid
    request.ClearField("ttl_seconds")
    assert not (await served.users.Renew(request, timeout=TIMEOUT)).lease.HasField("expires_at")
    for bad in (float("nan"), float("inf"), -1.0, 0.0):
        request.ttl_seconds = bad
        with pytest.raises(grpc.RpcError) as refused:
            await served.users.Renew(request, timeout=TIMEOUT)
        assert detail_of(refused.value).reason == "invalid-request"


# ---------------------------------------------------------------- waiting


async def test_queued_caller_gets_positions_and_then_its_lease(served: Service) -> None:
    held = await fill(served)
    calls = [served.users.Acquire(asking(ask(profile="7g.40gb", wait_seconds=600)), timeout=TIMEOUT) for _ in range(2)]
    places = [await first(call) for call in calls]
    assert sorted(each.queued.position for each in places) == [1, 2]
    status = await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
    assert [each.position for each in status.queue] == [1, 2]
    assert {each.wants for each in status.queue} == {"7g.40gb"}
    assert {each.holder.name for each in status.queue} == {"alice"}

    await served.users.Release(pb.ReleaseRequest(lease=held.lease.id, token=held.token), timeout=TIMEOUT)
    order = [place.queued.position for place in places]
    served_first, served_second = calls[order.index(1)], calls[order.index(2)]
    answers = [answer async for answer in served_first]
    assert answers[-1].HasField("granted")
    served.node.clock.advance(2)  # places are told once a second
    assert (await first(served_second)).queued.position == 1
    granted = answers[-1].granted
    await served.users.Release(pb.ReleaseRequest(lease=granted.lease.id, token=granted.token), timeout=TIMEOUT)
    assert [answer.WhichOneof("update") async for answer in served_second] == ["granted"]


async def test_disconnected_caller_is_dequeued(served: Service) -> None:
    await fill(served)
    call = served.users.Acquire(asking(ask(profile="7g.40gb", wait_seconds=float("inf"))), timeout=TIMEOUT)
    await first(call)
    assert len(served.node.manager.snapshot.queue) == 1
    call.cancel()
    await served.node.until(lambda: not served.node.manager.snapshot.queue)


async def test_request_is_refused_after_its_wait_time(served: Service) -> None:
    await fill(served)
    call = served.users.Acquire(asking(ask(profile="7g.40gb", wait_seconds=5)), timeout=TIMEOUT)
    await first(call)
    served.node.clock.advance(6)
    with pytest.raises(grpc.RpcError) as refused:
        async for _ in call:
            pass
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert detail_of(refused.value).reason == "waited-too-long"


async def test_waiting_request_is_refused_when_the_agent_stops(served: Service) -> None:
    await fill(served)
    call = served.users.Acquire(asking(ask(profile="7g.40gb", wait_seconds=60)), timeout=TIMEOUT)
    await first(call)
    await served.node.manager.close()
    with pytest.raises(grpc.RpcError) as refused:
        async for _ in call:
            pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert detail_of(refused.value).reason == "shutting-down"


# ---------------------------------------------------------------- Hold


async def test_a_held_lease_lives_as_long_as_its_stream(served: Service) -> None:
    call = served.users.Hold(pb.HoldRequest(request=ask(memory="4G")))
    granted = (await first(call)).granted
    assert granted.lease.hold
    assert granted.lease.id in served.node.leases
    served.node.clock.advance(100_000)
    assert granted.lease.id in served.node.leases
    call.cancel()
    await served.node.until(lambda: not served.node.leases)
    assert len(served.node.instances(InstanceState.IDLE)) == 1


async def test_hold_ended_by_the_agent_can_be_attached_again(served: Service) -> None:
    request = pb.HoldRequest(request=ask(memory="4G", request_id="held"))
    call = served.users.Hold(request)
    granted = (await first(call)).granted
    for servicer in served.servicers:
        servicer.stop()
    with pytest.raises(grpc.RpcError) as ended:
        await first(call)
    assert detail_of(ended.value).reason == "shutting-down"
    assert granted.lease.id in served.node.leases
    served.node.clock.advance(61)
    await served.node.until(lambda: not served.node.leases)


async def test_attaching_again_keeps_the_lease_when_the_first_stream_ends_late(served: Service) -> None:
    """A client that was cut off is back before the agent notices that its first stream is dead."""
    request = pb.HoldRequest(request=ask(memory="4G", request_id="held"))
    calls = [served.users.Hold(request) for _ in range(2)]
    leases = {(await first(call)).granted.lease.id for call in calls}
    assert len(leases) == 1
    calls[0].cancel()
    released = await served.acquire(memory="4G")  # by now the end of the first stream has been dealt with
    assert leases < set(served.node.leases)
    calls[1].cancel()
    await served.node.until(lambda: set(served.node.leases) == {released.lease.id})


async def test_hold_ends_when_its_lease_is_released(served: Service) -> None:
    call = served.users.Hold(pb.HoldRequest(request=ask(memory="4G")))
    granted = (await first(call)).granted
    await served.admins.Release(pb.ReleaseRequest(lease=granted.lease.id), timeout=TIMEOUT)
    with pytest.raises(grpc.RpcError) as ended:
        await first(call)
    detail = detail_of(ended.value)
    assert detail.reason == "lease-ended"
    assert granted.lease.id in detail.message


async def test_a_hold_can_wait(served: Service) -> None:
    held = await fill(served)
    call = served.users.Hold(pb.HoldRequest(request=ask(profile="7g.40gb", wait_seconds=60)))
    assert (await first(call)).queued.position == 1
    await served.users.Release(pb.ReleaseRequest(lease=held.lease.id, token=held.token), timeout=TIMEOUT)
    assert (await first(call)).HasField("granted")
    call.cancel()
    await served.node.until(lambda: not served.node.leases)


# ---------------------------------------------------------------- looking


async def test_plan_says_what_would_be_done_and_changes_nothing(served: Service) -> None:
    idle = await served.acquire(profile="1g.5gb")
    await served.users.Release(pb.ReleaseRequest(lease=idle.lease.id, token=idle.token), timeout=TIMEOUT)
    before = served.node.layout()
    requests = [ask(profile="1g.5gb"), ask(profile="7g.40gb"), ask(profile="9g.99gb"), ask(memory="9G", gpus=["1"])]
    answer = await served.users.Plan(pb.PlanRequest(requests=requests), timeout=TIMEOUT)
    reuse, large, unknown, other = answer.outcomes
    assert [each.kind for each in reuse.plan.steps] == [pb.STEP_KIND_REUSE]
    assert reuse.plan.devices[0].uuid == idle.lease.devices[0].uuid
    assert reuse.plan.devices[0].reused
    assert [each.kind for each in large.plan.steps] == [pb.STEP_KIND_DESTROY, pb.STEP_KIND_CREATE]
    assert large.plan.steps[0].uuid == idle.lease.devices[0].uuid
    assert large.plan.devices[0].placement == pb.Placement(start=0, size=8)
    assert large.plan.score > reuse.plan.score
    for each in (reuse.plan, large.plan, other.plan):
        parts = each.wasted_mib + 1e-3 * (each.capacity_lost + each.creation_cost)
        assert each.score == pytest.approx(parts)
    assert reuse.plan.HasField("creation_cost")
    assert (reuse.plan.expected_seconds, reuse.plan.creation_cost, reuse.plan.wasted_mib) == (0.0, 0.0, 0.0)
    pace = served.node.manager.step_times
    assert large.plan.expected_seconds == pytest.approx(pace.create + pace.destroy)
    assert large.plan.creation_cost == pytest.approx(2.2)  # one to create, one to destroy
    assert other.plan.wasted_mib == pytest.approx(other.plan.devices[0].memory_mib - 9e9 / 2**20)
    assert unknown.refusal.reason == "unknown-profile"
    assert other.plan.devices[0].gpu_index == 1
    assert answer.revision == served.node.manager.snapshot.view.revision
    assert served.node.layout() == before


async def test_acquire_can_insist_on_the_revision_of_a_plan(served: Service) -> None:
    plan = await served.users.Plan(pb.PlanRequest(requests=[ask(memory="4G")]), timeout=TIMEOUT)
    await served.acquire(memory="4G")
    with pytest.raises(grpc.RpcError) as refused:
        await served.acquire(memory="4G", if_revision=plan.revision)
    assert refused.value.code() is grpc.StatusCode.ABORTED
    detail = detail_of(refused.value)
    assert detail.reason == "revision-changed"
    assert detail.revision == served.node.manager.snapshot.view.revision
    assert list(detail.changed) == ["instance-created", "lease-granted"]
    dry = await served.users.Plan(
        pb.PlanRequest(requests=[ask(memory="4G", if_revision=plan.revision)]), timeout=TIMEOUT
    )
    assert dry.outcomes[0].refusal == detail


async def test_status_shows_instances_with_their_holders(served: Service) -> None:
    granted = await served.acquire(memory="4G", gpus=["0"])
    served.node.simulator.create_foreign(1, "1g.10gb")
    await served.node.look()
    status = await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
    assert status.node == "node-1"
    assert [each.index for each in status.gpus] == [0, 1]
    (leased,) = status.gpus[0].instances
    assert (leased.state, leased.lease, leased.holder, leased.tenant) == (
        pb.INSTANCE_STATE_LEASED,
        granted.lease.id,
        "alice",
        "team-a",
    )
    assert leased.uuid == granted.lease.devices[0].uuid
    (foreign,) = status.gpus[1].instances
    assert (foreign.state, foreign.lease) == (pb.INSTANCE_STATE_FOREIGN, "")
    assert status.gpus[0].mig == pb.MigMode(capable=True, current=True, pending=True)
    assert status.gpus[0].state == pb.GPU_STATE_READY
    assert [each.id for each in status.leases] == [granted.lease.id]
    assert status.leases[0].devices[0].uuid == granted.lease.devices[0].uuid


async def test_profiles_are_listed_by_model_smallest_first(served: Service) -> None:
    answer = await served.users.Profiles(pb.ProfilesRequest(), timeout=TIMEOUT)
    assert [list(each.gpus) for each in answer.models] == [[0], [1]]
    for model in answer.models:
        memory = [each.memory_mib for each in model.profiles]
        assert memory == sorted(memory)
    names = {each.name: each for each in answer.models[0].profiles}
    assert [each.start for each in names["3g.20gb"].placements] == [0, 4]
    assert list(names["1g.5gb+me"].attributes) == ["+me"]


async def test_watch_streams_events_and_resumes(served: Service) -> None:
    call = served.users.Watch(pb.WatchRequest())
    messages = aiter(call)
    opened = await first(messages)
    assert not opened.HasField("event")
    granted = await served.acquire(memory="4G", gpus=["1"])
    seen: list[pb.WatchResponse] = []
    while not seen or seen[-1].event.kind != "lease-granted":
        seen.append(await first(messages))
    event = seen[-1].event
    assert (event.lease, event.gpu_index, event.holder) == (granted.lease.id, 1, "alice")
    assert event.message
    assert seen[-1].revision > opened.revision
    call.cancel()

    resumed = aiter(served.users.Watch(pb.WatchRequest(after_revision=opened.revision)))
    assert (await first(resumed)).revision == opened.revision
    again = [await first(resumed) for _ in seen]
    assert [each.event for each in again] == [each.event for each in seen]


async def test_watch_from_an_unknown_revision_is_refused(served: Service) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await anext(aiter(served.users.Watch(pb.WatchRequest(after_revision=1))))
    assert refused.value.code() is grpc.StatusCode.ABORTED
    assert detail_of(refused.value).reason == "revision-changed"


async def test_watch_ends_with_a_message_when_the_agent_stops(served: Service) -> None:
    messages = aiter(served.users.Watch(pb.WatchRequest()))
    await first(messages)
    for servicer in served.servicers:
        servicer.stop()
    with pytest.raises(grpc.RpcError) as ended:
        await first(messages)
    assert detail_of(ended.value).reason == "shutting-down"


async def test_events_are_kept(served: Service) -> None:
    began = served.node.clock.now()
    await served.acquire(memory="4G", gpus=["0"])
    await served.acquire(memory="4G", gpus=["1"])
    await served.node.quiet()
    answer = await served.users.Events(pb.EventsRequest(since=began), timeout=TIMEOUT)
    assert [each.kind for each in answer.events].count("lease-granted") == 2
    only = await served.users.Events(pb.EventsRequest(since=began, gpu="1"), timeout=TIMEOUT)
    assert {each.gpu_index for each in only.events} == {1}
    last = await served.users.Events(pb.EventsRequest(since=began, limit=1), timeout=TIMEOUT)
    assert [each.message for each in last.events] == [answer.events[-1].message]
    with pytest.raises(grpc.RpcError) as refused:
        await served.users.Events(pb.EventsRequest(since=float("nan")), timeout=TIMEOUT)
    assert detail_of(refused.value).reason == "invalid-request"


async def test_usage_omits_what_the_driver_does_not_report(served: Service) -> None:
    granted = await served.acquire(memory="4G", gpus=["0"])
    device = granted.lease.devices[0]
    served.node.simulator.occupy(f"0/{device.gpu_instance_id}", used_mib=1000)
    answer = await served.users.Usage(pb.UsageRequest(), timeout=TIMEOUT)
    (used,) = answer.instances
    assert used.generation == device.generation
    assert used.memory_used_mib >= 1000
    assert used.memory_total_mib == device.memory_mib
    assert not used.HasField("utilization_percent"), "the driver does not tell it under MIG"
    assert len(used.processes.pids) == 1


async def test_accounting_counts_a_period_by_key(served: Service) -> None:
    granted = await served.acquire(memory="4G", gpus=["0"], holder=pb.Holder(name="train", tenant="team-a"))
    device = granted.lease.devices[0]
    began = served.node.clock.now()
    served.node.clock.advance(100.0)
    answer = await served.admins.Accounting(
        pb.AccountingRequest(since=began + 40.0, by=pb.ACCOUNTING_KEY_PROFILE), timeout=TIMEOUT
    )
    (row,) = answer.rows
    assert (row.key, row.leases, row.devices, row.slice_seconds) == (device.profile, 1, 1, 60.0)
    assert row.memory_mib_seconds == device.memory_mib * 60.0 == answer.total.memory_mib_seconds
    assert not row.HasField("peak_mib_seconds"), "nothing was measured"
    assert (answer.since, answer.until) == (began + 40.0, began + 100.0)
    by_tenant = await served.users.Accounting(pb.AccountingRequest(), timeout=TIMEOUT)
    assert ([each.key for each in by_tenant.rows], by_tenant.HasField("since")) == (["team-a"], False)
    assert by_tenant.complete_since <= began


@pytest.mark.parametrize(
    "request_",
    [pb.AccountingRequest(since=float("nan")), pb.AccountingRequest(since=2.0, until=1.0), pb.AccountingRequest(by=99)],  # type: ignore[arg-type] # of a newer client
)
async def test_accounting_of_nonsense_is_refused(served: Service, request_: pb.AccountingRequest) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await served.users.Accounting(request_, timeout=TIMEOUT)
    assert detail_of(refused.value).reason == "invalid-request"


async def test_advice_comes_with_its_numbers(served: Service) -> None:
    await served.acquire(memory="4G", gpus=["0"], holder=pb.Holder(name="train", tenant="team-a"))
    (advice,) = (await served.admins.Advise(pb.AdviseRequest(name="train"), timeout=TIMEOUT)).advice
    assert (advice.verdict, advice.asked, advice.runs, advice.measured_runs) == ("too-few-runs", "4G", 1, 0)
    assert not advice.HasField("peak_mib")
    assert advice.message.startswith("train: asked 4G;")


# ---------------------------------------------------------------- administration


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Reclaim", pb.ReclaimRequest()),
        ("Cordon", pb.CordonRequest(gpu="0")),
        ("Cordon", pb.CordonRequest(gpu="0", uncordon=True)),
        ("SetMigMode", pb.SetMigModeRequest(gpu="0", mode=pb.MIG_MODE_TARGET_DISABLED)),
        ("Pause", pb.PauseRequest()),
        ("Resume", pb.ResumeRequest()),
        ("Adopt", pb.AdoptRequest(all=True)),
        ("Release", pb.ReleaseRequest(lease="x")),
        ("Renew", pb.RenewRequest(lease="x")),
    ],
)
async def test_administrative_calls_are_refused_on_the_users_socket(
    served: Service, method: str, request_: object
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await getattr(served.users, method)(request_, timeout=TIMEOUT)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    detail = detail_of(refused.value)
    assert detail.reason == "not-permitted"
    assert "sudo" in detail.hint


async def test_reclaim_destroys_and_returns_idle_instances(served: Service) -> None:
    kept = await served.acquire(memory="4G", gpus=["0"])
    idle = await served.acquire(memory="4G", gpus=["1"])
    await served.users.Release(pb.ReleaseRequest(lease=idle.lease.id, token=idle.token), timeout=TIMEOUT)
    answer = await served.admins.Reclaim(pb.ReclaimRequest(), timeout=TIMEOUT)
    (destroyed,) = answer.destroyed
    assert (destroyed.uuid, destroyed.gpu_index) == (idle.lease.devices[0].uuid, 1)
    assert {each.uuid for each in served.node.instances()} == {kept.lease.devices[0].uuid}


async def test_adopt_returns_the_adopted_instances(served: Service) -> None:
    served.node.simulator.create_foreign(0, "1g.5gb", start=6)
    await served.node.look()
    with pytest.raises(grpc.RpcError) as refused:
        await served.admins.Adopt(pb.AdoptRequest(), timeout=TIMEOUT)
    assert detail_of(refused.value).reason == "invalid-request"
    (adopted,) = (await served.admins.Adopt(pb.AdoptRequest(gpus=["0"]), timeout=TIMEOUT)).adopted
    assert adopted.state == pb.INSTANCE_STATE_IDLE
    assert (await served.acquire(memory="4G", gpus=["0"])).lease.devices[0].uuid == adopted.uuid


async def test_cordon_keeps_leases_off_a_gpu_until_uncordon(served: Service) -> None:
    answer = await served.admins.Cordon(pb.CordonRequest(gpu="0", reason="a fan is broken"), timeout=TIMEOUT)
    assert answer.gpu.state == pb.GPU_STATE_CORDONED
    assert "a fan is broken" in answer.gpu.reason
    with pytest.raises(grpc.RpcError):
        await served.acquire(memory="4G", gpus=["0"])
    answer = await served.admins.Cordon(pb.CordonRequest(gpu="0", uncordon=True), timeout=TIMEOUT)
    assert answer.gpu.state == pb.GPU_STATE_READY
    await served.acquire(memory="4G", gpus=["0"])


async def test_pause_releases_the_driver_and_resume_reopens_it(served: Service) -> None:
    kept = await served.acquire(memory="4G", gpus=["0"])
    answer = await served.admins.Pause(pb.PauseRequest(reason="  driver 590 "), timeout=TIMEOUT)
    assert (len(answer.paused), answer.driver_released, answer.message) == (1, True, "")
    assert answer.paused[0].endswith(": driver 590")
    status = await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)
    assert status.paused == answer.paused
    assert [each.id for each in status.leases] == [kept.lease.id]
    assert len(status.gpus) == 2
    with pytest.raises(grpc.RpcError) as refused:
        await served.acquire(memory="4G")
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    detail = detail_of(refused.value)
    assert (detail.reason, detail.retryable) == ("paused", True)
    (outcome,) = (await served.users.Plan(pb.PlanRequest(requests=[ask(memory="4G")]), timeout=TIMEOUT)).outcomes
    assert outcome.refusal.reason == "paused"
    resumed = await served.admins.Resume(pb.ResumeRequest(), timeout=TIMEOUT)
    assert (list(resumed.paused), resumed.driver_released, resumed.message) == ([], False, "")
    await served.acquire(memory="4G")


@pytest.mark.parametrize("reason", ["x" * 257, "two\nlines"])
async def test_reason_must_be_one_line(served: Service, reason: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await served.admins.Pause(pb.PauseRequest(reason=reason), timeout=TIMEOUT)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not (await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)).paused


async def test_the_lease_of_a_pod_names_it(served: Service) -> None:
    pod = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
    device = KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-3")
    request = served.node.request("1g.5gb", holder=Holder(tenant="team-a"), pod=pod, kubelet_devices=(device,))
    await served.node.manager.acquire(request, Caller(name="kubelet", admin=True))
    (lease,) = (await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)).leases
    assert lease.holder.name == "pod team-a/train-7f2c"
    assert lease.pod == pb.Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
    assert list(lease.kubelet_devices) == [pb.KubeletDevice(resource="nvidia.com/mig-1g.5gb", id="mig-agent-3")]
    (instance,) = served.node.instances(InstanceState.LEASED)
    assert instance.last_tenant == "team-a"


async def test_lease_of_a_pod_is_reserved_until_the_pod_is_bound(served: Service) -> None:
    pod = Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
    there = pb.Pod(namespace="team-a", name="train-7f2c", uid="6b8f")
    granted = await served.acquire(memory="4G", holder=pb.Holder(pod=there), ttl_seconds=60, request_id="6b8f")
    assert (granted.lease.pod, granted.lease.arrived) == (there, False)
    assert granted.lease.holder == pb.Holder(tenant="namespace team-a", name="pod team-a/train-7f2c")
    assert granted.lease.expires_at
    came = await served.node.manager.bind(LeaseId(granted.lease.id), bound(pod))
    (lease,) = (await served.users.Status(pb.StatusRequest(), timeout=TIMEOUT)).leases
    assert (lease.id, lease.pod, lease.arrived) == (came.id, there, True)
    assert not lease.HasField("expires_at")
    again = await served.acquire(memory="4G", holder=pb.Holder(pod=there), ttl_seconds=60, request_id="6b8f")
    assert (again.lease.id, again.token) == (granted.lease.id, granted.token)


async def test_no_stream_holds_the_lease_of_a_pod(served: Service) -> None:
    request_ = ask(memory="4G", holder=pb.Holder(pod=pb.Pod(namespace="team-a", name="train-7f2c")))
    with pytest.raises(grpc.RpcError) as refused:
        await first(served.users.Hold(pb.HoldRequest(request=request_), timeout=TIMEOUT))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    plan = await served.users.Plan(pb.PlanRequest(requests=[request_]), timeout=TIMEOUT)
    assert plan.outcomes[0].plan.devices
    assert not served.node.leases


async def test_set_mig_mode_needs_a_target(served: Service) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        await served.admins.SetMigMode(pb.SetMigModeRequest(gpu="1"), timeout=TIMEOUT)
    assert detail_of(refused.value).reason == "invalid-request"
    answer = await served.admins.SetMigMode(
        pb.SetMigModeRequest(gpu="1", mode=pb.MIG_MODE_TARGET_DISABLED), timeout=TIMEOUT
    )
    assert not answer.mig.current
    assert answer.gpu == served.node.gpu(1).uuid
    assert answer.message


async def test_cordon_needs_a_gpu_name(served: Service) -> None:
    for request in (pb.CordonRequest(), pb.CordonRequest(gpu="0.5")):
        with pytest.raises(grpc.RpcError) as refused:
            await served.admins.Cordon(request, timeout=TIMEOUT)
        assert detail_of(refused.value).reason == "invalid-request"
