"""Refused calls are recorded with who made them, and cannot drown what else is recorded."""

from __future__ import annotations

from pathlib import Path

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.events import EventKind
from mig_agent.engine.callers import Caller
from mig_agent.engine.denial_audit import MOST_OF_ALL, MOST_OF_ONE, PERIOD_SECONDS
from support.engine import Node, engine

MALLORY = Caller(name="mallory", uid=666, pid=4711)
WRONG = Refusal(reason=Reason.WRONG_TOKEN, message="cannot touch lease x: the token is not its token")


async def told(node: Node) -> list[str]:
    await node.quiet()
    return [each.message for each in node.told(EventKind.ACCESS_DENIED)]


async def test_a_denied_call_is_recorded_with_who_made_it(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        node.manager.report_refusal("Release", MALLORY, WRONG, "0123456789abcdef")
        await node.quiet()
        (event,) = [
            each for each in await node.manager.history.events(0.0, None, 100) if each.kind is EventKind.ACCESS_DENIED
        ]
        assert event.data == {
            "method": "Release",
            "reason": "wrong-token",
            "about": "0123456789abcdef",
            "left_out": 0,
            "by": "mallory",
            "role": "user",
            "uid": 666,
            "pid": 4711,
        }
        assert event.message.startswith("Release of mallory was refused: cannot touch lease x")


async def test_a_refusal_that_is_not_about_who_asks_is_not(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        for reason in (Reason.NO_CAPACITY, Reason.UNKNOWN_LEASE, Reason.INVALID_REQUEST):
            node.manager.report_refusal("Acquire", MALLORY, Refusal(reason=reason, message="cannot"))
        assert await told(node) == []


async def test_a_flood_is_counted_and_not_recorded(tmp_path: Path) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        for _ in range(1000):
            node.manager.report_refusal("Release", MALLORY, WRONG)
        assert len(await told(node)) == MOST_OF_ONE
        node.manager.report_refusal("Release", Caller(name="eve", uid=667), WRONG)  # others are heard all the same
        assert "990 such calls before it are not listed" in (await told(node))[-1]
        for uid in range(1000):
            node.manager.report_refusal("Release", Caller(uid=uid), WRONG)
        assert len(await told(node)) == MOST_OF_ALL
        node.clock.advance(PERIOD_SECONDS)
        node.manager.report_refusal("Release", MALLORY, WRONG)
        assert len(await told(node)) == MOST_OF_ALL + 1


async def test_what_a_caller_writes_is_cut_cleaned_and_searched_for_tokens(tmp_path: Path) -> None:
    """Somebody may paste a token where the lease belongs."""
    token = "0123456789abcdef" * 4
    async with engine(tmp_path, "a100-40gb") as node:
        message = f"cannot release lease {token}\n\x1b[2J" + "x" * 100_000
        node.manager.report_refusal(
            "Release", MALLORY, Refusal(reason=Reason.NOT_PERMITTED, message=message), token + "\n" * 9999
        )
        await node.quiet()
        (event,) = node.told(EventKind.ACCESS_DENIED)
        assert token not in f"{event.message}{event.data}"
        assert r"cannot release lease (a token)\u000a\u001b[2J" in event.message
        assert event.message.isprintable()
        assert len(event.message) < 500
        about = event.data["about"]
        assert isinstance(about, str)
        assert len(about) < 200
