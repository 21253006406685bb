"""Removes what the agent put on a node when it will not come back; a restart or an upgrade removes nothing.

The agent checks this when it is stopped. It will not come back if its DaemonSet is deleted or being deleted, if the
node has lost the configured label, or if the DaemonSet no longer selects the node (such as after a change of the
chart's `nodeLabel`). The RBAC rights to check and to clean must exist until then, so a Helm release deletes the
DaemonSet in a hook (`delete_and_wait`) before anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from mig_agent.adapters.kubeapi import KubeApiError, KubeClient, selects
from mig_agent.core.errors import MigAgentError, RefusedError
from mig_agent.engine.callers import Caller
from mig_agent.engine.manager import Manager
from mig_agent.frontends.kubernetes.node.controller import nothing, write
from mig_agent.frontends.kubernetes.node.pause_labels import carries

ASK_SECONDS: Final = 5.0
"""How long to wait for the API server; an agent that is merely restarted waits as long if there is no answer."""
STEP_SECONDS: Final = 8.0
"""The time limit of each step; a pod that is stopped has half a minute in all."""
POLL_SECONDS: Final = 1.0
"""The pause between two checks whether a DaemonSet is deleted."""
UNINSTALL: Final = Caller(name="uninstalling", admin=True, inside=True)

_LOG = structlog.get_logger(__name__)


async def is_leaving(api: KubeClient, namespace: str, pod: str, label: str) -> bool:
    """Return whether the agent will not come back: its DaemonSet is deleted, or no longer selects the node.

    `namespace` and `pod` are those of the agent's own pod; empty if it does not run as a pod. Without an answer from
    the API server the result is False, since removing cannot be undone.
    """
    if not namespace or not pod:
        return False
    try:
        return await asyncio.wait_for(_leaves(api, namespace, pod, label), ASK_SECONDS)
    except (KubeApiError, TimeoutError) as error:
        words = error.words if isinstance(error, KubeApiError) else f"no answer for {ASK_SECONDS:g} s"
        _LOG.warning(
            "it is not known whether the agent is uninstalled, so nothing is removed from the node", error=words
        )
        return False


async def _leaves(api: KubeClient, namespace: str, pod: str, label: str) -> bool:
    own = await api.pod(namespace, pod)
    if own is None or not own.daemon_set:
        return False
    owner = await api.daemon_set(namespace, own.daemon_set)
    if owner is None or owner.deleting:
        return True
    node = await api.node()
    return not carries(node.labels, label) or not selects(owner.pod_spec, node.labels, node.name)


async def leave(
    api: KubeClient, manager: Manager, resources: Sequence[str], others: Sequence[Callable[[], Awaitable[None]]] = ()
) -> None:
    """Remove from the node what the agent put there, except leases and their instances.

    `resources` are the extended resources that the agent served and no longer offers to the kubelet; `others` are
    further steps, such as removing files. A step that fails is logged, not raised, and the next ones still run.
    """

    async def show_nothing() -> None:
        facts = await api.node()
        await write(api, facts, nothing(facts))

    async def offer_nothing() -> None:
        await api.patch_resources(dict.fromkeys(resources, 0))

    async def destroy_idle() -> None:
        if any(gpu.idle for gpu in manager.view.gpus):
            await manager.reclaim((), UNINSTALL)

    for step in (show_nothing, offer_nothing, destroy_idle, *others):
        try:
            await asyncio.wait_for(step(), STEP_SECONDS)
        except TimeoutError:
            _LOG.warning("not all could be removed from the node: no answer in time", step=_name(step))
        except RefusedError as error:
            _LOG.warning("not all could be removed from the node", step=_name(step), error=error.refusal.message)
        except (MigAgentError, OSError) as error:
            _LOG.warning("not all could be removed from the node", step=_name(step), error=str(error))
    _LOG.info("removed the agent from the node", resources=len(resources))


async def delete_and_wait(api: KubeClient, namespace: str, name: str, seconds: float) -> bool:
    """Delete a DaemonSet and wait until it and its pods are removed; return whether they are within `seconds`.

    A DaemonSet that does not exist counts as removed. Raises KubeApiError if the API server refuses.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    asked = False
    while True:
        try:
            found = await api.daemon_set(namespace, name)
            if found is None:
                return True
            if not asked and not found.deleting:
                await api.delete_daemon_set(namespace, name)
            asked = True
        except KubeApiError as error:
            if error.not_found:
                return True
            if not error.retryable:
                raise
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)


def _name(step: Callable[[], Awaitable[None]]) -> str:
    return getattr(step, "__name__", "step").replace("_", " ")
