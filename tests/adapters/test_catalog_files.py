"""The catalog's files: that ours are right in themselves, and that mistakes in any are told in words."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import yaml

from mig_agent.adapters import catalog_files
from mig_agent.adapters.catalog_files import load, load_model
from mig_agent.core.errors import ConfigError
from mig_agent.core.model import Layout, Profile

FOLDER = Path(catalog_files.__file__).parents[3] / "profiles"
FILES = sorted(FOLDER.glob("*.yaml"))
MODELS = {path.stem: load_model(path) for path in FILES}


def test_every_promised_model_is_there() -> None:
    assert set(MODELS) == {
        "a30-24gb",
        "a100-40gb",
        "a100-80gb",
        "h100-80gb",
        "h100-94gb",
        "h100-96gb",
        "gh200-96gb",
        "gh200-144gb",
        "h200-141gb",
        "b200-180gb",
        "rtx-pro-6000-96gb",
    }
    assert len(load().entries) == len(MODELS)


def test_no_product_name_means_two_models() -> None:
    names = [name for entry in MODELS.values() for name in entry.product_names]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_names_its_sources(name: str) -> None:
    assert MODELS[name].sources


def full(layout: Layout) -> Profile:
    return next(each for each in layout.profiles if each.memory_slices == layout.memory_slices and not each.attributes)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_holds_together(name: str) -> None:
    layout = MODELS[name].layout
    whole = full(layout)
    assert layout.engines == whole.engines
    assert whole.memory_mib <= layout.memory_mib
    for profile in layout.profiles:
        assert profile.compute_slices <= whole.compute_slices
        assert profile.memory_mib <= whole.memory_mib
        # A profile has its share of the memory, less what the driver keeps.
        share = layout.memory_mib * profile.memory_slices / layout.memory_slices
        assert 0.88 * share <= profile.memory_mib <= share * 1.01
        assert all(place.size == profile.memory_slices for place in profile.placements)
        assert all(place.start + place.size <= layout.memory_slices for place in profile.placements)
        assert bool(profile.attributes) == ("+" in profile.name or "-" in profile.name)


def test_the_axis_of_each_family() -> None:
    assert MODELS["a30-24gb"].layout.memory_slices == 4
    assert MODELS["rtx-pro-6000-96gb"].layout.memory_slices == 12
    others = set(MODELS) - {"a30-24gb", "rtx-pro-6000-96gb"}
    assert {MODELS[name].layout.memory_slices for name in others} == {8}


def test_what_the_facts_print_of_an_a100() -> None:
    names = MODELS["a100-40gb"].layout.by_name
    assert names["1g.5gb"].memory_mib == 4864
    assert names["1g.5gb"].id == 19
    assert [place.start for place in names["1g.10gb"].placements] == [0, 2, 4, 6]
    assert [place.start for place in names["2g.10gb"].placements] == [0, 2, 4]
    assert names["1g.5gb+me"].attributes == frozenset({"+me"})
    assert names["7g.40gb"].placements[0].size == 8


def test_amounts_that_nobody_captured_are_shares_of_the_gpu() -> None:
    gh200 = MODELS["gh200-144gb"].layout
    assert gh200.by_name["3g.72gb"].memory_mib == math.floor(gh200.memory_mib / 2)
    assert gh200.by_name["7g.144gb"].memory_mib == gh200.memory_mib
    assert any("3g, 4g and 7g" in each for each in MODELS["gh200-144gb"].uncertain)


def test_attributes_come_from_the_name() -> None:
    names = MODELS["rtx-pro-6000-96gb"].layout.by_name
    assert names["1g.24gb+me.all"].attributes == frozenset({"+me.all"})
    assert names["2g.48gb-me"].attributes == frozenset({"-me"})
    assert names["4g.96gb+gfx"].attributes == frozenset({"+gfx"})


def test_another_folder_can_be_given(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "a30-24gb.yaml", tmp_path)
    assert [entry.layout.model for entry in load(tmp_path).entries] == ["NVIDIA A30"]


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.yaml file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no folder"):
        load(tmp_path / "nowhere")


GOOD = """\
product_names: [NVIDIA Test]
memory_mib: 16000
memory_slices: 4
profiles:
  - id: 1
    name: 1g.4gb
    compute_slices: 1
    memory_slices: 1
    memory_mib: 4000
    starts: [0, 1, 2, 3]
    engines: [10, 1, 0, 0, 0, 0]
"""


def test_the_smallest_good_file(tmp_path: Path) -> None:
    path = tmp_path / "test.yaml"
    path.write_text(GOOD)
    entry = load_model(path)
    assert entry.layout.engines.multiprocessors == 10
    assert entry.sources == ()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (GOOD, "", "the file must be a mapping"),
        (GOOD, "- 1\n", "the file must be a mapping"),
        (GOOD, "a: [", "cannot read the GPU model in"),
        (GOOD, "a: !!python/object:os.system x\n", "cannot read the GPU model in"),
        ("memory_mib: 16000\n", "", "the file lacks memory_mib"),
        ("memory_mib: 16000", "memory: 16000\nmemory_mib: 16000", "has memory, which nothing here means"),
        ("[NVIDIA Test]", "[]", "product_names needs at least one name"),
        ("[NVIDIA Test]", "[1]", "product_names must be a list of texts"),
        ("[NVIDIA Test]", "NVIDIA Test", "product_names must be a list"),
        ("memory_slices: 4", "memory_slices: 0", "memory_slices must be 1 to 64, not 0"),
        ("memory_slices: 4", "memory_slices: 4.5", "memory_slices must be a whole number, not 4.5"),
        ("memory_slices: 4", "memory_slices: true", "memory_slices must be a whole number, not True"),
        ("memory_mib: 16000", "memory_mib: -1", "memory_mib must be 1 or more, not -1"),
        ("starts: [0, 1, 2, 3]", "starts: [0, 4]", "profiles[0].starts must be 0 to 3, not 4"),
        ("starts: [0, 1, 2, 3]", "starts: []", "profiles[0].starts must name at least one slice"),
        ("starts: [0, 1, 2, 3]", "starts: [1, 1]", "profiles[0].starts must name at least one slice, and none twice"),
        ("[10, 1, 0, 0, 0, 0]", "[10, 1]", "profiles[0].engines must be 6 numbers, not 2"),
        ("name: 1g.4gb", "name: 5", "profiles[0].name must be a text"),
        ("    id: 1\n", "", "mapping"),
        ("  - id: 1\n", "  - id: 1\n    colour: red\n", "profiles[0] has colour"),
        ("    compute_slices: 1\n", "", "profiles[0] lacks compute_slices"),
    ],
)
def test_mistakes_are_told_with_the_file_and_the_place(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "broken.yaml"
    text = GOOD.replace(old, new)
    path.write_text(text)
    if old == "    id: 1\n":
        path.write_text(GOOD.replace("  - id: 1\n", "  - 7\n  - id: 1\n"))
    with pytest.raises(ConfigError) as caught:
        load_model(path)
    assert words in str(caught.value)
    assert "broken.yaml" in str(caught.value)


def test_one_id_or_name_twice_is_refused(tmp_path: Path) -> None:
    content = yaml.safe_load(GOOD)
    content["profiles"].append(dict(content["profiles"][0], name="other"))
    path = tmp_path / "twice.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="names one id twice"):
        load_model(path)


def test_a_model_without_profiles_is_refused(tmp_path: Path) -> None:
    content = yaml.safe_load(GOOD)
    content["profiles"] = []
    path = tmp_path / "none.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="needs at least one profile"):
        load_model(path)
