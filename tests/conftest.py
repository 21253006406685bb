"""What every test needs, wherever it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from support.agent import CHECK_THREADS
from support.figures import figure, pytest_terminal_summary, table
from support.webserver import WebServer, web_server

__all__ = ["figure", "pytest_terminal_summary", "table"]

# A shell that runs this in the background has it ignore Ctrl-C, and whatever the tests start would inherit that.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# Bytecode is kept even where the environment says otherwise: each of the processes that import the agent, and each of
# pytest's, would compile all of it again, which takes longer than the rest of a start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What belongs to the event loop of an agent, here or in a process that a test starts, fails on any other thread.
os.environ[CHECK_THREADS] = "1"

# A loaded machine is no reason to fail, so examples have no deadline. In CI every run tries the same examples: what
# fails there fails everywhere. People's own runs look for new ones.
base = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.register_profile("search", base)
settings.register_profile("ci", base, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "search")


@pytest.fixture(autouse=True)
def no_client_is_left_behind() -> Iterator[None]:
    """A client's thread that outlives its test goes on calling, and disturbs tests that have nothing to do with it."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("mig-agent-"):
            thread.join(timeout=10)
            assert not thread.is_alive(), f"{thread.name} was left behind"


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the machine that the tests run on reaches the settings."""
    for variable in tuple(os.environ):
        if (variable.startswith("MIG_AGENT_") and variable != CHECK_THREADS) or variable == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(variable)


@pytest.fixture
def web() -> Iterator[WebServer]:
    """A web server that answers as the test tells it to."""
    with web_server() as running:
        yield running
