"""An agent with a configuration file that changes while it runs."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.agent import Agent, eventually


class Reloaded(Agent):
    """An agent with a configuration file."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        listen: Sequence[str] = (),
    ) -> None:
        """`text` is what the file holds at the start."""
        self.config = folder / "config.yaml"
        self.config.write_text(text)
        given = ["--config", str(self.config), *flags]
        super().__init__(folder, "a100-40gb:1", flags=given, variables=variables, listen=listen)
        # A flag would win over the file.
        at = self._command.index("--metrics")
        del self._command[at : at + 2]

    def reload(self, text: str) -> dict[str, Any]:
        """Replace the file, send SIGHUP, and return the event that tells the result."""
        before = len(self.told())
        self.config.write_text(text)
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)
        event: dict[str, Any] = eventually(lambda: self.told()[before:], "the configuration is read again")[0]
        return event

    def told(self) -> list[dict[str, Any]]:
        """The events about the configuration."""
        events = self.ask("events", "--since", "1h")["events"]
        return [each for each in events if each["kind"].startswith("config-reload")]
