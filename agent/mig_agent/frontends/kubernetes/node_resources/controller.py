"""The controller of node resources: keeps the numbers in the node object's status correct without a device plugin.

Whenever the node view, the pods or the node object change, the wanted numbers are computed and the difference is
written. With another way of advertising, or none, the controller only removes numbers that an earlier agent wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from mig_agent.adapters.kubeapi import InformerSubscription, KubeApiError, NodeFacts
from mig_agent.adapters.kubelet import DeviceCheckpoint, Identity, KubeletPaths
from mig_agent.core.backoff import Backoff
from mig_agent.core.owner import Pod
from mig_agent.engine.manager import Manager
from mig_agent.engine.tasks import Tasks
from mig_agent.frontends.kubernetes.metrics import Devices
from mig_agent.frontends.kubernetes.node.pause_labels import carries
from mig_agent.frontends.kubernetes.node_resources.ownership import (
    Correction,
    OwnershipConflict,
    correction,
    numbers,
    others,
    owned,
)
from mig_agent.frontends.kubernetes.reservations import Asked, in_progress
from mig_agent.frontends.kubernetes.resources import Naming

PAUSE_SECONDS: Final = (0.1, 5.0)
"""The pause after a write, so that a burst of changes is one write; the longest if others write the same resources."""
RETRY_SECONDS: Final = (2.0, 60.0)
"""The first and the longest pause after a write that the API server did not accept."""
POLL_SECONDS: Final = 10.0
"""The longest time between two reads of the kubelet's record of device plugins."""
TRIES: Final = 3
"""How often `clear` reads the node and writes what is left."""
CLOSING_SECONDS: Final = 2.0

_LOG = structlog.get_logger(__name__)


class NodeResourcesApi(Protocol):
    """The part of the API server that this controller uses; its coroutines raise KubeApiError."""

    async def node(self) -> NodeFacts:
        """Return the agent's own node."""
        ...

    def follow_node(
        self, on_change: Callable[[NodeFacts], None], on_lost: Callable[[str], None]
    ) -> InformerSubscription:
        """Call `on_change` with the node now and whenever it changes, until the result is closed."""
        ...

    async def patch_owned(self, counts: Mapping[str, int | None], annotations: Mapping[str, str | None]) -> None:
        """Set numbers in the node's status, and annotations; None removes one."""
        ...

    async def tell(self, about: Pod | None, reason: str, words: str, *, warning: bool) -> None:
        """Send an Event about a pod, or about the node."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatusSettings:
    """Settings of the node resources."""

    node: str
    """The node's name."""
    shows: bool
    """Whether to write the numbers; if not, numbers that were written before are removed."""
    label: str = ""
    """The label that the node must carry to be served: `key=value` or `key`; empty: none."""
    naming: Naming = field(default_factory=Naming)


async def clear(api: NodeResourcesApi, registered: Mapping[str, frozenset[str]]) -> None:
    """Remove all numbers that an agent wrote on the node. Raises KubeApiError.

    `registered` are the resources that the kubelet has of device plugins, with the ids of their devices.
    """
    for _ in range(TRIES):
        facts = await api.node()
        change = correction({}, facts, others(owned(facts), facts, registered))
        if not change:
            return
        await api.patch_owned(change.counts, change.annotations)


