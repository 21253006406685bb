"""What docs/python.md says of the client is so: its table has every method with its arguments, and so on."""

from __future__ import annotations

import inspect
import re
import traceback
from pathlib import Path

import pytest

import mig_agent.client
from mig_agent.client import AsyncClient, Client, ClientError, MigAgentError, NoAgent, Refused, UsageError
from mig_agent.client.request_args import RequestArgs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
METHODS = {name: method for name, method in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}


def arguments_of(method: object) -> str:
    """A method's arguments as the table writes them."""
    parts: list[str] = []
    stars: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for name, each in inspect.signature(method).parameters.items():  # type: ignore[arg-type] # a function
        if name == "self":
            continue
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        prefix = stars.get(each.kind, "")
        default = "" if each.default is inspect.Parameter.empty else f"={each.default!r}"
        parts.append(f"{prefix}{name}{default}".replace("'", '"'))
    return ", ".join(parts)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_is_in_the_table_with_its_arguments(name: str) -> None:
    assert f"| `{name}({arguments_of(METHODS[name])})` |" in PAGE


@pytest.mark.parametrize("name", METHODS)
def test_each_method_says_what_it_raises(name: str) -> None:
    assert "Raises " in (METHODS[name].__doc__ or "")


def test_both_clients_have_the_same_methods() -> None:
    theirs = {name for name, _ in inspect.getmembers(AsyncClient, inspect.isroutine) if not name.startswith("_")}
    assert theirs == set(METHODS)


def test_each_argument_of_a_request_is_in_the_table() -> None:
    listed = re.findall(r"^\| `(\w+)` \| ", PAGE, re.MULTILINE)
    assert set(RequestArgs.__annotations__) <= set(listed)


def test_each_name_that_the_page_imports_is_there() -> None:
    names = {
        each.strip()
        for line in re.findall(r"from mig_agent\.client import ([\w, ]+)", PAGE)
        for each in line.split(",")
    }
    assert {"Client", "NoPlan", "Event"} <= names
    for each in names:
        assert hasattr(mig_agent.client, each)
        assert each in mig_agent.client.__all__


def test_a_traceback_ends_with_the_hint() -> None:
    for error in (
        UsageError("cannot take 4 as memory", "write 4G"),
        Refused(reason="too-large", message="cannot", hint="write 4G"),
        NoAgent("cannot", "write 4G"),
    ):
        assert traceback.format_exception(error)[-1] == "Hint: write 4G\n"
        assert str(error).startswith("cannot"), "the message itself has no hint"
    assert not hasattr(UsageError("cannot"), "__notes__")


def test_one_except_catches_all_that_a_client_raises() -> None:
    assert issubclass(UsageError, MigAgentError)
    assert issubclass(ClientError, MigAgentError)
    with pytest.raises(UsageError, match="cannot serve 99 whole GPUs: from 1 to 64 can be asked"):
        Client().plan(num_gpus=99)
