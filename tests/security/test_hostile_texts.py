"""Texts that would move a cursor, turn a line round or hide: refused at the door, and shown escaped where they are old.

The fields are read from the API's own descriptors, so a field that is added later is tried, too.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from mig_agent.adapters.grpc_errors import TRAILER
from mig_agent.adapters.ledger.store import LEDGER_FILE
from mig_agent.core.texts import visible
from mig_agent.frontends.grpc.handlers import SERVICE, texts_within
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from support.agent import GENEROUS_SECONDS, Agent, short_folder
from support.ledgers import rewritten

HOSTILE = (
    "\0",
    "\n",
    "\x1b[2J",
    "\x7f",
    "\x9b",
    "\xad",
    "\u200b",
    "\u2028",
    "\u202e",
    "\u2066",
    "\ufeff",
    "\U000e0041",
)
FIELDS = [(method.name, path) for method in SERVICE.methods for path in texts_within(method.input_type)]
METHODS = {method.name: method for method in SERVICE.methods}


class AgentWithMetrics(Agent):
    """One A100-40GB, with everything switched on that shows texts."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as asked:
            asked.bind(("127.0.0.1", 0))
            self.port = asked.getsockname()[1]
        flags = ["--metrics", f"127.0.0.1:{self.port}", "--log-level", "debug", "--log-format", "json"]
        super().__init__(folder, "a100-40gb:1", flags=flags)

    @property
    def admin(self) -> str:
        return f"unix://{self.folder}/admin.sock"

    def everything_shown(self) -> str:
        """All that this agent tells anybody, as it comes over each wire."""
        texts = [self.log()]
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=GENEROUS_SECONDS) as page:
            texts.append(page.read().decode())
        for verb in ("status", "events", "top"):
            out = self.migctl(verb, "-o", "json", "--address", self.admin).stdout
            texts += [out, *strings(json.loads(out))]
            texts.append(self.migctl(verb, "--address", self.admin, *(["--once"] if verb == "top" else [])).stdout)
        with grpc.insecure_channel(self.admin) as channel:
            for name in ("Status", "Events", "Profiles"):
                texts += strings_of(call(channel, name, METHODS[name].input_type))
        for line in self.log().splitlines():
            texts += strings(json.loads(line))
        return "\n".join(texts)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentWithMetrics]:
    with short_folder() as folder, AgentWithMetrics(folder) as running:
        yield running


def strings(value: Any) -> list[str]:
    """All texts in what was JSON."""
    match value:
        case str():
            return [value]
        case list():
            return [text for each in value for text in strings(each)]
        case dict():
            return [text for each in value.items() for text in strings(list(each))]
        case _:
            return []


def strings_of(message: Message) -> list[str]:
    found: list[str] = []
    for _, value in message.ListFields():
        for each in [value] if isinstance(value, (str, Message)) or not hasattr(value, "__iter__") else value:
            if isinstance(each, str):
                found.append(each)
            elif isinstance(each, Message):
                found += strings_of(each)
        if hasattr(value, "values"):
            for each in value.values():
                found += strings_of(each) if isinstance(each, Message) else strings(each)
    return found


def call(channel: grpc.Channel, name: str, request: Any) -> Any:
    """The first answer of a method, whichever kind of stream it takes and gives."""
    method = METHODS[name]
    message = request if isinstance(request, Message) else GetMessageClass(request)()
    answer = GetMessageClass(method.output_type)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    made = getattr(channel, kind)(
        f"/{SERVICE.full_name}/{name}",
        request_serializer=lambda each: each.SerializeToString(),
        response_deserializer=answer.FromString,
    )
    answered = made(iter([message]) if method.client_streaming else message, timeout=GENEROUS_SECONDS)
    return next(iter(answered)) if method.server_streaming else answered


def with_text(name: str, path: str, text: str) -> Any:
    """A request of the method that has nothing but this text."""
    request: Any = GetMessageClass(METHODS[name].input_type)()
    *parents, last = path.split(".")
    at = request
    for each in parents:
        at = getattr(at, each)
        if not isinstance(at, Message):
            at = at.add()
    if isinstance(getattr(at, last), str):
        setattr(at, last, text)
    else:
        getattr(at, last).append(text)
    return request


def raw_in(text: str) -> list[str]:
    """The hostile characters in a text of several lines."""
    return sorted({hex(ord(each)) for each in text if each != "\n" and visible(each) != each})


def test_every_kind_of_request_has_its_texts_among_those_tried() -> None:
    assert {"Acquire", "Hold", "Plan", "Release", "Renew", "Cordon", "Pause", "Reclaim"} <= {name for name, _ in FIELDS}
    assert any(path.endswith("wants.text") for _, path in FIELDS)
    assert any(path.endswith("holder.pod.name") for _, path in FIELDS)


@pytest.mark.parametrize(("name", "path"), FIELDS, ids=[f"{name}-{path}" for name, path in FIELDS])
def test_a_hostile_text_in_any_field_of_any_request_is_refused_in_words(
    agent: AgentWithMetrics, name: str, path: str
) -> None:
    with grpc.insecure_channel(agent.admin) as channel:
        for each in HOSTILE:
            with pytest.raises(grpc.RpcError) as raised:
                call(channel, name, with_text(name, path, f"0{each}0"))
            error: Any = raised.value
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error.details()
            words = f"U+{ord(each[0]):04X}, at position 2"
            assert error.details().startswith(f"cannot take this text as `{path.rpartition('.')[2]}`")
            assert words in error.details()
            trailer = dict(error.trailing_metadata() or ())[TRAILER]
            assert words in pb.RefusalDetail.FromString(trailer).message
            assert not raw_in("".join(strings_of(pb.RefusalDetail.FromString(trailer))))


def test_nothing_of_it_is_shown_afterwards(agent: AgentWithMetrics) -> None:
    assert not raw_in(agent.everything_shown())


def test_what_was_stored_earlier_is_shown_escaped() -> None:
    hostile = "".join(HOSTILE)
    with short_folder() as folder, AgentWithMetrics(folder) as agent:
        lease = agent.ask("request", "--gpu-memory", "4G", "--name", "alice")["lease"]
        agent.migctl("cordon", "--gpu", "0", "--reason", "why", "--address", agent.admin)
        agent.migctl("pause", "--reason", "why", "--address", agent.admin)
        agent.kill()
        with rewritten(folder / "state" / LEDGER_FILE) as ledger:
            ledger.execute("UPDATE lease SET tenant = ?, holder = ?", (f"t{hostile}", f"h{hostile}"))
            ledger.execute("UPDATE cordon SET reason = ?", (f"c{hostile}",))
            data = json.dumps({"reason": f"d{hostile}"})
            ledger.execute("UPDATE event SET words = ?, holder = ?, data = ?", (f"w{hostile}", f"e{hostile}", data))
            # As the agent sees its own events at its start, they are in its log, too.
            ledger.execute("UPDATE event SET at = ?", (time.time() + 60,))
        agent.start()
        shown = agent.everything_shown()
        assert not raw_in(shown)
        for each in "thcdwe":
            assert f"{each}{visible(hostile)}" in shown, each
        agent.migctl("release", lease, "--address", agent.admin)
        assert not raw_in(agent.everything_shown())
