"""The API server as the rest of the agent sees it: coroutines, each with a deadline, made in daemonic threads.

A server that hangs holds up neither the event loop nor the end of the process. Reads go side by side; changes of the
node keep their order in a thread of their own, and events in another, so that nothing important waits behind them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import structlog

from mig_agent.adapters.kubeapi.events import About, EventBook, Telling, again, new_event, stamp
from mig_agent.adapters.kubeapi.informer import Followed, NodePosition, PodInformer, PodsPosition
from mig_agent.adapters.kubeapi.objects import (
    DaemonSetFacts,
    Json,
    KubeApiError,
    NodeCondition,
    NodeFacts,
    PodFacts,
    PodName,
    daemon_set_facts,
    node_facts,
    pod_facts,
)
from mig_agent.adapters.kubeapi.patches import (
    JSON_PATCH,
    MERGE_PATCH,
    STRATEGIC_MERGE_PATCH,
    Patch,
    condition_patch,
    condition_removal_patch,
    metadata_patch,
    owned_patch,
    resources_patch,
)
from mig_agent.adapters.kubeapi.transport import ApiServer
from mig_agent.adapters.threads import Call, CallThread
from mig_agent.core.owner import Pod

DEADLINE_SECONDS: Final = 20.0
"""For any call, whatever it waits for; longer than ApiServer takes for one that nothing stands before."""
READERS: Final = 3
MOST_EVENTS_WAITING: Final = 100

_LONGEST_NAME: Final = 200
"""Of the part of an Event's name that is the object's; the whole may have 253 characters."""
_Answer = TypeVar("_Answer")
_LOG = structlog.get_logger(__name__)


class KubeClient:
    """Belongs to the event loop. What it raises is KubeApiError, whose words start with "cannot"."""

    def __init__(self, server: ApiServer, node: str, clock: Callable[[], float] = time.time) -> None:
        self._server = server
        self._node = node
        self._now = clock
        self._readers = [CallThread(f"kube-read-{number}") for number in range(READERS)]
        self._changes = CallThread("kube-change")
        self._events = CallThread("kube-events")
        self._out = dict.fromkeys((*self._readers, self._changes, self._events), 0)
        """Calls that have not come back."""
        self._book = EventBook()
        self._telling = 0
        self._followed_node = Followed(server, partial(NodePosition, node))
        self._followed_pods = Followed(server, partial(PodsPosition, node))

    @classmethod
    def connect(cls, kubeconfig: Path | None, node: str) -> KubeClient:
        """As the pod that the agent runs in, or with a kubeconfig. Sends nothing yet. Raises ConfigError."""
        return cls(ApiServer.connect(kubeconfig), node)

    @property
    def address(self) -> str:
        """Where the API server is, for messages."""
        return self._server.address

    # Reading

    async def pod(self, namespace: str, name: str) -> PodFacts | None:
        """A pod; None where there is none of this name."""
        return await self._read_object(f"/api/v1/namespaces/{namespace}/pods/{name}", pod_facts)

    async def node(self) -> NodeFacts:
        """The agent's own node."""
        found = await self._read_object(f"/api/v1/nodes/{self._node}", node_facts)
        if found is None:
            raise KubeApiError(f"cannot find node {self._node}: the API server does not have it", 404)
        return found

    async def daemon_set(self, namespace: str, name: str) -> DaemonSetFacts | None:
        """A DaemonSet; None where there is none of this name."""
        return await self._read_object(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}", daemon_set_facts)

    def follow_node(
        self, on_change: Callable[[NodeFacts], None], on_lost: Callable[[str], None] = lambda _words: None
    ) -> PodInformer:
        """Tells of the node now and whenever it changes, on the event loop, until it is closed.

        `on_lost` hears in words when the API server cannot be reached; the next `on_change` says that it can again. All
        who follow share one watch.
        """
        return self._followed_node.follow(on_change, on_lost)

    def follow_pods(
        self,
        on_change: Callable[[Mapping[PodName, PodFacts]], None],
        on_lost: Callable[[str], None] = lambda _words: None,
    ) -> PodInformer:
        """The same of the pods that are bound to the node: all of them, now and whenever one of them changes.

        A pod that is missing is gone, or was bound a moment ago; `pod` tells which.
        """
        return self._followed_pods.follow(on_change, on_lost)

    # Changing the node

    async def patch_resources(
        self, counts: Mapping[str, int], capacity: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Sets what the node gives of these resources, and has of them: as many, where `capacity` says nothing else.

        Others stay as they are.
        """
        if counts:
            await self._patch_status(resources_patch(counts, capacity), JSON_PATCH)

    async def patch_owned(self, counts: Mapping[str, int | None], annotations: Mapping[str, str | None]) -> None:
        """Sets what the node has and gives of resources that no device plugin serves, and annotations, in one write.

        None takes one away; others stay as they are.
        """
        await self._patch_status(owned_patch(counts, annotations), MERGE_PATCH)

    async def patch_labels(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None] | None = None
    ) -> None:
        """Sets labels and annotations of the node; None takes one away. Others stay as they are."""
        patch = metadata_patch(labels, annotations or {})
        await self._call(self._changes, lambda: self._server.patch_node(self._node, patch), "change the node's labels")

    async def patch_condition(self, condition: NodeCondition, before: NodeCondition | None) -> None:
        """Sets a condition of the node. `before` is what the node has of this type now, as NodeFacts tells."""
        changed = before is None or before.status != condition.status
        patch = condition_patch(condition, stamp(self._now()), changed=changed)
        await self._patch_status(patch, STRATEGIC_MERGE_PATCH)

    async def remove_condition(self, kind: str) -> None:
        """Takes a condition of this type away from the node."""
        await self._patch_status(condition_removal_patch(kind), STRATEGIC_MERGE_PATCH)

    async def delete_daemon_set(self, namespace: str, name: str) -> None:
        """Begins to delete a DaemonSet in the foreground: it is gone when its pods are."""
        await self._call(self._changes, lambda: self._server.delete_daemon_set(namespace, name), "delete a DaemonSet")

    # Events

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        """Tells people of something, as an Event on a pod, or on the node (None). Never raises.

        The same again counts the Event up. What is too much for one object, or for a server that is slow, is left out.
        """
        if self._telling >= MOST_EVENTS_WAITING:
            return
        self._telling += 1
        try:
            await self._tell(about, reason, words, warning=warning)
        except KubeApiError as error:
            _LOG.warning("an event did not reach the API server", event_words=words, error=error.words)
        finally:
            self._telling -= 1

    async def _tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        subject = await self._subject(about)
        if subject is None or not self._book.may_tell(subject, self._now()):
            return
        telling = Telling(about=subject, reason=reason, words=words, warning=warning)
        await self._call(self._events, lambda: self._send_event(telling), "tell of an event")

    async def _subject(self, pod: Pod | None) -> About | None:
        if pod is None:
            node = self._followed_node.latest or await self.node()
            return About(kind="Node", name=node.name, uid=node.uid)
        uid = pod.uid
        if not uid:
            found = await self.pod(pod.namespace, pod.name)
            if found is None:
                return None
            uid = found.uid
        return About(kind="Pod", namespace=pod.namespace, name=pod.name, uid=uid)

    def _send_event(self, telling: Telling) -> None:
        """In the thread of events, which alone uses what was told."""
        now, namespace = self._now(), telling.about.events_namespace
        told = self._book.told(telling, now)
        if told is not None:
            try:
                self._server.patch_event(namespace, told.name, again(told.count + 1, now))
            except KubeApiError as error:
                if not error.not_found:
                    raise
                self._book.forget(telling)
            else:
                told.count += 1
                return
        name = f"{telling.about.name[:_LONGEST_NAME].rstrip('-.')}.{secrets.token_hex(8)}"
        self._server.create_event(namespace, new_event(telling, name, self._node, now))
        self._book.remember(telling, name, now)

    # The rest

    def close(self) -> None:
        """Nothing is told any more and no thread takes another call; does not wait."""
        self._followed_node.close()
        self._followed_pods.close()
        for thread in self._out:
            thread.close()

    async def _patch_status(self, patch: Patch, kind: str) -> None:
        what = "change the node's status"
        await self._call(self._changes, lambda: self._server.patch_status(self._node, patch, kind), what)

    async def _read_object(self, path: str, facts: Callable[[Json], _Answer]) -> _Answer | None:
        try:
            return facts(await self._call(self._free_reader(), lambda: self._server.read(path), f"read {path}"))
        except KubeApiError as error:
            if error.not_found:
                return None
            raise
        except (KeyError, TypeError) as error:
            raise KubeApiError(f"cannot read {path}: the answer is not what it should be") from error

    def _free_reader(self) -> CallThread:
        """The one with the fewest calls, those that nobody waits for any more included."""
        return min(self._readers, key=self._out.__getitem__)

    async def _call(self, thread: CallThread, function: Callable[[], _Answer], what: str) -> _Answer:
        call = Call(function, asyncio.get_running_loop(), lambda _call: self._returned(thread))
        self._out[thread] += 1
        thread.submit(call)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer, and who
            # cancelled waits for ever.
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await call.answer
        except TimeoutError:
            raise KubeApiError(f"cannot {what} at {self.address}: no answer for {DEADLINE_SECONDS:g} s") from None

    def _returned(self, thread: CallThread) -> None:
        self._out[thread] -= 1
