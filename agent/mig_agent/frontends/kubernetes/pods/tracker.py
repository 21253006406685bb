"""Tracks the pods that leases were taken for: when they are bound to this node, and when they have ended.

The API server is watched only while such a lease exists, and asked for a single pod only if the watch does not answer
the question.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, PodFacts, PodName
from mig_agent.core.errors import RefusedError
from mig_agent.core.events import Event, EventKind
from mig_agent.core.model import Lease, LeaseId
from mig_agent.core.owner import Pod, PodOwner
from mig_agent.engine.manager import Manager
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.backoff import Backoffs
from mig_agent.frontends.kubernetes.pod_leases import devices_of, pod_owner
from mig_agent.frontends.kubernetes.pods.api import PodTrackerApi
from mig_agent.frontends.kubernetes.pods.api_evidence import (
    ASK,
    UNCHANGED,
    Bound,
    Ended,
    Pods,
    Verdict,
    by_answer,
    by_watch,
    pod_of,
)

SETTLE_SECONDS: Final = 0.05
"""The pause between two scans, so that a burst of changes is one scan."""
LONGEST_SECONDS: Final = 30.0
"""The longest time between two scans while there are leases of pods."""
LINGER_SECONDS: Final = 300.0
"""How long the watch stays open after the last lease of a pod: keeping it costs the API server less than a new one."""
MOST_QUERIES: Final = 5
"""How many pods are asked for in one scan; the API server has other nodes to answer, too."""
REST_SECONDS: Final = 0.5
"""The pause until the next scan if there are more pods to ask for."""
QUERY_SECONDS: Final = 5.0
"""The time limit of one query for a pod."""
QUERY_AGAIN_SECONDS: Final = (2.0, 60.0)
"""The first and the longest pause before the same pod is asked for again."""
RETRY_SECONDS: Final = (1.0, 30.0)
"""The first and the longest pause before a change that the manager refused is tried again."""
CLOSING_SECONDS: Final = 2.0

_LOG = structlog.get_logger(__name__)


class PodTracker:
    """Binds leases to their pods and ends them with their pods. Not thread-safe; use from the event loop."""

    def __init__(
        self,
        manager: Manager,
        api: PodTrackerApi,
        *,
        node: str,
        arrival_seconds: float,
        alone: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Track pods of `node`; a reserved lease without a deadline ends if its pod is not bound in `arrival_seconds`.

        `alone`: no device plugin runs, so this also tracks pods with devices of the kubelet. `now` is the clock of the
        leases.
        """
        self._manager = manager
        self._api = api
        self._node = node
        self._arrival_seconds = arrival_seconds
        self._alone = alone
        self._now = now
        self.on_change: list[Callable[[], None]] = []
        """Called on the event loop when more is known of what pods request."""
        self._pods: Pods | None = None
        """The pods that the watch shows; None while there is no watch, or before its first answer."""
        self._is_lost = False
        self._following: InformerSubscription | None = None
        self._idle_since: float | None = None
        self._answers: dict[PodName, PodFacts] = {}
        """The API server's last answers to queries for pods with leases."""
        self._confirmed: dict[LeaseId, float] = {}
        """When leases were last renewed, on the clock of the leases."""
        self._began = -math.inf
        """When the tracker started, on the same clock; earlier renewals are not known."""
        self._asking: Backoffs[LeaseId] = Backoffs(first=QUERY_AGAIN_SECONDS[0], longest=QUERY_AGAIN_SECONDS[1])
        self._writing: Backoffs[tuple[LeaseId, str]] = Backoffs(first=RETRY_SECONDS[0], longest=RETRY_SECONDS[1])
        self._poke = asyncio.Event()
        self._tasks = Tasks()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to follow leases and their pods."""
        self._began = self._now()
        self._manager.observers.append(self._on_event)
        self._manager.on_view.append(self._poke.set)
        self._poke.set()
        self._loop = self._tasks.keep("follow leased pods", self._run)

    async def close(self) -> None:
        """Stop; leases stay as they are."""
        if self._loop is None:
            return
        with contextlib.suppress(ValueError):
            self._manager.observers.remove(self._on_event)
            self._manager.on_view.remove(self._poke.set)
        self._loop.cancel()
        self._loop = None
        self._unfollow()
        await self._tasks.end(CLOSING_SECONDS)

    def asked(self, pod: Pod) -> Mapping[str, int] | None:
        """Return how many of each extended resource a pod with a lease requests; None if that is not known (yet)."""
        name = (pod.namespace, pod.name)
        for facts in ((self._pods or {}).get(name), self._answers.get(name)):
            if facts is not None and (not pod.uid or pod.uid in facts.uids):
                return facts.resources
        return None

    def _on_event(self, event: Event) -> None:
        if event.kind is EventKind.LEASE_RENEWED and event.lease is not None:
            self._confirmed[event.lease] = self._now()

    # The loop

    async def _run(self) -> None:
        while True:
            leases = tuple(self._tracked(self._manager.view.leases.values()))
            self._follow_while(bool(leases))
            await self._scan(leases)
            await asyncio.sleep(SETTLE_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause(bool(leases))):
                    await self._poke.wait()
            self._poke.clear()

    def _tracked(self, leases: Iterable[Lease]) -> Iterable[Lease]:
        return (each for each in leases if pod_owner(each) is not None and (self._alone or not devices_of(each)))

    def _pause(self, is_busy: bool) -> float | None:  # noqa: FBT001 -- a fact, no switch
        if not is_busy:
            return None if self._following is None else LINGER_SECONDS
        next_due = min(
            (each for each in (self._asking.next_due(), self._writing.next_due()) if each is not None), default=None
        )
        if next_due is None:
            return LONGEST_SECONDS
        return min(max(next_due - self._clock(), SETTLE_SECONDS), LONGEST_SECONDS)

    def _follow_while(self, is_busy: bool) -> None:  # noqa: FBT001 -- as above
        now = self._clock()
        if is_busy:
            self._idle_since = None
            if self._following is None:
                self._following = self._api.follow_pods(self._changed, self._lost)
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= LINGER_SECONDS:
            self._unfollow()

    def _unfollow(self) -> None:
        if self._following is not None:
            self._following.close()
            self._following = None
        self._pods, self._is_lost = None, False

    def _changed(self, pods: Pods) -> None:
        if self._is_lost:
            _LOG.info("the pods of this node can be followed again")
        self._pods, self._is_lost = pods, False
        self._poke.set()
        self._notify()

    def _lost(self, words: str) -> None:
        """Log once that the watch failed. The last known pods stay valid, so no lease ends because of the failure."""
        if not self._is_lost:
            _LOG.warning("the pods of this node cannot be followed", error=words, hint="they are assumed to be alive")
        self._is_lost = True
        self._poke.set()

    def _notify(self) -> None:
        for each in tuple(self.on_change):
            each()

    # One scan

    async def _scan(self, leases: tuple[Lease, ...]) -> None:
        ids = {each.id for each in leases}
        self._confirmed = {lease: moment for lease, moment in self._confirmed.items() if lease in ids}
        names = {(pod_of(each).namespace, pod_of(each).name) for each in leases}
        self._answers = {name: facts for name, facts in self._answers.items() if name in names}
        verdicts = {each.id: self._by_watch(each) for each in leases}
        self._writing.retain({(lease, str(verdict)) for lease, verdict in verdicts.items()})
        for lease in leases:
            await self._apply(lease, verdicts[lease.id])
        questions = [
            each for each in leases if verdicts[each.id] is ASK or (each.owner.is_reserved and self._is_unknown(each))
        ]
        self._asking.retain({each.id for each in questions})
        due = [each for each in questions if self._asking.is_due(each.id, self._clock())]
        # One after the other, and none after the first query that fails.
        for lease in sorted(due, key=lambda each: self._asking.due_at(each.id))[:MOST_QUERIES]:
            if not await self._ask(lease):
                break
        if len(due) > MOST_QUERIES:
            asyncio.get_running_loop().call_later(REST_SECONDS, self._poke.set)

    def _by_watch(self, lease: Lease) -> Verdict:
        if self._pods is None:
            return ASK if self._is_lost else UNCHANGED  # its first answer is due in a moment
        verdict = by_watch(lease, self._pods)
        return ASK if verdict is UNCHANGED and lease.owner.is_reserved and self._is_lost else verdict

    def _is_unknown(self, lease: Lease) -> bool:
        """Return whether it is not known yet what the lease's pod requests."""
        return self.asked(pod_of(lease)) is None

    async def _ask(self, lease: Lease) -> bool:
        """Ask the API server for a lease's pod and act on the answer; return whether it answered."""
        pod = pod_of(lease)
        self._asking.attempted(lease.id, self._clock())
        try:
            # What the watch shows of other pods must not wait for a slow server.
            async with asyncio.timeout(QUERY_SECONDS):
                facts = await self._api.pod(pod.namespace, pod.name)
        except (KubeApiError, TimeoutError) as error:
            why = error.words if isinstance(error, KubeApiError) else f"no answer for {QUERY_SECONDS:g} s"
            _LOG.debug("a pod is assumed to be alive", pod=str(pod), why=why)
            return False
        if facts is not None:
            self._answers[pod.namespace, pod.name] = facts
            self._notify()
        # The lease may have changed while the API server answered, or a change of it is being recorded now.
        await self._manager.wait_for_pending_commit(lease.id)
        current = self._manager.view.leases.get(lease.id)
        if current is not None and current in tuple(self._tracked((current,))):
            await self._apply(current, self._by_answer(current, facts))
        return True

    def _by_answer(self, lease: Lease, facts: PodFacts | None) -> Verdict:
        confirmed_at = self._confirmed.get(lease.id, self._began)
        return by_answer(lease, facts, self._node, self._now(), self._arrival_seconds, confirmed_at=confirmed_at)

    async def _apply(self, lease: Lease, verdict: Verdict) -> None:
        """Bind or end the lease as the verdict says; a change that the manager refuses is tried again later."""
        change = (lease.id, str(verdict))
        if not isinstance(verdict, Bound | Ended) or not self._writing.is_due(change, self._clock()):
            return
        self._writing.attempted(change, self._clock())
        try:
            if isinstance(verdict, Bound):
                await self._manager.bind(lease.id, PodOwner(pod=verdict.pod, is_bound=True))
            else:
                await self._manager.owner_ended(lease.id, verdict.words)
        except RefusedError as error:
            _LOG.warning(error.refusal.message, hint=error.refusal.hint)

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()
