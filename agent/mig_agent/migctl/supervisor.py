"""Starts the commands of `migctl run` and ends what outlives them; started by path, as a process of its own.

The lease ends when migctl does, and its instance may be leased to somebody else the next moment; a process that goes
on, or that opens CUDA late, would run on it. So this process is the subreaper of all that the commands start: whatever
loses its parent becomes its child, and it ends only when none is left. It reads orders from a pipe that only migctl has
open for writing: the end of that pipe is the end of migctl, whatever killed it, and then everything is killed at once.
When this process is killed itself, the kernel kills the commands, and migctl, a subreaper too, what they have started.

It imports nothing of the package, so that it starts at once, and it has no threads, so that it may fork.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # before anything else: no traceback for a signal that comes early

import contextlib
import ctypes
import json
import os
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

COULD_NOT_RUN = 125
FORWARDED = (
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
)
"""The signals that are passed on to the commands."""
_IMPATIENT = frozenset({signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
"""The signals that kill at once what is being ended anyway."""
LINGER_SECONDS = 1.0
"""Grace in which what outlives the commands may end by itself, as `tee` does that still writes their last lines."""
GIVE_UP_SECONDS = 10.0
"""Time to wait for what was killed: a process that hangs in a driver cannot end."""
SAY_AFTER_SECONDS = 2.0
"""Time after which it is said what is waited for: a silent wait looks like a hang of migctl."""
_LOOK_SECONDS = 0.5
"""The pause before descendants are looked for again while they may clean up: they may have started others."""
_AGAIN_SECONDS = 0.05
"""The pause before descendants are looked for again while they are being killed."""
_SIGNALLED = 128
_SHOWN = 4
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Descendant:
    """A process below another one. Together with its start the pid identifies it."""

    __slots__ = ("name", "parent", "pid", "started")

    def __init__(self, pid: int, parent: int, name: str, started: str) -> None:
        self.pid = pid
        self.parent = parent
        self.name = name
        self.started = started

    def send(self, number: int) -> None:
        """Send a signal; harmless if the process has ended or belongs to somebody else."""
        same = _read(str(self.pid))
        if same is not None and same.started == self.started:
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def __str__(self) -> str:
        name = self.name if self.name.isprintable() else ascii(self.name)
        return f"{name} (pid {self.pid})"


def become_subreaper() -> None:
    """Make this process the new parent of descendants that lose theirs, in place of the machine's init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_here() -> frozenset[int]:
    """Return the pids of this process's children, as far as the kernel tells."""
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 -- pathlib takes longer to import than all the rest
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:  # noqa: PTH123 -- the same
            found.update(map(int, file.read().split()))
    return frozenset(found)


