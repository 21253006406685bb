"""What can be said of the chart without helm; tests/e2e renders and installs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.config import load
from mig_agent.config.field_types import Row
from mig_agent.config.settings import ROWS
from mig_agent.core.errors import ConfigError, UsageError
from support.agent import PROCESS_SECONDS

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/chart/mig-agent"

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


@cache
def chart_schema() -> dict[str, Any]:
    """What helm checks values with."""
    return dict(json.loads((CHART / "values.schema.json").read_text()))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return chart_schema()


@pytest.fixture(scope="module")
def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def leaves(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every value that is no group of others; an empty group counts as a value."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


def described(
    schema: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    for name, value in schema["properties"].items():
        yield (*path, name), value
        if "properties" in value:
            yield from described(value, (*path, name))


def test_every_value_is_described_and_there(values: dict[str, Any], schema: dict[str, Any]) -> None:
    known = dict(described(schema))
    assert all(each["description"].endswith(".") for each in known.values())
    free = {path for path, each in known.items() if each["type"] == "object" and "properties" not in each}
    for path in leaves(values):
        assert path in known or any(path[:length] in free for length in range(1, len(path))), path
    there = set(leaves(values)) | {path[:length] for path in leaves(values) for length in range(1, len(path))}
    left_out = {path for path in known if path not in there and path[:-1] != ("settings",)}
    assert left_out == {("global",)}


def test_what_is_mistyped_is_refused_everywhere(schema: dict[str, Any]) -> None:
    groups = [schema, *(each for _, each in described(schema) if "properties" in each)]
    assert all(group["additionalProperties"] is False for group in groups)


def test_settings_are_those_of_the_agent(schema: dict[str, Any]) -> None:
    """Else an agent that cannot read its configuration starts over and over. hack/docs.sh writes them."""
    assert list(schema["properties"]["settings"]["properties"]) == list(ROWS)


TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def taken(value: object, by: Mapping[str, Any]) -> bool:
    """Whether a schema with the keywords that ours has for settings takes a value."""
    if "enum" in by:
        return value in by["enum"]
    types = [each for each in by["type"] if isinstance(value, TYPES[each])]
    found = [each for each in types if (each == "boolean") == isinstance(value, bool)]
    if isinstance(value, str):
        return (
            bool(found) and len(value) <= by.get("maxLength", 1 << 30) and bool(re.search(by.get("pattern", ""), value))
        )
    if isinstance(value, bool):
        return bool(found)
    if isinstance(value, int | float):
        return bool(found) and by.get("minimum", value) <= value <= by.get("maximum", value)
    return bool(found)


def test_the_schema_knows_the_bounds_of_settings(schema: dict[str, Any]) -> None:
    properties = schema["properties"]["settings"]["properties"]
    for name, row in ROWS.items():
        shape = properties[name]
        if row.kind.metavar == "NUMBER":
            most = 999_999_999 if row.at_most is None else row.at_most
            least = row.at_least or 0
            assert [taken(value, shape) for value in (least, most, least - 1)] == [True, True, False], name
            assert row.at_most is None or not taken(row.at_most + 1, shape), name
        for each in (row.default, row.example):
            assert not each or taken(each, shape), (name, each)
        assert row.kind.many or not taken("x" * 2_000_000, shape), name
    assert not taken("maybe", properties["reuse"])
    assert not taken("soon", properties["reread"])
    assert not taken(30, properties["reread"]), "the agent takes no duration without a unit"
    assert taken(False, properties["idle_limit"]), "`off` is a boolean in YAML"
    assert "At least 1s." in properties["reread"]["description"]


def agent_takes(row: Row, value: object) -> bool:
    try:
        row.read(value if isinstance(value, str) else str(value).lower())
    except (ConfigError, UsageError):
        return False
    return True


def test_the_schema_takes_zero_and_one_where_the_agent_does() -> None:
    for name, row in ROWS.items():
        shape = chart_schema()["properties"]["settings"]["properties"][name]
        for value in (0, 1, 5, False, True):
            refused = not row.kind.choices and not row.kind.many and not taken(value, shape)
            assert not refused or not agent_takes(row, value), (name, value)


@given(
    row=st.sampled_from([row for row in ROWS.values() if not row.kind.many and row.kind.section is None]),
    value=st.one_of(
        st.from_regex(r"[0-9]{1,3}(\.[0-9])?", fullmatch=True).map(float),
        st.integers(0, 10**9),
        st.booleans(),
        st.from_regex(r" ?([0-9]{1,2}(\.5)? ?(w|d|h|m|s|ms) ?){1,3}", fullmatch=True),
        st.sampled_from(["off", "OFF", "auto", "no", "0", "12", "2.5", "", "any", "Any", "0660", "respect"]),
    ),
)
def test_the_schema_refuses_nothing_that_the_agent_takes(row: Row, value: object) -> None:
    """But a word in capitals, and `5.0` for 5."""
    shape = chart_schema()["properties"]["settings"]["properties"][row.name]
    if row.kind.choices or (isinstance(value, float) and row.kind.yaml_types[0] == "integer"):
        return
    assert taken(value, shape) or not agent_takes(row, value), (row.name, value)


def test_versions_agree(version: str) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == version
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile.agent").read_text()


def test_the_defaults_are_those_of_the_agent(values: dict[str, Any]) -> None:
    """Where the chart repeats a default, so that people see it, it is the same one."""
    settings = load()
    paths, names = values["paths"], values["resources"]
    assert Path(paths["kubelet"]) == settings.kubelet_dir
    assert Path(paths["cdi"]) == settings.cdi_dir
    assert Path(paths["state"]) == settings.state_dir
    assert settings.lock_dir == Path(paths["run"]) / "locks"
    assert f"unix://{paths['run']}/mig-agent.sock" == str(settings.listen[0])
    assert names["profilePrefix"] == settings.resource_prefix
    assert names["memoryPrefix"] == settings.memory_resource_prefix
    assert tuple(names["memory"]) == settings.memory_resources
    assert names["wholeGpu"] == settings.whole_gpu_resource
    assert values["featureLabels"] == settings.feature_labels
    assert values["advertise"] == "device-plugin", "a pod of the DaemonSet finds a kubelet"


def test_the_stop_is_waited_for() -> None:
    grace = re.search(r"terminationGracePeriodSeconds: (\d+)", (CHART / "templates/daemonset.yaml").read_text())
    assert grace
    assert int(grace[1]) > 2 * load().stop_deadline


def test_the_image_has_what_the_tests_run_with() -> None:
    done = subprocess.run(
        [sys.executable, "hack/lock.py", "check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PROCESS_SECONDS,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt"])
def test_every_package_has_hashes(name: str) -> None:
    text = (ROOT / "deploy" / name).read_text().replace("\\\n", "")
    packages = [line for line in text.splitlines() if not line.startswith("#")]
    assert packages
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", line) for line in packages)


def test_the_image_is_pinned() -> None:
    lines = (ROOT / "Dockerfile.agent").read_text().splitlines()
    (base,) = [line.removeprefix("ARG BASE=") for line in lines if line.startswith("ARG BASE=")]
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert [line for line in lines if line.startswith("FROM ")] == ["FROM ${BASE} AS build", "FROM ${BASE}"]
