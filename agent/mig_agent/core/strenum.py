"""`enum.StrEnum`, also for Python 3.10: with that the blocking client runs, and so what it imports."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):  # noqa: UP036 -- the agent needs 3.11, the distribution mig-agent-client does not
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):  # noqa: UP042 -- there is none yet
        """Texts with names; each is equal to, and shown as, its text."""

        __str__ = str.__str__
        __format__ = str.__format__


__all__ = ["StrEnum"]
