"""Contexts: names that people give to agents, with the address and certificate files of each.

    current_context: gpu3
    contexts:
      gpu3:
        address: gpu3.example.com:7400
        tls_ca: ca.crt
        tls_cert: alice.crt
        tls_key: alice.key

Each user has a file of them, `mig-agent/contexts.yaml` in $XDG_CONFIG_HOME (~/.config), and a system may have one in
$XDG_CONFIG_DIRS (/etc/xdg). Files hold the names of key files and never a key.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.core.errors import ConfigError
from mig_agent.core.quantities import shown

TLS_FILES = ("tls_ca", "tls_cert", "tls_key")
KEYS = ("address", *TLS_FILES, "tls_server_name")
"""The entry of a context in a file."""
FILE_NAME = Path("mig-agent") / "contexts.yaml"
CONTEXTS_KEY, CURRENT_KEY = "contexts", "current_context"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_SYSTEM_FOLDERS = "/etc/xdg"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """One context, as its file has it."""

    name: str
    file: Path
    address: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    """The line of each key that is set; that of the name under the empty text."""
    mistake: str = ""
    """Why it cannot be used, with the place; empty if it can."""
    hint: str = ""

    def place(self, key: str = "") -> str:
        """Return where a key is written, or the context itself: `/etc/xdg/mig-agent/contexts.yaml, line 4`."""
        line = self.lines.get(key) or self.lines.get("")
        return f"{self.file}, line {line}" if line else str(self.file)

    def tls_file(self, key: str) -> str:
        """Return the path of a file of TLS_FILES; relative ones begin at the folder of the contexts' file."""
        written: str = getattr(self, key)
        return str(self.file.parent / Path(written).expanduser()) if written else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFile:
    """The contents of one file."""

    path: Path
    contexts: Mapping[str, AgentContext] = field(default_factory=dict)
    current: str | None = None
    """The current context, empty for none; None if the file does not say."""
    current_line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """The contexts of all files: those of the user's file come before those of the system."""

    files: tuple[ContextFile, ...]

    @property
    def by_name(self) -> Mapping[str, AgentContext]:
        """All contexts, the user's first."""
        found: dict[str, AgentContext] = {}
        for each in self.files:
            found |= {name: context for name, context in each.contexts.items() if name not in found}
        return found

    @property
    def current(self) -> tuple[str, str]:
        """The name of the current context and where it is set; an empty name if none is."""
        for each in self.files:
            if each.current is not None:
                return each.current, f"{CURRENT_KEY} in {each.path}, line {each.current_line}"
        return "", ""


def user_file(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of this user's file; None for a person without a home folder."""
    given = environment.get("XDG_CONFIG_HOME", "")
    if given.startswith("/"):  # the XDG specification says to ignore relative paths
        return Path(given) / FILE_NAME
    try:
        return Path.home() / ".config" / FILE_NAME
    except RuntimeError:
        return None


def system_files(environment: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return the paths of the system's files, the most important first."""
    folders = (environment.get("XDG_CONFIG_DIRS") or _SYSTEM_FOLDERS).split(":")
    return tuple(Path(each) / FILE_NAME for each in folders if each.startswith("/"))


def read_contexts(environment: Mapping[str, str] = os.environ) -> Contexts:
    """Return the contexts of this user and of the system. Raises ConfigError for a file that cannot be read.

    A mistake in one context is kept with it, so that the others can be used.
    """
    own = user_file(environment)
    paths = (*([] if own is None else [own]), *system_files(environment))
    return Contexts(files=tuple(map(_read, paths)))


def _read(path: Path) -> ContextFile:
    """Return what a file says; none if there is no such file. Most people have none, and import no YAML."""
    if not path.exists():
        return ContextFile(path=path)
    from mig_agent.adapters.context_yaml import parse_file  # noqa: PLC0415 -- see above

    return parse_file(path)


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of a context."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"cannot name a context {shown(name) or 'with an empty text'}",
            "up to 63 letters, digits, dots, hyphens and underscores, the first one a letter or a digit",
        )


def change_file(change: Callable[[ContextFile], ContextFile], environment: Mapping[str, str] = os.environ) -> None:
    """Replace this user's file by what `change` makes of it, all of it or nothing. Raises ConfigError.

    Two programs that do so at once do it one after the other. Killed at any moment, this leaves the file as it was or
    as it should be. A file that is a link stays one.
    """
    from mig_agent.adapters.context_yaml import dump_file  # noqa: PLC0415 -- see `_read`

    path = user_file(environment)
    if path is None:
        raise ConfigError("cannot write your contexts: you have no home folder", "set HOME or XDG_CONFIG_HOME")
    try:
        target = Path(os.path.realpath(path))
        with _locked(target):
            before = _read(path)
            for each in before.contexts.values():
                if each.mistake:
                    raise ConfigError(f"cannot change {path}: {each.mistake}", each.hint or "mend that first")
            _write(target, dump_file(change(before)))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}", "set XDG_CONFIG_HOME to a folder that you may write in"
        ) from error


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    with FAILPOINTS.around("contexts-folder"):
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FAILPOINTS.around("contexts-lock"):
        lock = os.open(target.with_name(f".{target.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(target: Path, text: str) -> None:
    """Replace the file by rename, synced before and after."""
    fresh = target.with_name(f".{target.name}.new")  # one name under the lock: a crash leaves at most one behind
    with FAILPOINTS.around("contexts-file"):
        fresh.unlink(missing_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
    with FAILPOINTS.around("contexts-rename"):
        fresh.replace(target)
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
