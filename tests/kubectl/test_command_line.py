"""`kubectl mig` as a program, against an API server that answers as the test says. The real one is in tests/e2e."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.agent import PROCESS_SECONDS
from support.webserver import Asked, Says, json_of, web_server

Run = Callable[..., subprocess.CompletedProcess[str]]
PENDING: dict[str, Any] = {
    "metadata": {"name": "mig-agent-1"},
    "spec": {"nodeName": "n1"},
    "status": {"phase": "Pending"},
}


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": "agent", "COLUMNS": "80"}


def command(*arguments: str) -> Sequence[str]:
    return (sys.executable, "-m", "mig_agent.kubectl", *arguments)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def start(*arguments: str, answer: Says | None = None) -> subprocess.CompletedProcess[str]:
        with web_server(lambda _asked: answer or json_of({"items": [PENDING]})) as web:
            kubeconfig = ("--kubeconfig", str(web.kubeconfig(tmp_path))) if "--kubeconfig" not in arguments else ()
            return subprocess.run(
                command(*arguments, *kubeconfig),
                env=environment(tmp_path),
                capture_output=True,
                text=True,
                check=False,
                timeout=PROCESS_SECONDS,
            )

    return start


def test_nodes_that_do_not_answer_are_shown_and_counted(run: Run) -> None:
    done = run("status")
    assert (done.returncode, done.stderr) == (4, "")
    assert done.stdout == "1 node, 0 GPUs, 0 leases, no answer from 1 node\n\nn1: its agent's pod is Pending\n"
    done = run("leases")
    assert (done.returncode, done.stdout) == (4, "no leases on nodes that answer\n")
    assert done.stderr == "n1: its agent's pod is Pending\n"
    done = run("top")
    assert done.returncode == 4
    assert done.stdout.startswith("1 node, no answer from 1 node, 0 leases\n")
    assert "\nn1: its agent's pod is Pending\n" in done.stdout
    done = run("top", "-o", "json")
    assert json.loads(done.stdout)["nodes"] == [
        {"node": "n1", "pod": "mig-agent-1", "top": None, "error": "its agent's pod is Pending"}
    ]
    done = run("status", "-o", "json")
    assert json.loads(done.stdout)["nodes"][0]["error"] == "its agent's pod is Pending"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("statu",), 2, "no such command 'statu'"),
        (("status", "-o", "yaml"), 2, "cannot print as yaml. Hint: -o takes text, wide or json"),
        (("top", "-o", "wide"), 2, "cannot print as wide. Hint: -o takes text or json"),
        (("top", "--sort", "age"), 2, "cannot take that for --sort"),
        (("top", "--interval", "2"), 2, "it has no unit"),
        (("status", "--node", "n2"), 2, "cannot find an agent on node n2. Hint: see `kubectl mig status`"),
        (("status", "--timeout", "5"), 2, "it has no unit"),
        (("status", "--context", "prod"), 2, "cannot reach the API server with"),
        (("status", "--kubeconfig", "/nowhere/config"), 2, "cannot reach the API server with /nowhere/config"),
    ],
    ids=["command", "output", "top's output", "order", "interval", "node", "timeout", "context", "kubeconfig"],
)
def test_mistakes(run: Run, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("kubectl mig: cannot ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_agents_there(run: Run) -> None:
    done = run("status", "-n", "gpus", answer=json_of({"items": []}))
    assert done.returncode == 2
    assert "namespace gpus has no pods with app.kubernetes.io/name=mig-agent" in done.stderr


def test_no_right_to_list_pods(run: Run) -> None:
    done = run("status", answer=json_of({"message": 'pods is forbidden: User "bob" cannot list'}, 403))
    assert done.returncode == 4
    assert "pods is forbidden" in done.stderr
    assert "get and create on pods/exec" in done.stderr


def test_ctrl_c_is_quiet(tmp_path: Path) -> None:
    asked = threading.Event()

    def hang(_asked: Asked) -> Says:
        asked.set()
        web.over.wait(60)
        return Says()

    with web_server(hang) as web:
        process = subprocess.Popen(
            command("status", "--kubeconfig", str(web.kubeconfig(tmp_path))),
            env=environment(tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert asked.wait(30)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PROCESS_SECONDS) == (b"", b"")
        assert process.returncode == 130


@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_top_live(tmp_path: Path, end: str) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with web_server(lambda _asked: json_of({"items": [PENDING]})) as web:
        process = subprocess.Popen(
            command("top", "--watch", "--interval", "50ms", "--kubeconfig", str(web.kubeconfig(tmp_path))),
            env=environment(tmp_path) | {"TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
        )
        screen = ""
        while "n1: its agent's pod is Pending" not in screen or len(web.asked) < 3:
            assert select.select([ours], (), (), 30)[0], screen
            screen += os.read(ours, 65536).decode()
        if end == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert termios.tcgetattr(theirs) == before
        assert process.communicate()[1] == b""
    os.close(ours)
    os.close(theirs)
