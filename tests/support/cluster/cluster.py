"""A real Kubernetes of one node or more: start it, use it, stop it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.agent import eventually
from support.cluster.api import Api, ApiError
from support.cluster.failures import ClusterError, tail
from support.cluster.layout import Layout
from support.cluster.node import Node
from support.cluster.programs import ROOT, Programs

_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """One that stands. `keeper` is None for one that somebody else started."""

    layout: Layout
    nodes: tuple[Node, ...]
    api: Api
    keeper: subprocess.Popen[str] | None = None

    @property
    def node(self) -> Node:
        """The first, which has the control plane."""
        return self.nodes[0]

    def node_named(self, name: str) -> Node:
        """ClusterError where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise ClusterError(f"cannot find a node {name}: there are {', '.join(each.name for each in self.nodes)}")

    def check(self) -> None:
        """ClusterError, with the end of its log, for a part of any node that has ended."""
        for node in self.nodes:
            node.check()

    def stop(self) -> None:
        """Returns when nothing is left of it."""
        if self.keeper is not None:
            assert self.keeper.stdin is not None
            self.keeper.stdin.close()
            self.keeper.wait()

    def until_ready(self) -> None:
        """Returns when the API server answers, after it was started again."""
        eventually(self._answers, "the API server answers", _PATIENCE_SECONDS)

    def _answers(self) -> bool:
        try:
            return bool(self.api.call("GET", "/readyz") == "ok")
        except (OSError, ApiError):
            return False

    def log(self, part: str) -> str:
        """The end of what a part of the first node has written."""
        return tail(self.layout.log(part))


def start(folder: Path, programs: Programs, *, nodes: int = 1, detached: bool = False) -> Cluster:
    """A new cluster in an empty or new folder; ClusterError, with the end of the log at fault, when there is none.

    It lives as long as this process, unless it is detached: then until `stop_in`.
    """
    layout = Layout(folder)
    flags = ["--detached"] if detached else []
    # Without a name: nothing of it is left, whoever is killed.
    with tempfile.TemporaryFile() as log:
        keeper = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "support.cluster.keeper",
                str(folder),
                ":".join(map(str, programs.folders)),
                str(nodes),
                *flags,
            ],
            stdin=subprocess.DEVNULL if detached else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
            start_new_session=True,  # Ctrl-C is for this process: the keeper sees it end
        )
        assert keeper.stdout is not None
        try:
            words = keeper.stdout.read().strip()
        except BaseException:  # Ctrl-C, say: it does not come up behind whoever asked for it
            keeper.terminate()
            keeper.wait()
            raise
        keeper.stdout.close()
        if words or not layout.ready.exists():
            if keeper.stdin is not None:
                keeper.stdin.close()
            keeper.wait()
            log.seek(0)
            raise ClusterError(words or f"cannot make a cluster: its keeper ended: {log.read().decode()}")
    return _standing(layout, programs, None if detached else keeper)


def attach(folder: Path, programs: Programs) -> Cluster:
    """One that was started in that folder; ClusterError where there is none."""
    layout = Layout(folder)
    if not layout.ready.exists():
        raise ClusterError(f"cannot find a cluster in {folder}; start one with `hack/cluster.sh up`")
    cluster = _standing(layout, programs)
    cluster.node.states()
    return cluster


def _standing(layout: Layout, programs: Programs, keeper: subprocess.Popen[str] | None = None) -> Cluster:
    nodes = tuple(Node(layout.of(name), programs) for name in layout.ready.read_text().split())
    return Cluster(layout, nodes, Api.of(layout.api, layout.kubeconfig), keeper)
