"""Trains on GPU instances that shrink, grow and move, and keeps the result.

>>> from mig_agent import elastic
>>> job = elastic.init(256, 64)
>>> job.steps, job.batch_size
(4, 64)

No framework is imported with it. `elastic.torch` and `elastic.keras` import theirs when they are first used.
"""

from __future__ import annotations

from importlib import import_module

from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.elastic.batch_plan import BatchPlan, MicroBatch, plan
from mig_agent.elastic.checkpoints import CheckpointError
from mig_agent.elastic.environment import YIELD_CODE
from mig_agent.elastic.job import Job, Yielded
from mig_agent.elastic.sample_order import Position
from mig_agent.elastic.start import current_job, init

__all__ = [
    "YIELD_CODE",
    "BatchPlan",
    "CheckpointError",
    "Job",
    "MicroBatch",
    "MigAgentError",
    "Position",
    "UsageError",
    "Yielded",
    "current_job",
    "init",
    "plan",
]


def __getattr__(name: str) -> object:
    """Import what belongs to a framework when it is first used."""
    if name in {"keras", "torch"}:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
