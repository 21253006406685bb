"""Messages of the device plugin for events of pods and for the log. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from mig_agent.core.errors import Reason, Refusal
from mig_agent.core.owner import KubeletDevice, Pod
from mig_agent.core.quantities import format_duration

_MOST_CHARACTERS = 600
"""An event of Kubernetes takes 1024 bytes, and the kubelet puts its own text before this one."""


def wanted(devices: Collection[KubeletDevice]) -> str:
    """Return what is requested: `2 x nvidia.com/mig-1g.10gb and mig-agent.io/memory-5g`."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.resource] = counts.get(device.resource, 0) + 1
    parts = [f"{count} x {name}" if count > 1 else name for name, count in sorted(counts.items())]
    return " and ".join(parts) or "nothing"


def still_waiting(
    pod: Pod, devices: Sequence[KubeletDevice], refusal: Refusal | None, place: int | None, seconds: float
) -> Refusal:
    """Return why a container cannot start yet; the kubelet asks again. `refusal` is the planner's, None for a plan."""
    if refusal is None:
        why = "requests before it are served first" if place else "it is being made"
    else:
        why = refusal.message.removeprefix("cannot ").strip()
        why = f"cannot {why}"
    where = f"; place {place} in the agent's queue" if place else ""
    return Refusal(
        reason=Reason.NO_CAPACITY if refusal is None else refusal.reason,
        message=shortened(
            f"cannot start {pod} yet: it has waited {format_duration(seconds)} for {wanted(devices)}{where}: {why}"
        ),
        hint="it starts when capacity returns; `migctl status` shows who holds what",
        blockers=() if refusal is None else refusal.blockers,
    )


def for_pod(refusal: Refusal) -> Refusal:
    """Return a refusal with a hint for people who write pods, not requests."""
    return replace(refusal, hint=refusal.hint.replace("in several requests", "in several pods"))


def for_kubelet(refusal: Refusal) -> str:
    """Return a refusal as the one text of a gRPC status."""
    return shortened(f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message)


def shortened(text: str) -> str:
    """Return the text, cut to the length that an event can show."""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
