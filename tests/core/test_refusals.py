"""The words of every refusal: what is in the way, who holds it, what would work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.model import GpuState, GpuUuid, NodeView, Slot, Want
from mig_agent.core.planning.plan import Plan
from mig_agent.core.planning.planner import plan
from mig_agent.core.planning.wait_blockers import wait_blockers
from support.nodes import (
    A30,
    A100_40,
    H100,
    WHOLE,
    Has,
    Machine,
    fraction,
    memory,
    node,
    nodes,
    profile,
    request,
    wants_for,
    whole,
)

NODE = node(Machine(A100_40), Machine(H100), Machine(H100))
TRAIN = Has("7g.80gb", 0, "leased", "pod team-a/train-7f2c", expires_at=1600.0)
FULL = node(Machine(H100, [TRAIN]))


def refused(
    view: NodeView,
    *wants: Want,
    gpus: Sequence[str] = (),
    reserved: frozenset[GpuUuid] = frozenset(),
    exclude: frozenset[Slot] = frozenset(),
) -> Refusal:
    outcome = plan(view, request(*wants, gpus=gpus), now=1000.0, reserved=reserved, exclude=exclude)
    assert isinstance(outcome, Refusal), outcome
    return outcome


# What can never be served here


@pytest.mark.parametrize(
    ("view", "wants", "gpus", "reason", "message", "hint"),
    [
        (
            NODE,
            [profile("1g.7gb")],
            [],
            Reason.UNKNOWN_PROFILE,
            "cannot place 1g.7gb: no such profile on this node, which offers 1g.5gb, 1g.5gb+me, 1g.10gb, 2g.10gb, ",
            "nearest is 1g.5gb",
        ),
        (
            node(Machine(H100)),
            [profile("3g.20gb")],
            [],
            Reason.UNKNOWN_PROFILE,
            "which offers 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb",
            "nearest by memory is 2g.20gb, by compute 3g.40gb",
        ),
        (NODE, [profile("1g.5gb.me")], [], Reason.UNKNOWN_PROFILE, "no such profile", "did you mean 1g.5gb+me?"),
        (NODE, [profile("nvidia.com/mig-1g.5gb")], [], Reason.UNKNOWN_PROFILE, "no such", "did you mean 1g.5gb?"),
        (NODE, [profile("mig-7g.40GB")], [], Reason.UNKNOWN_PROFILE, "no such", "did you mean 7g.40gb?"),
        (NODE, [profile("foo")], [], Reason.UNKNOWN_PROFILE, "cannot place foo: no such", "`migctl profiles`"),
        (
            NODE,
            [profile("1c.3g.20gb")],
            [],
            Reason.UNKNOWN_PROFILE,
            "cannot place 1c.3g.20gb",
            "compute instances inside a GPU instance are not handed out one by one; did you mean 3g.20gb?",
        ),
        (
            NODE,
            [profile("1g.5gb")],
            ["1"],
            Reason.UNKNOWN_PROFILE,
            "cannot place 1g.5gb: no such profile on GPU 1, which offers 1g.10gb",
            "GPU 0 could serve it: leave --gpu out",
        ),
        (
            NODE,
            [replace(profile("1g.5gb"), min_compute_slices=2)],
            [],
            Reason.INVALID_REQUEST,
            "1g.5gb has 1 compute slice, not 2",
            "a profile's name says all",
        ),
        (
            NODE,
            [replace(profile("2g.10gb"), attributes=frozenset({"+me"}))],
            [],
            Reason.INVALID_REQUEST,
            "cannot place 2g.10gb with +me: 2g.10gb has no +me",
            "leave the rest out",
        ),
        (
            NODE,
            [memory("100Gi")],
            [],
            Reason.TOO_LARGE,
            "cannot place 100Gi: the largest instance on this node is 7g.80gb with 79.25Gi",
            "ask for at most 79.25Gi, or for several devices",
        ),
        (
            NODE,
            [memory("60G")],
            ["0"],
            Reason.TOO_LARGE,
            "cannot place 60G: the largest instance on GPU 0 is 7g.40gb with 39.25Gi",
            "GPUs 1, 2 could serve it: leave --gpu out",
        ),
        (
            node(Machine(A30), whole(memory_mib=200_000)),
            [memory("100G")],
            [],
            Reason.TOO_LARGE,
            "the largest instance on this node is 4g.24gb with 24000Mi",
            "--num-gpus 1 takes a whole GPU",
        ),
        (
            NODE,
            [memory("4G", min_compute=8)],
            [],
            Reason.TOO_LARGE,
            "cannot place 4G with at least 8 compute slices: the most on this node is 7",
            "ask for at most 7 compute slices",
        ),
        (
            NODE,
            [memory("20G", attributes=["+me"])],
            [],
            Reason.TOO_LARGE,
            "cannot place 20G with +me: the largest instance on this node is 1g.10gb+me with 9.75Gi",
            "at most 9.75Gi",
        ),
        (
            NODE,
            [memory("4G", attributes=["+gfx"])],
            [],
            Reason.UNKNOWN_PROFILE,
            "cannot place 4G with +gfx: nothing on this node is offered with +gfx",
            "it offers +me",
        ),
        (
            node(Machine(H100)),
            [memory("4G")] * 8,
            [],
            Reason.TOO_MANY_DEVICES,
            "cannot place 8 devices of 4G: at most 7 fit on this node with nothing else there",
            "ask for at most 7",
        ),
        (
            NODE,
            [profile("7g.80gb")] * 2,
            ["1"],
            Reason.TOO_MANY_DEVICES,
            "cannot place 2 devices of 7g.80gb: at most 1 fits on GPU 1 with nothing else there",
            "ask for at most 1",
        ),
        (
            node(Machine(H100)),
            [profile("7g.80gb"), memory("4G")],
            [],
            Reason.TOO_MANY_DEVICES,
            "cannot place 2 devices (7g.80gb, 4G): they do not fit on this node together, even with nothing else there",
            "in several requests",
        ),
        (
            node(whole(), Machine(H100)),
            [WHOLE] * 3,
            [],
            Reason.TOO_MANY_DEVICES,
            "cannot place 3 whole GPUs: at most 2 fit on this node",
            "at most 2",
        ),
        (node(), [memory("4G")], [], Reason.NO_MIG_GPU, "cannot place 4G: this node has no GPU", "`nvidia-smi`"),
        (
            node(whole(), whole(capable=False)),
            [memory("4G")],
            [],
            Reason.NO_MIG_GPU,
            "cannot place 4G: GPU 0 has MIG mode off and GPU 1 has no MIG mode, and none of them is shared",
            (
                "`migctl mode enable --gpu 0` switches MIG mode on; `migctl doctor` tells why no GPU is shared; "
                "or take a whole GPU: --num-gpus 1"
            ),
        ),
        (
            node(whole(capable=False)),
            [profile("1g.5gb")],
            [],
            Reason.NO_MIG_GPU,
            "cannot place 1g.5gb: GPU 0 has no MIG mode",
            "take a whole GPU: --num-gpus 1",
        ),
        (
            NODE,
            [memory("4G")],
            ["7"],
            Reason.UNKNOWN_GPU,
            "cannot use GPU 7: this node has no such GPU",
            "it has 0 (GPU-00000000), 1 (GPU-00000001)",
        ),
        (
            NODE,
            [memory("4G")],
            ["0", "7"],
            Reason.UNKNOWN_GPU,
            "cannot use GPU 7: this node has no such GPU",
            "it has 0 (GPU-00000000), 1 (GPU-00000001)",
        ),
        (NODE, [], [], Reason.INVALID_REQUEST, "cannot serve a request for nothing", "--gpu-memory 4G"),
    ],
)
def test_what_can_never_be_served(
    view: NodeView, wants: list[Want], gpus: list[str], reason: Reason, message: str, hint: str
) -> None:
    refusal = refused(view, *wants, gpus=gpus)
    assert refusal.reason is reason
    assert message in refusal.message
    assert hint in refusal.hint
    assert not refusal.retryable
    assert refusal.blockers == ()


# What could be served at another moment


@pytest.mark.parametrize(
    ("view", "wants", "reason", "message", "hint", "blockers"),
    [
        (
            FULL,
            [profile("3g.40gb")],
            Reason.NO_CAPACITY,
            "cannot place 3g.40gb on GPU 0: slices 0-7 are leased to pod team-a/train-7f2c",
            "GPU 0 is free for it in 10m at the latest, when what is leased there ends",
            ["GPU 0: 7g.80gb on slices 0-7 is leased, held by pod team-a/train-7f2c (lease lease-1)"],
        ),
        (
            node(
                Machine(H100, [TRAIN]),
                Machine(H100, [Has("3g.40gb", 0, "leased", "alice"), Has("3g.40gb", 4, "foreign")]),
                Machine(H100, state=GpuState.CORDONED, reason="by ops"),
            ),
            [memory("24G")],
            Reason.NO_CAPACITY,
            "cannot place 24G (3g.40gb) on any of 2 GPUs: nearest is GPU 0, where slices 0-7 are leased to pod team-a",
            "GPU 0 is free for it in 10m at the latest, when what is leased there ends",
            [
                "GPU 0: 7g.80gb on slices 0-7 is leased, held by pod team-a/train-7f2c (lease lease-1)",
                "GPU 1: 3g.40gb on slices 0-3 is leased, held by alice (lease lease-2)",
                "GPU 2 is cordoned",
            ],
        ),
        (
            node(Machine(H100, [Has("4g.40gb", 0, "leased", "bob"), Has("2g.20gb", 4, "leased", "eve")])),
            [memory("20Gi")],
            Reason.NO_CAPACITY,
            "cannot place 20Gi (3g.40gb) on GPU 0: slices 4-5 are leased to eve",
            "19.5Gi would fit now (1g.20gb on GPU 0)",
            ["GPU 0: 2g.20gb on slices 4-5 is leased, held by eve (lease lease-2)"],
        ),
        (
            node(Machine(H100, [Has("7g.80gb", 0, "foreign")])),
            [memory("4G")],
            Reason.NO_CAPACITY,
            "slices 0-7 are held by a 7g.80gb that somebody made without mig-agent",
            "--wait",
            ["GPU 0: 7g.80gb on slices 0-7 is foreign"],
        ),
        (
            node(Machine(H100, [Has("7g.80gb", 0, "blocked", reason="process 4711 (python) is on it")])),
            [memory("4G")],
            Reason.NO_CAPACITY,
            "slices 0-7 are blocked: process 4711 (python) is on it",
            "--wait",
            ["GPU 0: 7g.80gb on slices 0-7 is blocked"],
        ),
        (
            node(Machine(H100, [Has("7g.80gb", 0, "creating", "eve")])),
            [memory("4G")],
            Reason.NO_CAPACITY,
            "slices 0-7 are being made into a 7g.80gb for eve",
            "--wait",
            ["GPU 0: 7g.80gb on slices 0-7 is creating, held by eve (lease lease-1)"],
        ),
        (
            node(Machine(H100, [Has("7g.80gb", 0, "destroying")])),
            [memory("4G")],
            Reason.NO_CAPACITY,
            "slices 0-7 are being made free",
            "--wait",
            ["GPU 0: 7g.80gb on slices 0-7 is destroying"],
        ),
        (
            node(Machine(H100, [Has("1g.10gb", 3, "leased")])),
            [profile("7g.80gb")],
            Reason.NO_CAPACITY,
            "cannot place 7g.80gb on GPU 0: slice 3 is leased to somebody",
            "--wait",
            ["GPU 0: 1g.10gb on slice 3 is leased"],
        ),
        (
            node(Machine(H100, [Has("1g.10gb", 0, "leased", "bob"), Has("1g.10gb", 5, "leased", "eve")])),
            [fraction(1.0)],
            Reason.NO_CAPACITY,
            "cannot place the fraction 1 of a GPU (7g.80gb) on GPU 0: slice 0 is leased to bob and slice 5 is leased",
            "--wait",
            [
                "GPU 0: 1g.10gb on slice 0 is leased, held by bob (lease lease-1)",
                "GPU 0: 1g.10gb on slice 5 is leased, held by eve (lease lease-2)",
            ],
        ),
        (
            node(whole("leased", "alice"), Machine(H100, [Has("1g.10gb", 0, "leased", "bob")])),
            [WHOLE],
            Reason.NO_CAPACITY,
            "cannot place a whole GPU on any of 2 GPUs: nearest is GPU 0, where the whole GPU is leased to alice",
            "--wait",
            [
                "GPU 0: whole GPU is leased, held by alice (lease lease-1)",
                "GPU 1: 1g.10gb on slice 0 is leased, held by bob (lease lease-2)",
            ],
        ),
        (
            node(Machine(H100, [Has("3g.40gb", 0, "leased", "alice")])),
            [profile("2g.20gb")] * 3,
            Reason.NO_CAPACITY,
            "cannot place 3 devices of 2g.20gb together: only 1 of them fits now",
            "--wait 10m waits until all fit",
            ["GPU 0: 3g.40gb on slices 0-3 is leased, held by alice (lease lease-1)"],
        ),
        (
            FULL,
            [profile("2g.20gb"), memory("4G")],
            Reason.NO_CAPACITY,
            "cannot place 2 devices (2g.20gb, 4G) together: none of them fits now",
            "--wait 10m waits until all fit",
            ["GPU 0: 7g.80gb on slices 0-7 is leased, held by pod team-a/train-7f2c (lease lease-1)"],
        ),
        (
            node(Machine(H100, state=GpuState.CORDONED, reason="by ops: fan"), Machine(A100_40)),
            [memory("60G")],
            Reason.GPU_UNAVAILABLE,
            "cannot place 60G: GPU 0 is cordoned: by ops: fan",
            "`migctl uncordon --gpu 0`",
            ["GPU 0 is cordoned"],
        ),
        (
            node(Machine(H100, state=GpuState.LOST, reason="it fell off the bus")),
            [memory("60G")],
            Reason.GPU_UNAVAILABLE,
            "cannot place 60G: GPU 0 is lost: it fell off the bus",
            "`nvidia-smi`",
            ["GPU 0 is lost"],
        ),
    ],
)
def test_what_may_be_served_later(
    view: NodeView, wants: list[Want], reason: Reason, message: str, hint: str, blockers: list[str]
) -> None:
    refusal = refused(view, *wants)
    assert refusal.reason is reason
    assert message in refusal.message
    assert hint in refusal.hint
    assert refusal.retryable
    assert [each.describe() for each in refusal.blockers] == blockers


def _ends_at(*ends: float | None) -> Machine:
    """A GPU of 1g.10gb, one after the other, whose leases end then."""
    has = [Has("1g.10gb", at, "leased", f"user-{end}", expires_at=end) for at, end in enumerate(ends)]
    return Machine(H100, has)


@pytest.mark.parametrize(
    ("view", "want", "nearest", "seconds"),
    [
        (node(_ends_at(*[1900.0] * 7), _ends_at(*[1100.0] * 7)), "1g.10gb", "GPU 1", "1m40s"),
        # Of one GPU it is the place that is free first: its two leases end before the one of the other place does.
        (
            node(
                Machine(
                    H100,
                    [
                        Has("3g.40gb", 0, "leased", "a", expires_at=1900.0),
                        *_ends_at(0, 0, 0, 0, 1050.0, 1060.0).has[4:],
                    ],
                )
            ),
            "3g.40gb",
            "slice 4 is leased to user-1050.0 and slice 5",
            "1m",
        ),
        (node(_ends_at(*[None] * 7), _ends_at(*[1100.0] * 6, None), _ends_at(*[1300.0] * 7)), "7g.80gb", "GPU 2", "5m"),
        (node(_ends_at(*[1001.0] * 7), Machine(H100, [Has("7g.80gb", 0, "destroying")])), "7g.80gb", "GPU 1", ""),
        (node(Machine(H100, [Has("7g.80gb", 0, "foreign")]), _ends_at(*[None] * 7)), "7g.80gb", "GPU 1", ""),
    ],
)
def test_the_nearest_is_what_is_free_first(view: NodeView, want: str, nearest: str, seconds: str) -> None:
    """A user who reads who is in the way plans by the end that is named beside it."""
    refusal = refused(view, profile(want))
    assert nearest in refusal.message
    assert f"in {seconds} at the latest" in refusal.hint if seconds else "at the latest" not in refusal.hint
    assert wait_blockers(view, request(profile(want)))[0] == refusal.blockers[0]


def test_a_renewed_lease_is_no_longer_the_nearest() -> None:
    """The GPUs are the same values as before: only their leases have changed."""
    view = node(_ends_at(*[1900.0] * 7), _ends_at(*[1100.0] * 7))
    assert "GPU 1" in refused(view, profile("1g.10gb")).message
    renewed = {
        each.id: replace(each, expires_at=3000.0 if each.expires_at == 1100.0 else each.expires_at)
        for each in view.leases.values()
    }
    assert "nearest is GPU 0" in refused(replace(view, leases=renewed), profile("1g.10gb")).message


def test_a_changed_revision() -> None:
    outcome = plan(node(Machine(H100), revision=7), request(memory("4G"), if_revision=5))
    assert isinstance(outcome, Refusal)
    assert outcome.reason is Reason.REVISION_CHANGED
    assert outcome.message == "cannot go by revision 5: the node has changed and is at 7"
    assert outcome.revision == 7
    assert isinstance(plan(node(Machine(H100), revision=7), request(memory("4G"), if_revision=7)), Plan)


def test_refusal_for_reserved_gpus() -> None:
    view = node(Machine(H100))
    refusal = refused(view, memory("4G"), reserved=frozenset({view.gpus[0].uuid}))
    assert refusal.reason is Reason.NO_CAPACITY
    assert refusal.message == "cannot place 4G: GPU 0 is kept for a request that has waited long"
    assert [each.describe() for each in refusal.blockers] == ["GPU 0 is reserved"]


def test_refusal_for_full_and_reserved_gpus_names_the_holders() -> None:
    refusal = refused(FULL, memory("4G"), reserved=frozenset({FULL.gpus[0].uuid}))
    assert "slices 0-7 are leased to pod team-a/train-7f2c" in refusal.message
    assert refusal.blockers[-1].state == "reserved"


def test_places_that_just_failed() -> None:
    view = node(Machine(H100))
    wanted = H100.by_name["7g.80gb"]
    slot = Slot(view.gpus[0].uuid, wanted, wanted.placements[0])
    refusal = refused(view, profile("7g.80gb"), exclude=frozenset({slot}))
    assert refusal.reason is Reason.DRIVER_FAILED
    assert "the only places left just failed (7g.80gb on slices 0-7 of GPU 0)" in refusal.message


def test_what_has_no_deadline_gives_no_time() -> None:
    forever = Has("7g.80gb", 0, "leased", "alice")
    assert "at the latest" not in refused(node(Machine(H100, [forever])), profile("3g.40gb")).hint
    past = Has("7g.80gb", 0, "leased", "alice", expires_at=999.0)
    assert "at the latest" not in refused(node(Machine(H100, [past])), profile("3g.40gb")).hint


def test_many_devices_are_not_all_listed() -> None:
    wants = [memory(f"{number}G") for number in range(1, 21)]
    refusal = refused(node(Machine(A30)), *wants)
    assert "20 devices (1G, 2G, 3G, 4G, 5G, 6G and 14 more)" in refusal.message


def test_texts_from_outside_cannot_break_the_line() -> None:
    refusal = refused(NODE, Want(profile="x" * 200, text="x" * 200))
    assert len(refusal.message) < 500


# Near misses


@pytest.mark.parametrize(
    ("machine", "text", "note"),
    [
        (H100, "10Gi", "10Gi takes 2 memory slices of GPU 0 (1g.20gb), 9.75Gi would take 1 (1g.10gb)"),
        (A100_40, "5Gi", "5Gi takes 2 memory slices of GPU 0 (1g.10gb), 4.75Gi would take 1 (1g.5gb)"),
        (A30, "6Gi", "6Gi takes 2 memory slices of GPU 0 (2g.12gb), 5.75Gi would take 1 (1g.6gb)"),
    ],
)
def test_near_miss_gives_a_note(machine: object, text: str, note: str) -> None:
    layout = next(each for each in (H100, A100_40, A30) if each is machine)
    outcome = plan(node(Machine(layout)), request(memory(text)))
    assert isinstance(outcome, Plan)
    assert outcome.notes == (note,)


@pytest.mark.parametrize(("layout", "text"), [(H100, "10G"), (H100, "9.5Gi"), (A100_40, "5G"), (H100, "15G")])
def test_no_note_without_a_near_miss(layout: object, text: str) -> None:
    machine = next(each for each in (H100, A100_40) if each is layout)
    outcome = plan(node(Machine(machine)), request(memory(text)))
    assert isinstance(outcome, Plan)
    assert outcome.notes == ()


def test_equal_notes_appear_once() -> None:
    outcome = plan(node(Machine(H100)), request(memory("10Gi"), memory("10Gi")))
    assert isinstance(outcome, Plan)
    assert len(outcome.notes) == 1


@given(view=nodes(), wants=st.lists(wants_for(), min_size=1, max_size=5), named=st.lists(st.integers(0, 4), max_size=2))
def test_every_refusal_is_one_line_that_starts_with_cannot(view: NodeView, wants: list[Want], named: list[int]) -> None:
    outcome = plan(view, request(*wants, gpus=[str(number) for number in named]))
    if isinstance(outcome, Plan):
        return
    assert outcome.message.startswith("cannot ")
    assert outcome.message.isprintable()
    assert outcome.hint.isprintable()
    assert outcome.hint
    assert len(outcome.blockers) <= 64
    for blocker in outcome.blockers:
        assert blocker.describe()
    if outcome.retryable:
        # Then ending every lease and every other hold must serve it.
        empty = replace(view, gpus=tuple(replace(gpu, instances=()) for gpu in view.gpus))
        assert isinstance(plan(empty, request(*wants, gpus=[str(number) for number in named])), Plan)


def test_a_gpu_that_the_agent_set_aside_itself_is_not_to_be_uncordoned() -> None:
    """The driver hangs there: nothing that a person types changes that."""
    view = node(Machine(H100, state=GpuState.CORDONED, reason="the driver has not come back"), Machine(A100_40))
    aside = replace(view, gpus=(replace(view.gpus[0], set_aside=True), *view.gpus[1:]))
    hint = refused(aside, memory("60G")).hint
    assert "uncordon" not in hint
    assert "used again by itself" in hint
