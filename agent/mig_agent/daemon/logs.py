"""Logs with structlog: text for people at a terminal, one JSON object a line for everything else."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from mig_agent.config import Settings
from mig_agent.core.event import Event, EventKind
from mig_agent.daemon.loglimit import LEFT_OUT, OncePerMinute

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_WARNINGS = frozenset(
    {
        EventKind.INSTANCE_BLOCKED,
        EventKind.INSTANCE_LOST,
        EventKind.LEASE_REDUCED,
        EventKind.STEP_FAILED,
        EventKind.GPU_CORDONED,
        EventKind.PROFILE_DIFFERS,
        EventKind.ACCESS_DENIED,
    }
)
_ERRORS = frozenset(
    {EventKind.GPU_LOST, EventKind.LEDGER_FAILED, EventKind.LEDGER_SET_ASIDE, EventKind.CERTIFICATES_KEPT}
)
_DETAILS = frozenset({EventKind.INSTANCE_REUSED, EventKind.LEASE_RENEWED})
"""Another event tells the same to most readers."""
_TOGETHER_SECONDS = 0.02


def configure(settings: Settings, stream: TextIO | None = None) -> None:
    """Sends all logs of this process, those of libraries included, to standard error or the stream."""
    out = stream or sys.stderr
    as_text = settings.log_format == "text" or (settings.log_format == "auto" and out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not as_text),
    ]
    finish: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback, sort_keys=False
            )
        ]
        if as_text
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(ensure_ascii=False)]
    )
    structlog.configure(
        processors=[*shared, *finish],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[settings.log_level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=True,
    )
    # Libraries (gRPC, asyncio) log through the standard library; what they have to say at `info` nobody needs.
    handler = _ToStructlog()
    handler.addFilter(OncePerMinute())
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, _LEVELS[settings.log_level]), force=True)


class _ToStructlog(logging.Handler):
    """Passes a library's records on."""

    def emit(self, record: logging.LogRecord) -> None:
        """One record."""
        log = structlog.get_logger()
        left_out = {LEFT_OUT: number} if (number := getattr(record, LEFT_OUT, 0)) else {}
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info, **left_out)


class EventLog:
    """Writes what happens on the node; an observer of the manager. Belongs to the event loop.

    Ordinary events are written a moment later, together: nobody's answer waits for a line of the log. The ledger has
    them already.
    """

    def __init__(self) -> None:
        self._log = structlog.get_logger("events")
        self._unwritten: list[Event] = []

    def __call__(self, event: Event) -> None:
        """One event, in its own words."""
        self._unwritten.append(event)
        if event.kind in _ERRORS or event.kind in _WARNINGS:
            self.flush()
        elif len(self._unwritten) == 1:
            asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, self.flush)

    def flush(self) -> None:
        """Writes what has gathered, in its order."""
        events, self._unwritten = self._unwritten, []
        for event in events:
            self._write(event)

    def _write(self, event: Event) -> None:
        facts: dict[str, object] = {"event_kind": event.kind.value, "revision": event.revision}
        named: dict[str, object] = {"gpu": event.gpu_index, "lease": event.lease, "holder": event.holder or None}
        # Who called for it, where somebody did.
        named |= {name: event.data.get(name) for name in ("by", "role", "uid", "pid", "method")}
        facts |= {name: value for name, value in named.items() if value is not None}
        if event.kind in _ERRORS:
            self._log.error(event.words, **facts)
        elif event.kind in _WARNINGS:
            self._log.warning(event.words, **facts)
        elif event.kind in _DETAILS:
            self._log.debug(event.words, **facts)
        else:
            self._log.info(event.words, **facts)
