"""Ledger and hardware compared: every way in which they can differ, and that repairs repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import (
    MIG_INSTANCE,
    SHARE,
    SHARE_PROFILE_ID,
    WHOLE_GPU,
    WHOLE_GPU_PROFILE_ID,
    Generation,
    GpuUuid,
    InstanceState,
    LeaseId,
    MigMode,
    Placement,
)
from mig_agent.core.observation import ObservedGpu, ObservedInstance, ObservedSharing
from mig_agent.core.recovery import (
    DESTROYED,
    GPU_RESET,
    INSTANCE_LOST,
    LIMIT_LOST,
    NEVER_MADE,
    REBOOT,
    AdoptForeign,
    EndLostLease,
    EndShare,
    FinishDestroy,
    ForgetForeign,
    ForgetInstance,
    LoseDevice,
    MarkIdle,
    MarkLeased,
    Recorded,
    RecordedInstance,
    Repair,
    UpdateIds,
    reconcile,
)
from support.nodes import A100_40

GPU = GpuUuid("GPU-0")
BOOT = "boot-1"
LEASE = LeaseId("lease-1")


def found(
    gi: int = 7, profile: int = 19, start: int = 0, size: int = 1, *, complete: bool = True, pids: Sequence[int] = ()
) -> ObservedInstance:
    return ObservedInstance(
        gpu_instance_id=gi,
        profile_id=profile,
        placement=Placement(start, size),
        compute_instances=(0,) if complete else (),
        uuid=f"MIG-{gi}" if complete else "",
        processes=tuple(pids),
    )


def gpu(*instances: ObservedInstance, uuid: GpuUuid = GPU, on: bool = True) -> ObservedGpu:
    return ObservedGpu(
        index=0,
        uuid=uuid,
        minor=0,
        model="NVIDIA A100-SXM4-40GB",
        memory_mib=40960,
        mode=MigMode(capable=True, current=on, pending=on),
        layout=A100_40,
        instances=instances,
    )


def ours(
    state: str,
    gi: int | None = 7,
    generation: int = 1,
    *,
    start: int = 0,
    lease: LeaseId | None = None,
    answered: bool | None = None,
) -> RecordedInstance:
    return RecordedInstance(
        generation=Generation(generation),
        gpu=GPU,
        kind=MIG_INSTANCE,
        profile_id=19,
        placement=Placement(start, 1),
        state=InstanceState(state),
        gpu_instance_id=gi,
        compute_instance_id=None if gi is None else 0,
        uuid="" if gi is None else f"MIG-{gi}",
        lease=lease,
        answered=answered,
    )


def repairs(
    records: Sequence[RecordedInstance],
    *gpus: ObservedGpu,
    boot: str = BOOT,
    of_pods: Sequence[LeaseId] = (),
    beside: Sequence[LeaseId] = (),
) -> tuple[Repair, ...]:
    recorded = Recorded(
        boot_id=BOOT,
        instances=tuple(records),
        leases=tuple({each.lease: None for each in records if each.lease is not None}),
        of_pods=frozenset(of_pods),
        beside=frozenset(beside),
    )
    return reconcile(recorded, gpus, boot)


ONE = Generation(1)
REMOVE = FinishDestroy(GPU, 7, 19, Placement(0, 1), ONE)


@pytest.mark.parametrize(
    ("record", "instance", "expected"),
    [
        # What agrees
        (ours("idle"), found(), []),
        (ours("leased", lease=LEASE), found(), []),
        (ours("blocked"), found(), []),
        (ours("foreign"), found(), []),
        # What is gone
        (ours("idle"), None, [ForgetInstance(ONE, GPU_RESET)]),
        (ours("blocked"), None, [ForgetInstance(ONE, GPU_RESET)]),
        (ours("foreign"), None, [ForgetForeign(ONE)]),
        (ours("leased", lease=LEASE), None, [EndLostLease(LEASE, GPU_RESET), ForgetInstance(ONE, GPU_RESET)]),
        (ours("destroying"), None, [ForgetInstance(ONE, DESTROYED)]),
        (ours("creating", None), None, [ForgetInstance(ONE, NEVER_MADE)]),
        (ours("creating", None, lease=LEASE), None, [EndLostLease(LEASE, NEVER_MADE), ForgetInstance(ONE, NEVER_MADE)]),
        (ours("creating", 7, lease=LEASE), None, [EndLostLease(LEASE, NEVER_MADE), ForgetInstance(ONE, NEVER_MADE)]),
        # What was being made
        (ours("creating", None, lease=LEASE), found(), [EndLostLease(LEASE, NEVER_MADE), REMOVE]),
        (ours("creating", 7, lease=LEASE), found(), [EndLostLease(LEASE, NEVER_MADE), REMOVE]),
        (ours("creating", None), found(complete=False), [REMOVE]),
        (
            ours("creating", None, lease=LEASE, answered=True),
            found(),
            [UpdateIds(ONE, 7, 0, "MIG-7"), MarkLeased(ONE, LEASE)],
        ),
        (
            ours("creating", None, lease=LEASE, answered=True),
            found(complete=False),
            [EndLostLease(LEASE, INSTANCE_LOST), REMOVE],
        ),
        (
            ours("creating", None, lease=LEASE),
            found(pids=[4711]),
            [EndLostLease(LEASE, NEVER_MADE), ForgetInstance(ONE, NEVER_MADE), AdoptForeign(GPU, found(pids=[4711]))],
        ),
        # What was being destroyed
        (ours("destroying"), found(), [MarkIdle(ONE)]),
        (ours("destroying"), found(complete=False), [REMOVE]),
        # What was taken apart
        (ours("idle"), found(complete=False), [REMOVE]),
        (ours("blocked"), found(complete=False), [REMOVE]),
        (ours("leased", lease=LEASE), found(complete=False), [EndLostLease(LEASE, INSTANCE_LOST), REMOVE]),
        (ours("foreign"), found(complete=False), [UpdateIds(ONE, 7, None, "")]),
        # Leases that were never answered, or are missing
        (ours("leased", lease=LEASE, answered=False), found(), [EndLostLease(LEASE, NEVER_MADE)]),
        (ours("leased"), found(), [MarkIdle(ONE)]),
        # What stands in its place is another
        (ours("idle"), found(gi=8), [ForgetInstance(ONE, INSTANCE_LOST), AdoptForeign(GPU, found(gi=8))]),
        (
            ours("leased", lease=LEASE),
            found(start=1),
            [EndLostLease(LEASE, INSTANCE_LOST), ForgetInstance(ONE, INSTANCE_LOST), AdoptForeign(GPU, found(start=1))],
        ),
        (
            ours("leased", lease=LEASE),
            found(profile=20),
            [
                EndLostLease(LEASE, INSTANCE_LOST),
                ForgetInstance(ONE, INSTANCE_LOST),
                AdoptForeign(GPU, found(profile=20)),
            ],
        ),
        (ours("foreign"), found(gi=8), [ForgetForeign(ONE), AdoptForeign(GPU, found(gi=8))]),
        (ours("creating", None), found(start=1), [ForgetInstance(ONE, NEVER_MADE), AdoptForeign(GPU, found(start=1))]),
    ],
)
def test_one_record_and_one_instance(
    record: RecordedInstance, instance: ObservedInstance | None, expected: list[Repair]
) -> None:
    observed = gpu() if instance is None else gpu(instance)
    assert list(repairs([record], observed)) == expected


def test_unrecorded_instance_is_foreign() -> None:
    half = found(gi=9, start=3, complete=False)
    assert repairs([], gpu(found(), half)) == (AdoptForeign(GPU, found()), AdoptForeign(GPU, half))


def test_a_changed_uuid_is_taken_over() -> None:
    record = replace(ours("leased", lease=LEASE), uuid="MIG-old")
    assert repairs([record], gpu(found())) == (UpdateIds(ONE, 7, 0, "MIG-7"),)


def test_a_known_instance_is_not_mistaken_for_one_being_made() -> None:
    """Both records name the same slot: the one with the id has it, the other was never made."""
    records = [ours("creating", None, generation=2), ours("idle", 7, generation=1)]
    assert repairs(records, gpu(found())) == (ForgetInstance(Generation(2), NEVER_MADE),)


def test_of_two_being_made_in_one_slot_the_later_has_it() -> None:
    records = [ours("creating", None, generation=1), ours("creating", None, generation=2)]
    assert repairs(records, gpu(found())) == (
        ForgetInstance(Generation(1), NEVER_MADE),
        FinishDestroy(GPU, 7, 19, Placement(0, 1), Generation(2)),
    )


def test_a_gpu_that_was_not_read_keeps_its_records() -> None:
    other = gpu(uuid=GpuUuid("GPU-1"))
    assert repairs([ours("leased", lease=LEASE)], other) == ()
    assert repairs([ours("leased", lease=LEASE)]) == ()


def test_one_lost_instance_ends_the_whole_lease_once() -> None:
    records = [ours("leased", 7, 1, lease=LEASE), ours("leased", 8, 2, start=1, lease=LEASE)]
    assert repairs(records, gpu(found(gi=8, start=1))) == (
        EndLostLease(LEASE, INSTANCE_LOST),
        ForgetInstance(ONE, INSTANCE_LOST),
    )


def test_a_pods_lease_goes_on_with_the_instances_that_are_left() -> None:
    records = [ours("leased", 7, 1, lease=LEASE), ours("leased", 8, 2, start=1, lease=LEASE)]
    lost = (LoseDevice(LEASE, ONE, INSTANCE_LOST), ForgetInstance(ONE, INSTANCE_LOST))
    assert repairs(records, gpu(found(gi=8, start=1)), of_pods=[LEASE]) == lost
    both = gpu(found(complete=False), found(gi=8, start=1))
    assert repairs(records, both, of_pods=[LEASE]) == (LoseDevice(LEASE, ONE, INSTANCE_LOST), REMOVE)


def test_a_pods_lease_goes_on_with_the_instances_that_are_on_other_gpus() -> None:
    records = [ours("leased", 7, 1, lease=LEASE)]
    lost = (LoseDevice(LEASE, ONE, GPU_RESET), ForgetInstance(ONE, GPU_RESET))
    assert repairs(records, gpu(), of_pods=[LEASE], beside=[LEASE]) == lost
    ended = (EndLostLease(LEASE, GPU_RESET), ForgetInstance(ONE, GPU_RESET))
    assert repairs(records, gpu(), of_pods=[LEASE]) == ended, "nothing is left of it"
    assert repairs(records, gpu(), beside=[LEASE]) == ended, "it is no pod's"


def test_a_pods_lease_ends_with_the_boot_and_where_it_was_never_granted() -> None:
    records = [ours("leased", 7, 1, lease=LEASE), ours("leased", 8, 2, start=1, lease=LEASE)]
    assert EndLostLease(LEASE, REBOOT) in repairs(records, gpu(found()), boot="boot-2", of_pods=[LEASE])
    records = [ours("creating", None, 1, lease=LEASE), ours("leased", 8, 2, start=1, lease=LEASE)]
    assert EndLostLease(LEASE, NEVER_MADE) in repairs(records, gpu(found(gi=8, start=1)), of_pods=[LEASE])


def test_a_lease_with_no_instance_left_ends() -> None:
    recorded = Recorded(boot_id=BOOT, instances=(), leases=(LEASE,))
    assert reconcile(recorded, (gpu(),), BOOT) == (EndLostLease(LEASE, INSTANCE_LOST),)


def test_a_new_boot_ends_everything() -> None:
    records = [
        ours("leased", 7, 1, lease=LEASE),
        ours("leased", 8, 2, start=1, lease=LEASE),
        ours("idle", 9, 3, start=2),
        ours("foreign", 10, 4, start=3),
        ours("creating", None, 5, start=4, lease=LeaseId("lease-2")),
    ]
    # One stands exactly where ours stood: somebody else made it since.
    assert repairs(records, gpu(found()), boot="boot-2") == (
        EndLostLease(LEASE, REBOOT),
        EndLostLease(LeaseId("lease-2"), REBOOT),
        ForgetInstance(Generation(1), REBOOT),
        ForgetInstance(Generation(2), REBOOT),
        ForgetInstance(Generation(3), REBOOT),
        ForgetForeign(Generation(4)),
        ForgetInstance(Generation(5), REBOOT),
        AdoptForeign(GPU, found()),
    )


def test_a_new_ledger_has_no_boot_to_compare() -> None:
    assert reconcile(Recorded(boot_id=""), (gpu(found()),), BOOT) == (AdoptForeign(GPU, found()),)


OFF = replace(gpu(on=False), sharing=ObservedSharing(terms=None))
LOST = replace(OFF, sharing=ObservedSharing(terms=None, lost={ONE: "its MPS daemon has ended"}))


def whole(state: str, lease: LeaseId | None = None, *, answered: bool | None = None) -> RecordedInstance:
    return RecordedInstance(
        generation=ONE,
        gpu=GPU,
        kind=WHOLE_GPU,
        profile_id=WHOLE_GPU_PROFILE_ID,
        placement=Placement(0, 1),
        state=InstanceState(state),
        uuid=GPU,
        lease=lease,
        answered=answered,
    )


def share(state: str, lease: LeaseId | None = None) -> RecordedInstance:
    return replace(whole(state, lease), kind=SHARE, profile_id=SHARE_PROFILE_ID)


@pytest.mark.parametrize(
    ("record", "observed", "expected"),
    [
        (share("leased", LEASE), OFF, ()),
        # Whether its limit holds is not known.
        (share("leased", LEASE), replace(OFF, sharing=None), ()),
        # It is never set up again: its processes would go on without a limit meanwhile.
        (share("leased", LEASE), LOST, (EndLostLease(LEASE, LIMIT_LOST), EndShare(ONE, "its MPS daemon has ended"))),
        (share("leased", LEASE), gpu(), (EndLostLease(LEASE, INSTANCE_LOST), EndShare(ONE))),
        # Half made, left by a lease, or about to end: it serves no other lease.
        *((share(state), OFF, (EndShare(ONE),)) for state in ("creating", "idle", "destroying")),
    ],
)
def test_shares(record: RecordedInstance, observed: ObservedGpu, expected: tuple[Repair, ...]) -> None:
    assert repairs([record], observed) == expected


def test_a_share_that_a_restored_ledger_may_be_wrong_about_is_not_ended() -> None:
    recorded = Recorded(boot_id=BOOT, instances=(share("idle"),), doubtful_up_to=1)
    assert reconcile(recorded, (OFF,), BOOT) == (ForgetInstance(ONE, INSTANCE_LOST),)


def test_a_whole_gpu_is_there_until_mig_mode_is() -> None:
    assert repairs([whole("leased", LEASE)], gpu(on=False)) == ()
    assert repairs([whole("idle")], gpu(on=False)) == ()
    assert repairs([whole("leased", LEASE, answered=False)], gpu(on=False)) == (EndLostLease(LEASE, NEVER_MADE),)
    assert repairs([whole("idle")], gpu(on=True)) == (ForgetInstance(ONE, INSTANCE_LOST),)
    assert repairs([whole("leased", LEASE)], gpu(on=True)) == (
        EndLostLease(LEASE, INSTANCE_LOST),
        ForgetInstance(ONE, INSTANCE_LOST),
    )


def test_mig_mode_switched_off_by_somebody_ends_the_leases() -> None:
    assert repairs([ours("leased", lease=LEASE)], gpu(on=False)) == (
        EndLostLease(LEASE, INSTANCE_LOST),
        ForgetInstance(ONE, INSTANCE_LOST),
    )


# Any ledger, any hardware


@st.composite
def ledgers(draw: st.DrawFn) -> list[RecordedInstance]:
    records: list[RecordedInstance] = []
    for generation in range(1, draw(st.integers(0, 6)) + 1):
        state = draw(st.sampled_from(list(InstanceState)))
        may_lack = state is InstanceState.CREATING
        gi = None if may_lack and draw(st.booleans()) else draw(st.integers(7, 10))
        has_lease = state in {InstanceState.LEASED, InstanceState.CREATING} and draw(st.booleans())
        record = ours(
            state.value,
            gi,
            generation,
            start=draw(st.integers(0, 3)),
            lease=LeaseId(f"lease-{draw(st.integers(1, 3))}") if has_lease else None,
            answered=draw(st.sampled_from((None, True, False))),
        )
        if record.gpu_instance_id is None or all(record.gpu_instance_id != each.gpu_instance_id for each in records):
            records.append(record)
    return records


@st.composite
def hardware(draw: st.DrawFn) -> ObservedGpu:
    starts = draw(st.lists(st.integers(0, 3), unique=True))
    ids = draw(st.permutations(range(7, 11)))
    pids = draw(st.sampled_from(((), (4711,))))
    return gpu(
        *(
            found(gi, start=start, complete=draw(st.booleans()), pids=pids)
            for gi, start in zip(ids, starts, strict=False)
        )
    )


def carried_out(  # noqa: C901, PLR0912 -- one case for each repair
    records: Sequence[RecordedInstance], observed: ObservedGpu, done: Sequence[Repair]
) -> tuple[list[RecordedInstance], ObservedGpu]:
    """What ledger and hardware are after the repairs, as the agent would make them."""
    kept = {each.generation: each for each in records}
    instances = {each.gpu_instance_id: each for each in observed.instances}
    number = 1000
    for repair in done:
        match repair:
            case EndLostLease(lease, _):
                for each in list(kept.values()):
                    if each.lease == lease:
                        leased = each.state is InstanceState.LEASED
                        state = InstanceState.IDLE if leased else each.state
                        kept[each.generation] = replace(each, lease=None, state=state)
            case LoseDevice(_, generation, _):
                kept[generation] = replace(kept[generation], lease=None)
            case ForgetInstance(generation, _) | ForgetForeign(generation):
                del kept[generation]
            case AdoptForeign(_, instance):
                number += 1
                kept[Generation(number)] = RecordedInstance(
                    generation=Generation(number),
                    gpu=GPU,
                    kind=MIG_INSTANCE,
                    profile_id=instance.profile_id,
                    placement=instance.placement,
                    state=InstanceState.FOREIGN,
                    gpu_instance_id=instance.gpu_instance_id,
                    compute_instance_id=instance.compute_instances[0] if instance.compute_instances else None,
                    uuid=instance.uuid,
                )
            case FinishDestroy(_, gi, _, _, generation):
                del instances[gi]
                del kept[generation]
            case MarkIdle(generation):
                kept[generation] = replace(kept[generation], state=InstanceState.IDLE, lease=None)
            case MarkLeased(generation, lease):
                if kept[generation].lease == lease:
                    kept[generation] = replace(kept[generation], state=InstanceState.LEASED)
                else:  # the lease ended for another reason
                    kept[generation] = replace(kept[generation], state=InstanceState.IDLE)
            case UpdateIds(generation, gi, compute, uuid):
                kept[generation] = replace(kept[generation], gpu_instance_id=gi, compute_instance_id=compute, uuid=uuid)
    return list(kept.values()), replace(observed, instances=tuple(instances.values()))


LEASES = st.lists(st.sampled_from([LeaseId(f"lease-{number}") for number in (1, 2, 3)]), unique=True)


@given(records=ledgers(), observed=hardware(), boot=st.sampled_from((BOOT, "boot-2")), of_pods=LEASES, beside=LEASES)
def test_after_the_repairs_ledger_and_hardware_agree(
    records: list[RecordedInstance],
    observed: ObservedGpu,
    boot: str,
    of_pods: list[LeaseId],
    beside: list[LeaseId],
) -> None:
    done = repairs(records, observed, boot=boot, of_pods=of_pods, beside=beside)
    after, hardware_after = carried_out(records, observed, done)
    assert repairs(after, hardware_after, boot=BOOT, of_pods=of_pods, beside=beside) == ()
    ids = sorted(each.gpu_instance_id or 0 for each in after)
    assert ids == sorted(each.gpu_instance_id for each in hardware_after.instances)


@given(records=ledgers(), observed=hardware())
def test_nothing_that_may_be_in_use_is_removed(records: list[RecordedInstance], observed: ObservedGpu) -> None:
    """Only what lacks its compute instance, or what nobody was told of and nobody is on, is removed."""
    by_generation = {each.generation: each for each in records}
    on_it = {each.gpu_instance_id: each for each in observed.instances}
    for repair in repairs(records, observed):
        if isinstance(repair, FinishDestroy):
            record, instance = by_generation[repair.generation], on_it[repair.gpu_instance_id]
            assert record.state is not InstanceState.FOREIGN
            if instance.compute_instances:
                assert record.state is InstanceState.CREATING
                assert not instance.processes


@given(records=ledgers(), observed=hardware())
def test_a_granted_lease_with_its_instances_is_preserved(
    records: list[RecordedInstance], observed: ObservedGpu
) -> None:
    ended = {repair.lease for repair in repairs(records, observed) if isinstance(repair, EndLostLease)}
    for lease in {each.lease for each in records if each.lease is not None}:
        mine = [each for each in records if each.lease == lease]
        stands = all(
            any(
                (each.gpu_instance_id, each.profile_id, each.placement)
                == (other.gpu_instance_id, other.profile_id, other.placement)
                and other.compute_instances
                for other in observed.instances
            )
            for each in mine
        )
        answered = all(each.answered or (each.answered is None and each.state is InstanceState.LEASED) for each in mine)
        if stands and answered:
            assert lease not in ended


@given(records=ledgers(), observed=hardware(), of_pods=LEASES, beside=LEASES)
def test_a_lease_goes_on_without_a_device_only_where_it_is_a_pods_and_something_is_left(
    records: list[RecordedInstance], observed: ObservedGpu, of_pods: list[LeaseId], beside: list[LeaseId]
) -> None:
    done = repairs(records, observed, of_pods=of_pods, beside=beside)
    ended = {each.lease for each in done if isinstance(each, EndLostLease)}
    lost = [each for each in done if isinstance(each, LoseDevice)]
    gone = {each.generation for each in lost}
    for lease in {each.lease for each in lost}:
        assert lease in of_pods
        assert lease not in ended
        left = [each for each in records if each.lease == lease and each.generation not in gone]
        assert left or lease in beside
