"""A program that hands over something of a wrong type is told so in words, and no agent is needed for that."""

from __future__ import annotations

import contextlib
import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from mig_agent.client import Client, UsageError, arg_checks
from mig_agent.client.request_args import RequestArgs, request_for

ODD = [
    object(),
    b"4G",
    True,
    5,
    -1,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    "5",
    "\ud800",
    None,
    [None],
    [object()],
    {},
    dt.timedelta(minutes=1),
    1j,
]
NAMES = sorted(RequestArgs.__annotations__)


def test_each_argument_has_a_kind() -> None:
    assert sorted(arg_checks.REQUEST_ARGS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_handed_over_is_taken_or_refused_in_words(name: str) -> None:
    for value in ODD:
        asking: Any = {name: value}
        if name not in {"mig_profile", "gpu_memory", "devices"}:
            asking["mig_profile"] = "1g.5gb"
        with contextlib.suppress(UsageError):
            request_for(asking)


@pytest.mark.parametrize(
    ("asking", "words", "hint"),
    [
        ({"priority": "5"}, "cannot take '5', a str, as priority", "give a whole number"),
        ({"priority": True}, "cannot take True, a bool, as priority", "give a whole number"),
        ({"priority": None}, "cannot take None as priority", "give a whole number"),
        ({"wait": dt.timedelta(0)}, "cannot take datetime.timedelta(0), a timedelta, as wait", "a text such as '10m'"),
        ({"gpus": 0}, "cannot take 0, an int, as gpus", "a list of indexes or UUIDs"),
        ({"gpus": "0"}, "cannot take one text as gpus", "give a list: gpus=['0']"),
        ({"attributes": [1]}, "cannot take 1, an int, as one of attributes", "such as ['+me']"),
        ({"if_revision": -1}, "cannot take -1 as if_revision", "a revision"),
    ],
)
def test_the_words_say_what_would_do(asking: Any, words: str, hint: str) -> None:
    asking["gpu_memory"] = "4G"
    with pytest.raises(UsageError) as mistake:
        request_for(asking)
    assert words in mistake.value.message
    assert hint in mistake.value.hint


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.lease(gpu_memory=4),
        lambda client: client.acquire(gpu_memory="4G", wait=object()),
        lambda client: client.plan(gpu_memory="4G", pid="self"),
        lambda client: client.release(None),
        lambda client: client.release("l", 5),
        lambda client: client.renew(5, ttl=None),
        lambda client: client.cancel(4711),
        lambda client: client.renew("l", ttl=object()),
        lambda client: client.renew("l", b"token", ttl=None),
        lambda client: client.events(since="yesterday"),
        lambda client: client.events(limit="5"),
        lambda client: client.events(limit=-1),
        lambda client: client.events(limit=2**40),
        lambda client: client.events(gpu=object()),
        lambda client: next(client.watch("5")),
        lambda client: next(client.watch(-1)),
        lambda client: client.reclaim(1.5),
        lambda client: client.cordon(None),
        lambda client: client.cordon(0, 5),
        lambda client: client.uncordon([0]),
        lambda client: client.pause(None),
        lambda client: client.set_mig_mode(object(), enable=True),
    ],
)
def test_every_call_of_the_client_judges_what_it_is_given(call: Any, tmp_path: Path) -> None:
    with Client(f"unix://{tmp_path}/none.sock") as client, pytest.raises(UsageError) as mistake:
        call(client)
    assert mistake.value.message.startswith("cannot ")


def test_an_address_is_a_text() -> None:
    number: Any = 5
    with pytest.raises(UsageError, match="cannot take 5, an int, as address"):
        Client(number)
