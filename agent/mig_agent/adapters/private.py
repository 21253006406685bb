"""A folder that only this process's user can enter: what is in it, nobody else can reach, whatever its own mode."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mig_agent.adapters.crashpoints import CRASH_POINTS
from mig_agent.core.errors import ConfigError

_MODE = 0o700
_OTHERS = 0o077


class PrivateFolder:
    """Open until it is closed; its path may change meanwhile."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> PrivateFolder:
        """Opens the folder, and makes it where it is not there. Its parent must be there.

        Raises ConfigError where it cannot be made, is somebody else's, or lets others in.
        """
        try:
            with CRASH_POINTS.around("private-folder"):
                path.mkdir(mode=_MODE, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot use the folder {path}: {error.strerror}", "see who made it") from error
        there = os.fstat(descriptor)
        if there.st_uid != os.geteuid() or stat.S_IMODE(there.st_mode) & _OTHERS:
            os.close(descriptor)
            raise ConfigError(
                f"cannot use the folder {path}: others than the agent's own user may enter it",
                f"remove it; the agent makes it anew, as its own and with mode {_MODE:04o}",
            )
        return cls(descriptor)

    def path_of(self, name: str) -> str:
        """The path of something in it, for this process: short enough for sockets, wherever the folder is."""
        return f"/proc/self/fd/{self._descriptor}/{name}"

    def close(self) -> None:
        """What is open in it stays open."""
        os.close(self._descriptor)
