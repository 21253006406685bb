"""Refusals on the wire: one table from reason to gRPC status, and the typed details that travel as a trailer.

Trailing metadata has little room: gRPC's implementations stop reading at 8 KiB of headers unless told otherwise, and
binary values grow by a third. So texts and the list of blockers are shortened until they fit, the most telling first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from grpc import StatusCode

from mig_agent.core.errors import Blocker, Reason, Refusal
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

TRAILER: Final = "migagent-refusal-bin"
"""The key of trailing metadata under which a serialised RefusalDetail travels."""
MOST_TRAILER_BYTES: Final = 3000
"""Of the serialised RefusalDetail, before base64."""
LONGEST_WORDS: Final = 600
"""Characters of a message or hint on the wire."""
LONGEST_NAME: Final = 128
"""Characters of any name in a blocker."""

STATUS: Final[Mapping[Reason, StatusCode]] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: StatusCode.INVALID_ARGUMENT,
        Reason.UNKNOWN_PROFILE: StatusCode.NOT_FOUND,
        Reason.UNKNOWN_GPU: StatusCode.NOT_FOUND,
        Reason.TOO_LARGE: StatusCode.OUT_OF_RANGE,
        Reason.TOO_MANY_DEVICES: StatusCode.OUT_OF_RANGE,
        Reason.NO_MIG_GPU: StatusCode.FAILED_PRECONDITION,
        Reason.NO_CAPACITY: StatusCode.RESOURCE_EXHAUSTED,
        Reason.GPU_UNAVAILABLE: StatusCode.UNAVAILABLE,
        Reason.REVISION_CHANGED: StatusCode.ABORTED,
        Reason.WAITED_TOO_LONG: StatusCode.DEADLINE_EXCEEDED,
        Reason.QUEUE_FULL: StatusCode.RESOURCE_EXHAUSTED,
        Reason.DRIVER_FAILED: StatusCode.INTERNAL,
        Reason.LEDGER_FAILED: StatusCode.UNAVAILABLE,
        Reason.SHUTTING_DOWN: StatusCode.UNAVAILABLE,
        Reason.CANCELLED: StatusCode.CANCELLED,
        Reason.UNKNOWN_LEASE: StatusCode.NOT_FOUND,
        Reason.LEASE_ENDED: StatusCode.FAILED_PRECONDITION,
        Reason.WRONG_TOKEN: StatusCode.PERMISSION_DENIED,
        Reason.REQUEST_ID_REUSED: StatusCode.ALREADY_EXISTS,
        Reason.IN_USE: StatusCode.FAILED_PRECONDITION,
        Reason.NOT_SUPPORTED: StatusCode.FAILED_PRECONDITION,
        Reason.RESET_REQUIRED: StatusCode.FAILED_PRECONDITION,
        Reason.NOT_PERMITTED: StatusCode.PERMISSION_DENIED,
    }
)
"""The one table. A test holds it complete."""


def detail_of(refusal: Refusal) -> pb.RefusalDetail:
    """The typed details of a refusal, unshortened."""
    return pb.RefusalDetail(
        reason=refusal.reason.value,
        message=refusal.message,
        hint=refusal.hint,
        retryable=refusal.retryable,
        blockers=[_blocker(each) for each in refusal.blockers],
    )


def trailer_of(refusal: Refusal) -> bytes:
    """What travels under TRAILER: the details, shortened to MOST_TRAILER_BYTES."""
    detail = pb.RefusalDetail(
        reason=refusal.reason.value,
        message=shortened(refusal.message, LONGEST_WORDS),
        hint=shortened(refusal.hint, LONGEST_WORDS),
        retryable=refusal.retryable,
    )
    room = MOST_TRAILER_BYTES - detail.ByteSize() - 8  # for blockers_left_off
    for blocker in refusal.blockers:
        message = _blocker(blocker)
        room -= message.ByteSize() + 4  # its tag and length
        if room < 0:
            break
        detail.blockers.append(message)
    detail.blockers_left_off = len(refusal.blockers) - len(detail.blockers)
    return detail.SerializeToString()


def shortened(text: str, most: int) -> str:
    """`text` in at most so many characters, with an ellipsis where it was longer."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _blocker(blocker: Blocker) -> pb.Blocker:
    return pb.Blocker(
        gpu_index=blocker.gpu_index,
        what=shortened(blocker.what, LONGEST_NAME),
        state=shortened(blocker.state, LONGEST_NAME),
        lease=shortened(blocker.lease, LONGEST_NAME),
        holder=shortened(blocker.holder, LONGEST_NAME),
    )
