"""The reference scheduler of examples/scheduler as a real process, with agents that it finds over TCP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mig_agent.client import Client
from mig_agent.client.types import LeaseInfo
from support.agent import GENEROUS_SECONDS, Agent, environment, eventually, short_folder
from support.apiserver import ApiServer, api_server
from support.certificates import Authority
from support.documents import ROOT
from support.tls import port_of

EXAMPLE = ROOT / "examples/scheduler"
NAME = "mig-agent-scheduler"
PATIENCE_SECONDS = 120.0
"""For what takes the start of a program and several calls, on a machine that has much else to do."""
_SERVICE = "mig-agent.mig-agent.svc"


@dataclass(slots=True)
class Placing:
    """Nodes, an API server, and a scheduler that runs after `start`."""

    api: ApiServer
    agents: dict[str, Agent]
    """By node."""
    folder: Path
    authority: Authority
    program: str = "scheduler.py"
    """In the folder of the example."""
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; it may have run before."""
        variables = {
            "KUBECONFIG": str(self.api.web.kubeconfig(self.folder)),
            "SCHEDULER_TLS": str(self.folder / "secret"),
            "SCHEDULER_NAME": NAME,
            "SCHEDULER_ANSWER_SECONDS": "60",  # no node is left out because the machine is busy
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(EXAMPLE),  # for who stands elsewhere
            "EXTENDER_PORT": "0",
        }
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE / self.program)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.folder, **variables),
            )

    def kill(self) -> None:
        """SIGKILL; harmless where it does not run."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(GENEROUS_SECONDS)

    def use_certificate_of(self, name: str) -> None:
        """In the scheduler's Secret, as cert-manager lays it out."""
        folder, own = self.folder / "secret", self.authority.issue(name)
        folder.mkdir(exist_ok=True)
        for file, to in ((own.cert, "tls.crt"), (own.key, "tls.key"), (self.authority.ca, "ca.crt")):
            (folder / to).write_bytes(file.read_bytes())

    def listen(self, node: str) -> None:
        """The API server says where the agent of the node is now."""
        self.api.agents[node] = f"127.0.0.1:{port_of(self.agents[node])}"

    def pod(self, name: str, *, gang: int = 0, **limits: int) -> dict[str, Any]:
        """A pod for the scheduler: `memory_5g=1` or `mig_1g=1` with dots and slashes put in."""
        return self.api.pod(name, NAME, {_resource(each): count for each, count in limits.items()}, gang=gang)

    def until_bound(self, *names: str) -> None:
        """Returns when they have nodes."""
        eventually(lambda: all(map(self.api.node_of, names)), f"{names} are bound", PATIENCE_SECONDS)

    def until_looked(self) -> None:
        """Returns when the scheduler is done with all that it knew of pods before."""

        def looks() -> int:
            return sum(
                each.path.startswith("/api/v1/pods?") and "watch=" not in each.path for each in self.api.web.asked
            )

        def again() -> bool:
            self.api.changed.set()
            return looks() >= before + 2

        before = looks()
        eventually(again, "the scheduler looks again, and again", PATIENCE_SECONDS)

    def client(self, node: str) -> Client:
        """Of one agent, as its administrator."""
        return Client(f"unix://{self.agents[node].folder}/admin.sock", patience=GENEROUS_SECONDS)

    def leases(self, node: str) -> tuple[LeaseInfo, ...]:
        """Of one agent."""
        with self.client(node) as client:
            return client.status().leases

    def leases_of(self, name: str) -> list[tuple[str, LeaseInfo]]:
        """Of a pod, on all nodes."""
        uid = self.api.pods[name]["metadata"]["uid"]
        return [(node, each) for node in self.agents for each in self.leases(node) if each.pod and each.pod.uid == uid]

    def clear(self) -> None:
        """No scheduler, no pod, no lease, no instance: as at the start."""
        self.kill()
        self.program = "scheduler.py"
        self.api.pods.clear()
        for node in self.agents:
            self.api.node(node)
        self.api.after_waiting = lambda: None
        self.api.before_node = lambda _name: None
        self.use_certificate_of(NAME)
        self.api.before_binding = lambda _pod: None
        self.log_file.unlink(missing_ok=True)
        for node in self.agents:
            with self.client(node) as client:
                for lease in client.status().leases:
                    client.release(lease.id)
                client.reclaim()

    def check(self) -> None:
        """Each pod that is bound has one lease, on its node, of the instances that were written down for it."""
        for name, pod in self.api.pods.items():
            if node := self.api.node_of(name):
                ((where, lease),) = self.leases_of(name)
                assert (where, [device.uuid for device in lease.devices]) == (node, self.api.annotation(name)), pod

    def log(self) -> str:
        """What it has said."""
        return self.log_file.read_text() if self.log_file.exists() else ""

    @property
    def log_file(self) -> Path:
        return self.folder / "scheduler.log"


def _resource(name: str) -> str:
    kind, _, what = name.partition("_")
    return f"mig-agent.io/memory-{what}" if kind == "memory" else f"nvidia.com/mig-{what.replace('_', '.')}"


@contextmanager
def placing(**gpus: str) -> Iterator[Placing]:
    """Agents on nodes of these names, with these simulated GPUs; the scheduler is not started yet."""
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        authority = Authority(folder)
        server = authority.issue("server", also=[_SERVICE])
        api = stack.enter_context(api_server())
        flags = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.ca)]
        found = Placing(api, {}, folder, authority)
        found.use_certificate_of(NAME)
        for node, models in gpus.items():
            own = folder / node
            own.mkdir()
            agent = Agent(
                own,
                models,
                flags=[*flags, "--tls-schedulers", NAME, "--tls-users", NAME],
                listen=[f"unix://{own}/agent.sock", "127.0.0.1:0"],
            )
            found.agents[node] = stack.enter_context(agent)
            found.listen(node)
            api.node(node)
        stack.callback(found.kill)
        yield found
