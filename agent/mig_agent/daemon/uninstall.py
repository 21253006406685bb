"""`mig-agent leave`: makes a cluster's agents clean their nodes and stop, while their rights still exist.

Helm deletes a release's roles within moments of its DaemonSet; an agent that is stopped then may no longer check
whether it is being uninstalled, nor remove its labels. So the chart runs this in a hook before it deletes anything. An
agent that is no pod of a DaemonSet, or is dead, does not clean up: then a person cleans its node.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from mig_agent.adapters.kubeapi import KubeApiError, KubeClient
from mig_agent.core.errors import ConfigError
from mig_agent.frontends.kubernetes.node.controller import nothing, write
from mig_agent.frontends.kubernetes.node.uninstall import delete_and_wait
from mig_agent.frontends.kubernetes.node_resources.controller import clear

GONE = 0
FAILED = 1


def uninstall(namespace: str, daemon_set: str, seconds: float, kubeconfig: Path | None) -> int:
    """Delete the DaemonSet and wait for its pods; return the exit code. Prints the result on stderr."""
    try:
        gone = asyncio.run(_delete(namespace, daemon_set, seconds, kubeconfig))
    except ConfigError as error:
        return _print_result(f"{error.message}. Hint: {error.hint}", FAILED)
    except KubeApiError as error:
        return _print_result(error.words, FAILED)
    if gone:
        return _print_result(f"the agents of {namespace}/{daemon_set} have gone", GONE)
    return _print_result(
        f"cannot wait any longer for the agents of {namespace}/{daemon_set}: some have not gone in {seconds:g} s. "
        f"Hint: see `kubectl -n {namespace} get pods -o wide`; a node that is down leaves when it comes back",
        FAILED,
    )


def clean(node: str, kubeconfig: Path | None) -> int:
    """Remove from a node object what an agent wrote on it; return the exit code. Prints the result on stderr."""
    try:
        asyncio.run(_clean(node, kubeconfig))
    except ConfigError as error:
        return _print_result(f"{error.message}. Hint: {error.hint}", FAILED)
    except KubeApiError as error:
        return _print_result(error.words, FAILED)
    return _print_result(f"nothing of an agent is on node {node}", GONE)


async def _clean(node: str, kubeconfig: Path | None) -> None:
    api = KubeClient.connect(kubeconfig, node)
    try:
        facts = await api.node()
        await write(api, facts, nothing(facts))
        await clear(api, {})
    finally:
        api.close()


async def _delete(namespace: str, daemon_set: str, seconds: float, kubeconfig: Path | None) -> bool:
    api = KubeClient.connect(kubeconfig, "")
    try:
        return await delete_and_wait(api, namespace, daemon_set, seconds)
    finally:
        api.close()


def _print_result(words: str, code: int) -> int:
    sys.stderr.write(f"mig-agent: {words}\n")
    return code
