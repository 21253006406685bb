"""The first process in a node's namespaces: makes the node's world, starts its parts when told to, and reaps.

When it ends, the kernel ends every process of the node and takes its mounts and network away. It ends when its standard
input does, and so with the keeper that holds the other end, however that one went.

Orders are JSON, one line each on a Unix socket, and so are the answers:
`{"do": "start", "name": NAME, "argv": [...]}` (without argv: as the last time),
`{"do": "signal", "name": NAME, "signal": 9}`, `{"do": "state"}`. The answer is
`{"parts": {NAME: {"pid": N, "exit": null or code}}}` or `{"error": WORDS}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.cluster.layout import API_PORT, NODE, PRIVATE, SERVICE_ADDRESS, Layout
from support.cluster.relay import carrying_to

_KERNEL_DEFAULTS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}
"""What the kubelet insists on. They are the whole machine's, so the node sees them set and the machine's stay."""

_PLENTY_BYTES = 8 << 30
"""The images of a cluster take up to one GiB."""


def make_world(layout: Layout) -> None:
    """Mounts and network of the node's own."""
    for path in PRIVATE:
        source = layout.private(path)
        source.mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", str(source), path)
    if not Path("/var/run").is_symlink():
        _run("mount", "--bind", str(layout.private("/run")), "/var/run")
    # In memory: what the cluster knows is worth no disk's patience, and where there is plenty, so are its images.
    in_memory = ["etcd"] if layout.node == NODE else []
    if _available_bytes() > _PLENTY_BYTES:
        in_memory.append("containerd")
    for folder in in_memory:
        kept = Path("/var/lib") / folder
        kept.mkdir(exist_ok=True)
        _run("mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(kept))
    for name, value in _KERNEL_DEFAULTS.items():
        known = Path("/proc/sys") / name
        if known.exists():
            shown = layout.own / "sysctl" / name
            shown.parent.mkdir(parents=True, exist_ok=True)
            shown.write_text(value + "\n")
            _run("mount", "--bind", str(shown), str(known))
    # Pods may ask that mounts reach them; the group of peers is this namespace's own.
    _run("mount", "--make-rshared", "/")
    _run("hostname", layout.node)
    _run("ip", "link", "set", "lo", "up")
    if layout.node == NODE:  # the others get theirs when they are joined to this one
        for command in (
            f"address add {SERVICE_ADDRESS}/32 dev lo",
            # The API server does not start on a machine without a default route.
            "link add eth0 type veth peer name far0",
            f"address add {layout.address}/24 dev eth0",
            "link set eth0 up",
            "link set far0 up",
            f"route add default dev eth0 src {layout.address}",
        ):
            _run("ip", *command.split())


def _available_bytes() -> int:
    """Of memory that programs may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"cannot make the node's world: {' '.join(command)}: {done.stderr.strip()}")


class _RefusedError(Exception):
    """An order that makes no sense now, in words."""


class First:
    """Process number 1 of the node."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._argv: dict[str, list[str]] = {}
        self._pids: dict[str, int] = {}
        self._exits: dict[int, int] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        gone = asyncio.Event()
        loop.add_reader(sys.stdin.fileno(), gone.set)
        if self._layout.node == NODE:
            far = carrying_to(lambda: asyncio.open_connection("127.0.0.1", API_PORT))
            await asyncio.start_unix_server(far, self._layout.api)
        # Under another name until it listens: between binding and listening it is there, and refuses whoever comes.
        aside = self._layout.control.with_suffix(".part")
        await asyncio.start_unix_server(self._ordered, aside)
        aside.rename(self._layout.control)
        await gone.wait()

    def _reap(self) -> None:
        """Everybody whose parent has gone becomes a child of this process."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._exits[pid] = os.waitstatus_to_exitcode(status)

    async def _ordered(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            order = json.loads(await reader.readline())
            try:
                self._obey(order)
                answer: dict[str, Any] = {"parts": self._state()}
            except _RefusedError as error:
                answer = {"error": str(error)}
            except (OSError, KeyError) as error:
                answer = {"error": f"cannot obey {order}: {error!r}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()

    def _obey(self, order: dict[str, Any]) -> None:
        if order["do"] == "start":
            self._start(order["name"], order.get("argv"))
        elif order["do"] == "signal" and self._pids[order["name"]] not in self._exits:
            os.kill(self._pids[order["name"]], order["signal"])

    def _start(self, name: str, argv: list[str] | None) -> None:
        pid = self._pids.get(name)
        if pid is not None and pid not in self._exits:
            raise _RefusedError(f"cannot start {name} on {self._layout.node}: it runs already, as process {pid} there")
        self._argv[name] = argv or self._argv[name]
        log = self._layout.log(name)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                self._argv[name], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        # Kept, so that its end is not told by two.
        self._started.append(process)
        self._exits.pop(process.pid, None)
        self._pids[name] = process.pid

    def _state(self) -> dict[str, dict[str, int | None]]:
        return {name: {"pid": pid, "exit": self._exits.get(pid)} for name, pid in self._pids.items()}


if __name__ == "__main__":
    here = Layout(Path(sys.argv[1]), sys.argv[2])
    make_world(here)
    asyncio.run(First(here).run())
    os._exit(0)  # with it, the kernel ends all the others
