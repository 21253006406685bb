"""The controller of the node object: pauses by label, feature labels, the condition and Events of this node."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, KubeClient, NodeCondition, NodeFacts
from mig_agent.core.backoff import Backoff
from mig_agent.core.errors import RefusedError
from mig_agent.core.events import Event
from mig_agent.core.model import NodeView
from mig_agent.core.pod_resources import in_kubernetes
from mig_agent.engine.callers import Caller
from mig_agent.engine.manager import Manager
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.node.conditions import CONDITION, condition_of
from mig_agent.frontends.kubernetes.node.events import notice
from mig_agent.frontends.kubernetes.node.feature_labels import Changes, changes, feature_labels
from mig_agent.frontends.kubernetes.node.pause_labels import carries, pauses, unlabelled
from mig_agent.frontends.kubernetes.resources import Naming

FIRST_READ_SECONDS: Final = 5.0
"""How long the agent waits for the node object when it starts."""
SETTLE_SECONDS: Final = 1.0
"""The pause between two writes, so that another writer of the same labels does not cause a busy loop."""
RETRY_SECONDS: Final = (2.0, 60.0)
"""The first and the longest pause after a write that the API server did not accept."""
RECLAIM_SECONDS: Final = 10.0
"""The time limit for destroying the idle instances of a node that is no longer served."""
CLOSING_SECONDS: Final = 2.0
"""How long closing waits for Events that are being sent."""
LABELS: Final = Caller(name="the node's labels", admin=True, inside=True)
"""The caller of pauses and resumes that follow from the node's labels."""

