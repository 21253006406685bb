"""Killed while something is changed at the API server: it has the change, or has never heard of it.

The next agent looks again at what is there and makes whatever is missing: see `mig_agent.frontends.kubernetes.node`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import VARIABLE
from support.agent import PROCESS_SECONDS
from support.figures import Figure
from support.reached import API_SERVER, REACHED
from support.webserver import web_server

PROGRAM = """
import asyncio, os, sys
from pathlib import Path
from mig_agent.adapters.kubeapi import KubeClient
from mig_agent.core.owner import Pod

async def main():
    api = KubeClient.connect(Path(sys.argv[1]), "n1")
    pod = Pod(namespace="team-a", name="train", uid="u-2")
    match sys.argv[2]:
        case "node shown":
            await api.patch_resources({"example.com/a": 1})
            await api.patch_labels({"a": "b"})
        case "event on Kubernetes":
            await api.tell(pod, "Waits", "words", warning=False)
            await api.tell(pod, "Waits", "words", warning=False)
        case "uninstalled":
            await api.delete_daemon_set("gpu", "mig-agent")
        case "slices published":
            body = {"metadata": {"name": "n1-0"}}
            await api.write_slice(body, is_new=True)
            await api.write_slice(body, is_new=False)
            await api.delete_slice("n1-0")

asyncio.run(main())
os._exit(0)
"""
REQUESTS = {
    "node-status": ("PATCH", "/status"),
    "node-labels": ("PATCH", "/nodes/n1"),
    "event": ("POST", "/events"),
    "event-again": ("PATCH", "/events/"),
    "resource-slice": ("POST", "/resourceslices"),
    "resource-slice-again": ("PUT", "/resourceslices/n1-0"),
    "resource-slice-removal": ("DELETE", "/resourceslices/n1-0"),
    "daemon-set": ("DELETE", "/daemonsets/mig-agent"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("kind", "door"), [(kind, door) for kind in API_SERVER for door in sorted(REACHED[kind])])
def test_killed_at_a_door(tmp_path: Path, kind: str, door: str, when: str, figure: Figure) -> None:
    with web_server() as web:
        command = [sys.executable, "-c", PROGRAM, str(web.kubeconfig(tmp_path)), kind]
        environment = os.environ | {VARIABLE: f"{when}-{door}"}
        done = subprocess.run(command, env=environment, check=False, timeout=PROCESS_SECONDS)
        assert done.returncode == -signal.SIGKILL
        method, path = REQUESTS[door]
        sent = [asked for asked in web.asked if asked.method == method and _is_of(asked.path, path)]
        assert len(sent) == (1 if when == "after" else 0)
    figure("crash points x kinds, each killed for real", 1)
    figure("kills of a process with one adapter", 1)


def _is_of(path: str, end: str) -> bool:
    return end in path if end.endswith("/") else path.endswith(end)
