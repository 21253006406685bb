"""The network between the nodes of a cluster: one cable to each, one switch, and the ways to each other's pods."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from support.cluster.failures import ClusterError
from support.cluster.node import Node


def join(nodes: Sequence[Node]) -> None:
    """The first node has an end of a cable already: it goes into a switch, which its namespace has for all.

    From then on every node and every pod reaches every other by its address; so does whoever is in a node's network.
    """
    first, *others = nodes
    if not others:
        return
    for command in ("link add lan0 type bridge", "link set far0 master lan0", "link set lan0 up"):
        _ip(first, command)
    for node in others:
        far = f"far{node.layout.number}"
        _cable(first, far, node)
        _ip(first, f"link set {far} master lan0 up")
        for command in (
            f"address add {node.layout.address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {first.layout.address}",
        ):
            _ip(node, command)
    for node in nodes:
        for other in nodes:
            if other is not node:
                _ip(node, f"route add {other.layout.pod_range} via {other.layout.address}")


def _cable(first: Node, far: str, node: Node) -> None:
    """Both of its ends are in the nodes from the beginning: the machine's own network never sees it."""
    ends = [each.layout.pid.read_text().strip() for each in (first, node)]
    command = ["ip", "link", "add", far, "netns", ends[0], "type", "veth", "peer", "name", "eth0", "netns", ends[1]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ClusterError(f"cannot join {node.name} to {first.name}: {' '.join(command)}: {done.stderr.strip()}")


def _ip(node: Node, command: str) -> None:
    node.run("ip", *command.split())
