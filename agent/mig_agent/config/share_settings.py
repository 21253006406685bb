"""The settings of shares of GPUs without MIG mode."""

# ruff: noqa: RUF009 -- setting() makes a dataclasses.field, which is no default that instances share

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mig_agent.config import field_types
from mig_agent.config.field_types import setting
from mig_agent.config.fractions import CHOICES, FractionsByGpu

_SHARES = "Shares of GPUs without MIG mode"


@dataclass(frozen=True, kw_only=True)
class ShareSettings:
    """Settings for serving requests by memory and fraction where there is no MIG instance."""

    fractions: Literal["auto", "cgroup", "mps", "off"] = setting(
        "auto",
        "How GPUs without MIG mode may be shared, by who enforces the memory limits: the driver (`cgroup`, from 615 "
        "on), a daemon of `mps` for each share, or `auto`: the first of them that works. `off` leases them whole only. "
        "See fractions.md.",
        kind=field_types.choice(*CHOICES),
        group=_SHARES,
        example="mps",
        live=True,
    )
    fractions_by_gpu: FractionsByGpu = setting(
        (),
        "The same for single GPUs, by index or UUID.",
        kind=field_types.FRACTIONS_BY_GPU,
        group=_SHARES,
        example="{0: mps, 1: off}",
        when_unset="`fractions` for all",
        live=True,
    )
    share_headroom: int = setting(
        512,
        "Memory of each shared GPU that no share gets, beside what the driver reserves.",
        kind=field_types.MIB,
        group=_SHARES,
        example="512Mi",
        live=True,
    )
    least_share: int = setting(
        1024,
        "The smallest memory limit of a share; requests for less get this much. A CUDA context alone takes up to "
        "0.8Gi of it.",
        kind=field_types.MIB,
        group=_SHARES,
        example="1Gi",
        live=True,
    )
    isolation: Literal["any", "mig"] = setting(
        "any",
        "For requests by memory or fraction that do not say: `any` serves them by a share of a GPU where no MIG "
        "instance fits, `mig` never does.",
        kind=field_types.choice("any", "mig"),
        group=_SHARES,
        example="mig",
        live=True,
    )
