"""Leaving a node clean when the agent is not to come back; a restart or an upgrade removes nothing.

The agent asks when it is told to stop: its DaemonSet is gone or on its way out, the node has lost the label without
which it is not served, or the DaemonSet has other nodes now (as by another `nodeLabel` of the chart). Rights to ask and
to clean must stand until then, so a Helm release deletes the DaemonSet by a hook of its own (`delete_and_wait`) before
anything else.
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
"""Also an agent that is merely restarted waits so long for an API server that does not answer."""
STEP_SECONDS: Final = 8.0
"""For each of the steps; a pod that is stopped has half a minute."""
LOOK_SECONDS: Final = 1.0
"""Between two looks whether a DaemonSet has gone."""
UNINSTALL: Final = Caller(name="uninstalling", admin=True, inside=True)

_LOG = structlog.get_logger(__name__)


async def is_leaving(api: KubeClient, namespace: str, pod: str, label: str) -> bool:
    """Whether the agent that stops is not to come back: its DaemonSet goes, or has no pod on a node with these labels.

    `namespace` and `pod` are its own; empty where it runs as no pod. No answer: no, since what is removed is gone.
    """
    if not namespace or not pod:
        return False
    try:
        return await asyncio.wait_for(_leaves(api, namespace, pod, label), ASK_SECONDS)
    except (KubeApiError, TimeoutError) as error:
        words = error.words if isinstance(error, KubeApiError) else f"no answer for {ASK_SECONDS:g} s"
        _LOG.warning(
            "it is not known whether the agent leaves for good, so nothing is removed from the node", error=words
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
    """Takes from the node what the agent put there, leases and their instances excepted. Never raises.

    `resources` are the extended resources that it served, no longer offered to the kubelet by now; `others` are more
    steps, such as removing files. A step that fails is told and does not hold up the next.
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
    _LOG.info("left the node", resources=len(resources))


async def delete_and_wait(api: KubeClient, namespace: str, name: str, seconds: float) -> bool:
    """Deletes a DaemonSet and waits until it and its pods have gone; whether they have. One that is not there has.

    Raises KubeApiError where the API server refuses.
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
        await asyncio.sleep(LOOK_SECONDS)


def _name(step: Callable[[], Awaitable[None]]) -> str:
    return getattr(step, "__name__", "step").replace("_", " ")
