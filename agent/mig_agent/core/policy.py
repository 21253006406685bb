"""What a node's administrator may set about planning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How plans are weighed. Costs are in units of remaining capacity: memory slices summed over free windows."""

    creation_cost: float = 2.0
    """What creating an instance costs against reusing an idle one; towards 8 where creating is slow."""
    search_limit: int = 1000
    """How many GPUs are looked at, again and again, to better a plan of several devices. It bounds optimising, never
    whether a plan is found."""


DEFAULT_POLICY = Policy()
