"""The kubelet's abstract device ids: `mig-agent-0`, `mig-agent-1`, ... of each resource. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import count

_BEGINNING = "mig-agent-"
_OURS = re.compile(rf"{_BEGINNING}(0|[1-9][0-9]{{0,8}})", re.ASCII)


def device_id(number: int) -> str:
    """The id with this number, from 0 on."""
    return f"{_BEGINNING}{number}"


def is_ours(device: str) -> bool:
    """Whether this agent, or one before it on this node, made the id."""
    return _OURS.fullmatch(device) is not None


def number_of(device: str) -> int:
    """The number of an id of ours. Raises ValueError for another's."""
    match = _OURS.fullmatch(device)
    if match is None:
        raise ValueError(device)
    return int(match[1])


def listed(total: int, allocated: Collection[str]) -> tuple[str, ...]:
    """The ids that there are for the kubelet: what it has allocated, and the lowest others, `total` if possible.

    An id that a container has is never left out, whatever the total. Ordered by number.
    """
    chosen = set(allocated)
    free = (device for device in map(device_id, count()) if device not in allocated)
    while len(chosen) < total:
        chosen.add(next(free))
    return tuple(sorted(chosen, key=number_of))
