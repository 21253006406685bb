"""The control daemon: takes commands, starts servers and lets clients in."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from mig_agent.simulator import cuda_devices, faults
from mig_agent.simulator.cuda_codes import CudaCode
from mig_agent.simulator.mps import commands
from mig_agent.simulator.mps.commands import ClientRow, Settings
from mig_agent.simulator.mps.server import NAME
from mig_agent.simulator.mps.wire import LOG_VARIABLE, LONGEST_PIPE, PIPE_VARIABLE, Link, Message, Peer
from mig_agent.simulator.state import driver_branch
from mig_agent.simulator.store import Store

_FIRST_WITH_PID_FILE = 550
_MOST_SERVER_STARTS = 6
"""Seconds for one client."""
_FIRST_WITH_60_CLIENTS = 590
_LOOK_SECONDS = 1.0
"""The pause between two looks whether the simulated machine is still there."""


class CannotStartError(Exception):
    """The daemon cannot start; the message, which may be empty, is for standard error."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Client:
    """A process with a connection."""

    peer: Peer
    link: Link
    number: int
    device: str
    command: str
    is_busy: bool = False
    """True while it has work on the GPU: killed then, it takes the others with it."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Server:
    """A server process."""

    process: subprocess.Popen[bytes]
    uid: int
    settings: Settings
    status: str = "INITIALIZING"
    link: Link | None = None
    clients: list[_Client] = field(default_factory=list)
    devices: Sequence[str] = ()
    is_stuck: bool = False
    """True after a client was killed with work on the GPU: later clients wait for ever."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @pid.setter
    def pid(self, _pid: int) -> None:
        raise AttributeError("a process keeps its pid")

    def rows(self) -> Sequence[ClientRow]:
        """Return its clients."""
        return [
            ClientRow(pid=each.peer.pid, number=each.number, device=each.device, command=each.command)
            for each in self.clients
        ]