_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings of the node controller."""

    label: str = ""
    """The label that the node must carry to be served: `key=value` or `key`; empty: none."""
    features: bool = True
    """Whether to write feature labels."""
    naming: Naming = field(default_factory=Naming)
    has_gpus: bool = True
    """Whether the node has GPUs to show; if not, what an earlier agent wrote is removed."""


async def first_pauses(api: KubeClient, settings: NodeSettings) -> tuple[str, ...]:
    """Return the reasons why a starting agent must not open the driver; empty if it may.

    Takes FIRST_READ_SECONDS at most. Give the same reasons to NodeFrontend, which ends those pauses.
    """
    facts: NodeFacts | None = None
    try:
        facts = await asyncio.wait_for(api.node(), FIRST_READ_SECONDS)
    except (KubeApiError, TimeoutError) as error:
        words = error.words if isinstance(error, KubeApiError) else f"no answer for {FIRST_READ_SECONDS:g} s"
        _LOG.warning("the node could not be read yet", server=api.address, error=words)
    return pauses(facts, settings.label)


async def write(api: KubeClient, facts: NodeFacts, wanted: Shown | None) -> None:
    """Make the node show this; write only what differs. Raises KubeApiError."""
    if wanted is None:
        return
    before = facts.conditions.get(CONDITION)
    if wanted.condition is not None and before != wanted.condition:
        await api.patch_condition(wanted.condition, before)
    elif wanted.condition is None and before is not None:
        await api.remove_condition(CONDITION)
    if wanted.changes:
        await api.patch_labels(wanted.changes.labels, wanted.changes.annotations)


class NodeFrontend:
    """Keeps labels, condition and Events of the node object current. Not thread-safe; use from the event loop."""

    def __init__(self, manager: Manager, api: KubeClient, settings: NodeSettings, paused: tuple[str, ...] = ()) -> None:
        """Control the node of `api`. `paused` are the reasons of `first_pauses`, with which the manager was started."""
        self._manager = manager
        self._api = api
        self._settings = settings
        self._reasons = set(paused)
        """The reasons for which this controller has paused the manager."""
        self._facts: NodeFacts | None = None
        self._following: InformerSubscription | None = None
        self._switching = asyncio.Event()
        self._showing = asyncio.Event()
        self._tasks = Tasks()
        self._loops: list[asyncio.Task[None]] = []
        self._lost = False
        self._complaint = ""

    def start(self) -> None:
        """Start to follow the node. Until it is read for the first time, the reasons of `first_pauses` stay."""
        self._following = self._api.follow_node(self._node_changed, self._disconnected)
        self._manager.on_view.append(self._showing.set)
        self._manager.observers.append(self._on_event)
        self._loops = [
            self._tasks.keep(name, loop) for name, loop in (("node switch", self._switch), ("node shown", self._show))
        ]

    async def close(self) -> None:
        """Stop. What is on the node stays, for the next agent; Events being sent get CLOSING_SECONDS."""
        if self._following is None:
            return
        self._following.close()
        self._following = None
        with contextlib.suppress(ValueError):
            self._manager.on_view.remove(self._showing.set)
        with contextlib.suppress(ValueError):
            self._manager.observers.remove(self._on_event)
        for loop in self._loops:
            loop.cancel()
        await self._tasks.end(CLOSING_SECONDS)

    # Input

    def _node_changed(self, facts: NodeFacts) -> None:
        if self._lost:
            _LOG.info("the API server answers again", server=self._api.address)
        self._lost = False
        self._facts = facts
        self._switching.set()
        self._showing.set()

    def _disconnected(self, words: str) -> None:
        """Log that the API server is away. The last known labels stay valid: without it nothing changes on nodes."""
        if not self._lost:
            _LOG.warning("out of touch with the API server", error=words)
        self._lost = True

    def _on_event(self, event: Event) -> None:
        found = notice(event)
        if found is not None:
            self._tasks.spawn(
                "node event", self._api.tell(found.about, found.reason, found.words, warning=found.warning)
            )

    # Output

    async def _switch(self) -> None:
        while True:
            await self._switching.wait()
            self._switching.clear()
            try:
                await self._apply_pauses(set(pauses(self._facts, self._settings.label)))
            except Exception:  # noqa: BLE001 -- whatever the error, the node's labels must be followed further
                _LOG.exception("cannot follow the node's labels now")
                self._switching.set()
                await asyncio.sleep(RETRY_SECONDS[0])

    async def _apply_pauses(self, wanted: set[str]) -> None:
        """Pause and resume the manager so that its reasons are those that are wanted."""
        # New reasons first, so that the driver is not reopened for a moment between two reasons.
        for reason in sorted(wanted - self._reasons):
            if self._facts is not None and reason == unlabelled(self._facts, self._settings.label):
                await self._reclaim_idle()
            await self._log_if_refused(self._manager.pause(reason, LABELS))
            self._reasons.add(reason)
        for reason in sorted(self._reasons - wanted):
            await self._log_if_refused(self._manager.resume(reason, LABELS))
            self._reasons.discard(reason)

    async def _reclaim_idle(self) -> None:
        """Destroy idle instances, so that the next user of the GPUs finds no unused ones."""
        if self._manager.paused:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECLAIM_SECONDS):
                await self._log_if_refused(self._manager.reclaim((), LABELS))

    async def _log_if_refused(self, call: Coroutine[Any, Any, object]) -> None:
        try:
            await call
        except RefusedError as error:
            _LOG.warning(error.refusal.message, hint=error.refusal.hint)

    async def _show(self) -> None:
        failures = 0
        while True:
            await self._showing.wait()
            self._showing.clear()
            facts = self._facts
            if facts is None:
                continue
            try:
                await write(self._api, facts, self._wanted(facts))
            except Exception as error:  # noqa: BLE001 -- whatever the error, the node must be kept current
                failures += 1
                self._complain(error.words if isinstance(error, KubeApiError) else repr(error))
                self._showing.set()
                pause = Backoff(*RETRY_SECONDS).pause(failures, random.random())  # noqa: S311 -- no secret
                await asyncio.sleep(pause)
            else:
                failures = 0
                self._complaint = ""
                await asyncio.sleep(SETTLE_SECONDS)

    def _wanted(self, facts: NodeFacts) -> Shown | None:
        manager, settings = self._manager, self._settings
        if not settings.has_gpus:
            return nothing(facts)
        return shown(
            manager.view,
            facts,
            label=settings.label,
            features=settings.features,
            paused=bool(manager.paused),
            driver_version=manager.driver_version,
            naming=settings.naming,
        )

    def _complain(self, words: str) -> None:
        if words != self._complaint:
            _LOG.warning("the node object cannot be updated", error=words)
        self._complaint = words


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What to write on the node."""

    condition: NodeCondition | None = None
    """The condition to show; None: remove it if the node has one."""
    changes: Changes = field(default_factory=Changes)
    """Changes of labels and annotations."""


def shown(
    view: NodeView,
    facts: NodeFacts,
    *,
    label: str,
    features: bool,
    paused: bool,
    driver_version: str,
    naming: Naming,
) -> Shown | None:
    """Return what the node should show now; None: leave it as it is.

    An agent that was paused before it read its GPUs does not know them, and what the node shows may be true.
    """
    if not carries(facts.labels, label):
        return nothing(facts)
    if paused and not view.gpus:
        return None
    wanted = feature_labels(view, driver_version, lambda profile: naming.profiles + in_kubernetes(profile))
    return Shown(condition=condition_of(view), changes=changes(wanted if features else {}, facts))


def nothing(facts: NodeFacts) -> Shown:
    """Return the changes that remove all that an agent wrote on the node."""
    return Shown(changes=changes({}, facts))