class NodeStatus:
    """Keeps the numbers of devices in the node's status current. Not thread-safe; use from the event loop."""

    def __init__(
        self, manager: Manager, api: NodeResourcesApi, paths: KubeletPaths, asked: Asked, settings: NodeStatusSettings
    ) -> None:
        """Control the node of `api`. `asked` returns what a pod with a lease requests."""
        self._manager = manager
        self._api = api
        self._paths = paths
        self._checkpoint = DeviceCheckpoint(paths)
        self._asked = asked
        self._settings = settings
        self._facts: NodeFacts | None = None
        self.shown: Mapping[str, Devices] = {}
        """What the node shows, or will after the next write, by name of the resource. Replaced as a whole."""
        self._written: frozenset[str] = frozenset()
        """Names of resources that this agent has written since its start."""
        self._read: tuple[Identity | None, Mapping[str, frozenset[str]]] = (None, {})
        self._refused: Mapping[str, OwnershipConflict] = {}
        self._complaint = ""
        self._removing_from = 0.0
        """Loop time before which no resource is removed, after the API server refused a removal."""
        self._poke = asyncio.Event()
        self._following: InformerSubscription | None = None
        self._tasks = Tasks()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to follow the node; writing begins when it has been read."""
        self._following = self._api.follow_node(self._node_changed, lambda _words: None)
        if self._settings.shows:
            self._manager.on_view.append(self.refresh)
        self._loop = self._tasks.keep("show numbers in the node's status", self._run)

    async def close(self) -> None:
        """Stop. What is on the node stays, for the next agent."""
        if self._loop is None or self._following is None:
            return
        self._following.close()
        with contextlib.suppress(ValueError):
            self._manager.on_view.remove(self.refresh)
        self._loop.cancel()
        self._loop = None
        await self._tasks.end(CLOSING_SECONDS)

    async def clear(self) -> None:
        """Remove all numbers that an agent wrote; call this after `close`. Raises KubeApiError."""
        await clear(self._api, await self._registered())

    def refresh(self) -> None:
        """Compute the numbers again soon, since something has changed."""
        self._poke.set()

    def _node_changed(self, facts: NodeFacts) -> None:
        self._facts = facts
        self._poke.set()

    async def _run(self) -> None:
        failures = repeated = 0
        before = Correction()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._poke.wait()
            self._poke.clear()
            change = Correction() if self._facts is None else await self._change(self._facts)
            if not change:
                continue
            try:
                await self._api.patch_owned(change.counts, change.annotations)
            except KubeApiError as error:
                self._complain(error.words)
                self._poke.set()
                if change.removes:
                    # A refused removal must not delay other changes.
                    self._removing_from = asyncio.get_running_loop().time() + RETRY_SECONDS[1]
                    continue
                failures += 1
                pause = Backoff(*RETRY_SECONDS).pause(failures, random.random())  # noqa: S311 -- no secret
                await asyncio.sleep(pause)
                continue
            failures, self._complaint = 0, ""
            self._remember_written(change)
            # The same change again means that another writer overwrites the numbers.
            repeated = repeated + 1 if change == before else 1
            before = change
            await asyncio.sleep(Backoff(*PAUSE_SECONDS).pause(repeated))

    async def _change(self, facts: NodeFacts) -> Correction:
        wanted = self._wanted(facts)
        ours = owned(facts)
        if not wanted and not ours:
            self.shown = {}
            return Correction()
        not_ours = others({*wanted, *ours}, facts, await self._registered(), self._written)
        self._report_refused({name: reason for name, reason in not_ours.items() if name in wanted})
        self.shown = {name: devices for name, devices in wanted.items() if name not in not_ours}
        removing = asyncio.get_running_loop().time() >= self._removing_from
        counts = {name: devices.possible for name, devices in wanted.items()}
        return correction(counts, facts, not_ours, removing=removing)

    def _wanted(self, facts: NodeFacts) -> Mapping[str, Devices]:
        settings, manager = self._settings, self._manager
        if not settings.shows or not carries(facts.labels, settings.label):
            return {}
        view = manager.view
        if manager.paused and not view.gpus:
            # The GPUs have not been read yet, and nothing can be leased.
            return dict.fromkeys(owned(facts), Devices(possible=0, allocated=0, promised=0))
        return numbers(view, settings.naming, manager.count_creatable, self._asked, in_progress(manager.reserving()))

    async def _registered(self) -> Mapping[str, frozenset[str]]:
        """Return the kubelet's record of device plugins; read again only if its file has changed."""
        identity = Identity.of(self._paths.checkpoint)
        if identity is None or identity != self._read[0]:
            self._read = (identity, await asyncio.to_thread(self._checkpoint.registered))
        return self._read[1]

    def _remember_written(self, change: Correction) -> None:
        shown = {name for name, count in change.counts.items() if count is not None}
        self._written = (self._written | shown) - (change.counts.keys() - shown)

    def _report_refused(self, refused: Mapping[str, OwnershipConflict]) -> None:
        new = {name: reason for name, reason in refused.items() if self._refused.get(name) is not reason}
        self._refused = refused
        for reason in OwnershipConflict:
            names = sorted(name for name in new if new[name] is reason)
            if not names:
                continue
            words = f"cannot show {', '.join(names)} on node {self._settings.node}: {reason}"
            if reason is OwnershipConflict.ENDED:
                _LOG.info(words)
                continue
            hint = "switch that off on this node, or give the agent's resources other names (resource_prefix)"
            _LOG.warning(words, hint=hint)
            sending = self._api.tell(None, "ResourceRefused", f"{words}; {hint}", warning=True)
            self._tasks.spawn("event of the node", sending)

    def _complain(self, words: str) -> None:
        if words != self._complaint:
            _LOG.warning("the numbers of devices cannot be written to the node object", error=words)
        self._complaint = words
