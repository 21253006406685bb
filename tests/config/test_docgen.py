"""What is made from the table of settings."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mig_agent.config import docgen, load
from mig_agent.config.flags import GroupedCommand, settings_flags, texts_of
from mig_agent.config.load import read
from mig_agent.config.settings import ROWS

ROOT = Path(__file__).resolve().parents[2]


def test_the_documents_in_the_checkout_are_fresh() -> None:
    """`hack/docs.sh` makes them again."""
    assert (ROOT / "docs/mig-agent.example.yaml").read_text() == docgen.example_file()
    assert (ROOT / "docs/configuration.md").read_text() == docgen.page()


def uncommented(names: set[str]) -> str:
    """The example with these settings set as it shows them."""
    lines = docgen.example_file().splitlines()
    prefixes = tuple(f"#{name}: " for name in names)
    return "\n".join(line.removeprefix("#") if line.startswith(prefixes) else line for line in lines)


def test_the_example_is_exactly_the_default_configuration(tmp_path: Path) -> None:
    """Whoever installs it as it is has the same agent as somebody without any file."""
    example, empty = tmp_path / "example.yaml", tmp_path / "empty.yaml"
    example.write_text((ROOT / "docs/mig-agent.example.yaml").read_text())
    empty.write_text("")
    assert load(example) == load(empty) == load()
    assert not read(example).given


def test_the_values_that_the_example_shows_are_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(uncommented({name for name, row in ROWS.items() if row.default}))
    assert load(path) == load()


def test_every_example_value_is_accepted(tmp_path: Path) -> None:
    """With every commented setting taken in: also the examples must be right."""
    path = tmp_path / "example.yaml"
    path.write_text(uncommented(set(ROWS)))
    reading = read(path)
    assert set(reading.given) == set(ROWS)
    assert load(path).gpus == ("0", "2")


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