class Daemon:
    """One daemon. A lock guards everything; it is released only while something is waited for."""

    def __init__(self, state_file: Path, pipe: Path, logs: Path, *, log_to: TextIO | None, multi_user: bool) -> None:
        self._store = Store(state_file)
        machine = self._store.read()
        self.branch = driver_branch(machine)
        self.uid = os.geteuid()
        self.defaults = Settings()
        found = cuda_devices.visible(cuda_devices.devices(machine), os.environ.get("CUDA_VISIBLE_DEVICES"))
        self.devices: Sequence[str] = [each.uuid for each in found]
        self._pipe = pipe
        self._logs = logs
        self._log_to = log_to
        self._multi_user = multi_user
        self._changed = threading.Condition(threading.RLock())
        self._running: dict[int, _Server] = {}
        self._is_quitting = False
        self._listener: socket.socket | None = None
        self._lock_fd = -1

    def open(self) -> None:
        """Make the folders, the lock and the sockets, over what a killed daemon left. Raises CannotStartError."""
        try:
            if not self._pipe.is_dir():
                self._pipe.mkdir()
                self._pipe.chmod(0o777)
            self._lock_fd = _open(self._pipe / "control_lock", 0o666)
        except OSError:
            raise CannotStartError(f"Cannot access CUDA_MPS_PIPE_DIRECTORY={self._pipe}") from None
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotStartError("An instance of this daemon is already running") from None
        fifo = self._pipe / "log"
        if not fifo.exists():
            os.mkfifo(fifo)
            fifo.chmod(0o777)
        self._open_logs()
        if len(bytes(self._pipe)) > LONGEST_PIPE:
            raise CannotStartError
        self._listener = _listen(self._pipe / "control", 0o666)
        _listen(self._pipe / "control_privileged", 0o755).close()
        if self.branch >= _FIRST_WITH_PID_FILE:
            pid_file = self._pipe / "nvidia-cuda-mps-control.pid"
            pid_file.write_text(str(os.getpid()))
            pid_file.chmod(0o666)
        self.log(f"Starting control daemon using socket {self._pipe}/control")
        self.log(f"To connect CUDA applications to this daemon, set env {PIPE_VARIABLE}={self._pipe}")

    def serve(self) -> None:
        """Serve until somebody who may says `quit`, or the simulated machine is removed."""
        assert self._listener is not None  # noqa: S101 -- `open` comes first
        threading.Thread(target=self._end_with_machine, daemon=True).start()
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # `quit` has ended all else
                break
            self.log("Accepting connection...")
            threading.Thread(target=self._talk, args=(Link(connection),), daemon=True).start()

    def _end_with_machine(self) -> None:
        while self._store.path.exists():
            time.sleep(_LOOK_SECONDS)
        for each in tuple(self._running.values()):
            each.process.kill()
        os._exit(0)

    def close(self) -> None:
        """Remove the files that a daemon which was told to quit does not leave."""
        for name in ("log", "nvidia-cuda-mps-control.pid"):
            (self._pipe / name).unlink(missing_ok=True)

    # What commands use.

    def servers(self) -> Mapping[int, commands.ServerView]:
        """Return the running servers by pid."""
        return {pid: each for pid, each in self._running.items() if each.status != "INITIALIZING"}

    def start_server(self, uid: int) -> None:
        """Start a server and wait until it serves or has ended."""
        if not any(each.uid == uid for each in self._running.values()):
            self._start(uid)

    def shut_down(self, server: int, *, force: bool) -> None:
        """End a server, without force after its last client."""
        found = self._running.get(server)
        while found is not None and found.clients and not force and server in self._running:
            self._changed.wait()
        if found is not None:
            self._end(found)

    def terminate(self, server: int, client: int) -> bool:
        """End a client's use of the GPU; False if the server has no such client."""
        found = [each for each in self._running[server].clients if each.peer.pid == client]
        for each in found:
            self._drop(self._running[server], each, CudaCode.MPS_CLIENT_TERMINATED)
        return bool(found)

    def log(self, text: str) -> None:
        """Write a line to control.log, which with `-f` is standard output."""
        now = dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        line = f"[{now} Control {os.getpid():5}] {text}\n"
        if self._log_to is not None:
            self._log_to.write(line)
            self._log_to.flush()
        else:
            with contextlib.suppress(OSError), (self._logs / "control.log").open("a", encoding="utf-8") as file:
                file.write(line)

    # Connections, each in a thread of its own.

    def _talk(self, link: Link) -> None:
        first = link.receive()
        kind = first.get("kind") if first else None
        if first is None:
            link.close()
        elif kind == "command":
            self._commands(link, first)
        elif kind == "server":
            self._server_ready(link, [str(each) for each in _list(first["devices"])])
        else:
            self._client(link)

    def _commands(self, link: Link, first: Message) -> None:
        """Answer the commands of one program."""
        peer = link.peer()
        with self._changed:
            self.log("NEW UI")
        message: Message | None = first
        while message is not None:
            command = str(message.get("command", ""))
            with self._changed:
                self.log(f"Cmd:{command}")
                is_quit = command.split()[:1] == ["quit"]
                if is_quit and commands.may_quit(self, peer):
                    self._quit(link, command.split()[1:])
                    return
                lines = [commands.MAY_NOT_QUIT] if is_quit else commands.answer(self, peer, command)
                for line in lines:
                    self.log(line)
            link.send({"lines": lines})
            message = link.receive()
        with self._changed:
            self.log("UI closed")
        link.close()

    def _quit(self, link: Link, words: Sequence[str]) -> None:
        seconds = float(words[1]) if words[:1] == ["-t"] and words[1:] and words[1].isdigit() else None
        self._is_quitting = True
        self._changed.wait_for(lambda: not any(each.clients for each in self._running.values()), timeout=seconds)
        status = 0
        for server in tuple(self._running.values()):
            for client in tuple(server.clients):
                self._drop(server, client, CudaCode.MPS_CLIENT_TERMINATED)
            status |= self._end(server)
        self.log(f"Exit with status {status}")
        self.close()
        link.send({"lines": [], "quit": True, "code": int(bool(status))})
        link.close()
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)

    def _server_ready(self, link: Link, devices: Sequence[str]) -> None:
        pid = link.peer().pid
        with self._changed:
            server = self._running.get(pid)
            if server is None:
                link.close()
                return
            server.status, server.link, server.devices = "ACTIVE", link, devices
            self._changed.notify_all()

    def _client(self, link: Link) -> None:
        peer = link.peer()
        uid = 0 if self._multi_user else peer.uid
        with self._changed:
            self.log(
                f"NEW CLIENT {peer.pid} from user {uid}: Server is not ready, push client to pending list"
                if not any(each.uid == uid and each.status == "ACTIVE" for each in self._running.values())
                else f"NEW CLIENT {peer.pid} from user {uid}: Server already exists"
            )
            found = self._server_for(uid)
            if isinstance(found, CudaCode):
                link.send({"code": found})
                link.close()
                return
            most = 60 if self.branch >= _FIRST_WITH_60_CLIENTS else 48
            if len(found.clients) >= most:
                link.send({"code": CudaCode.MPS_MAX_CLIENTS_REACHED})
                link.close()
                return
            client = _Client(
                peer=peer,
                link=link,
                number=len(found.clients),
                device=found.devices[0],
                command=_command_of(peer.pid),
            )
            found.clients.append(client)
            link.send(
                {
                    "code": CudaCode.SUCCESS,
                    "server": found.pid,
                    "devices": list(found.devices),
                    "limits_mib": {str(ordinal): mib for ordinal, mib in found.settings.limits_mib.items() if mib},
                    "percentage": found.settings.percentage,
                }
            )
        while (message := link.receive()) is not None:
            with self._changed:
                if message.get("fault"):
                    self._fail(found)
                client.is_busy = bool(message.get("busy", client.is_busy))
        with self._changed:
            if client not in found.clients:
                return
            self._drop(found, client, None)
            if client.is_busy:
                found.is_stuck = True
                for other in found.clients:
                    other.link.send({"code": CudaCode.ILLEGAL_ADDRESS})

    # Servers. All of these are called with the lock held.

    def _server_for(self, uid: int) -> _Server | CudaCode:
        """Wait for a server of this user, for which the clients of other users have to be gone."""
        starts = 0
        while True:
            others = [each for each in self._running.values() if each.uid != uid]
            mine = next((each for each in self._running.values() if each.uid == uid), None)
            if any(each.clients for each in others) or (mine is not None and mine.is_stuck) or self._is_quitting:
                self._changed.wait()
            elif others:
                self._end(others[0])
            elif mine is not None and mine.status == "FAULT":
                return CudaCode.MPS_SERVER_NOT_READY
            elif mine is not None and mine.status == "ACTIVE":
                return mine
            elif mine is not None:
                self._changed.wait()
            elif starts == _MOST_SERVER_STARTS:
                return CudaCode.MPS_CONNECTION_FAILED
            else:
                starts += 1
                self._start(uid)

    def _start(self, uid: int) -> None:
        other = uid if self.uid == 0 and uid != 0 else None
        # Both folders by their full path, since a server may be told nothing else.
        env = {**os.environ, PIPE_VARIABLE: str(self._pipe), LOG_VARIABLE: str(self._logs)}
        try:
            process = subprocess.Popen([NAME], env=env, stdin=subprocess.DEVNULL, user=other, group=other)  # noqa: S603 -- found on PATH, as by the real one
        except OSError:
            self.log("Server exited with status 1")
            return
        self.log(f"Starting new server {process.pid} for user {uid}")
        server = _Server(process=process, uid=uid, settings=self.defaults.copy())
        self._running[process.pid] = server
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()
        self._changed.wait_for(lambda: server.status != "INITIALIZING" or server.pid not in self._running)

    def _watch(self, server: _Server) -> None:
        status = server.process.wait()
        with self._changed:
            self._running.pop(server.pid, None)
            self.log(f"Server {server.pid} exited with status {status}")
            for client in tuple(server.clients):
                self._drop(server, client, CudaCode.MPS_RPC_FAILURE)
            self._changed.notify_all()

    def _end(self, server: _Server) -> int:
        """End a server and wait for it; return its exit status."""
        if server.link is not None:
            server.link.close()
        else:
            server.process.terminate()
        self._changed.wait_for(lambda: server.pid not in self._running)
        return server.process.returncode

    def _fail(self, server: _Server) -> None:
        """Tell all clients of a fatal fault; new ones are let in after the last of these has gone."""
        server.status = "FAULT"
        for client in server.clients:
            client.link.send({"code": CudaCode.ILLEGAL_ADDRESS})

    def _drop(self, server: _Server, client: _Client, code: CudaCode | None) -> None:
        """Take a client from its server, and what it uses from the GPU; with a code it is told why."""
        server.clients.remove(client)
        if code is not None:
            client.link.send({"code": code})
        with self._store.edit() as machine:
            for processes in faults.process_lists(machine):
                processes[:] = [each for each in processes if each["pid"] != client.peer.pid or "mps" not in each]
        client.link.close()
        if server.status == "FAULT" and not server.clients:
            server.status = "ACTIVE"
        self._changed.notify_all()

    def _open_logs(self) -> None:
        try:
            self._logs.mkdir(mode=0o700, exist_ok=True)
            for name in ("control.log", "server.log"):
                (self._logs / name).touch()
        except OSError:
            print(  # noqa: T201 -- what the real one prints
                f"Warning: Failed writing log files to directory [{self._logs}]. No logs will be available.",
                flush=True,
            )


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _open(path: Path, mode: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    with contextlib.suppress(PermissionError):
        path.chmod(mode)
    return fd


def _listen(path: Path, mode: int) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(mode)
    listener.listen(64)
    return listener


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "?"
    return words[0].decode(errors="replace") or "?"
