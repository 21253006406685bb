"""Which profile serves which want."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from mig_agent.core.model import Layout, Want, whole_gpu_layout
from mig_agent.core.planning.profiles import candidates, slices_of_fraction, smallest_profile, wasted_mib
from support.nodes import (
    A30,
    A100_40,
    A100_80,
    H100,
    LAYOUTS,
    RTX_PRO,
    WHOLE,
    fraction,
    layout_of,
    memory,
    profile,
    wants_for,
)

WHOLE_LAYOUT = whole_gpu_layout("NVIDIA A10", 23028)


def chosen(want: Want, layout: Layout) -> str | None:
    found = smallest_profile(want, layout)
    return None if found is None else found.name


@pytest.mark.parametrize(
    ("layout", "text", "name"),
    [
        (A100_40, "4G", "1g.5gb"),
        (A100_40, "5G", "1g.5gb"),  # 5,000,000,000 bytes are 4768.4 MiB, and it has 4864
        (A100_40, "5Gi", "1g.10gb"),
        (A100_40, "4864Mi", "1g.5gb"),
        (A100_40, "4865Mi", "1g.10gb"),
        (A100_40, "9856Mi", "1g.10gb"),  # 2g.10gb has the same memory and more compute
        (A100_40, "10Gi", "3g.20gb"),
        (A100_40, "20Gi", "7g.40gb"),
        (A100_40, "40Gi", None),
        (A100_80, "4G", "1g.10gb"),
        (A100_80, "10G", "1g.10gb"),
        (A100_80, "9.5Gi", "1g.10gb"),
        (A100_80, "10Gi", "1g.20gb"),
        (H100, "4G", "1g.10gb"),
        (H100, "9.75Gi", "1g.10gb"),
        (H100, "10Gi", "1g.20gb"),
        (H100, "20Gi", "3g.40gb"),
        (H100, "80Gi", None),
        (H100, "80G", "7g.80gb"),
        (A30, "6G", "1g.6gb"),
        (A30, "6Gi", "2g.12gb"),
        (A30, "12Gi", "4g.24gb"),
        (RTX_PRO, "4G", "1g.24gb"),
        (RTX_PRO, "24G", "1g.24gb"),
        (RTX_PRO, "24Gi", "2g.48gb"),
    ],
)
def test_memory_is_compared_with_what_the_profile_has(layout: Layout, text: str, name: str | None) -> None:
    assert chosen(memory(text), layout) == name


def test_compute_slices_can_be_asked_for() -> None:
    assert chosen(memory("4G", min_compute=2), A100_40) == "2g.10gb"
    assert chosen(memory("15G", min_compute=4), A100_40) == "4g.20gb"
    assert chosen(memory("4G", min_compute=5), A100_40) == "7g.40gb"
    assert chosen(memory("4G", min_compute=8), A100_40) is None


def test_attribute_profiles_serve_only_wants_for_their_attributes() -> None:
    assert chosen(memory("4G", attributes=["+me"]), A100_40) == "1g.5gb+me"
    assert chosen(memory("9G", attributes=["+me"]), A100_40) is None
    assert chosen(memory("7G", attributes=["+me"]), A30) == "2g.12gb+me"
    assert chosen(memory("4G", attributes=["+gfx"]), RTX_PRO) == "1g.24gb+gfx"
    assert chosen(memory("4G", attributes=["-me"]), RTX_PRO) == "1g.24gb-me"
    assert chosen(memory("4G", attributes=["+gfx"]), A100_40) is None


def test_a_profile_is_exact() -> None:
    assert chosen(profile("2g.10gb"), A100_40) == "2g.10gb"
    assert chosen(profile("1g.5gb+me"), A100_40) == "1g.5gb+me"
    assert chosen(profile("2g.10gb"), H100) is None
    assert chosen(replace(profile("1g.5gb"), min_compute_slices=2), A100_40) is None
    assert chosen(replace(profile("1g.5gb"), attributes=frozenset({"+me"})), A100_40) is None


@pytest.mark.parametrize(
    ("layout", "value", "name"),
    [
        (H100, 0.01, "1g.10gb"),
        (H100, 0.125, "1g.10gb"),
        (H100, 0.126, "1g.20gb"),
        (H100, 0.25, "1g.20gb"),
        (H100, 0.3, "3g.40gb"),
        (H100, 0.5, "3g.40gb"),
        (H100, 0.51, "7g.80gb"),
        (H100, 1.0, "7g.80gb"),
        (A30, 0.25, "1g.6gb"),
        (A30, 0.5, "2g.12gb"),
        (RTX_PRO, 0.1, "1g.24gb"),
        (RTX_PRO, 0.25, "1g.24gb"),
        (RTX_PRO, 1 / 3, "2g.48gb"),
        (layout_of("B200"), 0.5, "3g.90gb"),
    ],
)
def test_fractions_count_slices(layout: Layout, value: float, name: str) -> None:
    assert chosen(fraction(value), layout) == name


def test_rounding_of_a_float_costs_no_slice() -> None:
    assert slices_of_fraction(0.1 + 0.15, 8) == 2
    assert slices_of_fraction(0.7 + 0.05, 4) == 3
    assert slices_of_fraction(1e-9, 8) == 1


def test_whole_gpus() -> None:
    assert chosen(WHOLE, WHOLE_LAYOUT) == "whole"
    assert chosen(WHOLE, H100) == "7g.80gb"
    assert chosen(WHOLE, A30) == "4g.24gb"
    assert chosen(WHOLE, RTX_PRO) == "4g.96gb"


@given(wants_for())
def test_nothing_but_a_whole_want_takes_a_whole_gpu(want: Want) -> None:
    assert smallest_profile(want, WHOLE_LAYOUT) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.model)
@given(want=wants_for())
def test_no_smaller_profile_would_have_served(layout: Layout, want: Want) -> None:
    found = smallest_profile(want, layout)
    serving = candidates(want, layout)
    assert found == (serving[0] if serving else None)
    if found is None or want.memory_bytes is None:
        return
    assert found.memory_mib * 2**20 >= want.memory_bytes
    for other in layout.profiles:
        if other.attributes == want.attributes and other.compute_slices >= want.min_compute_slices:
            enough = other.memory_mib * 2**20 >= want.memory_bytes
            smaller = (other.memory_mib, other.compute_slices) < (found.memory_mib, found.compute_slices)
            assert not (enough and smaller)


def test_waste() -> None:
    one = H100.by_name["1g.10gb"]
    assert wasted_mib(one, memory("9984Mi"), H100) == 0
    assert wasted_mib(one, memory("4Gi"), H100) == 9984 - 4096
    assert wasted_mib(one, profile("1g.10gb"), H100) == 0
    assert wasted_mib(one, fraction(0.0625), H100) == pytest.approx(H100.memory_mib / 16)
