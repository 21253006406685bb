"""The settings of shares: what they mean, and how their mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.config import load
from mig_agent.config.changes import compare
from mig_agent.config.load import read
from mig_agent.core.shares import Fractions
from mig_agent.daemon.agent import _engine_settings
from mig_agent.engine.context import EngineSettings


def test_the_defaults_are_those_of_the_engine() -> None:
    made, plain = _engine_settings(load(), None), EngineSettings(node="n")
    for name in ("isolation", "fractions", "fractions_by_gpu", "share_headroom_mib", "least_share_mib"):
        assert getattr(made, name) == getattr(plain, name), name


def test_each_gpu_may_have_a_way_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("fractions: MPS\nfractions_by_gpu:\n  0: cgroup\n  GPU-0123abcd: off\nshare_headroom: 1Gi\n")
    settings = load(path)
    assert settings.fractions == "mps"
    assert settings.fractions_by_gpu == (("0", Fractions.CGROUP), ("GPU-0123abcd", Fractions.OFF))
    assert settings.share_headroom == 1024
    assert load(flags={"fractions_by_gpu": "{0: cgroup, GPU-0123abcd: off}"}).fractions_by_gpu == (
        settings.fractions_by_gpu
    )


def test_amounts_are_rounded_up_to_mib() -> None:
    assert load(flags={"share_headroom": "512M"}).share_headroom == 489
    assert load(flags={"least_share": "1G"}).least_share == 954


def test_off_may_come_as_the_boolean_that_yaml_and_helm_make_of_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("fractions: false\nfractions_by_gpu: {1: false}\nfeature_labels: false\n")
    settings = load(path)
    assert (settings.fractions, settings.feature_labels) == ("off", "off")
    assert settings.fractions_by_gpu == (("1", Fractions.OFF),)


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("fractions: preload\n", "cannot take preload", "write auto, cgroup, mps or off"),
        ("fractions: hami\n", "cannot take hami", "write auto, cgroup, mps or off"),
        ("isolation: strong\n", "cannot take strong", "write any or mig"),
        ("fractions_by_gpu: {0: preload}\n", "fractions_by_gpu.0", "write one of auto, cgroup, mps, off"),
        ("fractions_by_gpu: {0.5: mps}\n", "cannot take 0.5 as a GPU", "indices or UUIDs"),
        ("fractions_by_gpu: {00: mps, 0: off}\n", "GPU 0 is named twice", "remove one"),
        ("fractions_by_gpu: mps\n", "it holds no names with values", "{0: mps, 1: off}"),
        ("least_share: 512\n", "it has no unit", "512M"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str, words: str, hint: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    (problem,) = read(path).problems
    assert words in problem.message
    assert hint in problem.hint
    assert problem.line == 1


def test_all_of_them_change_by_a_reload() -> None:
    flags = {"fractions": "off", "fractions_by_gpu": "{0: mps}", "isolation": "mig", "least_share": "2Gi"}
    changes = compare(load(), load(flags=flags))
    assert {each.name for each in changes.live} == set(flags)
    assert not changes.at_restart
    assert "fractions_by_gpu is {0: mps} (was not set)" in map(str, changes.live)
