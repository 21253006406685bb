"""How many devices of a resource the kubelet is shown, so that no pod fails for a number that was true a moment ago.

A pod is bound on what the node object shows, and fails for good when the kubelet's list has become shorter than that by
then. So a list grows at once and shrinks only when nobody can believe in the longer one any more. Pure: moments are
seconds on any clock that never goes back.
"""

from __future__ import annotations

BELIEVED_SECONDS = 2.0
"""So long after the node object stopped showing a number a pod may still be bound on it."""
UNKNOWN_SECONDS = 15.0
"""How long a list stays too long where nobody knows what the node object shows: the kubelet tells it every 10 s."""
CALM_SECONDS = 6.0
"""So long after the kubelet wrote the node object it surely does not write it again; it does so every 10 s at most, and
always while its list is not what the node object shows."""
NO_WRITE_SECONDS = 30.0
"""How long a list stays too long for a kubelet that writes nothing."""
OUT_OF_TOUCH_SECONDS = 600.0
"""The same while the API server is away: nobody is bound, and when it is back pods are bound on what the node object
showed last, before the kubelet or the agent can correct it."""


class DeviceList:
    """The list of one resource."""

    def __init__(self) -> None:
        self._shown: int | None = None
        self._past: dict[int, float] = {}
        """What the node object showed before, with the moment until which that is believed."""
        self._too_long_until: float | None = None
        """Where nobody knows what it shows: when the list may shrink."""
        self._patience = UNKNOWN_SECONDS
        self._calm_until = 0.0
        self._no_write_until: float | None = None
        """Where the list is to shrink: when it does so without having seen the kubelet write."""
        self._due: float | None = None
        self.length = 0
        """Of the list as last told to the kubelet."""

    @property
    def shown(self) -> int | None:
        """What the node object shows; None where that is not known."""
        return self._shown

    def showed(self, number: int | None, now: float, *, in_touch: bool = True) -> None:
        """What the node object shows from this moment on; None: nobody knows.

        That is so where the API server is not `in_touch`, or does not take what it is told.
        """
        self._patience = UNKNOWN_SECONDS if in_touch else OUT_OF_TOUCH_SECONDS
        latest = now + (self._patience if number is None else BELIEVED_SECONDS)
        if number != self._shown and self._shown is not None:
            self._past[self._shown] = latest
        self._past = {each: min(until, latest) for each, until in self._past.items()}
        if self._too_long_until is not None:
            self._too_long_until = min(self._too_long_until, now + self._patience)
        self._shown = number

    def kubelet_wrote(self, now: float) -> None:
        """The kubelet has written the status of the node object."""
        self._calm_until = now + CALM_SECONDS

    def believed(self, now: float) -> int:
        """The most that somebody may still believe, as far as the node object tells."""
        self._past = {number: until for number, until in self._past.items() if until > now}
        return max((*self._past, self._shown or 0))

    def plan(self, target: int, now: float) -> int:
        """The length that the list has from now on, for this many devices that there are or can be."""
        believed = self.believed(now)
        if self._shown is not None or target >= self.length:
            self._too_long_until = None
        elif self._too_long_until is None:
            self._too_long_until = now + self._patience
        if self._too_long_until is not None and now < self._too_long_until:
            believed = max(believed, self.length)
        self.length = self._not_now_shorter(max(target, believed), now)
        if self.length == target:
            self._too_long_until = None
        moments = (*self._past.values(), self._too_long_until or now, self._no_write_until or now)
        self._due = min((moment for moment in moments if moment > now), default=None)
        return self.length

    def _not_now_shorter(self, length: int, now: float) -> int:
        """The length, or the list's as it is where the kubelet may just now be writing that to the node object."""
        if self._shown is None or length >= self.length or now < self._calm_until:
            self._no_write_until = None
        elif self._no_write_until is None:
            self._no_write_until = now + NO_WRITE_SECONDS
        if self._no_write_until is not None and now < self._no_write_until:
            return self.length
        self._no_write_until = None
        return length

    def due(self) -> float | None:
        """The moment after the last plan at which it may change by itself; None: at none."""
        return self._due

    def withdrawn(self) -> None:
        """The kubelet has forgotten the list, as when it starts."""
        self.length = 0
        self._too_long_until = None
        self._no_write_until = None
