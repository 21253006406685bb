"""The processes of clients: the engine asks its host about them, and nobody asks while an answer is encoded."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import mig_agent
from mig_agent.adapters import processes
from mig_agent.core.errors import Reason, RefusedError
from mig_agent.core.model import Holder
from mig_agent.frontends.grpc import encode
from support.engine import ADMIN, Node, engine

PACKAGE = Path(mig_agent.__file__).parent


class Clients:
    """What a host tells of processes, in place of this machine's /proc."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: dict[int, int] = {}
        self.ended: dict[int, Callable[[], None]] = {}
        monkeypatch.setattr(node.host, "client_started", self.started.get)
        monkeypatch.setattr(node.host, "client_lives_since", lambda pid, _moment: pid in self.started)
        monkeypatch.setattr(node.host, "watch_client", self._watch)

    def _watch(self, pid: int, _started: int | None, on_end: Callable[[], None]) -> Clients:
        self.ended[pid] = on_end
        return self

    def close(self) -> None:
        """As a watch."""


async def test_a_lease_is_bound_to_a_process_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        clients = Clients(node, monkeypatch)
        with pytest.raises(RefusedError) as refused:
            await node.acquire("4G", pid=os.getpid())
        assert refused.value.refusal.reason is Reason.INVALID_REQUEST, "which this host does not have"
        clients.started[4_194_305] = 17
        granted = await node.acquire("4G", pid=4_194_305)
        assert list(node.leases) == [granted.lease.id]
        clients.ended[4_194_305]()
        await node.until(lambda: not node.leases)


async def test_a_status_names_no_process_that_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        clients = Clients(node, monkeypatch)
        clients.started[7] = 1
        lease = (await node.acquire("4G", holder=Holder(name="alice", pid=7))).lease
        (named,) = encode.status(node.manager.snapshot, "1", ADMIN).leases
        assert named.holder.pid == 7
        del clients.started[7]
        assert node.manager.snapshot.left == {lease.id}
        (left,) = encode.status(node.manager.snapshot, "1", ADMIN).leases
        assert not left.holder.HasField("pid")
        assert left.holder.name == "alice"


async def test_nothing_is_read_while_a_status_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(tmp_path, "a100-40gb") as node:
        await node.acquire("4G", holder=Holder(name="alice", pid=os.getpid()))
        snapshot = node.manager.snapshot

        def read(*_: object) -> None:
            raise AssertionError("an answer is only encoded here")

        monkeypatch.setattr(processes, "started", read)
        monkeypatch.setattr(Path, "read_text", read)
        assert len(encode.status(snapshot, "1", ADMIN).leases) == 1


def test_only_the_host_adapter_reads_processes() -> None:
    for layer in ("engine", "frontends"):
        for path in (PACKAGE / layer).rglob("*.py"):
            tree = ast.parse(path.read_text())
            imported = {
                each.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("mig_agent.adapters")
                for each in node.names
            }
            assert not imported & {"processes", "started", "lives_since"}, path
            texts = [each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)]
            assert not [each for each in texts if isinstance(each, str) and each.startswith("/proc")], path
