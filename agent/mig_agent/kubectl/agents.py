"""The agents of a cluster, reached by exec of `migctl` in their DaemonSet's pods."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mig_agent.adapters.kubeapi import KubeApiError
from mig_agent.adapters.kubeapi.credentials import Credentials, user_credentials
from mig_agent.adapters.kubeapi.pod_exec import Finished, exec_in_pod
from mig_agent.adapters.kubeapi.transport import ApiServer
from mig_agent.client import from_json
from mig_agent.client.to_json import Json
from mig_agent.client.types import Status
from mig_agent.core.errors import MigAgentError
from mig_agent.kubectl.agent_pods import CONTAINER, AgentPod, agent_pods
from mig_agent.migctl.nodes_top import TopAnswer, of_json

_Decoded = TypeVar("_Decoded")

_MOST_BYTES = 128 << 20
"""Limit of the list of pods: 10 KiB for each of ten thousand."""


class NoAnswerError(MigAgentError):
    """A node's agent gave no status; the message completes "n1: "."""


@dataclass(frozen=True, slots=True)
class Agents:
    """The agents of one cluster in one namespace."""

    credentials: Credentials
    namespace: str
    selector: str
    seconds: float
    """Time limit of one question."""

    @classmethod
    def connect(cls, kubeconfig: Path | None, context: str, *, namespace: str, selector: str, seconds: float) -> Agents:
        """Return the agents that this kubeconfig leads to; sends nothing. Raises ConfigError."""
        return cls(user_credentials(kubeconfig, context), namespace, selector, seconds)

    def pods(self) -> tuple[AgentPod, ...]:
        """Return the agents' pods, one for each node. Raises KubeApiError."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        listed = ApiServer(self.credentials).read(path, {"labelSelector": self.selector}, _MOST_BYTES)
        return agent_pods(listed.get("items") or ())

    def status(self, pod: AgentPod) -> Status:
        """Return a node's status. Raises NoAnswerError."""
        return status_of(self._run(pod, "status"))

    def top(self, pod: AgentPod) -> TopAnswer:
        """Return what is used on a node's instances. Raises NoAnswerError."""
        return top_of(self._run(pod, "top"), pod)

    def _run(self, pod: AgentPod, verb: str) -> Finished:
        """Run a verb of `migctl` that shows something in the agent's container. Raises NoAnswerError."""
        try:
            return exec_in_pod(
                self.credentials,
                namespace=self.namespace,
                pod=pod.name,
                container=CONTAINER,
                command=("migctl", verb, "-o", "json"),
                seconds=self.seconds,
            )
        except KubeApiError as error:
            raise NoAnswerError(error.words) from error


def status_of(done: Finished) -> Status:
    """Return the status that `migctl` printed. Raises NoAnswerError with what it said in its place."""
    return _decoded(_printed(done), from_json.status)


def top_of(done: Finished, pod: AgentPod) -> TopAnswer:
    """Return the use of instances that `migctl` printed. Raises NoAnswerError with what it said in its place."""
    return _decoded(_printed(done), lambda answer: of_json(answer, pod))


def _printed(done: Finished) -> Json:
    try:
        answer: Json = json.loads(done.stdout)
    except ValueError:
        answer = None
    if done.code:
        failure = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(failure, dict):
            raise NoAnswerError(str(failure.get("message", "")))
        raise NoAnswerError(done.stderr.strip() or done.message)
    return answer


def _decoded(answer: Json, decode: Callable[[Json], _Decoded]) -> _Decoded:
    try:
        return decode(answer)
    except (ValueError, TypeError, LookupError) as error:
        raise NoAnswerError(str(error)) from error
