"""Each part by itself, small: it prints JSON, is the same again, and tells what it is held to."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from placement import PARTS, main
from placement_bench.figures import Series, line_chart
from placement_bench.page import put_into
from placement_bench.parva import DEPLOYMENTS
from placement_bench.results import Check, Report, Table

ROOT = Path(__file__).resolve().parents[2]
SMALL: Mapping[str, Sequence[str]] = {
    "regret": ("--repeats", "2"),
    "sweep": ("--gpus", "2", "--loads", "0.85", "--requests", "60", "--repeats", "2"),
    "reuse": ("--gpus", "2", "--loads", "0.5", "--requests", "60", "--repeats", "2"),
    "queue": ("--gpus", "2", "--loads", "0.7", "--requests", "60", "--repeats", "2"),
    "waits": ("--gpus", "2", "--loads", "0.8", "--requests", "150", "--repeats", "1"),
    "parva": (),
    "trace": ("--gpus", "3", "--requests", "200"),
    "rounds": ("--gpu-models", "a30-24gb", "a100-40gb", "--requests", "16", "--repeats", "2"),
    "dra": ("--gpus", "2", "--gpu-models", "a30-24gb", "a100-40gb", "--requests", "60", "--repeats", "2"),
}


def printed(part: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([part, *SMALL[part], "--jobs", "1", *more]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("part", PARTS)
def test_each_part_prints_json_and_a_table(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(printed(part, capsys, "-o", "json", "--seed", "3"))
    assert found["part"] == part
    assert found["seed"] == 3
    assert found["data"]
    for check in found["checks"]:
        assert check["met"] == (
            check["measured"] >= check["bound"] if check["at_least"] else check["measured"] <= check["bound"]
        )
    table = printed(part, capsys)
    assert "| ---" in table.replace("|-", "| -")


@pytest.mark.parametrize("part", ["regret", "sweep", "reuse", "queue", "rounds", "dra"])
def test_a_part_is_the_same_for_one_seed(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = printed(part, capsys, "-o", "json")
    assert printed(part, capsys, "-o", "json") == first
    if part != "regret":
        assert printed(part, capsys, "-o", "json", "--seed", "2") != first


def test_parvas_deployments_fit_on_as_few_gpus_as_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(printed("parva", capsys, "-o", "json", "--check"))
    assert [row["planned_together"] for row in found["data"]] == [published for _, published in DEPLOYMENTS]
    assert [row["fewest"] for row in found["data"]] == [published for _, published in DEPLOYMENTS]


def test_a_trace_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at,profile,lasts\n2,1g.10gb,5\n1,7g.80gb,5\n9,7g.80gb,1\n", encoding="utf-8")
    (found,) = json.loads(printed("trace", capsys, "-o", "json", "--trace", str(trace)))
    assert found["data"][-1]["requests"] == 3


def test_a_trace_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("at,profile,lasts\n1,9g.80gb,5\n", encoding="utf-8")
    assert main(["trace", "--trace", str(trace)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_the_script_runs_from_anywhere_and_over_processes(tmp_path: Path) -> None:
    script = str(ROOT / "hack" / "bench" / "placement.py")
    command = (sys.executable, script, "sweep", *SMALL["sweep"], "-o", "json")
    one, two = (
        subprocess.run([*command, "--jobs", jobs], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for jobs in ("1", "2")
    )
    assert one == two
    assert json.loads(one)[0]["data"]


def test_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed("reuse", capsys, "--figures", str(tmp_path))
    (figure,) = tmp_path.iterdir()
    assert ET.parse(figure).getroot().tag.endswith("svg")  # noqa: S314 -- our own file


def test_a_chart_names_its_lines_without_overlaps() -> None:
    series = [Series(f"line <{number}>", ((0.0, 90.0), (1.0, 95.0 + number / 100))) for number in range(5)]
    chart = ET.fromstring(line_chart("title", "x", "%", series))  # noqa: S314 -- our own text
    labels = [float(e.get("y", "0")) for e in chart.iter() if e.text is not None and e.text.startswith("line <")]
    assert len(labels) == 5
    assert all(after - before >= 14 for before, after in zip(sorted(labels), sorted(labels)[1:], strict=False))


def test_the_page_takes_tables_between_its_marks() -> None:
    report = Report(
        part="sweep",
        seed=1,
        tables=(Table("title", ("what", "value"), (("a", "1"),)),),
        data=[],
        figures={"placement-x.svg": "<svg/>"},
    )
    page = put_into("before\n<!-- part: sweep -->\nold\n<!-- end -->\nafter\n", [report])
    assert "old" not in page
    assert "| a    |     1 |" in page
    assert "![placement-x](figures/placement-x.svg)" in page
    assert page.startswith("before\n")
    assert page.endswith("<!-- end -->\nafter\n")
    with pytest.raises(ValueError, match="no marks"):
        put_into("nothing", [report])


def test_the_page_has_marks_for_every_part() -> None:
    page = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
    for part in (*PARTS, "checks"):
        assert f"<!-- part: {part} -->" in page


def test_a_check_that_is_missed() -> None:
    assert not Check(what="x", measured=0.3, bound=0.25).met
    assert Check(what="x", measured=0.3, bound=0.25, at_least=True).met
