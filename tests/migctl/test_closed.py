"""Daemons and cron start programs with nothing behind stdout or stderr, or with something that is full."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.agent import PROCESS_SECONDS, Agent, environment, short_folder

MIGCTL = f"{sys.executable} -m mig_agent.migctl"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--version >&-", 0),
        ("--version 2>&- <&-", 0),
        ("plan --gpu-memory 4 >&-", 2),
        ("plan --gpu-memory 4 2>&-", 2),
        ("plan --gpu-memory 4 -o json >/dev/full", 1),
        ("status --address unix:///nowhere >&- 2>&-", 4),
        ("help >/dev/full", 1),
    ],
)
def test_it_ends_as_always_and_without_a_traceback(command: str, code: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{MIGCTL} {command}"], capture_output=True, text=True, check=False, timeout=PROCESS_SECONDS
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr + done.stdout


@pytest.mark.parametrize("command", ["help", "help run", "help connection", "completion bash", "version"])
def test_a_reader_that_has_gone_is_no_failure_to_speak_of(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*MIGCTL.split(), *command.split()], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_is_said_to_be_about_the_output() -> None:
    done = subprocess.run(["sh", "-c", f"{MIGCTL} version >/dev/full"], stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == "migctl: cannot write the output: No space left on device\n"


@pytest.mark.parametrize("output", ["text", "json", "env"])
def test_no_lease_remains_when_stdout_cannot_be_written(output: str) -> None:
    flag = "" if output == "text" else f"-o {output}"
    with short_folder() as folder, Agent(folder) as agent:
        for where, code in ((">&-", 2), (">/dev/full", 1)):
            done = subprocess.run(
                ["sh", "-c", f"{MIGCTL} --address {agent.address} request --gpu-memory 4G {flag} {where}"],
                env=environment(folder),
                capture_output=True,
                text=True,
                check=False,
                timeout=PROCESS_SECONDS,
            )
            assert done.returncode == code, done.stderr
            assert "cannot" in done.stderr
            assert agent.ask("status")["leases"] == []


@pytest.mark.parametrize("output", ["text", "json", "env"])
def test_a_lease_is_printed_in_one_piece(output: str) -> None:
    """Whoever reads the first line of it has been given all, even where each line is written as it comes."""
    flags = [] if output == "text" else ["-o", output]
    with short_folder() as folder, Agent(folder) as agent:
        reading, writing = os.pipe2(os.O_DIRECT)  # which keeps what was written at once apart from the rest
        done = subprocess.run(
            [
                sys.executable,
                "-u",
                "-m",
                "mig_agent.migctl",
                "--address",
                agent.address,
                "request",
                "--gpu-memory",
                "4G",
                *flags,
            ],
            env=environment(folder),
            stdout=writing,
            check=False,
            timeout=PROCESS_SECONDS,
        )
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as pieces:
            whole, rest = pieces.read(65536), pieces.read(65536)
        assert done.returncode == 0
        assert whole is not None
        assert whole.endswith(b"\n")
        assert rest == b""
