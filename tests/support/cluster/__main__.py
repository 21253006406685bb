"""`hack/cluster.sh`: a real one-node Kubernetes for a person."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from support.cluster import agent_image, installed, programs
from support.cluster.cluster import Cluster, attach, start
from support.cluster.failures import ClusterError
from support.cluster.keeper import Keeper
from support.cluster.layout import Layout

_USAGE = """\
up [--bare] [GPUS]     start a cluster (etcd, API server, scheduler, kubelet, containerd, in namespaces of their own)
                       and install the agent by its chart over simulated GPUs (a100-40gb:1,h100-80gb:1); --bare: do not
prepare                only build and install what is missing on this machine: minutes, once
agent [GPUS]           install the agent on it as it is in the checkout now, over the one that is there
down                   take it away, with all that is in it
kubectl ARGUMENTS      kubectl as its administrator
exec COMMAND ...       run a program in the node's namespaces, in this folder (its /run and /var/lib are the node's)
helm ARGUMENTS         helm as its administrator
logs [PART]            what a part has written: etcd, kube-apiserver, kube-scheduler, kubelet, containerd, ...
stop PART, kill PART, start PART    for instance the kubelet
status                 the parts and their processes, and where things are
"""


def main(arguments: list[str]) -> int:
    """Exit code 1 where it cannot be done, in words; else the command's own."""
    parser = argparse.ArgumentParser(
        prog="hack/cluster.sh",
        description="A real one-node Kubernetes on this machine, without Docker or a registry. Needs root.",
        epilog=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="default", help="several clusters can stand side by side (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where its files are (a folder of the temporary one, by the name)")
    parser.add_argument(
        "command",
        choices=[
            "prepare",
            "up",
            "agent",
            "down",
            "kubectl",
            "helm",
            "exec",
            "logs",
            "stop",
            "kill",
            "start",
            "status",
        ],
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    folder = (parsed.dir or Path(tempfile.gettempdir()) / f"mig-agent-cluster-{parsed.name}").absolute()
    try:
        return _do(parsed.command, folder, parsed.rest)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _do(command: str, folder: Path, rest: list[str]) -> int:
    found = programs.ensure()
    if command == "prepare":
        agent_image.build()
    elif command == "up":
        cluster = start(folder, found, detached=True)
        if "--bare" not in rest:
            _install(cluster, rest)
        print(f"the cluster stands; for programs of your own: export KUBECONFIG={folder}/kubeconfig")
    elif command == "down":
        _down(Layout(folder), found)
    else:
        return _use(attach(folder, found), command, rest)
    return 0


def _use(cluster: Cluster, command: str, rest: list[str]) -> int:
    if command == "agent":
        _install(cluster, rest)
        return 0
    if command in {"kubectl", "helm"}:
        return _run([cluster.node.programs[command], *rest], KUBECONFIG=str(cluster.layout.kubeconfig))
    if command == "exec":
        return _run(cluster.node.inside(*(rest or ["bash"])), **cluster.node.environment())
    return _look_after(cluster, command, rest)


def _install(cluster: Cluster, rest: list[str]) -> None:
    installed.label(cluster)
    installed.install(cluster, installed.load_image(cluster), gpus=rest[0] if rest else installed.GPUS)


def _look_after(cluster: Cluster, command: str, rest: list[str]) -> int:
    layout = cluster.layout
    states = cluster.node.states()
    if command == "status":
        for name, state in states.items():
            print(f"{name:<26}{'running' if state.exit is None else f'ended with {state.exit}'}")
        print(f"KUBECONFIG={layout.kubeconfig}")
        print(f"logs: {layout.log('kubelet').parent}    the node's files: {layout.folder / 'root'}")
        return 0
    names = rest or sorted(states)
    unknown = {*names} - {*states}
    if unknown or (command != "logs" and not rest):
        raise ClusterError(f"cannot {command} {shlex.join(rest) or 'nothing'}: the parts are {', '.join(states)}")
    for name in names:
        if command == "logs":
            print(cluster.log(name))
        elif command == "start":
            cluster.node.start(name)
        else:
            cluster.node.kill(name, signal.SIGTERM if command == "stop" else signal.SIGKILL)
    return 0


def _run(argv: list[str], **environment: str) -> int:
    return subprocess.run(argv, env=os.environ | environment, check=False).returncode


def _down(layout: Layout, found: programs.Programs) -> None:
    if not layout.lock.exists():
        raise ClusterError(f"cannot find a cluster in {layout.folder}")
    with layout.lock.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.kill(int(lock.read()), signal.SIGTERM)
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when all is gone
            return
        fcntl.flock(lock, fcntl.LOCK_UN)
    # Its keeper was killed.
    keeper = Keeper(layout, found)
    keeper.claim()
    keeper.down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
