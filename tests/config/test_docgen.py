"""What is made from the table of settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mig_agent.config import docgen, load
from mig_agent.config.flags import GroupedCommand, settings_flags, texts_of
from mig_agent.config.settings import ROWS

ROOT = Path(__file__).resolve().parents[2]


def test_the_documents_in_the_checkout_are_fresh() -> None:
    """`hack/docs.sh` makes them again."""
    assert (ROOT / "docs/mig-agent.example.yaml").read_text() == docgen.example_file()
    assert (ROOT / "docs/configuration.md").read_text() == docgen.page()


def test_the_example_is_the_default_configuration(tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(docgen.example_file())
    assert replace(load(path), given=frozenset()) == load()


def test_every_example_value_is_accepted(tmp_path: Path) -> None:
    """With every commented setting taken in: also the examples must be right."""
    path = tmp_path / "example.yaml"
    lines = docgen.example_file().splitlines()
    names = tuple(f"# {name}: " for name in ROWS)
    path.write_text("\n".join(line.removeprefix("# ") if line.startswith(names) else line for line in lines))
    settings = load(path)
    assert settings.given == set(ROWS)
    assert settings.gpus == ("0", "2")


def test_every_flag_reaches_its_setting() -> None:
    @click.command("serve", cls=GroupedCommand, params=settings_flags())
    def command(**values: object) -> None:
        print(json.dumps(texts_of(values)))  # noqa: T201 -- read back below

    runner = CliRunner()
    printed = runner.invoke(command, ["--gpus", "0", "--gpus", "1,2", "--strict-fifo", "--reread", "5s"]).output
    given = {name: value for name, value in json.loads(printed).items() if value is not None}
    assert given == {"gpus": ["0", "1,2"], "strict_fifo": "yes", "reread": "5s"}
    assert json.loads(runner.invoke(command, ["--no-strict-fifo"]).output)["strict_fifo"] == "no"
    shown = runner.invoke(command, ["--help"]).output
    for row in ROWS.values():
        assert f"  {row.flag}" in shown
        assert f"{row.group}:" in shown


@pytest.mark.parametrize("name", sorted(ROWS))
def test_every_setting_is_explained(name: str) -> None:
    row = ROWS[name]
    assert row.words.endswith(".")
    assert row.example
