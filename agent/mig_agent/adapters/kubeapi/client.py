"""Coroutines for the agent's API server calls; each has a deadline and runs in a daemonic thread.

A server that hangs blocks neither the event loop nor the exit of the process. Reads run in parallel; changes of the
node keep their order in a thread of their own, and Events in another, so that they delay nothing important.
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

from mig_agent.adapters.kubeapi.events import (
    EventContent,
    EventCorrelator,
    EventSubject,
    new_event,
    repeat_patch,
    rfc3339,
)
from mig_agent.adapters.kubeapi.informer import InformerSubscription, NodeWatchState, PodsWatchState, SharedInformer
from mig_agent.adapters.kubeapi.objects import (
    ClaimFacts,
    DaemonSetFacts,
    Json,
    KubeApiError,
    NodeCondition,
    NodeFacts,
    PodFacts,
    PodName,
    claim_facts,
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
from mig_agent.adapters.kubeapi.transport import RESOURCE_SLICES, ApiServer
from mig_agent.adapters.threads import Call, CallThread
from mig_agent.core.owner import Pod

DEADLINE_SECONDS: Final = 20.0
"""Deadline of any call, its wait for a thread included; longer than CALL_SECONDS, the limit of one request."""
READERS: Final = 3
MOST_EVENTS_WAITING: Final = 100

_LONGEST_NAME: Final = 200
"""Limit on the part of an Event's name that is the object's name, in characters; the whole name may have 253."""
_Answer = TypeVar("_Answer")
_LOG = structlog.get_logger(__name__)


class KubeClient:
    """Client of the API server for one node. Not thread-safe; use from the event loop.

    Calls raise KubeApiError, whose message starts with "cannot".
    """

    def __init__(self, server: ApiServer, node: str, clock: Callable[[], float] = time.time) -> None:
        self._server = server
        self._node = node
        self._now = clock
        self._readers = [CallThread(f"kube-read-{number}") for number in range(READERS)]
        self._changes = CallThread("kube-change")
        self._events = CallThread("kube-events")
        self._out = dict.fromkeys((*self._readers, self._changes, self._events), 0)
        """Calls per thread that have not returned."""
        self._correlator = EventCorrelator()
        self._events_pending = 0
        self._node_informer = SharedInformer(server, partial(NodeWatchState, node))
        self._pods_informer = SharedInformer(server, partial(PodsWatchState, node))

    @classmethod
    def connect(cls, kubeconfig: Path | None, node: str) -> KubeClient:
        """Return a client that uses the kubeconfig, or the service account of the agent's own pod if there is none.

        Sends nothing yet. Raises ConfigError.
        """
        return cls(ApiServer.connect(kubeconfig), node)

    @property
    def address(self) -> str:
        """URL of the API server, for messages."""
        return self._server.address

    # Reading

    async def pod(self, namespace: str, name: str) -> PodFacts | None:
        """Return the pod; None if no pod has this name."""
        return await self._read_object(f"/api/v1/namespaces/{namespace}/pods/{name}", pod_facts)

    async def node(self) -> NodeFacts:
        """Return the agent's own node. Raises KubeApiError (404) if the API server does not have it."""
        found = await self._read_object(f"/api/v1/nodes/{self._node}", node_facts)
        if found is None:
            raise KubeApiError(f"cannot find node {self._node}: the API server does not have it", 404)
        return found

    async def claim(self, namespace: str, name: str) -> ClaimFacts | None:
        """Return the ResourceClaim; None if there is none of this name."""
        path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"
        return await self._read_object(path, claim_facts)

    async def slices(self, driver: str) -> tuple[Json, ...]:
        """Return the ResourceSlices of a driver on the agent's own node."""
        query = {"fieldSelector": f"spec.driver={driver},spec.nodeName={self._node}"}
        what = "list the node's ResourceSlices"
        found = await self._call(self._free_reader(), lambda: self._server.read(RESOURCE_SLICES, query), what)
        return tuple(found.get("items") or ())

    async def daemon_set(self, namespace: str, name: str) -> DaemonSetFacts | None:
        """Return the DaemonSet; None if there is none of this name."""
        return await self._read_object(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}", daemon_set_facts)

    def follow_node(
        self, on_change: Callable[[NodeFacts], None], on_lost: Callable[[str], None] = lambda _words: None
    ) -> InformerSubscription:
        """Call `on_change` on the event loop with the node now and at each change, until the subscription is closed.

        `on_lost` is called with a message when the API server cannot be reached; the next `on_change` means that it can
        be reached again. All subscribers share one watch.
        """
        return self._node_informer.follow(on_change, on_lost)

    def follow_pods(
        self,
        on_change: Callable[[Mapping[PodName, PodFacts]], None],
        on_lost: Callable[[str], None] = lambda _words: None,
    ) -> InformerSubscription:
        """Call `on_change` with all pods bound to the node, now and whenever one changes; otherwise as `follow_node`.

        A pod that is missing was deleted, or was bound a moment ago; `pod` finds out which.
        """
        return self._pods_informer.follow(on_change, on_lost)

    # Changing the node

    async def patch_resources(
        self, counts: Mapping[str, int], capacity: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Set the node's allocatable count of each resource, and its capacity.

        The capacity equals the allocatable count where `capacity` has no entry. Other resources stay as they are.
        """
        if counts:
            await self._patch_status(resources_patch(counts, capacity), JSON_PATCH)

    async def patch_owned(self, counts: Mapping[str, int | None], annotations: Mapping[str, str | None]) -> None:
        """Set capacity and allocatable of resources that no device plugin serves, and annotations, in one write.

        None removes an entry; others stay as they are.
        """
        await self._patch_status(owned_patch(counts, annotations), MERGE_PATCH)

    async def patch_labels(
        self, labels: Mapping[str, str | None], annotations: Mapping[str, str | None] | None = None
    ) -> None:
        """Set labels and annotations of the node; None removes one. Others stay as they are."""
        patch = metadata_patch(labels, annotations or {})
        await self._call(self._changes, lambda: self._server.patch_node(self._node, patch), "change the node's labels")

    async def patch_condition(self, condition: NodeCondition, before: NodeCondition | None) -> None:
        """Set a condition of the node. `before` is the node's present condition of this type, from NodeFacts."""
        changed = before is None or before.status != condition.status
        patch = condition_patch(condition, rfc3339(self._now()), changed=changed)
        await self._patch_status(patch, STRATEGIC_MERGE_PATCH)

    async def remove_condition(self, kind: str) -> None:
        """Remove the condition of this type from the node."""
        await self._patch_status(condition_removal_patch(kind), STRATEGIC_MERGE_PATCH)

    async def write_slice(self, body: Json, *, is_new: bool) -> Json:
        """Create or replace a ResourceSlice; return it as the API server stored it, which drops unknown fields."""
        name, server = body["metadata"]["name"], self._server
        return await self._call(
            self._changes,
            lambda: server.create_slice(body) if is_new else server.replace_slice(name, body),
            f"write ResourceSlice {name}",
        )

    async def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice; one that is gone is no error."""
        try:
            await self._call(self._changes, lambda: self._server.delete_slice(name), f"delete ResourceSlice {name}")
        except KubeApiError as error:
            if not error.not_found:
                raise

    async def delete_daemon_set(self, namespace: str, name: str) -> None:
        """Start deleting a DaemonSet in the foreground: the object goes after its pods."""
        await self._call(self._changes, lambda: self._server.delete_daemon_set(namespace, name), "delete a DaemonSet")

    # Events

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        """Send an Event about a pod, or about the node if `about` is None. Never raises.

        A repeated Event raises the count of the existing one. Events above an object's rate limit, or while
        MOST_EVENTS_WAITING wait for a slow server, are dropped.
        """
        if self._events_pending >= MOST_EVENTS_WAITING:
            return
        self._events_pending += 1
        try:
            await self._record_event(about, reason, words, warning=warning)
        except KubeApiError as error:
            _LOG.warning("an event did not reach the API server", event_words=words, error=error.words)
        finally:
            self._events_pending -= 1

    async def _record_event(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        subject = await self._subject(about)
        if subject is None or not self._correlator.allow(subject, self._now()):
            return
        event = EventContent(about=subject, reason=reason, words=words, warning=warning)
        await self._call(self._events, lambda: self._send_event(event), "send an event")

    async def _subject(self, pod: Pod | None) -> EventSubject | None:
        if pod is None:
            node = self._node_informer.latest or await self.node()
            return EventSubject(kind="Node", name=node.name, uid=node.uid)
        uid = pod.uid
        if not uid:
            found = await self.pod(pod.namespace, pod.name)
            if found is None:
                return None
            uid = found.uid
        return EventSubject(kind="Pod", namespace=pod.namespace, name=pod.name, uid=uid)

    def _send_event(self, event: EventContent) -> None:
        """Send or count up one Event; runs in the Events thread, the only user of the record of sent Events."""
        now, namespace = self._now(), event.about.events_namespace
        sent = self._correlator.find(event, now)
        if sent is not None:
            try:
                self._server.patch_event(namespace, sent.name, repeat_patch(sent.count + 1, now))
            except KubeApiError as error:
                if not error.not_found:
                    raise
                self._correlator.forget(event)
            else:
                sent.count += 1
                return
        name = f"{event.about.name[:_LONGEST_NAME].rstrip('-.')}.{secrets.token_hex(8)}"
        self._server.create_event(namespace, new_event(event, name, self._node, now))
        self._correlator.remember(event, name, now)

    # The rest

    def close(self) -> None:
        """Stop all watches and threads without waiting; callbacks are not called afterwards."""
        self._node_informer.close()
        self._pods_informer.close()
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
        """Return the reading thread with the fewest calls, including calls whose caller has given up waiting."""
        return min(self._readers, key=self._out.__getitem__)

    async def _call(self, thread: CallThread, function: Callable[[], _Answer], what: str) -> _Answer:
        call = Call(function, asyncio.get_running_loop(), lambda _call: self._returned(thread))
        self._out[thread] += 1
        thread.submit(call)
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the answer, and the
            # canceller waits for ever.
            async with asyncio.timeout(DEADLINE_SECONDS):
                return await call.answer
        except TimeoutError:
            raise KubeApiError(f"cannot {what} at {self.address}: no answer for {DEADLINE_SECONDS:g} s") from None

    def _returned(self, thread: CallThread) -> None:
        self._out[thread] -= 1
