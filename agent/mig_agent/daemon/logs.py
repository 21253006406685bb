"""Logs with structlog: text for people at a terminal, one JSON object per line otherwise."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

from mig_agent.config import Settings
from mig_agent.core.events import Event, EventKind
from mig_agent.core.texts import visible
from mig_agent.daemon.journal_stream import is_journal, with_priority
from mig_agent.daemon.log_limit import LEFT_OUT, OncePerMinute
from mig_agent.daemon.log_writer import LogWriter

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_WARNINGS = frozenset(
    {
        EventKind.INSTANCE_BLOCKED,
        EventKind.INSTANCE_LOST,
        EventKind.LEASE_DEGRADED,
        EventKind.STEP_FAILED,
        EventKind.GPU_CORDONED,
        EventKind.PROFILE_DIFFERS,
        EventKind.ACCESS_DENIED,
    }
)
_ERRORS = frozenset(
    {
        EventKind.GPU_LOST,
        EventKind.LEDGER_FAILED,
        EventKind.LEDGER_QUARANTINED,
        EventKind.LEDGER_RESTORED,
        EventKind.CERTIFICATE_RELOAD_FAILED,
        EventKind.CONFIG_RELOAD_FAILED,
        EventKind.DRIVER_UNAVAILABLE,
        EventKind.SOCKET_LOST,
    }
)
_DETAILS = frozenset({EventKind.INSTANCE_REUSED, EventKind.LEASE_RENEWED})
"""Kinds logged at debug level, since another event reports the same to most readers."""
_BATCH_SECONDS = 0.02
_STANDARD_ERROR = 2
_LONGEST_UNFINISHED = 65_536
"""Limit in characters of an unfinished line of `sys.stderr` that waits for its end."""


class _MinimumLevel:
    """Drops less important messages; a processor of structlog whose level can change while loggers exist."""

    def __init__(self, level: str) -> None:
        self.level = _LEVELS[level]

    def __call__(self, _logger: object, name: str, fields: EventDict) -> EventDict:
        """Return the fields of a message that is important enough. Raises DropEvent for another."""
        if _LEVELS.get(name, logging.CRITICAL) < self.level:
            raise structlog.DropEvent
        return fields


class Log:
    """The log of this process."""

    def __init__(self, writer: LogWriter | None, minimum: _MinimumLevel) -> None:
        """`writer` is None where lines go to a stream."""
        self._writer = writer
        self._minimum = minimum

    @property
    def dropped(self) -> int:
        """Number of lines dropped so far."""
        return 0 if self._writer is None else self._writer.dropped

    def set_level(self, level: str) -> None:
        """Log messages from this level on: `debug`, `info`, `warning` or `error`."""
        self._minimum.level = _LEVELS[level]
        logging.getLogger().setLevel(_library_level(level))

    def close(self, seconds: float) -> None:
        """Write what is queued, for at most `seconds`. Nothing is written afterwards."""
        if self._writer is not None:
            self._writer.close(seconds)


def _library_level(level: str) -> int:
    """Return the level for libraries (gRPC, asyncio): their `info` messages are of no use."""
    return max(logging.WARNING, _LEVELS[level])


def configure(settings: Settings, stream: TextIO | None = None) -> Log:
    """Send all logs of this process to standard error, by a thread, or to the stream.

    Lines for systemd's journal begin with their priority.

    Without a stream this includes logs of libraries, Python's warnings, uncaught exceptions in threads and finalisers,
    and text written to `sys.stderr`.
    """
    out = stream or sys.stderr
    is_terminal = out is not None and out.isatty()
    as_text = settings.log_format == "text" or (settings.log_format == "auto" and is_terminal)
    minimum = _MinimumLevel(settings.log_level)
    processors: list[Processor] = [
        minimum,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not as_text),
        structlog.processors.format_exc_info,
        _escaped,
    ]
    if as_text:
        plain = structlog.dev.plain_traceback
        console = structlog.dev.ConsoleRenderer(colors=is_terminal, exception_formatter=plain, sort_keys=False)
        processors += [_hint_in_message, console]
    else:
        processors.append(structlog.processors.JSONRenderer(ensure_ascii=False, default=_to_text))
    if stream is None and is_journal():
        processors.append(_prioritised)
    writer = None
    if stream is None:
        writer = LogWriter(_STANDARD_ERROR, functools.partial(_format_dropped, processors))
        write: Callable[[str], object] = writer.write
    else:
        write = stream.write
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=lambda *_: _LineLogger(write),
        cache_logger_on_first_use=True,
    )
    handler = _ToStructlog()
    handler.addFilter(OncePerMinute())
    logging.basicConfig(handlers=[handler], level=_library_level(settings.log_level), force=True)
    if stream is None:
        _redirect_standard_error()
    return Log(writer, minimum)


def _hint_in_message(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Put the hint of an error into its message, as all messages for people have it."""
    hint = event.pop("hint", "")
    if hint:
        event["event"] = f"{event.get('event', '')}. Hint: {hint}"
    return event


