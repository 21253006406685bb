"""The catalog of GPU models and what the driver changes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mig_agent.core.catalog import Catalog, profile_name, reconcile_layout
from mig_agent.core.model import Layout, Placement
from support.nodes import A30, A100_40, CATALOG, H100, LAYOUTS, RTX_PRO


def test_a_model_is_found_by_any_of_its_names() -> None:
    for name in ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "nvidia a100-pcie-40gb"):
        found = CATALOG.layout(name, 40960)
        assert found is not None
        assert found.model == name
        assert found.profiles == A100_40.profiles


def test_the_same_question_gets_the_same_object() -> None:
    assert CATALOG.layout("NVIDIA A30", 24576) is CATALOG.layout("NVIDIA A30", 24576)


def test_the_memory_is_what_the_driver_says() -> None:
    found = CATALOG.layout("NVIDIA A100-SXM4-40GB", 40536)
    assert found is not None
    assert found.memory_mib == 40536


def test_unknown_models_have_no_layout() -> None:
    assert CATALOG.layout("NVIDIA GeForce RTX 4090", 24564) is None
    assert CATALOG.layout("", 0) is None


def test_a_known_name_with_another_memory_is_another_model() -> None:
    assert CATALOG.layout("NVIDIA H100 80GB HBM3", 40000) is None


def test_of_two_models_of_one_name_the_nearest_in_memory_counts() -> None:
    small, large = CATALOG.entries[0], CATALOG.entries[1]
    close = replace(large, product_names=small.product_names, layout=replace(small.layout, memory_mib=43000))
    both = Catalog(entries=(small, close))
    entry = both.entry(small.product_names[0], 42900)
    assert entry is close


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
def test_every_name_in_the_catalog_is_the_one_that_nvidias_rule_makes(layout: Layout) -> None:
    for profile in layout.profiles:
        made = profile_name(
            compute_slices=profile.compute_slices,
            memory_mib=profile.memory_mib,
            total_memory_mib=layout.memory_mib,
            attribute="".join(profile.attributes),
        )
        assert made == profile.name


@pytest.mark.parametrize(
    ("compute", "mib", "total", "name"),
    [
        (3, 71168, 143771, "3g.71gb"),  # 70.5, half away from zero
        (1, 22528, 183359, "1g.23gb"),  # 22.5
        (7, 81152, 81559, "7g.80gb"),
        (1, 4864, 40960, "1g.5gb"),
    ],
)
def test_names_round_half_away_from_zero(compute: int, mib: int, total: int, name: str) -> None:
    assert profile_name(compute_slices=compute, memory_mib=mib, total_memory_mib=total) == name


def test_names_of_compute_instances_tell_their_share() -> None:
    made = profile_name(compute_slices=3, memory_mib=19968, total_memory_mib=40960, compute_only=1)
    assert made == "1c.3g.20gb"
    assert profile_name(compute_slices=3, memory_mib=19968, total_memory_mib=40960, compute_only=3) == "3g.20gb"


def test_without_a_driver_the_file_counts_and_the_other_way_round() -> None:
    assert reconcile_layout(None, A30) == (A30, ())
    assert reconcile_layout(A30, None) == (A30, ())
    assert reconcile_layout(None, None) == (None, ())
    assert reconcile_layout(A30, A30) == (A30, ())


def test_the_driver_wins_and_differences_are_reported() -> None:
    first, second, *rest = H100.profiles
    moved = replace(second, placements=(Placement(0, 1),))
    driver = replace(H100, profiles=(replace(first, memory_mib=9856, name="1g.10gb.new"), moved, *rest[:-1]))
    layout, differences = reconcile_layout(driver, H100)
    assert layout is driver
    text = "\n".join(differences)
    assert "with MiB 9856, 9984 in the catalog" in text
    assert "named 1g.10gb.new, 1g.10gb in the catalog" in text
    assert "with starts [0], [0, 1, 2, 3, 4, 5, 6] in the catalog" in text
    assert f"no profile {rest[-1].name}" in text
    assert all(each.startswith("NVIDIA H100 80GB HBM3: the driver reports") for each in differences)


def test_extra_profiles_of_the_driver_are_reported() -> None:
    file = replace(RTX_PRO, profiles=RTX_PRO.profiles[1:], memory_slices=8)
    layout, differences = reconcile_layout(RTX_PRO, file)
    assert layout is RTX_PRO
    assert any("which the catalog lacks" in each for each in differences)
    assert any("12 memory slices, 8 in the catalog" in each for each in differences)
