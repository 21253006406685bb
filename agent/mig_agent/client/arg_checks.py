"""Type checks of arguments, so that a wrong type gives a message for people instead of protobuf's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final

from mig_agent.client.types import Grant, LeaseInfo, Pod, Waiting
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown

_MOST_REVISION = 2**64 - 1
"""Largest uint64, as the API's revisions."""
_MOST_COUNT = 2**32 - 1
"""Largest uint32, as the API's counts."""


@dataclass(frozen=True, slots=True)
class ArgType:
    """Types that an argument may have; `words` completes "give"."""

    types: tuple[type, ...]
    words: str
    optional: bool = True
    """True if None is allowed."""
    several: bool = False
    """True if it is a list of such values."""

    def check(self, name: str, value: object) -> None:
        """Raise UsageError if the value of the argument `name` has another type."""
        if value is None and self.optional:
            return
        if not self.several:
            self._check_one(name, value)
        elif isinstance(value, str):
            raise UsageError(f"cannot take one text as {name}", f"give a list: {name}=[{value!r}]")
        elif not isinstance(value, Iterable):
            raise self._refusal(name, value)
        else:
            for each in value:
                self._check_one(f"one of {name}", each)

    def _check_one(self, name: str, value: object) -> None:
        # True and False are integers to Python.
        if isinstance(value, bool) or not isinstance(value, self.types):
            raise self._refusal(name, value)

    def _refusal(self, name: str, value: object) -> UsageError:
        kind = type(value).__name__
        article = "an" if kind[0].lower() in "aeiou" else "a"
        what = "None" if value is None else f"{shown(repr(value))}, {article} {kind},"
        return UsageError(f"cannot take {what} as {name}", f"give {self.words}")


TEXT: Final = ArgType((str,), "a text", optional=False)
LEASE: Final = ArgType(
    (str, LeaseInfo, Grant), "its id, or the lease itself (Lease, LeaseInfo or Grant)", optional=False
)
WAITING: Final = ArgType((str, Waiting), "its id, or the request of Status.queue itself", optional=False)
ADDRESS: Final = ArgType((str,), "a text such as 'unix:///run/mig-agent/mig-agent.sock'")
MOMENT: Final = ArgType((Real,), "seconds since the epoch, as a number")
DURATION: Final = ArgType((str, Real), "a text such as '10m', or seconds as a number")
_MAYBE_TEXT: Final = ArgType((str,), "a text")
_NUMBER: Final = ArgType((Integral,), "a whole number")
_COUNT: Final = ArgType((Integral,), "a whole number", optional=False)

REQUEST_ARGS: Final[Mapping[str, ArgType]] = {
    "gpu_memory": ArgType((str,), "a text such as '4G'"),
    "mig_profile": ArgType((str,), "a text such as '1g.10gb'"),
    "gpu_fraction": ArgType((str, Real), "a number such as 0.25"),
    "num_gpus": _NUMBER,
    "devices": ArgType((str,), "a list of texts, such as ['1g.10gb', '4G']", optional=False, several=True),
    "min_compute": _NUMBER,
    "attributes": ArgType((str,), "a list of texts, such as ['+me']", optional=False, several=True),
    "isolation": ArgType((str,), "'any' or 'mig'"),
    "compute": ArgType((str, Integral), "a text such as '25%'"),
    "gpus": ArgType((str, Integral), "a list of indexes or UUIDs", optional=False, several=True),
    "wait": DURATION,
    "priority": _COUNT,
    "ttl": DURATION,
    "pid": _NUMBER,
    "request_id": _MAYBE_TEXT,
    "tenant": TEXT,
    "name": _MAYBE_TEXT,
    "pod": ArgType((Pod,), "a mig_agent.client.Pod"),
    "if_revision": _NUMBER,
}
"""Types of each argument of a request."""


def check_revision(name: str, value: object) -> None:
    """Raise UsageError unless the value is a revision of a node or None."""
    _NUMBER.check(name, value)
    if isinstance(value, Integral) and not 0 <= int(value) <= _MOST_REVISION:
        raise UsageError(f"cannot take {int(value)} as {name}", "give a revision as `migctl status` shows it")


def check_count(name: str, value: object) -> None:
    """Raise UsageError unless the value is a count, from 0."""
    _COUNT.check(name, value)
    if isinstance(value, Integral) and not 0 <= int(value) <= _MOST_COUNT:
        raise UsageError(f"cannot take {int(value)} as {name}", f"give a number from 0 to {_MOST_COUNT}")
