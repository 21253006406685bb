"""Recordings of planning: all that plans depend on and the plans themselves, as JSON that can be planned again.

A recording is made of a running agent for a bug report. `replay` plans its requests again with this version's planner,
from the recorded view, policy and clock, so that another machine sees the same plan or the same refusal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final, TypeAlias

from mig_agent.core.errors import Blocker, Reason, Refusal, UsageError
from mig_agent.core.model import (
    NO_REQUEST_ID,
    UNRECORDED_CALLER,
    DeviceKind,
    Engines,
    Gpu,
    GpuState,
    GpuUuid,
    Holder,
    Instance,
    InstanceState,
    Isolation,
    Layout,
    Lease,
    MigMode,
    NodeView,
    Placement,
    Profile,
    Request,
    Slot,
    Want,
)
from mig_agent.core.owner import (
    Claim,
    ClaimOwner,
    KubeletDevice,
    Pod,
    PodOwner,
    ProcessOwner,
    StreamOwner,
    TokenOwner,
)
from mig_agent.core.planning.plan import (
    CreateInstance,
    DestroyInstance,
    DevicePlan,
    Outcome,
    Plan,
    Policy,
    Reuse,
    ReuseInstance,
)
from mig_agent.core.planning.planner import plan
from mig_agent.core.quantities import shown
from mig_agent.core.shares import Enforcement, ShareTerms

FORMAT: Final = 1
"""The number of the format; raised when a reader of the one before would misread it."""

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """A request with the planner's answer to it."""

    request: Request
    outcome: Outcome
    waits: bool = False
    """True for a request of the queue, False for one that was made for the recording."""

    @property
    def text(self) -> str:
        """The request as people write it: `4G`, `1g.10gb, 1g.10gb on GPU 0`."""
        wants = ", ".join(want.text or want.profile or "a device" for want in self.request.wants)
        gpus = f" on GPU {' or '.join(self.request.gpus)}" if self.request.gpus else ""
        return f"{wants}{gpus}{' (waiting)' if self.waits else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Plans with everything that they depend on."""

    version: str
    """The version of the agent that planned."""
    now: float
    """The agent's wall clock, in seconds since the epoch."""
    view: NodeView
    policy: Policy
    plans: tuple[RecordedPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPlan:
    """A recorded plan beside the one that this version makes."""

    recorded: RecordedPlan
    outcome: Outcome

    @property
    def is_identical(self) -> bool:
        """True if both are the same in every field: steps, costs, notes, and of refusals the whole message."""
        return self.recorded.outcome == self.outcome


def record(view: NodeView, policy: Policy, now: float, plans: tuple[RecordedPlan, ...], version: str) -> Recording:
    """Return a recording without request ids and callers: with those of others their requests could be repeated."""
    leases = {
        id_: replace(each, request_id=NO_REQUEST_ID, caller_id=UNRECORDED_CALLER) for id_, each in view.leases.items()
    }
    anonymous = tuple(
        replace(each, request=replace(each.request, request_id=NO_REQUEST_ID, caller_id=UNRECORDED_CALLER))
        for each in plans
    )
    return Recording(version=version, now=now, view=replace(view, leases=leases), policy=policy, plans=anonymous)


def replay(recording: Recording) -> Iterator[ReplayedPlan]:
    """Yield each recorded plan with the plan that is made again."""
    for each in recording.plans:
        outcome = plan(recording.view, each.request, recording.policy, recording.now)
        yield ReplayedPlan(recorded=each, outcome=outcome)


def describe(outcome: Outcome, view: NodeView) -> str:
    """Return an outcome on a node for people, on one line: the steps and the costs, or the refusal."""
    if isinstance(outcome, Refusal):
        return f"{outcome.reason}: {outcome.message}{f' ({outcome.hint})' if outcome.hint else ''}"
    steps = ", ".join(f"{step.describe()} on GPU {view.by_uuid[_gpu_of(step)].index}" for step in outcome.steps)
    notes = f"; {'; '.join(outcome.notes)}" if outcome.notes else ""
    return f"{steps}; wastes {outcome.wasted_mib:g} MiB, costs {outcome.cost:g}{notes}"


def _gpu_of(step: ReuseInstance | DestroyInstance | CreateInstance) -> GpuUuid:
    return step.slot.gpu if isinstance(step, CreateInstance) else step.instance.slot.gpu


# JSON: {"$": TYPE, FIELD: VALUE, ...} for a value of ours, a list for a tuple, {"$ref": N} for one of the shared values

_TYPE, _REF, _SET, _MAP, _FLOAT = "$", "$ref", "set", "map", "float"
_VALUES: Final[Mapping[str, type]] = MappingProxyType(
    {
        each.__name__: each
        for each in (
            *(Blocker, CreateInstance, DestroyInstance, DeviceKind, DevicePlan, Engines, Gpu, Holder, Instance),
            *(
                Claim,
                ClaimOwner,
                KubeletDevice,
                Layout,
                Lease,
                MigMode,
                NodeView,
                Placement,
                Plan,
                Pod,
                PodOwner,
                Policy,
                ProcessOwner,
            ),
            *(
                Profile,
                RecordedPlan,
                Recording,
                Refusal,
                Request,
                ReuseInstance,
                ShareTerms,
                Slot,
                StreamOwner,
                TokenOwner,
                Want,
            ),
        )
    }
)
_WORDS: Final[Mapping[str, type[StrEnum]]] = MappingProxyType(
    {each.__name__: each for each in (Enforcement, GpuState, InstanceState, Isolation, Reason, Reuse)}
)
_OTHER_VERSION: Final = "replay it with the version that made it"
_WHAT_TO_GIVE: Final = "give a file that `migctl bundle` has written"
_SHARED: Final = (Layout, Profile)
"""Types whose values are large and the same for many GPUs and instances: written once."""


def to_json(recording: Recording) -> str:
    """Return a recording as JSON, in ASCII: names of older versions may have characters that must not be shown.

    Raises TypeError for a value whose type is not among those of recordings.
    """
    encoder = _Encoder()
    value = encoder.encode(recording)
    return json.dumps({"format": FORMAT, "shared": encoder.shared, "recording": value})


class _OtherVersionError(ValueError):
    """Another version has written the recording; the text says what differs."""


def from_json(text: str, name: str = "the recording") -> Recording:
    """Read what `to_json` wrote. Raises UsageError for anything else, and for what only another version knows.

    `name` is what messages call it.
    """
    try:
        document: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        why = f"it is no JSON{where}" if text.strip() else "it is empty"
        raise UsageError(f"cannot read {name}: {why}", _WHAT_TO_GIVE) from error
    if not isinstance(document, dict) or "recording" not in document:
        raise UsageError(f"cannot read {name}: it is no recording of an agent", _WHAT_TO_GIVE)
    if document.get("format") != FORMAT:
        raise UsageError(
            f"cannot read {name}: its format is {shown(str(document.get('format')))}, and this version reads {FORMAT}",
            _OTHER_VERSION,
        )
    try:
        shared: list[object] = []
        parts = document.get("shared")
        for each in parts if isinstance(parts, list) else []:
            shared.append(_decode(each, shared))
        recording = _decode(document["recording"], shared)
    except _OtherVersionError as error:
        raise UsageError(f"cannot read {name}: {error}", _OTHER_VERSION) from error
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UsageError(f"cannot read {name}: it is not as an agent writes it", "make the bundle again") from error
    if not isinstance(recording, Recording):
        raise UsageError(f"cannot read {name}: it is no recording of an agent", _WHAT_TO_GIVE)
    return recording


class _Encoder:
    """Encodes values, each of the shared types once."""

    def __init__(self) -> None:
        self.shared: list[Json] = []
        self._known: dict[object, int] = {}

    def encode(self, value: object) -> Json:
        """Return a value as JSON. Raises TypeError for a type that is not among those of recordings."""
        match value:
            case StrEnum():
                return {_TYPE: type(value).__name__, "value": value.value}
            case float() if not math.isfinite(value):
                return {_TYPE: _FLOAT, "value": str(value)}
            case None | bool() | int() | float() | str():
                return value
            case tuple() | frozenset() | Mapping():
                return self._encode_several(value)
            case _ if isinstance(value, _SHARED):
                return {_REF: self._share(value)}
            case _:
                return self._encode_fields(value)

    def _encode_several(self, values: tuple[object, ...] | frozenset[str] | Mapping[object, object]) -> Json:
        if isinstance(values, tuple):
            return [self.encode(each) for each in values]
        if isinstance(values, frozenset):
            return {_TYPE: _SET, "value": [self.encode(each) for each in sorted(values)]}
        return {_TYPE: _MAP, "value": [[self.encode(name), self.encode(each)] for name, each in values.items()]}

    def _share(self, value: object) -> int:
        if value not in self._known:
            encoded = self._encode_fields(value)
            self._known[value] = len(self.shared)
            self.shared.append(encoded)
        return self._known[value]

    def _encode_fields(self, value: object) -> Json:
        name = type(value).__name__
        if _VALUES.get(name) is not type(value) or not is_dataclass(value):
            raise TypeError(f"cannot record a {name}")
        return {_TYPE: name, **{each.name: self.encode(getattr(value, each.name)) for each in fields(value)}}


def _decode(value: Json, shared: list[object]) -> object:
    if isinstance(value, list):
        return tuple(_decode(each, shared) for each in value)
    if not isinstance(value, dict):
        return value
    if _REF in value:
        number = value[_REF]
        if not isinstance(number, int):
            raise TypeError(f"{shown(str(number))} is no number of a shared value")
        return shared[number]
    name = str(value[_TYPE])
    if name in _VALUES:
        given = {field: _decode(each, shared) for field, each in value.items() if field != _TYPE}
        return _make(_VALUES[name], given)
    return _decode_plain(name, value["value"], shared)


def _decode_plain(name: str, value: Json, shared: list[object]) -> object:
    if name in _WORDS:
        if not isinstance(value, str) or value not in list(_WORDS[name]):
            raise _OtherVersionError(f"this version knows no {name} {shown(str(value))}")
        return _WORDS[name](value)
    if name == _FLOAT:
        return float(str(value))
    decoded = _decode(value, shared)
    if not isinstance(decoded, tuple):
        raise TypeError(f"{name} has no list")
    if name == _SET:
        return frozenset(decoded)
    if name == _MAP:
        return dict(decoded)
    raise _OtherVersionError(f"this version knows no {shown(name)}")


def _make(type_: type, given: Mapping[str, object]) -> object:
    """Return the value of a type with these fields. Raises _OtherVersionError for one that is unknown or missing."""
    known = {each.name for each in fields(type_)}
    strange = sorted(given.keys() - known)
    if strange:
        raise _OtherVersionError(f"this version knows no {shown(strange[0])} of a {type_.__name__}")
    required = {each.name for each in fields(type_) if each.default is MISSING and each.default_factory is MISSING}
    missing = sorted(required - given.keys())
    if missing:
        raise _OtherVersionError(f"a {type_.__name__} has no {missing[0]}, which this version needs")
    made: object = type_(**given)
    return made
