"""Ctrl-C while a program starts: in the middle of each import it ends without a word."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.agent import PROCESS_SECONDS

INTERRUPTED = 130
EVERY = 12
"""Each process takes a fifth of a second, and there are some hundred imports."""
INTERRUPTED_WHILE_IMPORTING = """
import importlib, json, os, signal, sys

def ended(at):
    "How a process ends that is interrupted at one of its imports, and what it has said; how many imports there were."
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        class Interrupting:
            seen = 0
            def find_spec(self, *_):
                self.seen += 1
                if self.seen == at:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Interrupting())
        try:
            importlib.import_module(sys.argv[0]).main()
        except SystemExit as end:
            os._exit(end.code)
        finally:
            os._exit(99)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        words = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), words

sys.argv.pop(0)
every = int(sys.argv.pop(0))
found, at = [], 1
signal.alarm(240)
# The first ones are those of the program itself, before it can do anything.
for at in range(9, 2000, every):
    code, words = ended(at)
    if code == int(sys.argv[1]):
        break
    found.append((at, code, words))
json.dump(found, sys.stdout)
"""


@pytest.mark.parametrize(
    ("program", "usual", "arguments"),
    [
        ("mig_agent.migctl.__main__", 4, ["status", "--address", "unix:///nowhere/agent.sock"]),
        ("mig_agent.__main__", 1, ["health", "--address", "unix:///nowhere/agent.sock"]),
    ],
    ids=["migctl", "mig-agent"],
)
def test_it_ends_without_a_word(program: str, usual: int, arguments: list[str]) -> None:
    code = INTERRUPTED_WHILE_IMPORTING.replace("int(sys.argv[1])", str(usual))
    done = subprocess.run(
        [sys.executable, "-c", code, str(EVERY), program, *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert {(code, words) for _, code, words in found} == {(INTERRUPTED, "")}, found


def test_interrupts_that_are_ignored_stay_ignored() -> None:
    """As under nohup, and in a script's job in the background."""
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
        "from mig_agent import bootstrap; bootstrap.end_when_interrupted(); bootstrap.raise_when_interrupted();"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PROCESS_SECONDS
    )
    assert done.stdout.split() == ["True"]


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_interrupts_are_blocked_no_longer(handler: str) -> None:
    """The script `migctl` blocks them, and whatever is started later would inherit that."""
    code = (
        f"import signal; signal.signal(signal.SIGINT, signal.{handler});"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT});"
        "from mig_agent import bootstrap; bootstrap.end_when_interrupted();"
        "print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PROCESS_SECONDS
    )
    assert done.stdout.split() == ["False"]


def test_one_that_came_while_they_were_blocked_ends_it() -> None:
    code = (
        "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); signal.raise_signal(signal.SIGINT);"
        "from mig_agent import bootstrap; bootstrap.end_when_interrupted(); print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "")
