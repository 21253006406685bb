"""The length of a resource's device list, chosen so that no pod fails because of a number that was true a moment ago.

The scheduler binds a pod by the number in the node object, and the pod fails for good if the kubelet's list is shorter
than that by then. So a list grows at once, and shrinks only when no pod can be bound by the larger number any more.
Pure: times are seconds on any monotonic clock.
"""

from __future__ import annotations

BELIEVED_SECONDS = 2.0
"""How long after the node object stopped showing a number a pod may still be bound by it."""
UNKNOWN_SECONDS = 15.0
"""How long a list stays too long if the number in the node object is not known: the kubelet writes it every 10 s."""
CALM_SECONDS = 6.0
"""The kubelet writes node status at most every 10 s, and always while its list differs from the node object. For this
long after a write, no other write can be in flight, so the list may shrink."""
NO_WRITE_SECONDS = 30.0
"""How long a list stays too long if the kubelet writes nothing."""
OUT_OF_TOUCH_SECONDS = 600.0
"""How long a list stays too long while the API server cannot be reached: no pod is bound meanwhile, and when it is back
pods are bound by what the node object showed last, before the kubelet or the agent can correct it."""


class DeviceList:
    """Computes the length of one resource's device list."""

    def __init__(self) -> None:
        self._shown: int | None = None
        self._past: dict[int, float] = {}
        """Numbers that the node object showed before, with the time until which a pod may be bound by them."""
        self._too_long_until: float | None = None
        """When the list may shrink if the number in the node object is not known."""
        self._unknown_seconds = UNKNOWN_SECONDS
        self._calm_until = 0.0
        self._no_write_until: float | None = None
        """When a list that is to shrink does so even if the kubelet was not seen to write."""
        self._next: float | None = None
        self.length = 0
        """The length of the list that the kubelet was last given."""

    @property
    def shown(self) -> int | None:
        """The number in the node object; None if it is not known."""
        return self._shown

    def showed(self, number: int | None, now: float, *, in_touch: bool = True) -> None:
        """Note the number in the node object; None: it is not known, or the agent cannot write it.

        `in_touch` is False while the API server cannot be reached.
        """
        self._unknown_seconds = UNKNOWN_SECONDS if in_touch else OUT_OF_TOUCH_SECONDS
        latest = now + (self._unknown_seconds if number is None else BELIEVED_SECONDS)
        if number != self._shown and self._shown is not None:
            self._past[self._shown] = latest
        self._past = {each: min(until, latest) for each, until in self._past.items()}
        if self._too_long_until is not None:
            self._too_long_until = min(self._too_long_until, now + self._unknown_seconds)
        self._shown = number

    def kubelet_wrote(self, now: float) -> None:
        """Note that the kubelet has written the node's status."""
        self._calm_until = now + CALM_SECONDS

    def believed(self, now: float) -> int:
        """Return the largest number by which a pod may still be bound, as far as is known from the node object."""
        self._past = {number: until for number, until in self._past.items() if until > now}
        return max((*self._past, self._shown or 0))

    def plan(self, target: int, now: float) -> int:
        """Return the length of the list from now on, for `target` devices that exist or can be created."""
        believed = self.believed(now)
        if self._shown is not None or target >= self.length:
            self._too_long_until = None
        elif self._too_long_until is None:
            self._too_long_until = now + self._unknown_seconds
        if self._too_long_until is not None and now < self._too_long_until:
            believed = max(believed, self.length)
        self.length = self._delay_shrinking(max(target, believed), now)
        if self.length == target:
            self._too_long_until = None
        moments = (*self._past.values(), self._too_long_until or now, self._no_write_until or now)
        self._next = min((moment for moment in moments if moment > now), default=None)
        return self.length

    def _delay_shrinking(self, length: int, now: float) -> int:
        """Return `length`, or the current length while the kubelet may be writing that one to the node object."""
        if self._shown is None or length >= self.length or now < self._calm_until:
            self._no_write_until = None
        elif self._no_write_until is None:
            self._no_write_until = now + NO_WRITE_SECONDS
        if self._no_write_until is not None and now < self._no_write_until:
            return self.length
        self._no_write_until = None
        return length

    def due(self) -> float | None:
        """Return the time at which the next `plan` may give another length by itself; None: there is none."""
        return self._next

    def withdrawn(self) -> None:
        """Note that the kubelet has forgotten the list, as at its restart."""
        self.length = 0
        self._too_long_until = None
        self._no_write_until = None