def descendants(of: int, without: frozenset[int] = frozenset()) -> list[Descendant]:
    """Return the living processes below one, parents before their children; not its children in `without`."""
    children: dict[int, list[Descendant]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 -- the same
        found = _read(name) if name.isdigit() else None
        if found is not None:
            children.setdefault(found.parent, []).append(found)
    below = [each for each in children.get(of, ()) if each.pid not in without]
    for each in below:  # which grows meanwhile
        below += children.get(each.pid, [])
    return below


def _read(pid: str) -> Descendant | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 -- the same
            before, _, after = file.read().rpartition(")")
    except OSError:
        return None
    # Fields 2 (name), 3 (state), 4 (parent) and 22 (start time) of proc_pid_stat(5).
    fields = after.split()
    if fields[0] in {"Z", "X"}:
        return None
    return Descendant(int(pid), parent=int(fields[1]), name=before.partition("(")[2], started=fields[19])


class Supervisor:
    """Runs the commands of one job side by side, and ends with the exit code of the first that failed, in order."""

    def __init__(self, orders: int, unread: bytes, *, shares_group: bool, kill_after: float) -> None:
        """Take orders from this pipe, of which `unread` was read already.

        `shares_group`: the commands stay in the process group of migctl, which is on a terminal. `kill_after`: how many
        seconds after SIGTERM what has outlived the commands gets SIGKILL.
        """
        self._orders = orders
        self._unread = unread
        self._shares_group = shares_group
        self._kill_after = kill_after
        self._codes: dict[int, int | None] = {}
        """The exit code of each command by its pid, in order; negative for a signal, None while it runs."""
        self._caught: list[int] = []
        self._ends_at: float | None = None
        """Time at which what is left gets SIGTERM; None while a command runs that may go on."""
        self._kills_at: float | None = None
        """Time at which what is left then gets SIGKILL; None before SIGTERM."""
        self._asked: set[tuple[int, str]] = set()
        """The processes that have got SIGTERM."""
        self._is_announced = True
        """True if the end of what is left needs no words."""
        self._is_waiting_said = False
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Ignored signals stay ignored for the commands, too: `nohup migctl run ...`.
        self._numbers = [each for each in FORWARDED if signal.getsignal(each) is not signal.SIG_IGN]
        for number in (*self._numbers, signal.SIGCHLD):
            signal.signal(number, self._catch)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def run(self, command: Sequence[str], environments: Iterable[Mapping[str, str]]) -> int:
        """Run the command once in each environment; return the exit code, negative for SIGINT on a terminal."""
        try:
            for environment in environments:
                self._start(command, environment)
        except OSError as error:
            _say(f"cannot run {command[0]}: {error.strerror or error}")
            self._end(0.0)
            self._wait()
            return COULD_NOT_RUN
        self._wait()
        codes = [-signal.SIGKILL if code is None else code for code in self._codes.values()]
        if self._shares_group and -signal.SIGINT in codes:
            return -signal.SIGINT
        first = next((code for code in codes if code), 0)
        return _SIGNALLED - first if first < 0 else first

    def report(self, to: int, code: int) -> None:
        """Write the exit code to a pipe, and wait until migctl closes the one of orders, or has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(to, f"{code}\n".encode())
        while self._orders >= 0 and os.read(self._orders, 4096):
            pass

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        group = 0 if self._shares_group else next(iter(self._codes), 0)
        supervisor = os.getpid()
        # A signal that came between fork and exec would be lost.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if not pid:
                try:
                    if not self._shares_group:
                        os.setpgid(0, group)
                    self._become(command, environment, supervisor, mask)
                finally:
                    os._exit(COULD_NOT_RUN)
            if not self._shares_group:
                with contextlib.suppress(OSError):  # it has done so itself
                    os.setpgid(pid, group)
            self._codes[pid] = None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _become(
        self, command: Sequence[str], environment: Mapping[str, str], supervisor: int, mask: Iterable[int]
    ) -> None:
        """Replace this new process by the command; return if that fails."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before it was asked for
            return
        signal.set_wakeup_fd(-1)
        # The interpreter ignores these two, and ignored signals stay ignored over exec.
        for number in (*self._numbers, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            os.execvpe(command[0], list(command), environment)  # noqa: S606 -- running the command is what this is for
        except OSError as error:
            _say(f"cannot run {command[0]}: {error.strerror or error}")

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self._caught.append(number)

    def _wait(self) -> None:
        """Wait until no command and no descendant is left, or what is left cannot be ended."""
        self._carry_out()
        while True:
            while self._caught:
                number = self._caught.pop(0)
                # On a terminal it has come to the whole group; else only this process got it.
                if number == signal.SIGCHLD:
                    continue
                if self._shares_group:
                    self._hurry(number)
                else:
                    self._pass_on(number)
            if not self._reap():
                return
            timeout = self._go_on_ending()
            if timeout is not None and timeout < 0:
                return
            ready, _, _ = select.select([self._wake, *([self._orders] if self._orders >= 0 else [])], [], [], timeout)
            if self._wake in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if self._orders in ready:
                self._read_orders()

    def _reap(self) -> bool:
        """Collect what has ended; return False if no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                break
            if pid in self._codes:
                self._codes[pid] = os.waitstatus_to_exitcode(status)
        if self._ends_at is None and None not in self._codes.values():
            self._ends_at = time.monotonic() + LINGER_SECONDS
            self._is_announced = False
        return True

    def _read_orders(self) -> None:
        """Carry out what migctl writes: `signal NUMBER`, or `end SECONDS`; kill everything if migctl has ended."""
        read = os.read(self._orders, 4096)
        if not read:
            os.close(self._orders)
            self._orders = -1
            self._is_announced = True
            self._end(0.0)
            return
        self._unread += read
        self._carry_out()

    def _carry_out(self) -> None:
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            order, _, value = line.partition(b" ")
            if order == b"end":
                self._end(float(value))
            else:
                self._pass_on(int(value))

    def _hurry(self, number: int) -> None:
        """Kill what is being ended already, if the signal is one that ends programs."""
        if self._ends_at is not None and number in _IMPATIENT:
            self._end(0.0)

    def _pass_on(self, number: int) -> None:
        """Send a signal to the commands."""
        self._hurry(number)
        running = self._running()
        if self._shares_group:
            for pid in running:
                with contextlib.suppress(PermissionError):  # it has become another user's, as sudo does
                    os.kill(pid, number)
        elif running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(next(iter(self._codes)), number)

    def _running(self) -> list[int]:
        """Return the commands that run; their pids are theirs until they are reaped here."""
        return [pid for pid, code in self._codes.items() if code is None]

    def _end(self, grace_seconds: float) -> None:
        """End everything now: by SIGTERM, and by SIGKILL after the grace period; with none at once."""
        now = time.monotonic()
        kills_at = now + grace_seconds
        self._ends_at = now
        self._kills_at = kills_at if self._kills_at is None else min(self._kills_at, kills_at)

    def _go_on_ending(self) -> float | None:
        """Send what is due to what is left; return in how many seconds to look again, None: when something happens.

        A negative number: what is left cannot be ended.
        """
        now = time.monotonic()
        if self._ends_at is None:
            return None
        if now < self._ends_at:
            return self._ends_at - now
        if self._kills_at is None:
            self._kills_at = now + self._kill_after
        if now < self._kills_at:
            self._ask_to_end()
            return min(self._kills_at - now, _LOOK_SECONDS)
        for pid in self._running():  # before the look at all of the machine's processes, which takes a while
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
        left = descendants(os.getpid())
        if now - self._kills_at > GIVE_UP_SECONDS:
            _say(f"cannot end {_names(left)}; the lease is released all the same")
            return -1.0
        if left and not self._is_waiting_said and now - self._kills_at > SAY_AFTER_SECONDS:
            self._is_waiting_said = True
            say_waiting(left, self._kills_at + GIVE_UP_SECONDS - now)
        for each in left:
            each.send(signal.SIGKILL)
        return _AGAIN_SECONDS

    def _ask_to_end(self) -> None:
        """Send SIGTERM to whatever has not got it yet; SIGCONT, too, since what is stopped cannot see it."""
        left = descendants(os.getpid())
        if not self._is_announced and left:
            self._is_announced = True
            _say(f"ending what the command has left behind: {_names(left)}")
        for each in left:
            if (each.pid, each.started) not in self._asked:
                self._asked.add((each.pid, each.started))
                each.send(signal.SIGTERM)
                each.send(signal.SIGCONT)


def _names(processes: Sequence[Descendant]) -> str:
    more = len(processes) - _SHOWN
    return ", ".join(map(str, processes[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def say_waiting(left: Sequence[Descendant], seconds: float) -> None:
    """Say which processes do not end though they were killed, and for how long they are waited for."""
    why = "killed, but it hangs in a driver or is another user's"
    _say(f"waiting for {_names(left)} to end, at most {max(seconds, 1):.0f}s more: {why}")


def _say(words: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"migctl: {words}\n".encode(errors="replace"))


def main(orders: int, report: int) -> int:
    """Read the job, one line of JSON, from the pipe and run it; report the exit code and wait until migctl has read it.

    It may be in a cgroup that is to be removed: then it is killed meanwhile, and nothing is lost.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # one that is stopped has to see the pipe's end
    become_subreaper()
    text = b""
    while b"\n" not in text:
        read = os.read(orders, 1 << 16)
        if not read:
            return COULD_NOT_RUN  # migctl has ended
        text += read
    line, _, unread = text.partition(b"\n")
    job = json.loads(line)
    supervisor = Supervisor(orders, unread, shares_group=job["shares_group"], kill_after=job["kill_after"])
    code = supervisor.run(job["command"], job["environments"])
    supervisor.report(report, code)
    return 0


if __name__ == "__main__":
    for each in sys.argv[1:]:
        os.set_inheritable(int(each), False)
    os._exit(main(*map(int, sys.argv[1:])))
