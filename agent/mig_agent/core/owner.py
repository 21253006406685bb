"""Owners of leases: how long a lease lasts, and what ends it.

Each kind of owner is one class here. The engine, the ledger and messages use only what `OwnerKind` has, so that a new
kind is one class more, and the frontend that makes and binds it. Every lease can also end by a deadline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from mig_agent.core.errors import Reason, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A pod of Kubernetes. A pod of the same name with another UID is another pod."""

    namespace: str
    name: str
    uid: str = ""
    """Empty where it is not known."""

    def may_be(self, other: Pod) -> bool:
        """Return whether both are the same pod, as far as is known: one of two without a UID may be the other."""
        same_name = (self.namespace, self.name) == (other.namespace, other.name)
        return same_name and (not self.uid or not other.uid or self.uid == other.uid)

    def __str__(self) -> str:
        """Name it for messages, and as a holder: `pod team-a/train-7f2c`."""
        return f"pod {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletDevice:
    """One device as the kubelet counts it: an abstract id under the name of an extended resource."""

    resource: str
    """`nvidia.com/mig-1g.10gb`."""
    id: str
    """`mig-agent-3`."""

    def __str__(self) -> str:
        """Name it for messages: `nvidia.com/mig-1g.10gb mig-agent-3`."""
        return f"{self.resource} {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKind:
    """What is asked of an owner of any kind; the answers here are those of a lease that nothing but a call ends."""

    @property
    def process(self) -> ProcessOwner | None:
        """The process whose end ends the lease."""
        return None

    @property
    def ends_with_stream(self) -> bool:
        """Whether the lease ends with the stream over which it was granted; no stream outlives the agent."""
        return False

    @property
    def is_reserved(self) -> bool:
        """Whether the owner is expected on this node: until it comes, the lease is its holder's, by its token."""
        return False

    @property
    def is_bound(self) -> bool:
        """Whether the owner is on this node: only its end ends the lease, which survives the loss of a device."""
        return False

    @property
    def is_in_use(self) -> bool:
        """Whether the devices are known to be open, so that not even an administrator ends the lease by force."""
        return False

    @property
    def is_supervised(self) -> bool:
        """Whether somebody else watches its use, so that a lease without processes is nothing to report."""
        return False

    @property
    def noun(self) -> str:
        """What messages call it: `pod`."""
        return "owner"

    @property
    def end_reason(self) -> str:
        """Why the lease has ended when its bound owner has, as the ledger records it."""
        return "owner-ended"

    @property
    def label(self) -> str:
        """The holder's name where a request gives none; empty where the owner has no name."""
        return ""

    @property
    def devices_text(self) -> str:
        """The devices that the lease's instances are for the owner, for messages; empty where it counts none."""
        return ""

    @property
    def end_hint(self) -> str:
        """How a person ends a bound owner."""
        return "end its owner"

    def device_text(self, number: int) -> str:
        """Return what the owner calls the lease's device of this number, for messages; empty where it has no name."""
        del number
        return ""

    def event_data(self) -> Mapping[str, str]:
        """Return what events about the lease say of the owner."""
        return {}

    def identity(self) -> tuple[object, ...]:
        """Return what makes two requests for this owner the same, as values of JSON."""
        return ()

    def bind(self, to: Owner, *, what: str, holder: str, instances: int) -> Owner:
        """Return the owner of a lease with so many instances once it is bound to `to`, which is on this node.

        `what` completes "cannot ..."; `holder` has the lease. Raises RefusedError where the lease is not for this owner
        or it has other devices.
        """
        del to, instances
        raise refuse(Reason.IN_USE, f"cannot {what}: {holder} has it", "it was taken for somebody else")

    def conflict(self, others: Iterable[Owner]) -> str:
        """Return why a lease of before cannot be given back beside leases of others, in words; empty where it can."""
        del others
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwner(OwnerKind):
    """The client that has the lease's token: it confirms the lease, renews and releases it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOwner(OwnerKind):
    """A process of this machine. The lease ends with it."""

    pid: int
    started: int | None = None
    """In clock ticks from boot, since a pid alone can be another process's later; None until the agent looked it up."""

    @property
    def process(self) -> ProcessOwner:
        """The process whose end ends the lease."""
        return self

    def identity(self) -> tuple[object, ...]:
        """Return what makes two requests for this owner the same, as values of JSON."""
        return ("process", self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOwner(OwnerKind):
    """A stream that stays open. The lease ends with it, and with a process where the request also named one."""

    process: ProcessOwner | None = None

    @property
    def ends_with_stream(self) -> bool:
        """Whether the lease ends with the stream over which it was granted; no stream outlives the agent."""
        return True

    def identity(self) -> tuple[object, ...]:
        """Return what makes two requests for this owner the same, as values of JSON."""
        return ("stream", *(() if self.process is None else self.process.identity()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOwner(OwnerKind):
    """A pod of this node, or one that is expected here."""

    pod: Pod
    devices: tuple[KubeletDevice, ...] = ()
    """For each device of the lease, the kubelet's device that it stands for; empty where no kubelet allocated any."""
    is_bound: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for devices of a pod that is not on this node."""
        if self.devices and not self.is_bound:
            raise ValueError(f"cannot have devices of the kubelet for {self.pod}: it is not on this node")

    @property
    def is_reserved(self) -> bool:
        """Whether the owner is expected on this node: until it comes, the lease is its holder's, by its token."""
        return not self.is_bound

    @property
    def is_in_use(self) -> bool:
        """Whether the devices are known to be open: the kubelet started containers with them."""
        return bool(self.devices)

    @property
    def is_supervised(self) -> bool:
        """Whether somebody else watches its use: the kubelet reports when it has ended."""
        return True

    @property
    def noun(self) -> str:
        """What messages call it."""
        return "pod"

    @property
    def end_reason(self) -> str:
        """Why the lease has ended when its bound owner has, as the ledger records it."""
        return "pod-ended"

    @property
    def label(self) -> str:
        """The holder's name where a request gives none."""
        return str(self.pod)

    @property
    def devices_text(self) -> str:
        """The kubelet's devices, with commas between."""
        return ", ".join(map(str, self.devices))

    @property
    def end_hint(self) -> str:
        """How a person ends the pod."""
        return f"kubectl delete pod {self.pod.name} -n {self.pod.namespace}"

    def device_text(self, number: int) -> str:
        """Return the kubelet's device that the lease's device of this number stands for; empty where it is none."""
        return str(self.devices[number]) if number < len(self.devices) else ""

    def event_data(self) -> Mapping[str, str]:
        """Return `pod_namespace`, `pod_name` and `pod_uid`."""
        return {"pod_namespace": self.pod.namespace, "pod_name": self.pod.name, "pod_uid": self.pod.uid}

    def identity(self) -> tuple[object, ...]:
        """Return what makes two requests for this owner the same, as values of JSON."""
        pod = self.pod
        return ("pod", pod.namespace, pod.name, pod.uid, [(each.resource, each.id) for each in self.devices])

    def bind(self, to: Owner, *, what: str, holder: str, instances: int) -> Owner:
        """Return the owner once its pod is on this node; devices that it has stay where `to` names none."""
        if not isinstance(to, PodOwner) or not self.pod.may_be(to.pod):
            return OwnerKind.bind(self, to, what=what, holder=holder, instances=instances)
        if self.devices and not to.devices:
            return self
        if self.devices and self.devices != to.devices:
            raise refuse(Reason.IN_USE, f"cannot {what}: it has it already, as {self.devices_text}")
        if to.devices and len(to.devices) != instances:
            raise refuse(
                Reason.INVALID_REQUEST,
                f"cannot {what}: it has {instances} devices, and {len(to.devices)} are to stand for them",
            )
        return replace(to, pod=replace(self.pod, uid=self.pod.uid or to.pod.uid), is_bound=True)

    def conflict(self, others: Iterable[Owner]) -> str:
        """Return which device the kubelet has allocated to another pod since; empty where it has not."""
        taken = {device for other in others if isinstance(other, PodOwner) for device in other.devices}
        device = next((each for each in self.devices if each in taken), None)
        return "" if device is None else f"the kubelet has given {device} to another pod since"


Owner = TokenOwner | ProcessOwner | StreamOwner | PodOwner
TOKEN_OWNER = TokenOwner()


def with_start(owner: Owner, started: int) -> Owner:
    """Return an owner with the moment at which its process started, in clock ticks from boot."""
    match owner:
        case ProcessOwner():
            return replace(owner, started=started)
        case StreamOwner(process=ProcessOwner() as process):
            return replace(owner, process=replace(process, started=started))
        case _:
            return owner


def encode(owner: Owner) -> str:
    """Return an owner as JSON, for the ledger."""
    kind: str
    fields: tuple[object, ...]
    match owner:
        case TokenOwner():
            kind, fields = "token", ()
        case ProcessOwner():
            kind, fields = "process", (owner.pid, owner.started)
        case StreamOwner():
            kind, fields = "stream", () if owner.process is None else (owner.process.pid, owner.process.started)
        case PodOwner():
            devices = [(each.resource, each.id) for each in owner.devices]
            kind, fields = "pod", (owner.pod.namespace, owner.pod.name, owner.pod.uid, owner.is_bound, devices)
    return json.dumps((kind, *fields), separators=(",", ":"))


def decode(text: str) -> Owner:
    """Read what `encode` wrote. Raises ValueError, TypeError."""
    kind, *fields = json.loads(text)
    match kind:
        case "token":
            return TOKEN_OWNER
        case "process":
            return _process(*fields)
        case "stream":
            return StreamOwner(process=_process(*fields) if fields else None)
        case "pod":
            namespace, name, uid, is_bound, devices = fields
            return PodOwner(
                pod=Pod(namespace=namespace, name=name, uid=uid),
                devices=tuple(KubeletDevice(resource=resource, id=each) for resource, each in devices),
                is_bound=is_bound,
            )
    raise ValueError(f"{kind!r} is no kind of owner")


def _process(pid: int, started: int | None) -> ProcessOwner:
    return ProcessOwner(pid=pid, started=started)
