"""When certificates are looked at: before a connection goes on, and however long the files take to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from mig_agent.adapters.transport.tls import Certificates, Renewal
from mig_agent.daemon import cert_reload
from mig_agent.daemon.cert_reload import CertificateReloader

TAKEN = Renewal(words="the clients' authority was renewed", taken=True, revokes=True)
KEPT = Renewal(words="cannot read the file; the former certificates stay in use", taken=False)


class Files:
    """Stands for the certificates; each look waits until it may end, and finds what it is told."""

    def __init__(self, *found: Renewal | None) -> None:
        self.found = list(found)
        self.looks = 0
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def reload(self) -> Renewal | None:
        self.looks += 1
        self.began.set()
        self.may_end.wait()
        return self.found.pop(0) if self.found else None


@contextmanager
def looking_at(files: Files, told: list[Any]) -> Iterator[CertificateReloader]:
    found = CertificateReloader(cast("Certificates", files), lambda: told.append("closed"))
    found.report_to(told.append)
    try:
        yield found
    finally:
        files.may_end.set()
        found.stop()


async def test_connections_of_before_are_closed_when_a_look_has_found_that_an_authority_is_gone() -> None:
    """Before the look returns, and with it before the connection that it was for goes on."""
    told: list[Any] = []
    with looking_at(Files(TAKEN), told) as found:
        await found.check()
    assert told == ["closed", TAKEN]


async def test_nothing_is_closed_where_the_former_ones_stay() -> None:
    told: list[Any] = []
    with looking_at(Files(KEPT), told) as found:
        await found.check()
    assert told == [KEPT]


async def test_who_comes_during_a_look_gets_one_that_began_later() -> None:
    """The one that is under way may have looked before the files changed; those who wait share the next."""
    files = Files(None, TAKEN)
    files.may_end.clear()
    told: list[Any] = []
    with looking_at(files, told) as found:
        first = asyncio.create_task(found.check())
        assert await asyncio.to_thread(files.began.wait, 30)
        others = [asyncio.create_task(found.check()) for _ in range(20)]
        await asyncio.sleep(0)
        files.may_end.set()
        await asyncio.gather(first, *others)
    assert files.looks == 2
    assert told == ["closed", TAKEN]


async def test_files_that_do_not_answer_keep_no_connection_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cert_reload, "_CHECK_TIMEOUT_SECONDS", 0.01)
    files = Files()
    files.may_end.clear()
    with looking_at(files, []) as found:
        for _ in range(3):
            await found.check()
        assert files.looks == 1


async def test_they_are_looked_at_also_where_nobody_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cert_reload, "CHECK_SECONDS", 0.0)
    seen = asyncio.Event()
    found = CertificateReloader(cast("Certificates", Files(TAKEN)), seen.set)
    found.start()
    try:
        async with asyncio.timeout(30):
            await seen.wait()
    finally:
        found.stop()
