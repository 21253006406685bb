"""The replay of a history, and what advice makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.adapters import catalog_files
from mig_agent.core.accounting import AccountedDevice, AccountedUse, Peak, Reader
from mig_agent.core.advice import Advice, Verdict, advise, cases
from mig_agent.core.model import Gpu, GpuState, GpuUuid, Layout, MigMode, NodeView, whole_gpu_layout
from mig_agent.core.planning.plan import DEFAULT_POLICY
from mig_agent.core.replay import ReplayedNode, Run, replay, runs_of
from mig_agent.core.requests import memory_want, profile_want, whole_gpu_want

HOUR = 3600.0
ADMIN = Reader(everything=True)
A100 = catalog_files.load().layout("NVIDIA A100-SXM4-40GB", 40960)
assert A100 is not None
LAYOUT: Layout = A100


def node(gpus: int = 1, *, whole: int = 0) -> ReplayedNode:
    def gpu(index: int, layout: Layout, *, mig: bool) -> Gpu:
        mode = MigMode(capable=True, current=mig, pending=mig)
        return Gpu(index=index, uuid=GpuUuid(f"GPU-{index}"), layout=layout, mode=mode, state=GpuState.CORDONED)

    made = [gpu(index, LAYOUT, mig=True) for index in range(gpus)]
    made += [gpu(gpus + index, whole_gpu_layout("A100", 40960), mig=False) for index in range(whole)]
    view = NodeView(node="n", revision=1, gpus=tuple(made))
    return ReplayedNode(view=view, policy=DEFAULT_POLICY, reservation_after_seconds=300.0)


def run(number: int, want: str, at: float = 0.0, seconds: float = HOUR) -> Run:
    wanted = whole_gpu_want() if want == "whole" else profile_want(want) if "g." in want else memory_want(want)
    return Run(lease=f"l{number}", asked_at=at, seconds=seconds, wants=(wanted,))


def waits(on: ReplayedNode, runs: Sequence[Run]) -> Mapping[str, float]:
    steps = replay(on, runs)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Mapping[str, float] = end.value
            return found


def test_what_does_not_fit_waits_for_an_end() -> None:
    runs = [run(0, "4g.20gb"), run(1, "4g.20gb", 60.0), run(2, "3g.20gb", 120.0), run(3, "3g.20gb", 180.0)]
    assert waits(node(), runs) == {"l0": 0.0, "l2": 0.0, "l1": HOUR - 60.0, "l3": HOUR + 120.0 - 180.0}
    assert set(waits(node(2), runs).values()) == {0.0}


def test_whole_gpus_are_there_and_what_fits_nowhere_is_left_out() -> None:
    runs = [run(0, "whole"), run(1, "whole"), run(2, "80G")]
    assert waits(node(0, whole=1), runs) == {"l0": 0.0, "l1": HOUR}
    assert waits(node(0), [run(0, "4G")]) == {}


RUN = st.tuples(st.sampled_from(["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb", "4G"]), st.integers(0, 5000))


@given(st.lists(RUN, max_size=25))
def test_a_replay_serves_everybody_and_never_has_more_than_there_is(drawn: list[tuple[str, int]]) -> None:
    runs = sorted((run(n, want, float(at)) for n, (want, at) in enumerate(drawn)), key=lambda each: each.asked_at)
    found = waits(node(), runs)
    assert found == waits(node(), runs), "it is deterministic"
    assert found.keys() == {each.lease for each in runs}
    sizes = {"1g.5gb": 1, "4G": 1, "2g.10gb": 2, "3g.20gb": 4, "7g.40gb": 8}
    spans = [(r.asked_at + found[r.lease], sizes[r.wants[0].text]) for r in runs]
    for moment, _ in spans:
        assert sum(size for at, size in spans if at <= moment < at + HOUR) <= 8


def use(
    number: int, *, asked: str = "20G", peak: int | None = 3000, samples: int = 9, at: float = 0.0, name: str = "train"
) -> AccountedUse:
    device = AccountedDevice(profile="4g.20gb", model="A100", memory_mib=19968, slices=4, want=memory_want(asked))
    return AccountedUse(
        lease=f"l{number}",
        number=0,
        tenant="t",
        user="alice",
        uid=1000,
        name=f"alice ({name})",
        device=device,
        asked_at=at,
        granted_at=at + 10.0,
        ended_at=at + 10.0 + HOUR,
        peak=None if peak is None else Peak(used_mib=peak, samples=samples),
    )


def advice_on(uses: Sequence[AccountedUse], on: ReplayedNode | None = None) -> Advice:
    (case,) = cases(uses, ADMIN, "train")
    steps = advise(case, uses, on or node())
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Advice = end.value
            return found


def test_a_smaller_request_is_claimed_by_the_replay() -> None:
    found = advice_on([use(number, at=600.0 * number) for number in range(14)])
    assert (found.verdict, found.suggestion, found.peak_mib, found.replayed) == (Verdict.SMALLER, "4G", 3000, 14)
    assert found.waited_seconds
    assert found.waited_less_seconds == 0
    assert found.message.startswith("alice (train): asked 20G, peak 2.9Gi in 14 runs: 4G would not have waited, ")
    assert found.message.endswith("1g.5gb has 1 compute slice where 3g.20gb has 3, so runs may take longer")


def test_a_ratio_is_said_where_both_wait() -> None:
    found = advice_on([use(number, at=float(number)) for number in range(20)])
    assert found.waited_seconds is not None
    assert found.waited_less_seconds is not None
    times = found.waited_seconds / found.waited_less_seconds
    assert f"4G would have waited {times:.1f} times less (" in found.message


def test_runs_that_never_waited_are_no_claim() -> None:
    found = advice_on([use(number, at=5 * HOUR * number) for number in range(3)])
    assert (found.waited_seconds, found.waited_less_seconds) == (0.0, 0.0)
    assert "it would not have waited less, since it did not wait" in found.message


@pytest.mark.parametrize(
    "uses",
    [
        [use(0), use(1)],
        [use(number, samples=2) for number in range(5)],
        [use(number, peak=None) for number in range(5)],
        [use(number, peak=12) for number in range(5)],
    ],
)
def test_too_little_is_said_to_be_too_little(uses: list[AccountedUse]) -> None:
    found = advice_on(uses)
    assert (found.verdict, found.suggestion, found.waited_seconds) == (Verdict.TOO_FEW_RUNS, "", None)


def test_what_is_used_is_kept() -> None:
    found = advice_on([use(number, peak=18000) for number in range(5)])
    assert (found.verdict, found.suggestion) == (Verdict.FITS, "")


def test_only_what_asked_for_the_same_counts() -> None:
    """Somebody has taken the advice already."""
    uses = [use(number) for number in range(5)] + [use(9, asked="4G", at=HOUR)]
    assert (advice_on(uses).runs, advice_on(uses).asked) == (1, "4G")
    assert cases([use(0, name="other")], ADMIN, "train") == ()


def test_a_lease_that_a_limit_has_cut_is_left_out() -> None:
    assert [each.lease for each in runs_of([replace(use(0), number=1), use(1)])] == ["l1"]
