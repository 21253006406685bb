"""The node as seen from outside: orders to its first process, and programs run in its namespaces."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.cluster.failures import ClusterError, tail
from support.cluster.layout import CONTAINERD_SOCKET, Layout
from support.cluster.programs import Programs

_TIMEOUT_SECONDS = 30.0
_PAUSE_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class PartState:
    """A part's last process, as the node counts processes; `exit` is None while it runs."""

    pid: int
    exit: int | None


@dataclass(frozen=True, slots=True)
class Node:
    """A node whose first process runs."""

    layout: Layout
    programs: Programs

    @property
    def name(self) -> str:
        """As Kubernetes knows it."""
        return self.layout.node

    def order(self, **order: object) -> dict[str, PartState]:
        """Told to the first process. Returns the state of all parts; ClusterError where it cannot be done."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT_SECONDS)
            try:
                connection.connect(str(self.layout.control))
                connection.sendall(json.dumps(order).encode() + b"\n")
                with connection.makefile() as reader:
                    answer: dict[str, Any] = json.loads(reader.readline())
            except (OSError, ValueError) as error:
                raise ClusterError(f"cannot reach {self.name} of {self.layout.folder}: {error!r}") from error
        if "error" in answer:
            raise ClusterError(answer["error"])
        return {name: PartState(**state) for name, state in answer["parts"].items()}

    def start(self, name: str, argv: Sequence[str] | None = None) -> None:
        """A part of the cluster; without a command line: as the last time. ClusterError where it runs already."""
        self.order(do="start", name=name, argv=list(argv) if argv else None)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a part a signal; silent when it has ended. Returns when it has, for a signal that asks for that."""
        self.order(do="signal", name=name, signal=int(number))
        if number not in {signal.SIGKILL, signal.SIGTERM}:
            return
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while self.states()[name].exit is None:
            if time.monotonic() > deadline:
                raise ClusterError(f"cannot end {name}: it still runs {_TIMEOUT_SECONDS:g} s after {number.name}")
            time.sleep(_PAUSE_SECONDS)

    def restart(self, name: str) -> None:
        """Kills a part and starts it again."""
        self.kill(name)
        self.start(name)

    def states(self) -> dict[str, PartState]:
        return self.order(do="state")

    def check(self) -> None:
        """ClusterError, with the end of its log, for a part that has ended."""
        for name, state in self.states().items():
            if state.exit is not None:
                log = tail(self.layout.log(name))
                raise ClusterError(f"cannot keep the cluster up: {name} of {self.name} ended with {state.exit}; {log}")

    def inside(self, *argv: str, cwd: Path | None = None) -> list[str]:
        """The command line that runs a program in the node's namespaces, as root."""
        pid = self.layout.pid.read_text().strip()
        entered = ["nsenter", "--target", pid, "--mount", "--uts", "--net", "--pid", "--"]
        # Not nsenter's own --wd: that is opened before it enters.
        return [*entered, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd or Path.cwd()), *argv]

    def on_network(self, *argv: str) -> list[str]:
        """The command line that runs a program of the machine, with all of its files, in the node's network.

        So does a program outside the cluster that can reach nodes and pods by their addresses.
        """
        return ["nsenter", "--target", self.layout.pid.read_text().strip(), "--net", "--", *argv]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """For programs in the node's namespaces."""
        return os.environ | {
            "PATH": self.programs.path,
            "KUBECONFIG": str(self.layout.inner_kubeconfig),
            "CONTAINERD_ADDRESS": CONTAINERD_SOCKET,
            "CONTAINERD_NAMESPACE": "k8s.io",
            **(more or {}),
        }

    def run(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """What a program in the node's namespaces wrote; ClusterError with its words when it fails."""
        done = subprocess.run(
            self.inside(*argv),
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"cannot {' '.join(argv)}: it ended with {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout
