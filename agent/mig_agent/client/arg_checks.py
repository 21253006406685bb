"""What a Python program hands over, judged by its type: a wrong one is told in words instead of by protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Final

from mig_agent.client.types import Pod
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import shown

_MOST_REVISION = 2**64 - 1
"""Of the API's uint64."""
_MOST_COUNT = 2**32 - 1
"""Of its uint32."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value may be; its words complete "give"."""

    types: tuple[type, ...]
    words: str
    optional: bool = True
    """Whether None will do."""
    several: bool = False
    """Whether it is a list of them."""

    def check(self, name: str, value: object) -> None:
        """Raises UsageError for another kind of value. `name` is that of the argument."""
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
        # True and False are whole numbers to Python.
        if isinstance(value, bool) or not isinstance(value, self.types):
            raise self._refusal(name, value)

    def _refusal(self, name: str, value: object) -> UsageError:
        what = "None" if value is None else f"{shown(repr(value))}, a {type(value).__name__},"
        return UsageError(f"cannot take {what} as {name}", f"give {self.words}")


TEXT: Final = Kind((str,), "a text", optional=False)
ADDRESS: Final = Kind((str,), "a text such as 'unix:///run/mig-agent/mig-agent.sock'")
MOMENT: Final = Kind((Real,), "seconds since the epoch, as a number")
DURATION: Final = Kind((str, Real), "a text such as '10m', or seconds as a number")
_MAYBE_TEXT: Final = Kind((str,), "a text")
_NUMBER: Final = Kind((Integral,), "a whole number")
_COUNT: Final = Kind((Integral,), "a whole number", optional=False)

ASKING: Final[Mapping[str, Kind]] = {
    "gpu_memory": Kind((str,), "a text such as '4G'"),
    "mig_profile": Kind((str,), "a text such as '2g.10gb'"),
    "gpu_fraction": Kind((str, Real), "a number such as 0.25"),
    "num_gpus": _NUMBER,
    "devices": Kind((str,), "a list of texts, such as ['2g.10gb', '4G']", optional=False, several=True),
    "min_compute": _NUMBER,
    "attributes": Kind((str,), "a list of texts, such as ['+me']", optional=False, several=True),
    "gpus": Kind((str, Integral), "a list of indexes or UUIDs", optional=False, several=True),
    "wait": DURATION,
    "priority": _COUNT,
    "ttl": DURATION,
    "pid": _NUMBER,
    "request_id": _MAYBE_TEXT,
    "tenant": TEXT,
    "name": _MAYBE_TEXT,
    "pod": Kind((Pod,), "a mig_agent.client.Pod"),
    "if_revision": _NUMBER,
}
"""What each argument of a request may be."""


def check_revision(name: str, value: object) -> None:
    """Raises UsageError for what is no revision of a node."""
    _NUMBER.check(name, value)
    if isinstance(value, Integral) and not 0 <= int(value) <= _MOST_REVISION:
        raise UsageError(f"cannot take {int(value)} as {name}", "give a revision as `migctl status` shows it")


def check_count(name: str, value: object) -> None:
    """Raises UsageError for what is no number of things, 0 among them."""
    _COUNT.check(name, value)
    if isinstance(value, Integral) and not 0 <= int(value) <= _MOST_COUNT:
        raise UsageError(f"cannot take {int(value)} as {name}", f"give a number from 0 to {_MOST_COUNT}")