def _redirect_standard_error() -> None:
    """Send other output for standard error to the log, too.

    A pipe without a reader would block every thread that writes to it, and a full disk would raise there.
    """
    logging.captureWarnings(capture=True)
    logging.raiseExceptions = False  # otherwise a record that cannot be formatted writes to stderr
    threading.excepthook = _log_thread_failure
    sys.unraisablehook = _log_unraisable
    sys.stderr = _StandardErrorLines()


def _log_thread_failure(failure: threading.ExceptHookArgs) -> None:
    if failure.exc_value is not None and failure.exc_type is not SystemExit:
        name = "unknown" if failure.thread is None else failure.thread.name
        structlog.get_logger("threads").error("a thread ended unexpectedly", thread=name, exc_info=failure.exc_value)


def _log_unraisable(failure: sys.UnraisableHookArgs) -> None:
    what = failure.err_msg or "Exception ignored in"
    about = repr(failure.object)
    structlog.get_logger("python").error("uncaught exception", where=f"{what}: {about}", exc_info=failure.exc_value)


class _StandardErrorLines(io.TextIOBase):
    """Replaces `sys.stderr`: each line written to it becomes a line of the log."""

    def __init__(self) -> None:
        self._unfinished = ""

    def fileno(self) -> int:
        """Return standard error's descriptor, for child processes."""
        return _STANDARD_ERROR

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str) -> int:
        """Log each complete line and keep the rest until its end comes."""
        *lines, unfinished = f"{self._unfinished}{text}".split("\n")
        self._unfinished = unfinished[-_LONGEST_UNFINISHED:]
        for line in filter(None, lines):
            structlog.get_logger("stderr").warning(line, logger="stderr")
        return len(text)


class _LineLogger:
    """The logger that structlog calls with each finished line."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def msg(self, line: str) -> None:
        """Write the line."""
        self._write(line + "\n")

    log = debug = info = warn = warning = error = critical = exception = fatal = msg


def _format_dropped(processors: Sequence[Processor], lines: int) -> str:
    words = f"{lines} log line{' was' if lines == 1 else 's were'} dropped"
    line: Any = {"event": words, "dropped": lines}
    for each in processors:
        line = each(None, "warning", line)
    return f"{line}\n"


def _prioritised(_logger: object, name: str, line: Any) -> str:  # noqa: ANN401 -- what the renderer returned
    """Put the level's priority before a rendered line. A processor of structlog."""
    return with_priority(str(line), name)


def _escaped(_logger: object, _name: str, fields: EventDict) -> EventDict:
    """Escape all values: foreign text must not move a cursor, hide, or start a new line. A processor of structlog."""
    for name, value in fields.items():
        if name == "exception":
            fields[name] = "\n".join(map(visible, str(value).split("\n")))
        elif isinstance(value, str):
            fields[name] = visible(value)
        elif isinstance(value, (list, tuple, dict)):
            fields[name] = _visible_within(value)
    return fields


def _visible_within(value: object) -> object:
    match value:
        case str():
            return visible(value)
        case dict():
            return {visible(str(name)): _visible_within(each) for name, each in value.items()}
        case list() | tuple():
            return [_visible_within(each) for each in value]
        case _:
            return value


def _to_text(value: object) -> str:
    """Return a text for a value that JSON cannot represent."""
    return visible(repr(value))


class _ToStructlog(logging.Handler):
    """Passes records of libraries on to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record, whatever its level and arguments."""
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 -- a library's mistake in a message must not raise where it logs
            message = str(record.msg)
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
        left_out = {LEFT_OUT: number} if (number := getattr(record, LEFT_OUT, 0)) else {}
        structlog.get_logger().log(level, message, logger=record.name, exc_info=record.exc_info, **left_out)


class EventLog:
    """Logs the node's events; an observer of the manager. Not thread-safe; use from the event loop.

    Ordinary events are written together a moment later, so that no answer waits for a log line. The ledger has them
    already.
    """

    def __init__(self) -> None:
        self._log = structlog.get_logger("events")
        self._pending: list[Event] = []

    def __call__(self, event: Event) -> None:
        """Log an event by its message."""
        self._pending.append(event)
        if event.kind in _ERRORS or event.kind in _WARNINGS:
            self.flush()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_later(_BATCH_SECONDS, self.flush)

    def flush(self) -> None:
        """Write the collected events in order."""
        events, self._pending = self._pending, []
        for event in events:
            self._write(event)

    def _write(self, event: Event) -> None:
        facts: dict[str, object] = {"event_kind": event.kind.value, "revision": event.revision}
        named: dict[str, object] = {"gpu": event.gpu_index, "lease": event.lease, "holder": event.holder or None}
        # The caller who caused it, if any.
        named |= {name: event.data.get(name) for name in ("by", "role", "uid", "pid", "method")}
        facts |= {name: value for name, value in named.items() if value is not None}
        if event.kind in _ERRORS:
            self._log.error(event.message, **facts)
        elif event.kind in _WARNINGS:
            self._log.warning(event.message, **facts)
        elif event.kind in _DETAILS:
            self._log.debug(event.message, **facts)
        else:
            self._log.info(event.message, **facts)
