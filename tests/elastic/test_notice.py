"""A process is told to yield by a signal or a file."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from mig_agent.elastic.notice import YieldNotice


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_a_notice_and_reaches_who_listened_before(number: signal.Signals) -> None:
    heard = list[int]()

    def listener(number: int, _frame: FrameType | None) -> None:
        heard.append(number)

    signal.signal(number, listener)
    notice = YieldNotice({})
    notice.watch()
    notice.watch()
    given = [notice.is_given]
    os.kill(os.getpid(), number)
    assert [*given, notice.is_given] == [False, True]
    assert heard == [number]
    notice.stop_watching()
    assert signal.getsignal(number) is listener


def test_a_handler_that_came_later_stays() -> None:
    notice = YieldNotice({})
    notice.watch()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    notice.stop_watching()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_until_it_is_asked_a_program_ends_by_sigterm() -> None:
    YieldNotice({})
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forked_process_ends_by_sigterm() -> None:
    """So that `multiprocessing` can end its own."""
    notice = YieldNotice({})
    notice.watch()
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not notice.is_given


def test_elsewhere_than_in_the_main_thread_only_the_file_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notice = YieldNotice({"MIG_AGENT_NOTICE_FILE": str(tmp_path / "notice")})
    thread = threading.Thread(target=notice.watch)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "elastic: signals are not noticed" in capsys.readouterr().err
    (tmp_path / "notice").touch()
    assert notice.is_given


def test_a_file_that_appears_or_changes_is_a_notice(tmp_path: Path) -> None:
    """One that is there at the start was for the process before: obeying it again would be an endless loop."""
    path = tmp_path / "notice"
    environment = {"MIG_AGENT_NOTICE_FILE": str(path)}
    first = YieldNotice(environment)
    told = [first.is_given]
    path.write_text("shrink to 1g.10gb")
    second = YieldNotice(environment)
    told += [first.is_given, second.is_given]
    (tmp_path / "new").write_text("grow to 3g.40gb")
    (tmp_path / "new").rename(path)
    third = YieldNotice(environment)
    told += [second.is_given]
    path.unlink()
    told += [third.is_given]  # the notice is withdrawn
    path.write_text("shrink")
    assert [*told, third.is_given] == [False, True, False, True, False, True]
