"""Advice on what to ask for: what leases of one name asked for, what they used at peak, and what less would have meant.

The claim rests on two replays of the node's history (`core.replay`): once as it was, once with the smaller request.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mig_agent.core.accounting import LEAST_SAMPLES, AccountedUse, Reader
from mig_agent.core.model import NodeView, Profile, Want
from mig_agent.core.planning.blockers import describe_want
from mig_agent.core.planning.profiles import order_of_size, smallest_profile
from mig_agent.core.quantities import counted, format_duration
from mig_agent.core.replay import ReplayedNode, replay, runs_of, wanted

LEAST_RUNS = 3
"""The fewest measured runs that advice rests on."""
_MARGIN = 1.2
"""Peaks are samples, and the next run may need a little more."""
_IDLE_MIB = 64
"""The driver itself takes some memory of a device; a program's context takes more than this."""
_NOTABLE = 1.1
"""So many times less is worth a claim."""
_ROUND = 10
_GIGABYTE = 10**9
_MIB_IN_GIB = 1024


class Verdict(StrEnum):
    """The outcomes of advice. The values are on the wire; never rename one."""

    SMALLER = "smaller"
    """A smaller request would do."""
    FITS = "fits"
    """Nothing smaller on this node would do."""
    TOO_FEW_RUNS = "too-few-runs"
    """There are not enough runs whose use was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The leases of one name and user that asked for the same, the newest last."""

    name: str
    user: str
    uses: tuple[AccountedUse, ...]

    @property
    def want(self) -> Want:
        """Return what the newest of them asked for."""
        return wanted(self.uses[-1])

    @property
    def leases(self) -> frozenset[str]:
        """The ids of the leases."""
        return frozenset(each.lease for each in self.uses)

    @property
    def measured(self) -> tuple[AccountedUse, ...]:
        """The devices with enough samples, on which a program was seen."""
        return tuple(
            each
            for each in self.uses
            if each.peak is not None and each.peak.samples >= LEAST_SAMPLES and each.peak.used_mib >= _IDLE_MIB
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Return what to ask for instead."""

    name: str
    user: str
    verdict: Verdict
    message: str
    """The advice as a sentence."""
    runs: int
    measured_runs: int
    asked: str
    peak_mib: int | None
    """The most that was used in any measured run; None where none was measured."""
    suggestion: str = ""
    """The smaller request, as `--gpu-memory` takes it; empty where there is none."""
    replayed: int = 0
    """Number of leases of the node that were replayed."""
    waited_seconds: float | None = None
    """What these runs waited in the replay as they asked; None where nothing was replayed."""
    waited_less_seconds: float | None = None
    """What they waited in the replay with the smaller request."""


def cases(uses: Iterable[AccountedUse], reader: Reader, name: str) -> tuple[Case, ...]:
    """Return the cases that this reader may see, those that leased the most first; with a name only those of it.

    `name` is the holder's name, or what was given with `--name`: `train` finds `alice (train)`. Leases of one name that
    asked for something else than the newest are left out.
    """
    found: dict[tuple[str, str], list[AccountedUse]] = {}
    for use in sorted(uses, key=lambda each: each.granted_at):
        if reader.owns(use.uid, use.user) and (not name or use.name == name or use.name.endswith(f" ({name})")):
            found.setdefault((use.user, use.name), []).append(use)
    made = []
    for (user, label), each in found.items():
        newest = _shape(wanted(each[-1]))
        alike = tuple(use for use in each if _shape(wanted(use)) == newest)
        made.append(Case(name=label, user=user, uses=alike))
    return tuple(sorted(made, key=lambda case: -sum(use.device.memory_mib * use.seconds for use in case.uses)))


def _shape(want: Want) -> Want:
    return replace(want, text="")


def advise(case: Case, uses: Sequence[AccountedUse], node: ReplayedNode) -> Generator[None, None, Advice]:
    """Return the advice for a case, from the history of the node; yields between steps, as `replay` does."""
    measured = case.measured
    peak = max((each.peak.used_mib for each in measured if each.peak is not None), default=None)
    runs, measured_runs = len(case.leases), len({each.lease for each in measured})
    asked = case.want.text or describe_want(case.want)
    facts = f"{case.name}: asked {asked}"
    base = Advice(
        name=case.name,
        user=case.user,
        verdict=Verdict.TOO_FEW_RUNS,
        message=f"{facts}; a program's use was measured in {measured_runs} of {counted(runs, 'run')}, and advice takes "
        f"{LEAST_RUNS}",
        runs=runs,
        measured_runs=measured_runs,
        asked=asked,
        peak_mib=peak,
    )
    if peak is None or measured_runs < LEAST_RUNS:
        return base
    facts += f", peak {_memory(peak)} in {counted(measured_runs, 'run')}"
    smaller = _smaller(case.want, peak)
    before, after = _profiles(node.view, case.want), _profiles(node.view, smaller)
    gain = min(
        ((was, now) for was, now in zip(before, after, strict=True) if _is_smaller(now, was)), default=None, key=_size
    )
    if gain is None:
        message = f"{facts}: no smaller device of this node would do"
        return replace(base, verdict=Verdict.FITS, message=message)
    runs_before = runs_of(uses)
    runs_after = tuple(
        replace(run, wants=tuple(smaller if _shape(want) == _shape(case.want) else want for want in run.wants))
        if run.lease in case.leases
        else run
        for run in runs_before
    )
    waits, waits_less = (yield from replay(node, runs_before)), (yield from replay(node, runs_after))
    both = waits.keys() & waits_less.keys() & case.leases
    waited, waited_less = sum(waits[each] for each in both), sum(waits_less[each] for each in both)
    was, now = gain
    compute = ""
    if was is not None and now is not None and now.compute_slices < was.compute_slices:
        compute = (
            f". {now.name} has {counted(now.compute_slices, 'compute slice')} where {was.name} has "
            f"{was.compute_slices}, so runs may take longer"
        )
    return replace(
        base,
        verdict=Verdict.SMALLER,
        message=f"{facts}: {smaller.text} {_claim(waited, waited_less)}{compute}",
        suggestion=smaller.text,
        replayed=len(waits),
        waited_seconds=waited,
        waited_less_seconds=waited_less,
    )


def _smaller(want: Want, peak_mib: int) -> Want:
    gigabytes = max(1, math.ceil((peak_mib << 20) * _MARGIN / _GIGABYTE))
    return Want(
        memory_bytes=gigabytes * _GIGABYTE,
        min_compute_slices=want.min_compute_slices,
        attributes=want.attributes,
        text=f"{gigabytes}G",
    )


def _profiles(view: NodeView, want: Want) -> tuple[Profile | None, ...]:
    return tuple(smallest_profile(want, gpu.layout) for gpu in view.gpus)


def _is_smaller(now: Profile | None, was: Profile | None) -> bool:
    return now is not None and was is not None and now.memory_mib < was.memory_mib


def _size(gain: tuple[Profile | None, Profile | None]) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if gain[1] is None else order_of_size(gain[1])


def _claim(waited: float, waited_less: float) -> str:
    """Return what the smaller request would have meant, as the rest of a sentence."""
    if waited < 1:
        return "would do, and leave more to others; it would not have waited less, since it did not wait"
    if waited_less < 1:
        return f"would not have waited, where it waited {format_duration(waited)} in all"
    times = waited / waited_less
    if times < _NOTABLE:
        return f"would do, and leave more to others; it would have waited as long ({format_duration(waited_less)})"
    shown = f"{times:.1f}".removesuffix(".0") if times < _ROUND else f"{times:.0f}"
    return (
        f"would have waited {shown} times less ({format_duration(waited_less)} in all, not {format_duration(waited)})"
    )


def _memory(mib: int) -> str:
    return f"{mib / _MIB_IN_GIB:.1f}Gi" if mib >= _MIB_IN_GIB else f"{mib}Mi"
