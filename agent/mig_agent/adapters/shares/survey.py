"""The survey of a GPU that can be shared: on which terms, whether its shares hold, and which processes use what."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml import Driver
from mig_agent.adapters.shares.enforcer import Enforcer, Share
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.core.observation import ObservedGpu, ObservedSharing, ProcessUsage
from mig_agent.core.shares import Enforcement, ShareRules, ShareTerms

_LOST = frozenset({DriverErrorKind.NOT_FOUND, DriverErrorKind.READ_BACK})
"""Errors of a check after which the limit of a share does not hold; after others it is not known."""
_MOST_SECONDS = 2.0
"""The time after which no further share is checked in one survey."""
_MPS_SERVER = "nvidia-cuda-mps-server"
"""The program whose memory is in the overhead of shares: it is neither a client nor a stranger."""
_OTHERS_STEP_MIB = 64
"""The memory that others use is rounded up to this, lest every change of it change the GPU's layout."""


_UsersKey = tuple[frozenset[int], frozenset[Generation]]


class ShareSurvey:
    """Finds out how GPUs without MIG mode can be shared. Blocking and thread-safe; methods may raise DriverError."""

    def __init__(self, driver: Driver, host: Host, enforcers: Sequence[Enforcer]) -> None:
        self._driver = driver
        self._host = host
        self.enforcers = tuple(enforcers)
        self._known: dict[GpuUuid, tuple[_UsersKey, dict[Generation, frozenset[int]]]] = {}
        """The processes of each share at the last look, and for which processes and shares on the GPU that was."""

    def look(
        self, observed: ObservedGpu, shares: Sequence[tuple[Share, Enforcement | None]], rules: ShareRules
    ) -> ObservedSharing:
        """Survey a GPU that was read just now, with the leased shares on it and the ways in which they are enforced."""
        gpu = observed.uuid
        working, why_not = self._working(gpu, rules.ways)
        if not working and not shares:
            return ObservedSharing(terms=None, why_not=why_not)
        on_gpu = self._driver.processes(gpu) if observed.processes else ()
        users, others = self._users(gpu, shares, on_gpu)
        terms = self._terms(observed, working, shares, rules, others) if working else None
        if terms is not None and terms.usable_mib < terms.taken(terms.least_mib):
            terms, why_not = None, "share_headroom leaves less than the smallest share; lower it"
        return ObservedSharing(terms=terms, why_not=why_not, lost=self._lost(shares), users=users, others=others)

    def users(
        self, gpu: GpuUuid, shares: Sequence[tuple[Share, Enforcement | None]]
    ) -> tuple[Mapping[Generation, tuple[ProcessUsage, ...]], tuple[ProcessUsage, ...]]:
        """Return the processes on a GPU that use each of these leased shares on it, and those that use none."""
        return self._users(gpu, shares, self._driver.processes(gpu))

    def _terms(
        self,
        observed: ObservedGpu,
        working: Sequence[Enforcer],
        shares: Sequence[tuple[Share, Enforcement | None]],
        rules: ShareRules,
        others: Iterable[ProcessUsage],
    ) -> ShareTerms:
        needing = working[0].needs_process
        otherwise = next((each for each in working if not each.needs_process), None) if needing else None
        # Shares from before a change of the way take what their own way takes.
        ways = {working[0].enforcement, *(way for _, way in shares)}
        if otherwise is not None:
            ways.add(otherwise.enforcement)
        used = sum(each.used_mib or 0 for each in others)
        return ShareTerms(
            enforced_by=working[0].enforcement,
            usable_mib=max(observed.memory_mib - self._driver.reserved_mib(observed.uuid) - rules.headroom_mib, 1),
            overhead_mib=max(each.overhead_mib for each in self.enforcers if each.enforcement in ways),
            least_mib=rules.least_mib,
            needs_process=needing,
            otherwise=None if otherwise is None else otherwise.enforcement,
            others_mib=math.ceil(used / _OTHERS_STEP_MIB) * _OTHERS_STEP_MIB,
        )

    def _working(self, gpu: GpuUuid, ways: Sequence[Enforcement]) -> tuple[list[Enforcer], str]:
        """Return the ways that work on a GPU, the preferred one first; with the reasons if none does."""
        working, reasons = [], []
        for way in ways:
            enforcer = self._enforcer(way)
            why_not = f"this agent does not enforce limits by {way}" if enforcer is None else enforcer.why_not(gpu)
            if enforcer is not None and not why_not:
                working.append(enforcer)
            elif enforcer is not None or len(ways) == 1:
                reasons.append(f"not by {way} ({why_not})")
        return working, "" if working else ", ".join(reasons)

    def _users(
        self, gpu: GpuUuid, shares: Sequence[tuple[Share, Enforcement | None]], on_gpu: Sequence[ProcessUsage]
    ) -> tuple[dict[Generation, tuple[ProcessUsage, ...]], tuple[ProcessUsage, ...]]:
        # Who uses which share is looked up again when others are on the GPU, or there are other shares.
        key = frozenset(each.pid for each in on_gpu), frozenset(share.generation for share, _ in shares)
        known = self._known.get(gpu)
        if known is None or known[0] != key:
            pids = {}
            for share, way in shares:
                enforcer = self._enforcer(way)
                mine = () if enforcer is None or not on_gpu else enforcer.processes(share)
                pids[share.generation] = frozenset(mine)
            known = self._known[gpu] = (key, pids)
        users = {
            generation: tuple(each for each in on_gpu if each.pid in mine) for generation, mine in known[1].items()
        }
        used = frozenset[int]().union(*known[1].values())
        others = tuple(each for each in on_gpu if each.pid not in used and not self._is_mps_server(each.pid))
        return users, others

    def _lost(self, shares: Sequence[tuple[Share, Enforcement | None]]) -> dict[Generation, str]:
        lost: dict[Generation, str] = {}
        until = time.monotonic() + _MOST_SECONDS
        for share, way in shares:
            enforcer = self._enforcer(way)
            if enforcer is None:
                continue  # it is enforced still, by what an agent with other settings has set up
            if time.monotonic() > until:
                break  # one that hangs is not to keep the GPU's reader: the others are checked with the next reading
            try:
                enforcer.check(share)
            except DriverError as error:
                if error.kind in _LOST:
                    lost[share.generation] = error.detail or error.kind
        return lost

    def _enforcer(self, way: Enforcement | None) -> Enforcer | None:
        return next((each for each in self.enforcers if each.enforcement is way), None)

    def _is_mps_server(self, pid: int) -> bool:
        process = self._host.process(pid)
        return process is not None and _MPS_SERVER in process.command
