"""The thread that writes the log: nothing of what can become of a descriptor raises, blocks or goes uncounted."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mig_agent.daemon.log_writer import LogWriter
from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, environment, eventually

pytestmark = pytest.mark.timeout(60)

SAY = "{} dropped\n"
MANY = 50_000


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    # The thread of a writer may still be at work: the numbers must not become those of another test's pipe.
    with Path(os.devnull).open("r+b") as nowhere:
        for each in (reading, writing):
            os.dup2(nowhere.fileno(), each)


def read_to(reading: int, last: bytes) -> list[str]:
    """The lines up to the last one."""
    seen = b""
    while not seen.endswith(last):
        assert select.select([reading], [], [], GENEROUS_SECONDS)[0], seen[-200:]
        seen += os.read(reading, 65_536)
    return seen.decode().splitlines()


def test_lines_come_in_their_order_and_the_last_ones_at_the_end(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        writer = LogWriter(log.fileno(), SAY.format)
        for number in range(1000):
            writer.write(f"{number} \udce4 ä\n")
        writer.close(GENEROUS_SECONDS)
        writer.write("too late\n")
    assert (tmp_path / "log").read_text().splitlines() == [f"{number} \\udce4 ä" for number in range(1000)]
    assert writer.dropped == 0


def test_a_pipe_that_nobody_reads_costs_lines_which_are_counted_where_they_are_missing(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, SAY.format, most_bytes=200_000)
    for number in range(MANY):
        writer.write(f"{number:080}\n")
    dropped = writer.dropped
    assert dropped > MANY // 2
    # The reader is back, and there is room again.
    lines = read_to(reading, b" dropped\n")
    while sum(map(told, lines)) < dropped:
        lines += read_to(reading, b" dropped\n")
    writer.write("after it\n")
    lines += read_to(reading, b"after it\n")
    assert lines.pop() == "after it"
    # Each is there or counted, just where it is missing.
    at = 0
    for line in lines:
        assert told(line) or int(line) == at
        at += told(line) or 1
    assert at == MANY
    assert writer.dropped == dropped


def told(line: str) -> int:
    """How many it says were dropped."""
    return int(line.split(maxsplit=1)[0]) if line.endswith("dropped") else 0


def test_it_ends_in_time_while_nobody_reads(pipe: tuple[int, int]) -> None:
    _, writing = pipe
    writer = LogWriter(writing, SAY.format)
    for _ in range(2000):
        writer.write("x" * 80 + "\n")
    writer.close(0.1)
    assert any(each.name == "log" and each.daemon for each in threading.enumerate())


def test_a_pipe_that_takes_nothing_now_is_waited_for(pipe: tuple[int, int]) -> None:
    """A terminal that another program has set to not block."""
    reading, writing = pipe
    fcntl.fcntl(writing, fcntl.F_SETFL, fcntl.fcntl(writing, fcntl.F_GETFL) | os.O_NONBLOCK)
    writer = LogWriter(writing, SAY.format)
    for number in range(5000):
        writer.write(f"{number:080}\n")
    assert read_to(reading, b"4999\n") == [f"{number:080}" for number in range(5000)]
    assert writer.dropped == 0


def test_a_reader_that_is_gone_or_a_descriptor_that_is_closed_costs_all_lines(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    writer = LogWriter(writing, SAY.format)
    for sent in range(1, 4):
        writer.write("lost\n")
        counted = partial(lambda number: writer.dropped == number, sent)
        eventually(counted, "it is counted")
    os.close(writing)
    writer.write("lost\n")
    eventually(lambda: writer.dropped == 4, "it is counted")
    writer.close(GENEROUS_SECONDS)
    assert writer.dropped == 4, "that the number cannot be told is no line"


@pytest.mark.parametrize("by_itself", [True, False], ids=["by-itself", "with-the-next-line"])
def test_when_writing_works_again_the_log_says_how_many_were_lost(tmp_path: Path, *, by_itself: bool) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    writer = LogWriter(full, SAY.format)
    for _ in range(3):
        writer.write("lost\n")
    eventually(lambda: writer.dropped == 3, "they are counted")
    os.dup2(log, full)
    if not by_itself:
        writer.write("written\n")
    expected = ["3 dropped", *([] if by_itself else ["written"])]
    eventually(lambda: (tmp_path / "log").read_text().splitlines() == expected, "it says so")
    writer.close(GENEROUS_SECONDS)
    os.close(full)
    os.close(log)


def test_a_torn_line_stays_a_line_of_its_own(tmp_path: Path) -> None:
    """As where a disk is full in the middle of it."""
    code = """
import os, resource, sys, time
from mig_agent.daemon.log_writer import LogWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (95, resource.RLIM_INFINITY))
writer = LogWriter(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), "{} dropped\\n".format)
for number in range(5):
    writer.write(f"{number}" * 39 + "\\n")
while writer.dropped < 3:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write("again\\n")
writer.close(10)
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "log"], check=True, timeout=PROCESS_SECONDS)
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == ["0" * 39, "1" * 39, "2" * 15, "3 dropped", "again"]


EVERYTHING = """
import gc, logging, sys, threading, warnings
from mig_agent.config import Settings
from mig_agent.daemon import logs

writer = logs.configure(Settings(log_format="json"))
class Broken:
    def __del__(self):
        raise OSError("in a finaliser")
    def __str__(self):
        raise ValueError("cannot be formatted")
Broken()
gc.collect()
warnings.warn("a warning")
sys.stderr.write("half a ")
print("line \\u202e of stderr", file=sys.stderr)
logging.getLogger("grpc").log(35, "of a %s", "library")
logging.getLogger("kubernetes").error("%s", Broken())
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("asyncio").exception("with \\x1b[2J a traceback")
thread = threading.Thread(target=lambda: {}["missing"])
thread.start()
thread.join()
writer.close(10)
"""


def test_whatever_writes_to_standard_error_becomes_lines_of_the_log(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING],
        capture_output=True,
        env=environment(tmp_path),
        text=True,
        check=True,
        timeout=PROCESS_SECONDS,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = "\n".join(f"{each['level']} {each['event']} {each.get('exception', '')}" for each in lines)
    for part in (
        "uncaught exception",
        "OSError: in a finaliser",
        "UserWarning: a warning",
        "warning half a line \\u202e of stderr",
        "of a library",
        "with \\u001b[2J a traceback",
        "ZeroDivisionError",
        "a thread ended unexpectedly",
        "KeyError: 'missing'",
    ):
        assert part in told, done.stderr
