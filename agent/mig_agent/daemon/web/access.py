"""Access to the web page: by a token, whose file those may read who may open the socket beside it.

A token is made of a key in the state directory and a role: it stays valid after a restart, until the key is another.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.private_dir import refuse_if_replaceable
from mig_agent.adapters.tokens import Tokens
from mig_agent.config import Settings, UnixAddress
from mig_agent.core.errors import ConfigError
from mig_agent.engine.callers import Caller, Role

KEY_FILE = "web.key"
"""The key of the tokens, in the state directory."""
SUFFIX = ".web-token"
_OWNER_READS = 0o400
_WRITE_BITS = 0o222
"""Whoever may write to a socket may connect to it."""
READERS: Mapping[Role, Caller] = {Role.USER: Caller(), Role.ADMIN: Caller(admin=True)}
"""The caller that each role counts as. The users' token is one for all, so it shows what any user may see of others."""


@dataclass(frozen=True, slots=True)
class TokenFile:
    """The file with the token of a role, beside the socket whose permissions it has."""

    socket: Path
    role: Role

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.socket.with_name(f"{self.socket.name}{SUFFIX}")


class Access:
    """The tokens of one agent. `role` may be called from any thread."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = {role: tokens.named(f"web {role.value}") for role in READERS}

    @classmethod
    def of(cls, settings: Settings) -> Access:
        """Write the token files and return the tokens. Blocks. Raises ConfigError if that is impossible, or unsafe."""
        access = cls(Tokens.load_or_make(settings.state_dir / KEY_FILE))
        for each in token_files(settings):
            access.write(each)
        return access

    def role(self, token: str) -> Role | None:
        """Return the role of a token; None if it is none of this agent's."""
        given, found = token.encode(errors="replace"), None
        for role, known in self._tokens.items():  # all of them, in constant time
            if hmac.compare_digest(known.encode(), given):
                found = role
        return found

    def write(self, file: TokenFile) -> None:
        """Write a token file, which is never readable by more than it is to be. Raises ConfigError."""
        temporary = file.path.with_name(f".{file.path.name}.new")
        try:
            refuse_if_replaceable(file.path, "the token", "listen in another folder")
            socket = file.socket.lstat()
            with FAILPOINTS.around("web-token"):
                temporary.unlink(missing_ok=True)  # of an agent that was killed in here
                _write(temporary, f"{self._tokens[file.role]}\n", socket)
            with FAILPOINTS.around("web-token-rename"):
                temporary.replace(file.path)
        except OSError as error:
            raise ConfigError(f"cannot write the token {file.path}: {error.strerror}") from error


def _write(path: Path, text: str, socket: os.stat_result) -> None:
    """Write a new file that those can read who can write to the socket; nothing is left of it if that fails."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as out:
            os.fchown(out.fileno(), -1, socket.st_gid)
            os.fchmod(out.fileno(), _OWNER_READS | (socket.st_mode & _WRITE_BITS) << 1)
            out.write(text)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def token_files(settings: Settings) -> tuple[TokenFile, ...]:
    """Return the files: one beside each Unix socket of `listen`, one beside the administrators' socket."""
    users = [each.path for each in settings.listen if isinstance(each, UnixAddress)]
    return (*(TokenFile(each, Role.USER) for each in users), TokenFile(settings.admin_address.path, Role.ADMIN))


def remove_tokens(settings: Settings) -> None:
    """Remove the token files, as far as they are there."""
    for each in token_files(settings):
        if os.path.lexists(each.path):
            with suppress(OSError), FAILPOINTS.around("web-token-removal"):
                each.path.unlink()
