"""Brings a cluster up, keeps it, and takes it away again, whatever ends it.

Runs outside the nodes' namespaces as `python -m support.cluster.keeper FOLDER PROGRAMS NODES [--detached]`, with
folders as in PATH and the number of nodes. It says on stdout, before closing it, either nothing (the cluster works) or
why it does not. It ends on SIGTERM, when a node ends, and, unless detached, when its standard input does: with whoever
holds the other end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO

from support.cluster import cgroups, credentials, images, network
from support.cluster.api import Api, ApiError
from support.cluster.failures import ClusterError, tail
from support.cluster.layout import MOST_NODES, Layout, node_names
from support.cluster.node import Node
from support.cluster.parts import SERVER, control_plane, of_node
from support.cluster.programs import ROOT, Programs
from support.cluster.relay import carrying_to

_PATIENCE_SECONDS = 120.0
_PAUSE_SECONDS = 0.1
_LONGEST_SOCKET_PATH = 107


class Keeper:
    """One cluster, from nothing to nothing."""

    def __init__(self, layout: Layout, programs: Programs, nodes: int = 1) -> None:
        self._layout = layout
        self._nodes = [Node(layout.of(name), programs) for name in node_names(nodes)]
        self._lock: IO[bytes] | None = None
        self._begun: list[tuple[Node, subprocess.Popen[bytes]]] = []

    def claim(self) -> None:
        """The folder is this keeper's from now on; what a keeper that was killed left in it goes."""
        folder = self._layout.folder
        if max(len(str(node.layout.control)) for node in self._nodes) > _LONGEST_SOCKET_PATH:
            raise ClusterError(f"cannot make a cluster in {folder}: the path is too long for sockets in it")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self._layout.lock.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ClusterError(f"cannot make a cluster in {folder}: there is one; take it down first") from None
        self._lock = lock
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
        lock.flush()
        self._clear(keep=self._layout.lock)

    def up(self) -> None:
        """Returns when pods can be made. ClusterError otherwise."""
        layout, nodes, first = self._layout, self._nodes, self._nodes[0]
        made = credentials.make(layout, [node.name for node in nodes])
        for node in nodes:
            self._begin(node)
        network.join(nodes)
        images.pack(layout.folder / "images.tar")
        central = control_plane(layout, first.programs, made)
        each = {node.name: of_node(node.layout, node.programs, made) for node in nodes}
        credentials.write_kubeconfig(layout.inner_kubeconfig, made, credentials.ADMIN, SERVER)
        server = f"https://127.0.0.1:{self._relay()}"
        credentials.write_kubeconfig(layout.kubeconfig, made, credentials.ADMIN, server)
        api = Api.of(layout.api, layout.kubeconfig)
        for node in nodes:
            node.start("containerd", each[node.name]["containerd"].argv)
        for name in ("etcd", "kube-apiserver"):
            first.start(name, central[name].argv)
        self._wait(first, "kube-apiserver", lambda: api.call("GET", "/readyz") == "ok")
        for name in ("kube-controller-manager", "kube-scheduler"):
            first.start(name, central[name].argv)
        for node in nodes:
            node.start("kubelet", each[node.name]["kubelet"].argv)
        for node in nodes:
            self._wait(node, "containerd", partial(node.run, "ctr", "version"))
            node.run("ctr", "images", "import", str(layout.folder / "images.tar"))
        for node in nodes:
            self._wait(node, "kubelet", partial(_is_ready, api, node.name))
        self._wait(first, "kube-controller-manager", lambda: _has_account(api))
        # By renaming: whoever finds it finds all of it.
        aside = layout.ready.with_suffix(".part")
        aside.write_text(" ".join(each))
        aside.rename(layout.ready)

    def keep(self, *, detached: bool) -> None:
        """Returns when it is time to go."""
        ended = [os.pidfd_open(process.pid) for _, process in self._begun]
        select.select(ended if detached else [*ended, sys.stdin], [], [])

    def down(self) -> None:
        """Leaves nothing, and says on stderr (the keeper's log) what could not be removed."""
        if self._lock is None:
            return
        for node, process in self._begun:
            if process.stdin is not None:
                process.stdin.close()
            process.kill()  # its child dies with it, and with that one all the others
            process.wait()
            _await_end(node.layout.pid)
        self._clear()
        self._layout.folder.rmdir()
        self._lock.close()

    def _begin(self, node: Node) -> None:
        """The namespaces and their first process."""
        layout = node.layout
        cgroups.make(layout.cgroup)
        namespaces = ("--pid", "--mount", "--net", "--uts", "--ipc", "--mount-proc", "--fork", "--kill-child")
        layout.log("node").parent.mkdir(parents=True)
        with layout.log("node").open("ab") as out:
            process = subprocess.Popen(
                ["unshare", *namespaces, sys.executable, "-m", "support.cluster.inside", str(layout.folder), node.name],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=node.environment({"PYTHONPATH": str(ROOT / "tests"), "HOME": "/var/lib"}),
            )
        self._begun.append((node, process))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        self._wait(node, "node", lambda: children.read_text().strip() != "")
        layout.pid.write_text(children.read_text())
        self._wait(node, "node", layout.control.exists)

    def _wait(self, node: Node, part: str, done: Callable[[], object]) -> None:
        """For a part to do its work, while no part ends."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            last: Exception | None = None
            try:
                if done():
                    return
            except (OSError, ApiError, ClusterError) as error:
                last = error
            for begun, process in self._begun:
                if process.poll() is not None:
                    raise ClusterError(f"cannot make {begun.name}; {tail(begun.layout.log('node'))}")
                if begun.layout.control.exists():
                    begun.check()
            if time.monotonic() > deadline:
                words = f"{part} of {node.name} does not come up" + (f" ({last})" if last else "")
                raise ClusterError(f"cannot make a cluster: {words}; {tail(node.layout.log(part))}")
            time.sleep(_PAUSE_SECONDS)

    def _relay(self) -> int:
        """A port of the machine's loopback behind which the API server is."""
        port: list[int] = []
        begun = threading.Event()

        async def serve() -> None:
            far = carrying_to(lambda: asyncio.open_unix_connection(self._layout.api))
            server = await asyncio.start_server(far, "127.0.0.1", 0)
            port.append(server.sockets[0].getsockname()[1])
            begun.set()
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        begun.wait()
        return port[0]

    def _clear(self, keep: Path | None = None) -> None:
        # A keeper that was killed may have had more nodes than this one.
        for name in node_names(MOST_NODES):
            for left in cgroups.remove(self._layout.of(name).cgroup):
                print(f"cannot remove {left}", file=sys.stderr)
        for path in self._layout.folder.iterdir():
            if path == keep:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def _await_end(pid_file: Path) -> None:
    """The first process of the node ends last, when the kernel has ended all others."""
    try:
        ended = os.pidfd_open(int(pid_file.read_text()))
    except (OSError, ValueError):
        return
    select.select([ended], [], [])
    os.close(ended)


def _is_ready(api: Api, node: str) -> bool:
    conditions = api.get(f"/api/v1/nodes/{node}").get("status", {}).get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def _has_account(api: Api) -> bool:
    return api.find("/api/v1/namespaces/default/serviceaccounts/default") is not None


def main(folder: Path, path: str, nodes: int, *, detached: bool) -> int:
    """Exit code 1 when the cluster did not come up."""
    keeper = Keeper(Layout(folder), Programs(tuple(Path(part) for part in path.split(":"))), nodes)
    signal.signal(signal.SIGTERM, _end)
    try:
        keeper.claim()
        keeper.up()
        # Closed for the reader at the other end; whoever writes to it from now on writes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        keeper.keep(detached=detached)
    except ClusterError as error:
        print(error, flush=True)
        return 1
    finally:
        keeper.down()
    return 0


def _end(*_: object) -> None:
    """Once: nothing may disturb the cleaning up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), detached="--detached" in sys.argv[4:]))
