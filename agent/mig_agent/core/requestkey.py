"""By what a request is known: its id, among those of its caller."""

from __future__ import annotations

from typing import Final, NamedTuple, NewType

RequestId = NewType("RequestId", str)
Asker = NewType("Asker", str)
"""Whose request ids: `uid 1000`, `name slurm`."""
NOT_GIVEN: Final = RequestId("")
NOT_RECORDED: Final = Asker("")
"""Who asked for a lease that a version before this one has recorded."""


class RequestKey(NamedTuple):
    """One request: two callers may well use the same id."""

    asker: Asker
    id: RequestId
