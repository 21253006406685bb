"""Values that no node could work with are refused, and every bound in the table is one that can be reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.config.field_types import Row
from mig_agent.config.load import read
from mig_agent.config.settings import ROWS
from mig_agent.core.errors import ConfigError, UsageError

SENSELESS = [
    ("max_calls", "0", "1"),
    ("max_connections", "0", "2"),
    ("max_connections", "1", "2"),
    ("reread", "1ms", "1s"),
    ("call_deadline", "1ms", "1s"),
    ("call_deadline", "400d", "1h"),
    ("stop_deadline", "400d", "1h"),
    ("sample_usage", "1ms", "100ms"),
    ("fair_share_half_life", "1ms", "1m"),
    ("idle_after", "1ms", "1m"),
    ("keep_accounting", "1s", "1h"),
    ("start_deadline", "10m", "30s"),
    ("pod_arrival", "1ms", "1s"),
    ("creation_cost", "999999999", "1000"),
    ("simulate_create_seconds", "999999999", "3600"),
    ("simulate_destroy_seconds", "999999999", "3600"),
]
"""A setting, a value without sense, and the nearest one that is taken."""
BOUNDED = [row for row in ROWS.values() if row.at_least is not None or row.at_most is not None]
UNBOUNDED = {
    "max_waiting": "0 lets nobody wait",
    "idle_limit": "a moment destroys at once what is idle",
    "reservation_after": "a moment reserves for the first at once",
    "end_idle_after": "bounded by idle_after",
}
"""Numbers and durations of which every value has a sense."""


@pytest.mark.parametrize(("name", "text", "nearest"), SENSELESS)
def test_senseless_values_are_refused_with_the_nearest_that_is_not(name: str, text: str, nearest: str) -> None:
    (problem,) = read(None, {name: text}, environment={}).problems
    assert problem.message.startswith(f"cannot use --{name.replace('_', '-')}: {text} is ")
    assert problem.hint.startswith(f"write {nearest} or ")
    assert not read(None, {name: nearest}, environment={}).problems


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_every_text_has_a_longest(row: Row) -> None:
    with pytest.raises((ConfigError, UsageError)) as caught:
        row.read("/" + "a" * (row.kind.longest + 1))
    assert len(str(caught.value)) < 300
    if row.name == "tls_cert":
        assert str(caught.value).endswith("it has 4097 characters")
        assert row.read("/" + "a" * 4094)


def test_every_number_and_duration_has_bounds_or_a_reason() -> None:
    numbers = {name for name, row in ROWS.items() if row.kind.metavar in {"NUMBER", "DURATION"}}
    assert numbers == {each.name for each in BOUNDED} | set(UNBOUNDED)


@given(row=st.sampled_from(BOUNDED), seconds=st.integers(1, 10 * 365 * 86_400))
def test_exactly_what_is_inside_the_bounds_is_taken(row: Row, seconds: int) -> None:
    text = f"{seconds}s" if row.kind.metavar == "DURATION" else str(seconds)
    inside = (row.at_least or 0) <= seconds <= (row.at_most or float("inf"))
    reading = read(None, {row.name: text, "idle_after": text} if row.name == "idle_after" else {row.name: text})
    assert (not reading.problems) == inside


@pytest.mark.parametrize("row", BOUNDED, ids=[each.name for each in BOUNDED])
def test_defaults_and_examples_are_inside(row: Row) -> None:
    given = {row.name: row.default or row.example}
    assert not read(None, given, environment={}).problems
    assert row.bounds


@pytest.mark.parametrize(
    "lines",
    [
        ["listen: [unix:///run/a.sock, unix:///run/a.sock]"],
        [
            *("listen: 127.0.0.1:7400", "admin_listen: unix:///run/b.sock", "metrics: 127.0.0.1:7400"),
            *("tls_cert: /a", "tls_key: /b", "tls_client_ca: /c"),
        ],
    ],
    ids=["twice", "metrics"],
)
def test_one_address_for_two_things(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(lines))
    (problem,) = read(path, environment={}).problems
    assert " twice" in problem.message or " alike" in problem.message


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    (problem,) = read(path, environment={}).problems
    assert problem.message == f"cannot read the configuration {path}: it is larger than 1 MiB"
