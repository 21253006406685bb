"""Which GPU is kept for a request that has waited past the limit: the one with the fewest leases to end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mig_agent.core.model import Want
from mig_agent.core.planning import feasibility
from mig_agent.core.planning.exact_packing import pack
from mig_agent.core.planning.feasibility import FeasibilityCache, fewest_gpus
from mig_agent.core.planning.occupancy import Occupancy
from mig_agent.core.planning.placement import Window
from support.nodes import A30, H100, Has, Machine, node, profile

SEVEN = (profile("7g.80gb"),)
ONE_SMALL = Machine(H100, [Has("1g.10gb", 6, "leased")])
ONE_LARGE = Machine(H100, [Has("4g.40gb", 0, "leased")])
ONE_WHOLE = Machine(H100, [Has("7g.80gb", 0, "leased")])
TWO_SMALL = Machine(H100, [Has("1g.10gb", 5, "leased"), Has("1g.10gb", 6, "leased")])
TWO_LARGE = Machine(H100, [Has("4g.40gb", 0, "leased"), Has("3g.40gb", 4, "leased")])
THREE_SMALL = Machine(H100, [Has("1g.10gb", start, "leased") for start in (4, 5, 6)])


@pytest.mark.parametrize(
    ("machines", "kept"),
    [
        pytest.param((THREE_SMALL, ONE_WHOLE), 1, id="one lease before three, though it holds more slices"),
        pytest.param((TWO_SMALL, TWO_LARGE), 1, id="of as many leases the one of which less stands idle"),
        pytest.param((ONE_WHOLE, ONE_LARGE, ONE_SMALL), 2, id="with one left the one that has drained furthest"),
        pytest.param((ONE_SMALL, ONE_SMALL), 0, id="of equals the first"),
    ],
)
def test_which_gpu_is_reserved(machines: tuple[Machine, ...], kept: int) -> None:
    view = node(*machines)
    assert fewest_gpus(view.gpus, SEVEN) == {view.gpus[kept].uuid}


def test_only_what_is_in_the_way_counts() -> None:
    """A 2g needs two slices: two leases end for it on one GPU, one on the other."""
    full_of_ones = Machine(H100, [Has("1g.10gb", start, "leased") for start in range(7)])
    full_of_twos = Machine(
        H100, [Has("2g.20gb", 0, "leased"), Has("2g.20gb", 2, "leased"), Has("3g.40gb", 4, "leased")]
    )
    view = node(full_of_ones, full_of_twos)
    assert fewest_gpus(view.gpus, (profile("2g.20gb"),)) == {view.gpus[1].uuid}


def test_what_others_made_is_not_waited_for() -> None:
    view = node(Machine(H100, [Has("1g.10gb", 0, "foreign")]), THREE_SMALL)
    assert fewest_gpus(view.gpus, SEVEN) == {view.gpus[1].uuid}
    assert fewest_gpus(view.gpus[:1], SEVEN) == frozenset()


def test_equal_emptied_gpus_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 GPUs there are thousands of sets, each of which takes milliseconds, and all of it on the event loop."""
    tried: list[int] = []

    def counted(
        boards: Sequence[Occupancy], wants: Sequence[Want], *, most_steps: int | None = None
    ) -> tuple[tuple[int, Window], ...] | None:
        tried.append(len(boards))
        return pack(boards, wants, most_steps=most_steps)

    monkeypatch.setattr(feasibility, "pack", counted)
    wants = (profile("4g.40gb"),) * 5 + (profile("3g.40gb"),) * 3
    alike = node(*[ONE_SMALL] * 16)
    assert len(fewest_gpus(alike.gpus, wants)) == 5
    assert len(tried) <= 4
    rooms = FeasibilityCache(wants)
    mixed = node(*[ONE_SMALL, Machine(A30, []), Machine(H100, [Has("1g.10gb", 6, "foreign")]), ONE_WHOLE] * 4)
    kept = fewest_gpus(mixed.gpus, wants, rooms)
    again = len(tried)
    assert fewest_gpus(mixed.gpus, wants, rooms) == kept  # what is known is remembered
    assert len(tried) == again
