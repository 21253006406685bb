"""Owners of leases: how long a lease lasts, and what ends it.

Each kind of owner is one class here. The engine, the ledger and messages use only the members of `OwnerKind`, so a new
kind needs one more class, and a frontend that creates and binds it. Every lease can also end by a deadline.
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
    """Empty: not known."""

    def may_be(self, other: Pod) -> bool:
        """Return False if the other is certainly another pod: by its name, or by its UID if both are known."""
        same_name = (self.namespace, self.name) == (other.namespace, other.name)
        return same_name and (not self.uid or not other.uid or self.uid == other.uid)

    def __str__(self) -> str:
        """Name it for messages, and as a holder: `pod team-a/train-7f2c`."""
        return f"pod {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletDevice:
    """A device as the kubelet counts it: an abstract id of an extended resource."""

    resource: str
    """The name of the resource: `nvidia.com/mig-1g.10gb`."""
    id: str
    """Unique within the resource: `mig-agent-3`."""

    def __str__(self) -> str:
        """Name it for messages: `nvidia.com/mig-1g.10gb mig-agent-3`."""
        return f"{self.resource} {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKind:
    """The base of all kinds of owners; its defaults are right for a lease that only a call ends."""

    @property
    def process(self) -> ProcessOwner | None:
        """The process whose end ends the lease."""
        return None

    @property
    def ends_with_stream(self) -> bool:
        """True if the lease ends with the stream over which it was granted; no stream outlives the agent."""
        return False

    @property
    def is_reserved(self) -> bool:
        """True if the owner is expected on this node; until it is bound, the lease is controlled by its token."""
        return False

    @property
    def is_bound(self) -> bool:
        """True if the owner is on this node: only its end ends the lease, which survives the loss of a device."""
        return False

    @property
    def is_in_use(self) -> bool:
        """True if the devices are known to be open: then not even an administrator can end the lease by force."""
        return False

    @property
    def is_supervised(self) -> bool:
        """True if another program watches the use of the devices, so that a lease without processes is not reported."""
        return False

    @property
    def runs_in_containers(self) -> bool:
        """True if the devices are used in containers, which see only what was put into them."""
        return False

    @property
    def noun(self) -> str:
        """The word for this kind of owner in messages: `pod`."""
        return "owner"

    @property
    def end_reason(self) -> str:
        """The end reason that the ledger records for a lease whose bound owner has ended."""
        return "owner-ended"

    @property
    def label(self) -> str:
        """The holder's name if a request gives none; empty if the owner has no name."""
        return ""

    @property
    def devices_text(self) -> str:
        """The owner's names of the lease's devices, for messages; empty if it has none."""
        return ""

    @property
    def end_hint(self) -> str:
        """A hint on how to end a bound owner."""
        return "end its owner"

    def device_text(self, number: int) -> str:
        """Return the owner's name of a device of the lease by its index, for messages; empty if it has none."""
        del number
        return ""

    def event_data(self) -> Mapping[str, str]:
        """Return the data about the owner in events of the lease."""
        return {}

    def identity(self) -> tuple[object, ...]:
        """Return JSON values that are equal for the same owner; repeated requests are recognised by them."""
        return ()

    def bind(self, to: Owner, *, what: str, holder: str, instances: int) -> Owner:
        """Return the owner of a lease with `instances` devices once it is bound to `to`, which is on this node.

        `what` is the rest of the message "cannot ...", and `holder` has the lease. Raises RefusedError if the lease is
        not reserved for `to`, or is bound to other devices.
        """
        del to, instances
        raise refuse(Reason.IN_USE, f"cannot {what}: {holder} has it", "it was taken for somebody else")

    def conflict(self, others: Iterable[Owner]) -> str:
        """Return why a former lease cannot be recovered beside active ones of `others`; empty if it can."""
        del others
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwner(OwnerKind):
    """A client that has the lease's token, and confirms, renews and releases the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOwner(OwnerKind):
    """A process of this machine. The lease ends with it."""

    pid: int
    started: int | None = None
    """Start time in clock ticks since boot, since pids are reused; None until the agent has read it."""

    @property
    def process(self) -> ProcessOwner:
        """The process whose end ends the lease."""
        return self

    def identity(self) -> tuple[object, ...]:
        """Return JSON values that are equal for the same owner; repeated requests are recognised by them."""
        return ("process", self.pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOwner(OwnerKind):
    """An open stream. The lease ends with it, and with a process if the request also named one."""

    process: ProcessOwner | None = None

    @property
    def ends_with_stream(self) -> bool:
        """True if the lease ends with the stream over which it was granted; no stream outlives the agent."""
        return True

    def identity(self) -> tuple[object, ...]:
        """Return JSON values that are equal for the same owner; repeated requests are recognised by them."""
        return ("stream", *(() if self.process is None else self.process.identity()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodOwner(OwnerKind):
    """A pod of this node, or one that is expected here."""

    pod: Pod
    devices: tuple[KubeletDevice, ...] = ()
    """The kubelet's device for each device of the lease; empty if the kubelet allocated none."""
    is_bound: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError if there are devices for a pod that is not bound."""
        if self.devices and not self.is_bound:
            raise ValueError(f"cannot have devices of the kubelet for {self.pod}: it is not on this node")

    @property
    def is_reserved(self) -> bool:
        """True if the owner is expected on this node; until it is bound, the lease is controlled by its token."""
        return not self.is_bound

    @property
    def runs_in_containers(self) -> bool:
        """True if the devices are used in containers, which see only what was put into them."""
        return True

    @property
    def is_in_use(self) -> bool:
        """True if the devices are known to be open: the kubelet starts containers with them."""
        return bool(self.devices)

    @property
    def is_supervised(self) -> bool:
        """Always True: the kubelet reports the pod's end."""
        return True

    @property
    def noun(self) -> str:
        """The word for this kind of owner in messages."""
        return "pod"

    @property
    def end_reason(self) -> str:
        """The end reason that the ledger records for a lease whose bound owner has ended."""
        return "pod-ended"

    @property
    def label(self) -> str:
        """The holder's name if a request gives none."""
        return str(self.pod)

    @property
    def devices_text(self) -> str:
        """The kubelet's devices, separated by commas."""
        return ", ".join(map(str, self.devices))

    @property
    def end_hint(self) -> str:
        """The command that deletes the pod."""
        return f"kubectl delete pod {self.pod.name} -n {self.pod.namespace}"

    def device_text(self, number: int) -> str:
        """Return the kubelet's device for a device of the lease by its index; empty if there is none."""
        return str(self.devices[number]) if number < len(self.devices) else ""

    def event_data(self) -> Mapping[str, str]:
        """Return `pod_namespace`, `pod_name` and `pod_uid`."""
        return {"pod_namespace": self.pod.namespace, "pod_name": self.pod.name, "pod_uid": self.pod.uid}

    def identity(self) -> tuple[object, ...]:
        """Return JSON values that are equal for the same owner; repeated requests are recognised by them."""
        pod = self.pod
        return ("pod", pod.namespace, pod.name, pod.uid, [(each.resource, each.id) for each in self.devices])

    def bind(self, to: Owner, *, what: str, holder: str, instances: int) -> Owner:
        """Return the owner bound to the pod of `to`, and to its devices; devices that it has stay if `to` has none."""
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
        """Return which device the kubelet has allocated to another pod since, as a message; empty if none."""
        taken = {device for other in others if isinstance(other, PodOwner) for device in other.devices}
        device = next((each for each in self.devices if each in taken), None)
        return "" if device is None else f"the kubelet has given {device} to another pod since"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A ResourceClaim of Kubernetes. A claim of the same name with another UID is another claim."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        """Name it for messages, and as a holder: `claim team-a/train-gpu`."""
        return f"claim {self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOwner(OwnerKind):
    """A claim that the kubelet has prepared on this node. The lease ends when the kubelet unprepares it."""

    claim: Claim
    devices: tuple[str, ...]
    """The names of the allocated devices, one for each device of the lease."""

    @property
    def is_bound(self) -> bool:
        """Always True: the kubelet prepares claims of pods that are on this node."""
        return True

    @property
    def is_in_use(self) -> bool:
        """Always True: the kubelet starts containers with the devices."""
        return True

    @property
    def is_supervised(self) -> bool:
        """Always True: the kubelet reports the end of the claim's pods."""
        return True

    @property
    def noun(self) -> str:
        """The word for this kind of owner in messages."""
        return "claim"

    @property
    def end_reason(self) -> str:
        """The end reason that the ledger records for a lease whose bound owner has ended."""
        return "claim-ended"

    @property
    def label(self) -> str:
        """The holder's name if a request gives none."""
        return str(self.claim)

    @property
    def devices_text(self) -> str:
        """The names of the allocated devices, separated by commas."""
        return ", ".join(self.devices)

    @property
    def end_hint(self) -> str:
        """A hint on how to end the claim."""
        return f"delete the pods that use claim {self.claim.name} in namespace {self.claim.namespace}"

    def device_text(self, number: int) -> str:
        """Return the name of an allocated device by its index; empty if there is none."""
        return self.devices[number] if number < len(self.devices) else ""

    def event_data(self) -> Mapping[str, str]:
        """Return `claim_namespace`, `claim_name` and `claim_uid`."""
        claim = self.claim
        return {"claim_namespace": claim.namespace, "claim_name": claim.name, "claim_uid": claim.uid}

    def identity(self) -> tuple[object, ...]:
        """Return JSON values that are equal for the same owner; repeated requests are recognised by them."""
        return ("claim", self.claim.uid, *self.devices)


Owner = TokenOwner | ProcessOwner | StreamOwner | PodOwner | ClaimOwner
TOKEN_OWNER = TokenOwner()
_COMPACT = json.JSONEncoder(separators=(",", ":")).encode


def with_start(owner: Owner, started: int) -> Owner:
    """Return an owner with the start time of its process, in clock ticks since boot."""
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
        case ClaimOwner(claim=claim):
            kind, fields = "claim", (claim.namespace, claim.name, claim.uid, owner.devices)
    return _COMPACT((kind, *fields))


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
        case "claim":
            namespace, name, uid, names = fields
            return ClaimOwner(claim=Claim(namespace=namespace, name=name, uid=uid), devices=tuple(names))
    raise ValueError(f"{kind!r} is no kind of owner")


def _process(pid: int, started: int | None) -> ProcessOwner:
    return ProcessOwner(pid=pid, started=started)
