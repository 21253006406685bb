"""The other policies, each on a choice that tells it from the rest."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from placement_bench import rules
from placement_bench.agent import planner_rule
from placement_bench.clusters import (
    IdleCluster,
    RepackedCluster,
    RuleCluster,
    by_rule,
    fewest_gpus,
    fits,
    oldest_victims,
)
from placement_bench.geometry import GeometryCluster, geometries
from placement_bench.mixes import NAMES
from placement_bench.optimum import states_by_profile
from placement_bench.rules import Rule

ONE, DOUBLE, TWO, THREE, FOUR, SEVEN = range(len(NAMES))


def starts(rule: Rule, kind: int, count: int) -> list[int]:
    """Where one GPU is filled with a kind, in order."""
    mask, found = 0, []
    for _ in range(count):
        place = rule.choose(kind, mask)
        assert place is not None
        mask |= place.mask
        found.append(place.start)
    return found


@pytest.mark.parametrize(
    ("rule", "ones", "twos", "three"),
    [
        (rules.first_fit, [0, 1, 2, 3, 4, 5, 6], [0, 2, 4], 0),
        (rules.driver, [6, 4, 5, 0, 1, 2, 3], [4, 0, 2], 4),
        (planner_rule, [6, 4, 5, 0, 1, 2, 3], [4, 0, 2], 4),
    ],
    ids=["first fit", "driver", "this agent"],
)
def test_how_an_empty_gpu_is_filled(rule: Callable[[], Rule], ones: list[int], twos: list[int], three: int) -> None:
    assert starts(rule(), ONE, 7) == ones
    assert starts(rule(), TWO, 3) == twos
    assert starts(rule(), THREE, 1) == [three]


def placed(rule: Rule, kinds: list[int], gpus: int = 3) -> list[int | None]:
    """The GPUs that requests land on."""
    cluster = RuleCluster(rule, gpus)
    found = [cluster.place(kind, 0.0) for kind in kinds]
    return [None if each is None else each[0] for each in found]


def test_spread_goes_to_the_emptiest_and_binpack_to_the_fullest() -> None:
    assert placed(rules.hami_spread(), [ONE, ONE, ONE, ONE]) == [0, 1, 2, 0]
    assert placed(rules.hami_binpack(), [TWO, ONE, FOUR, ONE]) == [0, 0, 0, 1]
    assert placed(rules.hami_binpack(), [SEVEN, THREE, ONE, SEVEN]) == [0, 1, 1, 2]


def test_first_fit_blocks_a_profile_that_the_others_leave() -> None:
    """A 1g on slice 0 rules out the 4g."""
    assert placed(rules.first_fit(), [ONE, FOUR], gpus=1) == [0, None]
    assert placed(rules.mfi(), [ONE, FOUR], gpus=1) == [0, 0]
    assert placed(planner_rule(), [ONE, FOUR], gpus=1) == [0, 0]


def test_mfi_prefers_a_gpu_that_is_fragmented_already() -> None:
    """After a 3g on the right half, a 1g beside it hurts less than one on an empty GPU."""
    assert placed(rules.mfi(), [THREE, ONE], gpus=2) == [0, 0]


def test_ending_gives_the_slices_back() -> None:
    cluster = RuleCluster(rules.first_fit(), 1)
    first = cluster.place(SEVEN, 0.0)
    assert first is not None
    assert cluster.place(ONE, 0.0) is None
    cluster.end(first, 1.0)
    assert cluster.place(SEVEN, 1.0) == first
    assert (cluster.made.created, cluster.made.reused, cluster.made.destroyed) == (2, 0, 1)


def test_geometries_are_the_maximal_layouts() -> None:
    assert len(geometries()) == 78


def test_a_geometry_gives_its_other_pieces_without_cutting_again() -> None:
    cluster = GeometryCluster(1)
    first = cluster.place(ONE, 0.0)
    assert first is not None
    assert cluster.made.reused == 0
    assert cluster.place(ONE, 0.0) is not None
    assert cluster.made.reused == 1
    assert cluster.place(SEVEN, 0.0) is None


def test_reuse_first_takes_idle_instances_on_any_gpu() -> None:
    cluster = IdleCluster(2, by_rule(rules.first_fit()))
    one, two = cluster.place(ONE, 0.0), cluster.place(ONE, 0.0)
    assert one is not None
    assert two is not None
    cluster.end(one, 1.0)
    cluster.end(two, 2.0)
    again = cluster.place(ONE, 3.0)
    assert again is two
    assert cluster.made.reused == 1


def test_oldest_victims_go_first_even_where_they_are_not_in_the_way() -> None:
    """On one GPU a 1g and a 2g are idle; a 4g needs only one of them gone, and the older one goes too."""
    cluster = IdleCluster(1, oldest_victims(rules.first_fit()))
    held = [cluster.place(kind, 0.0) for kind in (FOUR, TWO)]
    for moment, each in enumerate(reversed(held), 1):
        assert each is not None
        cluster.end(each, float(moment))
    assert cluster.place(THREE, 3.0) is not None
    assert cluster.made.destroyed == 1, "the 2g on slices 4-5 is the older one, and slices 4-7 suffice"
    assert [held.kind for held in cluster.idle] == [FOUR]


@pytest.mark.parametrize(
    ("counts", "gpus"),
    [
        ((7, 0, 0, 0, 0, 0), 1),
        ((8, 0, 0, 0, 0, 0), 2),
        ((0, 4, 0, 0, 0, 0), 1),
        ((0, 0, 0, 2, 0, 0), 1),
        ((1, 0, 0, 2, 0, 0), 2),
        ((0, 0, 0, 0, 2, 0), 2),
        ((3, 0, 0, 0, 1, 0), 1),
        ((1, 1, 3, 0, 0, 0), 2),
        ((1, 0, 3, 0, 0, 0), 1),
        ((0, 1, 3, 0, 0, 1), 2),
    ],
)
def test_the_fewest_gpus_for_some_instances(counts: tuple[int, ...], gpus: int) -> None:
    assert fewest_gpus(list(counts)) == gpus


def test_counting_halves_agrees_with_all_layouts() -> None:
    """The counting of halves and pairs against all layouts of one GPU."""
    layouts = {
        tuple(sum(kind == each for kind, _ in state) for each in range(len(NAMES))) for state in states_by_profile()
    }
    bounds = (8, 5, 4, 3, 2, 2)
    for counts in product(*map(range, bounds)):
        assert fits(list(counts), 1) == (counts in layouts), counts


def test_repacking_moves_what_is_in_the_way() -> None:
    cluster = RepackedCluster(1)
    assert all(cluster.place(kind, 0.0) is not None for kind in (ONE, ONE, ONE, FOUR))
    assert cluster.place(ONE, 0.0) is None
