"""Asks the agents of many nodes at once; one that does not answer in time holds up no other."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mig_agent.core.errors import MigAgentError
from mig_agent.migctl.failures import one_line

if TYPE_CHECKING:
    from mig_agent.client.to_json import Json

MOST_AT_ONCE = 64
"""Nodes that are asked at the same time: each is a connection, and on Kubernetes a process on the node."""


class Target(Protocol):
    """A node whose agent can be asked. Hashable."""

    @property
    def label(self) -> str:
        """The name by which people know it."""

    @property
    def trouble(self) -> str:
        """Why it cannot be asked; empty if it can."""

    @property
    def keys(self) -> Mapping[str, Json]:
        """Return its keys in JSON, beside its answer."""


AnyTarget = TypeVar("AnyTarget", bound=Target)
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Answer(Generic[Found]):
    """The answer of a node's agent, or why there is no answer."""

    target: Target
    found: Found | None = None
    trouble: str = ""


def ask_all(
    targets: Sequence[AnyTarget], ask: Callable[[AnyTarget], Found], seconds: float
) -> tuple[Answer[Found], ...]:
    """Return the answer of each node, in the order of `targets`; none takes longer than `seconds` from its own start.

    `ask` runs in threads, and raises MigAgentError with a message. A thread that has not returned in time is left
    behind: it is daemonic, and its place is given to the next node.
    """
    found: dict[AnyTarget, Answer[Found]] = {each: Answer(each, trouble=each.trouble) for each in targets}
    todo = deque(each for each in targets if not each.trouble)
    asked: dict[AnyTarget, float] = {}
    answers: queue.SimpleQueue[tuple[AnyTarget, Answer[Found]]] = queue.SimpleQueue()
    while todo or asked:
        while todo and len(asked) < MOST_AT_ONCE:
            target = todo.popleft()
            asked[target] = time.monotonic() + seconds
            threading.Thread(target=_ask, args=(target, ask, answers), name=f"ask-{target.label}", daemon=True).start()
        try:
            target, answer = answers.get(timeout=max(0.0, min(asked.values()) - time.monotonic()))
        except queue.Empty:
            now = time.monotonic()
            for target in [each for each, due in asked.items() if due <= now]:
                found[target] = Answer(target, trouble=f"no answer within {seconds:g} s")
                del asked[target]
        else:
            if asked.pop(target, None) is not None:  # otherwise it comes too late
                found[target] = answer
    return tuple(found[each] for each in targets)


def repeated(answers: Sequence[Answer[Found]], agent_of: Callable[[Found], object]) -> dict[str, str]:
    """Return the names under which an agent answered that is there under an earlier name, with that name.

    `agent_of` returns what tells agents apart.
    """
    first: dict[object, str] = {}
    found: dict[str, str] = {}
    for each in answers:
        if each.found is not None:
            name = first.setdefault(agent_of(each.found), each.target.label)
            if name != each.target.label:
                found[each.target.label] = name
    return found


def troubles(answers: Sequence[Answer[Found]]) -> list[str]:
    """Return a line for each node that gave no answer."""
    return [one_line(f"{each.target.label}: {each.trouble}") for each in answers if each.found is None]


def _ask(
    target: AnyTarget,
    ask: Callable[[AnyTarget], Found],
    answers: queue.SimpleQueue[tuple[AnyTarget, Answer[Found]]],
) -> None:
    try:
        answer = Answer(target, ask(target))
    except MigAgentError as error:
        answer = Answer(target, trouble=str(error))
    except Exception as error:  # noqa: BLE001 -- shown as the reason: the other nodes are shown in any case
        answer = Answer(target, trouble=f"cannot be asked: {type(error).__name__}: {error}")
    answers.put((target, answer))
