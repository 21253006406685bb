"""`migctl top`: what is shown, what each key does, and the real program on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.client.types import (
    ComputeUsage,
    Gpu,
    Instance,
    LeaseInfo,
    MigMode,
    Placement,
    ProcessUsage,
    Status,
    Usage,
)
from mig_agent.migctl.keys import decode
from mig_agent.migctl.top_live import render
from mig_agent.migctl.top_view import ORDERS, NodeReading, View, list_lines, page, page_size, plain
from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder

TRAIN = ProcessUsage(pid=4711, uid=1000, command="python train.py", memory_used_mib=900)
HIDDEN = ProcessUsage(pid=4712, uid=None, command="", memory_used_mib=None)
HOLDERS = ("alice", "", "bob", "carol")


def instance(gpu: int, start: int, holder: str) -> Instance:
    number = 10 * gpu + start
    return Instance(
        uuid=f"MIG-{number}",
        generation=number,
        profile="1g.10gb" if start else "2g.20gb",
        memory_mib=9728 if start else 19968,
        placement=Placement(start, 1 if start else 2),
        gpu_instance_id=start,
        compute_instance_id=0,
        state="leased" if holder else "idle",
        lease=f"l-{number}" if holder else "",
        holder=holder,
        tenant="",
        since=0.0,
        reason="",
        gpu=f"GPU-{gpu}",
        gpu_index=gpu,
    )


def node(gpus: int = 1, holders: Sequence[str] = HOLDERS) -> Status:
    """Each GPU has one instance of each holder; those of nobody are idle."""
    found = [tuple(instance(gpu, start, holder) for start, holder in enumerate(holders)) for gpu in range(gpus)]
    leases = tuple(
        LeaseInfo(
            id=each.lease,
            holder=each.holder,
            tenant="",
            devices=(),
            created_at=0.0,
            expires_at=None,
            pid=None,
            hold=False,
            unused=each.holder == "bob",
        )
        for instances in found
        for each in instances
        if each.lease
    )
    return Status(
        node="node-1",
        revision=7,
        gpus=tuple(
            Gpu(
                index=index,
                uuid=f"GPU-{index}",
                model="NVIDIA H100 80GB HBM3",
                mig=MigMode(capable=True, current=True, pending=True),
                state="ready",
                reason="",
                memory_slices=8,
                memory_mib=81559,
                instances=instances,
            )
            for index, instances in enumerate(found)
        ),
        leases=leases,
        queue=(),
        started_at=0.0,
        ledger_error="",
        version="1",
        driver_version="580",
        strict_fifo=False,
    )


def usage(
    mib: int | None,
    *processes: ProcessUsage,
    details: bool = True,
    total: int | None = 9728,
    compute: float | None = None,
) -> Usage:
    return Usage(
        generation=0,
        memory_used_mib=mib,
        memory_total_mib=total,
        utilization_percent=None,
        processes=tuple(each.pid for each in processes),
        process_details=processes if details else (),
        compute=None
        if compute is None
        else ComputeUsage(seconds=2.0, sm_percent=compute, tensor_percent=None, memory_bandwidth_percent=None),
    )


def reading(readings: dict[int, Usage] | None = None, gpus: int = 1, holders: Sequence[str] = HOLDERS) -> NodeReading:
    return NodeReading(node(gpus, holders), readings or {}, lambda uid: {1000: "alice"}.get(uid, f"uid {uid}"))


def listed(of: NodeReading, view: View, width: int | None = None) -> list[str]:
    return plain(list_lines(of, view, width)[1]).splitlines()


def test_the_unknown_is_shown_as_unknown_and_never_as_0() -> None:
    nothing = Usage(generation=0, memory_used_mib=None, memory_total_mib=None, utilization_percent=None, processes=None)
    first, _, third, *_ = listed(reading({0: nothing, 2: usage(0)}), View())
    assert first.split() == ["0", "2g.20gb", "leased", "?", "19.5", "GiB", "?", "?", "alice"]
    assert third.split() == ["0", "1g.10gb", "leased", "0", "MiB", "9.5", "GiB", "..........", "?", "bob", "(unused)"]


def test_compute_is_shown_where_it_is_known() -> None:
    of = reading({0: usage(0, compute=31.4), 1: usage(0, compute=0.2), 2: usage(0, compute=0.0)})
    header, lines = list_lines(of, View(), None)
    assert plain([header]).split()[-2:] == ["COMPUTE", "HOLDER"]
    shown = [re.findall(r"(\S+%|\?)(?:  ([#.]{10}))?", line)[-1] for line in plain(lines).splitlines()]
    assert shown == [
        ("31%", "####......"),
        ("<1%", "#........."),
        ("0%", ".........."),
        ("?", ""),
    ]
    whole = replace(usage(0), utilization_percent=70)
    assert "  70%  #######...  " in listed(reading({0: whole}), View())[0]


@pytest.mark.parametrize(("width", "columns"), [(100, 2), (80, 1), (60, 0)])
def test_a_narrow_terminal_keeps_figures_and_holders_and_goes_without_bars(width: int, columns: int) -> None:
    of = reading({0: usage(1024, compute=31.4, total=19968), 2: usage(512, compute=99)})
    lines = listed(of, View(), width)
    assert len(re.findall(r"[#.]{10}", lines[0])) == columns
    assert "31%" in lines[0]
    assert lines[0].endswith("alice")
    assert lines[2].endswith("bob (unused)")
    assert max(map(len, lines)) <= width


def test_each_process_has_its_user_its_memory_and_its_command() -> None:
    lines = listed(reading({0: usage(900, TRAIN, HIDDEN, total=19968)}), View())
    assert lines[1].split() == ["4711", "alice", "900", "MiB", "python", "train.py"]
    assert lines[2].split() == ["4712", "?", "?", "?"]


def test_pids_alone_are_shown_where_nothing_else_is_known() -> None:
    lines = listed(reading({0: usage(900, TRAIN, HIDDEN, details=False)}), View())
    assert lines[0].endswith("alice (pid 4711, 4712)")
    assert len(lines) == len(HOLDERS)


def test_the_head_says_how_much_of_what_is_leased_is_used() -> None:
    whole = render(reading({0: usage(1024, total=19968), 2: usage(512)}), View())
    assert whole.splitlines()[0] == "node-1: 3 leases, 1.5 GiB used of 38.5 GiB leased"
    assert "? used of" in render(reading(), View())
    assert "no instances" in render(reading(holders=()), View())
    assert "no instance has that in it" in render(reading(), View(words="zzz"))


def test_the_bar_is_full_only_where_the_memory_is() -> None:
    empty, little, most, full = ("." * 10, "#" + "." * 9, "#" * 9 + ".", "#" * 10)
    of = reading({0: usage(0), 1: usage(1), 2: usage(9700), 3: usage(9728)})
    assert [re.findall(r"[#.]{10}", line)[0] for line in listed(of, View())] == [empty, little, most, full]


@pytest.mark.parametrize(
    ("order", "first"),
    [("gpu", "alice"), ("memory", "carol"), ("compute", "bob"), ("holder", "alice"), ("profile", "alice")],
)
def test_orders(order: str, first: str) -> None:
    lines = listed(reading({2: usage(100, compute=1.0), 3: usage(5000, compute=0.0)}), View(order=order))
    assert first in lines[0]
    assert len(lines) == len(HOLDERS)
    if order == "memory":
        assert "bob" in lines[1]
    if order == "compute":
        assert "carol" in lines[1], "the unknown come last"
    if order == "holder":
        assert "idle" in lines[-1]


@pytest.mark.parametrize("words", ["BOB", "train.py", "4711", "l-3", "idle", "2g.20", "gpu 0", "alice"])
def test_the_filter_looks_everywhere_in_a_row(words: str) -> None:
    of = reading({3: usage(5000, TRAIN)})
    shown = listed(of, View(words=words, with_processes=False))
    assert shown
    assert len(shown) < len(HOLDERS) or words == "gpu 0"


def test_a_long_name_takes_nothing_from_the_other_columns() -> None:
    name = "llama-3-70b-finetune-lora-rank-64-lr-3e-5-seed-12345-and-more-of-it"
    screen = plain(page(reading({0: usage(900, TRAIN)}, holders=(name,)), View(), 80, 24)).splitlines()
    (line,) = [each for each in screen if "llama" in each]
    assert "900 MiB" in line
    assert line.endswith("-of-it"), "the ends of names tell jobs apart"
    assert re.search(r"  llama[^ ]*\.\.[^ ]*$", line)
    assert max(map(len, screen)) <= 80


def test_scrolling_reaches_every_line_and_stays_within_them() -> None:
    of, height = reading(gpus=8), 12
    size = page_size(height)
    length = len(listed(of, View()))
    seen: set[str] = set()
    view: View | None = View()
    for _ in range(length):
        assert view is not None
        screen = plain(page(of, view, 100, height)).splitlines()
        assert len(screen) <= height
        seen |= set(screen)
        view = view.after("down", size, length)
    assert set(listed(of, View(), 100)) <= seen
    assert view == view.after("down", size, length)  # type: ignore[union-attr]  # it is one
    end = View().after("end", size, length)
    assert end is not None
    assert end.offset == length - size
    assert end.after("home", size, length) == View()
    assert View().after("up", size, length) == View()


def test_a_shorter_list_is_never_scrolled_out_of_sight() -> None:
    """Leases end, and windows grow, while one looks at the end of the list."""
    size = page_size(12)
    end = View().after("end", size, 4 * 8)
    assert end is not None
    for gpus, height in [(1, 12), (8, 60)]:
        screen = plain(page(reading(gpus=gpus), end, 100, height))
        assert all(each in screen for each in listed(reading(gpus=gpus), View(), 100))
        assert "more below" not in screen


@pytest.mark.parametrize("width", [30, 60, 80])
def test_the_keys_fit_and_a_kept_filter_is_always_seen(width: int) -> None:
    first, filtered = (
        plain(page(reading(), view, width, 15)).splitlines()[1] for view in (View(), View(order="compute", words="bob"))
    )
    assert not first.endswith("..")
    assert "q quit" in first
    assert filtered.startswith("filter: bob (Esc removes it)")
    assert not filtered.endswith("..")


def test_an_old_reading_is_said_to_be_old() -> None:
    screen = plain(page(reading(), View(), 80, 24, "the agent does not answer: these figures are 12s old"))
    assert screen.splitlines()[0] == "the agent does not answer: these figures are 12s old"


def test_keys() -> None:
    view = View()
    for order in (*ORDERS[1:], ORDERS[0]):
        following = view.after("s", 10, 10)
        assert following is not None
        assert following.order == order
        view = following
    assert view.after("q", 10, 10) is None
    assert view.after("x", 10, 10) == view
    typing = view.after("/", 10, 10)
    for key in ("q", "s", "backspace", "3"):
        assert typing is not None
        typing = typing.after(key, 10, 10)
    assert typing is not None
    assert typing.words == "q3", "while one types, a key is a letter"
    kept = typing.after("enter", 10, 10)
    assert kept is not None
    assert (kept.words, kept.is_typing) == ("q3", False)
    assert kept.after("escape", 10, 10) == view
    hidden = view.after("p", 10, 10)
    assert hidden is not None
    assert not hidden.with_processes


def test_what_a_terminal_sends_is_decoded() -> None:
    sent = b"q\x1b[A\x1b[B\x1bOH\x1b[5~\x1b[6~\r\x7f/\x1b[1;5Cs\xc3\xa9\x1b"
    names = ["q", "up", "down", "home", "page-up", "page-down", "enter", "backspace", "/", "s", "\u00e9", "escape"]
    assert list(decode(sent)) == names
    assert not list(decode(b"\x1b["))
    assert not list(decode(b"\xff"))


# The real program on a terminal


class Terminal:
    """`migctl top` on a terminal of 80x24, and all that it has written to it."""

    def __init__(self, agent: Agent, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mig_agent.migctl", "top", "--interval", "100ms", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.PIPE,
            env={**agent.person(), "TERM": "xterm"},
            process_group=0,  # so that it can be stopped, as a shell would stop it
        )
        self.written = ""

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def until(self, words: str, *, new: bool = False) -> None:
        """Reads until these words are there; with `new` only what comes from now on counts."""
        if new:
            self.read()
            self.written = ""

        def there() -> bool:
            self.read()
            return words in self.written

        eventually(there, f"the screen shows {words!r}: {self.written[-2000:]!r}")

    def read(self) -> None:
        while select.select([self.master], (), (), 0)[0]:
            with contextlib.suppress(OSError):
                self.written += os.read(self.master, 65536).decode(errors="replace")
                continue
            break

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder) as running:
        running.ask("request", "--gpu-memory", "4G", "--name", "alice")
        yield running


@contextlib.contextmanager
def on_a_terminal(agent: Agent, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal(agent, *arguments)
    try:
        terminal.until("alice")
        yield terminal
    finally:
        terminal.close()


def test_on_a_terminal_keys_are_not_echoed_and_q_leaves_it_as_it_was(agent: Agent) -> None:
    with on_a_terminal(agent) as terminal:
        terminal.type(b"s")
        terminal.until("sort: memory")
        terminal.type(b"/nothing like that\r")
        terminal.until("no instance has that in it")
        terminal.type(b"\x1b")
        terminal.until("alice", new=True)
        agent.ask("request", "--gpu-memory", "4G", "--name", "bob")
        terminal.until("bob")
        terminal.type(b"q")
        assert terminal.process.wait(GENEROUS_SECONDS) == 0
        terminal.read()
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert terminal.written.rstrip().endswith("\x1b[?25h") or "\x1b[?1049l" in terminal.written[-40:]


def test_several_contexts(agent: Agent) -> None:
    agent.migctl("context", "add", "one", "--address", agent.address)
    agent.migctl("context", "add", "away", "--address", "unix:///nowhere/agent.sock")
    with on_a_terminal(agent, "--all-contexts") as terminal:
        terminal.until("away: cannot reach the agent")
        terminal.type(b"s")
        terminal.until("sort: memory")
        agent.ask("request", "--gpu-memory", "4G", "--name", "bob")
        terminal.until("bob")
        terminal.process.send_signal(signal.SIGINT)
        terminal.process.wait(GENEROUS_SECONDS)
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.read()
        assert "\x1b[?1049l" in terminal.written, "the first screen is shown again"
        assert terminal.process.stderr is not None
        assert not terminal.process.stderr.read()


def test_an_agent_that_goes_away_and_comes_back(agent: Agent) -> None:
    with on_a_terminal(agent) as terminal:
        agent.kill()
        terminal.until("does not answer")
        terminal.type(b"s")
        terminal.until("sort: memory")
        agent.start()
        terminal.until("1 lease", new=True)
        terminal.type(b"q")
        assert terminal.process.wait(GENEROUS_SECONDS) == 0


def test_control_c_ends_it_quietly(agent: Agent) -> None:
    with on_a_terminal(agent) as terminal:
        terminal.process.send_signal(signal.SIGINT)
        terminal.process.wait(GENEROUS_SECONDS)
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert terminal.process.stderr is not None
        assert not terminal.process.stderr.read()


def test_suspended_it_gives_the_terminal_back_and_takes_it_again(agent: Agent) -> None:
    with on_a_terminal(agent) as terminal:
        os.kill(terminal.process.pid, signal.SIGTSTP)
        state = Path(f"/proc/{terminal.process.pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it is stopped")
        assert termios.tcgetattr(terminal.slave) == terminal.before
        os.kill(terminal.process.pid, signal.SIGCONT)
        terminal.until("alice", new=True)
        terminal.type(b"q")
        assert terminal.process.wait(GENEROUS_SECONDS) == 0


def test_another_size_of_the_terminal_is_taken_up(agent: Agent) -> None:
    with on_a_terminal(agent, "--interval", "1h") as terminal:
        fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.until("alice", new=True)
        terminal.type(b"q")
        assert terminal.process.wait(GENEROUS_SECONDS) == 0
