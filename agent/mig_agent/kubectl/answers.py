"""Asks the agents of many nodes at once; one that does not answer in time holds up no other."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mig_agent.client.types import Status
from mig_agent.core.errors import MigAgentError
from mig_agent.kubectl.agent_pods import AgentPod

MOST_AT_ONCE = 64
"""Nodes that are asked at the same time: each is a connection to the API server, and a process on the node."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A node's status, or why there is none."""

    pod: AgentPod
    status: Status | None = None
    trouble: str = ""


def ask_nodes(pods: Sequence[AgentPod], ask: Callable[[AgentPod], Status], seconds: float) -> tuple[NodeAnswer, ...]:
    """Return the answer of each node, in the order of `pods`; none takes longer than `seconds` from its own start on.

    `ask` runs in threads, and raises MigAgentError with a message. A thread that has not returned in time is left
    behind: it is daemonic, and its place is given to the next node.
    """
    found = {pod: NodeAnswer(pod, trouble=pod.trouble) for pod in pods if pod.trouble}
    todo = deque(pod for pod in pods if not pod.trouble)
    asked: dict[AgentPod, float] = {}
    answers: queue.SimpleQueue[NodeAnswer] = queue.SimpleQueue()
    while todo or asked:
        while todo and len(asked) < MOST_AT_ONCE:
            pod = todo.popleft()
            asked[pod] = time.monotonic() + seconds
            threading.Thread(target=_ask, args=(pod, ask, answers), name=f"ask-{pod.node}", daemon=True).start()
        try:
            answer = answers.get(timeout=max(0.0, min(asked.values()) - time.monotonic()))
        except queue.Empty:
            now = time.monotonic()
            for pod in [pod for pod, due in asked.items() if due <= now]:
                found[pod] = NodeAnswer(pod, trouble=f"no answer within {seconds:g} s")
                del asked[pod]
        else:
            if asked.pop(answer.pod, None) is not None:  # otherwise it comes too late
                found[answer.pod] = answer
    return tuple(found[pod] for pod in pods)


def _ask(pod: AgentPod, ask: Callable[[AgentPod], Status], answers: queue.SimpleQueue[NodeAnswer]) -> None:
    try:
        answers.put(NodeAnswer(pod, ask(pod)))
    except MigAgentError as error:
        answers.put(NodeAnswer(pod, trouble=str(error)))
    except Exception as error:  # noqa: BLE001 -- shown as the reason: the other nodes are shown in any case
        answers.put(NodeAnswer(pod, trouble=f"cannot be asked: {type(error).__name__}: {error}"))
