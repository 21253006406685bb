"""`hack/cluster.sh`: a real Kubernetes for a person."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mig_agent.simulator import SimulatorError
from mig_agent.simulator.state import parse_gpus
from support.cluster import agent_image, installed, kubescheduler, programs
from support.cluster.cluster import Cluster, attach, start
from support.cluster.failures import ClusterError, tail
from support.cluster.keeper import Keeper
from support.cluster.layout import MOST_NODES, NODE, Layout, node_names
from support.cluster.node import Node

_USAGE = """\
up [--bare] [--nodes N] [GPUS ...]
                       start a cluster (etcd, API server, scheduler, kubelet, containerd, in namespaces of their own)
                       and install the agent by its chart over simulated GPUs (a100-40gb:1,h100-80gb:1); --bare: do not;
                       with several nodes: GPUS for all of them, or for each in turn
prepare                only build and install what is missing on this machine: minutes, once
agent [GPUS ...]       install the agent on it as it is in the checkout now, over the one that is there
down                   take it away, with all that is in it
kubectl ARGUMENTS      kubectl as its administrator
exec COMMAND ...       run a program in the node's namespaces, in this folder (its /run and /var/lib are the node's)
net COMMAND ...        run a program of this machine in the node's network: it reaches all nodes and pods
helm ARGUMENTS         helm as its administrator
kube-schedulers        give the nodes the images that examples/kube-scheduler names: there is no registry
logs [PART]            what a part has written: etcd, kube-apiserver, kube-scheduler, kubelet, containerd, ...
stop PART, kill PART, start PART    for instance the kubelet
status                 the parts and their processes, and where things are
"""
_COMMANDS = (
    "prepare",
    "up",
    "agent",
    "down",
    "kubectl",
    "helm",
    "kube-schedulers",
    "exec",
    "net",
    "logs",
    "stop",
    "kill",
    "start",
    "status",
)
_BROKEN_OFF = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as a shell's."""


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 where it cannot be done, in words; else the command's own."""
    parser = argparse.ArgumentParser(
        prog="hack/cluster.sh",
        description="A real Kubernetes on this machine, without Docker or a registry. Needs root.",
        epilog=_USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", default="default", help="several clusters can stand side by side (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where its files are (a folder of the temporary one, by the name)")
    parser.add_argument("--node", default=NODE, help="whose parts and namespaces are meant (%(default)s, n2, ...)")
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    parsed = parser.parse_args(arguments)
    folder = (parsed.dir or Path(tempfile.gettempdir()) / f"mig-agent-cluster-{parsed.name}").absolute()
    try:
        return _do(parsed.command, folder, parsed.node, parsed.rest)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{parsed.command} was broken off", file=sys.stderr)
        return _BROKEN_OFF


def _do(command: str, folder: Path, node: str, rest: list[str]) -> int:
    if command == "up":
        _up(folder, rest)
        return 0
    found = programs.ensure()
    if command == "prepare":
        agent_image.build()
        kubescheduler.build()
    elif command == "down":
        _down(Layout(folder), found)
    else:
        return _use(attach(folder, found), command, node, rest)
    return 0


def _up(folder: Path, rest: list[str]) -> None:
    """What cannot be meant is told before anything is built or started."""
    parser = argparse.ArgumentParser(
        prog="hack/cluster.sh up", epilog=_USAGE, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bare", action="store_true", help="without the agent")
    parser.add_argument("--nodes", type=int, default=1, help="how many (%(default)s)")
    parser.add_argument("gpus", nargs="*", metavar="GPUS")
    chosen = parser.parse_intermixed_args(rest)
    if not 1 <= chosen.nodes <= MOST_NODES:
        raise ClusterError(f"cannot make a cluster of {chosen.nodes} nodes: between 1 and {MOST_NODES} can be")
    gpus = _gpus(chosen.gpus, chosen.nodes)
    cluster = start(folder, programs.ensure(), nodes=chosen.nodes, detached=True)
    if not chosen.bare:
        try:
            _install(cluster, gpus)
        except KeyboardInterrupt:
            _down(cluster.layout, cluster.node.programs)
            raise
        except ClusterError as error:
            raise ClusterError(f"{error}\nthe cluster stands without the agent: `down` takes it away") from None
    print(f"the cluster stands; for programs of your own: export KUBECONFIG={folder}/kubeconfig")


def _gpus(told: Sequence[str], nodes: int) -> str | dict[str, str]:
    """Of all nodes, or by node; ClusterError where there are no such GPUs."""
    for each in told:
        try:
            parse_gpus(each)
        except SimulatorError as error:
            raise ClusterError(f"{error}; GPUS are like {installed.GPUS}") from None
    if len(told) > 1 and len(told) != nodes:
        raise ClusterError(f"cannot give {len(told)} sorts of GPUs to {nodes} nodes: name one for all, or one for each")
    return dict(zip(node_names(nodes), told, strict=True)) if len(told) > 1 else (*told, installed.GPUS)[0]


def _use(cluster: Cluster, command: str, name: str, rest: list[str]) -> int:
    if command in {"agent", "kube-schedulers"}:
        if command == "agent":
            _install(cluster, _gpus(rest, len(cluster.nodes)))
        else:
            kubescheduler.load_images(cluster)
        return 0
    if command in {"kubectl", "helm"}:
        return _run([cluster.node.programs[command], *rest], KUBECONFIG=str(cluster.layout.kubeconfig))
    node = cluster.node_named(name)
    if command == "exec":
        return _run(node.inside(*(rest or ["bash"])), **node.environment())
    if command == "net":
        return _run(node.on_network(*(rest or ["bash"])), KUBECONFIG=str(cluster.layout.inner_kubeconfig))
    if command == "status":
        for each in cluster.nodes:
            _tell(each)
        print(f"KUBECONFIG={cluster.layout.kubeconfig}")
        return 0
    return _look_after(node, command, rest)


def _install(cluster: Cluster, gpus: str | dict[str, str]) -> None:
    for node in cluster.nodes:
        installed.label(cluster, node=node.name)
    installed.install(cluster, installed.load_image(cluster), gpus=gpus)


def _tell(node: Node) -> None:
    for name, state in node.states().items():
        print(f"{node.name}  {name:<26}{'running' if state.exit is None else f'ended with {state.exit}'}")
    print(f"{node.name}  logs: {node.layout.log('kubelet').parent}    the node's files: {node.layout.own / 'root'}")


def _look_after(node: Node, command: str, rest: list[str]) -> int:
    states = node.states()
    names = rest or sorted(states)
    unknown = {*names} - {*states}
    if unknown or (command != "logs" and not rest):
        what = shlex.join(rest) or "nothing"
        raise ClusterError(f"cannot {command} {what}: the parts of {node.name} are {', '.join(states)}")
    for name in names:
        if command == "logs":
            print(tail(node.layout.log(name)))
        elif command == "start":
            node.start(name)
        else:
            node.kill(name, signal.SIGTERM if command == "stop" else signal.SIGKILL)
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
