"""The controller of the node object: labels, the pause switch, the condition and Events of this agent's node."""

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

FIRST_LOOK_SECONDS: Final = 5.0
SETTLE_SECONDS: Final = 1.0
"""Between two rounds of writing, so that somebody who writes the same labels is no reason to run hot."""
AGAIN_SECONDS: Final = (2.0, 60.0)
"""The first and the longest pause after the API server took nothing."""
TIDY_SECONDS: Final = 10.0
"""For the idle instances of a node that is not to be served any more."""
LAST_WORDS_SECONDS: Final = 2.0
LABELS: Final = Caller(name="the node's labels", admin=True, inside=True)
"""Who pauses and resumes."""

_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What is configured of the node."""

    label: str = ""
    """The node is served only while it carries this: `key=value` or `key`; empty: always."""
    features: bool = True
    """Whether to write feature labels."""
    naming: Naming = field(default_factory=Naming)
    has_gpus: bool = True
    """Whether there is anything to show; else what an agent before showed is taken back."""


async def first_pauses(api: KubeClient, settings: NodeSettings) -> tuple[str, ...]:
    """Why the agent must not even open the driver when it starts; empty where it may. Takes FIRST_LOOK_SECONDS at most.

    The same reasons go into NodeFrontend, which takes them back.
    """
    facts: NodeFacts | None = None
    try:
        facts = await asyncio.wait_for(api.node(), FIRST_LOOK_SECONDS)
    except (KubeApiError, TimeoutError) as error:
        words = error.words if isinstance(error, KubeApiError) else f"no answer for {FIRST_LOOK_SECONDS:g} s"
        _LOG.warning("the node could not be read yet", server=api.address, error=words)
    return pauses(facts, settings.label)


async def write(api: KubeClient, facts: NodeFacts, wanted: Shown | None) -> None:
    """Makes the node show this; writes only what differs. Raises KubeApiError."""
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
        """`paused` are the reasons of `first_pauses`, for which the manager was started paused."""
        self._manager = manager
        self._api = api
        self._settings = settings
        self._reasons = set(paused)
        """Those that the manager has from here."""
        self._facts: NodeFacts | None = None
        self._following: InformerSubscription | None = None
        self._switching = asyncio.Event()
        self._showing = asyncio.Event()
        self._tasks = Tasks()
        self._loops: list[asyncio.Task[None]] = []
        self._lost = False
        self._complaint = ""

    def start(self) -> None:
        """Begins. Until the node is seen, what `first_pauses` found holds."""
        self._following = self._api.follow_node(self._node_changed, self._out_of_touch)
        self._manager.on_view.append(self._showing.set)
        self._manager.observers.append(self._happened)
        self._loops = [
            self._tasks.keep(name, loop) for name, loop in (("node switch", self._switch), ("node shown", self._show))
        ]

    async def close(self) -> None:
        """Ends it. What is on the node stays, for the agent that comes next; Events under way get a moment."""
        if self._following is None:
            return
        self._following.close()
        self._following = None
        with contextlib.suppress(ValueError):
            self._manager.on_view.remove(self._showing.set)
        with contextlib.suppress(ValueError):
            self._manager.observers.remove(self._happened)
        for loop in self._loops:
            loop.cancel()
        await self._tasks.end(LAST_WORDS_SECONDS)

    # What comes in

    def _node_changed(self, facts: NodeFacts) -> None:
        if self._lost:
            _LOG.info("the API server answers again", server=self._api.address)
        self._lost = False
        self._facts = facts
        self._switching.set()
        self._showing.set()

    def _out_of_touch(self, words: str) -> None:
        """What was known last still counts: a cluster without its API server changes nothing on its nodes."""
        if not self._lost:
            _LOG.warning("out of touch with the API server", error=words)
        self._lost = True

    def _happened(self, event: Event) -> None:
        telling = notice(event)
        if telling is not None:
            self._tasks.spawn(
                "node event", self._api.tell(telling.about, telling.reason, telling.words, warning=telling.warning)
            )

    # What goes out

    async def _switch(self) -> None:
        while True:
            await self._switching.wait()
            self._switching.clear()
            try:
                await self._heed(set(pauses(self._facts, self._settings.label)))
            except Exception:  # noqa: BLE001 -- whatever it was, the node's labels must be heard on
                _LOG.exception("cannot do what the node's labels want now")
                self._switching.set()
                await asyncio.sleep(AGAIN_SECONDS[0])

    async def _heed(self, wanted: set[str]) -> None:
        """Pauses and resumes until the reasons are those that are wanted."""
        # The new ones first: between two reasons the driver is not taken up for a moment.
        for reason in sorted(wanted - self._reasons):
            if self._facts is not None and reason == unlabelled(self._facts, self._settings.label):
                await self._tidy()
            await self._refused_at_most(self._manager.pause(reason, LABELS))
            self._reasons.add(reason)
        for reason in sorted(self._reasons - wanted):
            await self._refused_at_most(self._manager.resume(reason, LABELS))
            self._reasons.discard(reason)

    async def _tidy(self) -> None:
        """Whoever is given the GPUs next finds no instance on them that nobody uses."""
        if self._manager.paused:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIDY_SECONDS):
                await self._refused_at_most(self._manager.reclaim((), LABELS))

    async def _refused_at_most(self, call: Coroutine[Any, Any, object]) -> None:
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
            except Exception as error:  # noqa: BLE001 -- whatever it was, the node must be shown on
                failures += 1
                self._complain(error.words if isinstance(error, KubeApiError) else repr(error))
                self._showing.set()
                pause = Backoff(*AGAIN_SECONDS).pause(failures, random.random())  # noqa: S311 -- no secret
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
            _LOG.warning("the node cannot be shown as it is", error=words)
        self._complaint = words


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What to write on the node."""

    condition: NodeCondition | None = None
    """To be shown if it is not yet; None: to be taken away where the node has one."""
    changes: Changes = field(default_factory=Changes)
    """Of labels and annotations."""


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
    """What the node should show now; None: leave it as it is.

    An agent that was paused before it ever read its GPUs knows nothing of them, and what the node shows may be true.
    """
    if not carries(facts.labels, label):
        return nothing(facts)
    if paused and not view.gpus:
        return None
    wanted = feature_labels(view, driver_version, lambda profile: naming.profiles + in_kubernetes(profile))
    return Shown(condition=condition_of(view), changes=changes(wanted if features else {}, facts))


def nothing(facts: NodeFacts) -> Shown:
    """What an agent shows that has nothing to do with the node."""
    return Shown(changes=changes({}, facts))
