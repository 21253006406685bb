"""The tables of the placement policy, against figures computed elsewhere and the definition itself."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.model import Layout, Placement, whole_gpu_layout
from mig_agent.core.planning.placement import pack_engines, tables_for, unpack_engines
from support.nodes import A30, A100_40, H100, LAYOUTS, RTX_PRO


def plain_windows(layout: Layout) -> list[tuple[str, Placement]]:
    return [(p.name, place) for p in layout.profiles if not p.attributes for place in p.placements]


def states(windows: list[tuple[str, Placement]]) -> list[frozenset[tuple[str, Placement]]]:
    """All sets of windows that do not overlap."""
    found = [frozenset[tuple[str, Placement]]()]
    for window in windows:
        found += [each | {window} for each in found if not any(w.mask & window[1].mask for _, w in each)]
    return found


def test_the_size_of_the_space_is_the_known_one() -> None:
    """298 states and 19 maximal layouts with 5 profiles; 723, 78 and 192 masks with 1g.20gb (facts of the policy)."""
    windows = plain_windows(H100)
    five = [each for each in windows if each[0] != "1g.20gb"]
    for chosen, count, maximal in ((five, 298, 19), (windows, 723, 78)):
        all_states = states(chosen)
        assert len(all_states) == count
        full = [s for s in all_states if all(any(w.mask & o.mask for _, o in s) for _, w in chosen if (_, w) not in s)]
        assert len(full) == maximal
    masks = {sum(place.mask for _, place in each) for each in states(windows)}
    assert len(masks) == 192


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
def test_capacity_is_the_sum_of_the_free_windows(layout: Layout) -> None:
    tables = tables_for(layout)
    windows = plain_windows(layout)
    for mask in range(1 << layout.memory_slices):
        assert tables.capacity(mask) == sum(w.size for _, w in windows if not w.mask & mask)


def test_capacity_of_an_empty_gpu() -> None:
    assert tables_for(H100).capacity(0) == 7 * 1 + 4 * 2 + 3 * 2 + 2 * 4 + 4 + 8
    assert tables_for(A30).capacity(0) == 4 * 1 + 2 * 2 + 4
    assert tables_for(RTX_PRO).capacity(0) == 4 * 3 + 2 * 6 + 12


@pytest.mark.parametrize(
    ("profile", "start"),
    [("1g.10gb", 6), ("1g.20gb", 6), ("2g.20gb", 4), ("3g.40gb", 4), ("4g.40gb", 0), ("7g.80gb", 0)],
)
def test_the_first_place_on_an_empty_gpu_is_the_drivers_own(profile: str, start: int) -> None:
    ranked = tables_for(H100).ranked(H100.by_name[profile].id, 0)
    assert ranked[0].window.placement.start == start
    assert ranked[0].window.driver_rank == 0


@pytest.mark.parametrize(
    ("layout", "profile", "starts"),
    [
        (A100_40, "1g.5gb", [6, 4, 5, 0, 1, 2, 3]),  # seven 1g, as captured
        (H100, "1g.10gb", [6, 4, 5, 0, 1, 2, 3]),
        (A100_40, "2g.10gb", [4, 0, 2]),
        (A100_40, "3g.20gb", [4, 0]),
        (A30, "1g.6gb", [0, 1, 2, 3]),
    ],
)
def test_the_drivers_order(layout: Layout, profile: str, starts: list[int]) -> None:
    windows = tables_for(layout).windows[layout.by_name[profile].id]
    assert [w.placement.start for w in sorted(windows, key=lambda w: w.driver_rank)] == starts


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
@given(data=st.data())
def test_ranked_windows_are_the_free_ones_by_cost(layout: Layout, data: st.DataObject) -> None:
    tables = tables_for(layout)
    mask = data.draw(st.integers(0, (1 << layout.memory_slices) - 1))
    profile = data.draw(st.sampled_from(layout.profiles))
    ranked = tables.ranked(profile.id, mask)
    assert {r.window.placement for r in ranked} == {p for p in profile.placements if not p.mask & mask}
    assert [r.cost for r in ranked] == sorted(r.cost for r in ranked)
    for r in ranked:
        after = mask | r.window.mask
        free = layout.memory_slices - after.bit_count()
        lost = tables.capacity(mask) - tables.capacity(after)
        assert r.cost == pytest.approx(lost + 1e-3 * free + 1e-6 * r.window.driver_rank, abs=1e-12)


def test_unknown_profiles_have_no_windows() -> None:
    assert tables_for(H100).ranked(999, 0) == ()


@given(st.lists(st.sampled_from(RTX_PRO.profiles), max_size=6))
def test_packed_engines_add_up(profiles: list[object]) -> None:
    chosen = [each for each in RTX_PRO.profiles if each in profiles]
    taken = sum(pack_engines(each.engines) for each in chosen)
    expected = tuple(sum(each.engines.as_tuple()[n] for each in chosen) for n in range(6))
    assert unpack_engines(taken) == expected
    fits = all(count <= total for count, total in zip(expected, RTX_PRO.engines.as_tuple(), strict=True))
    assert tables_for(RTX_PRO).engines_fit(taken) == fits
    missing = tables_for(RTX_PRO).missing_engines(taken)
    assert any(missing) != fits


def test_engines_give_the_media_rules() -> None:
    """One `+me` on a GPU; beside `+me.all` only `-me`; on an A30 1g+me excludes 2g+me; nothing else is refused."""

    def together(layout: Layout, *names: str) -> bool:
        tables = tables_for(layout)
        return tables.engines_fit(sum(tables.engines_of(layout.by_name[name]) for name in names))

    assert not together(A100_40, "1g.5gb+me", "1g.5gb+me")
    assert together(A100_40, "1g.5gb+me", *["1g.5gb"] * 6)
    assert not together(A30, "1g.6gb+me", "2g.12gb+me")
    assert together(A30, "1g.6gb+me", "2g.12gb", "1g.6gb")
    assert not together(RTX_PRO, "1g.24gb+me.all", "1g.24gb")
    assert together(RTX_PRO, "1g.24gb+me.all", "1g.24gb-me", "1g.24gb-me", "1g.24gb-me")
    assert together(RTX_PRO, *["1g.24gb+gfx"] * 4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
def test_engines_never_refuse_what_has_no_attribute(layout: Layout) -> None:
    tables = tables_for(layout)
    for state in states(plain_windows(layout)):
        assert tables.engines_fit(sum(tables.engines_of(layout.by_name[name]) for name, _ in state))


def test_unreported_engine_totals_limit_nothing() -> None:
    whole = whole_gpu_layout("NVIDIA A10", 23028)
    tables = tables_for(whole)
    assert tables.engines_fit(pack_engines(H100.engines))


def test_every_larger_window_contains_one_of_each_smaller_profile_of_a_classic_gpu() -> None:
    """Why giving more than the smallest fitting profile never helps."""
    plain = [profile for profile in H100.profiles if not profile.attributes]
    for large, small in itertools.permutations(plain, 2):
        if large.memory_slices <= small.memory_slices:
            continue
        for place in large.placements:
            assert any(inner.mask & ~place.mask == 0 for inner in small.placements)
