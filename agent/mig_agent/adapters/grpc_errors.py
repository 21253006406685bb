"""Refusals on the wire: one table from reason to gRPC status, and the typed details that travel as a trailer.

Trailing metadata is small: gRPC's implementations accept 8 KiB of headers by default, and binary values grow by a
third. So texts, the list of blockers and the explanation are shortened until they fit, the most useful first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from grpc import StatusCode

from mig_agent.core.errors import Blocker, Reason, Refusal
from mig_agent.core.texts import visible
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

TRAILER: Final = "migagent-refusal-bin"
"""The key of trailing metadata under which a serialised RefusalDetail travels."""
MOST_TRAILER_BYTES: Final = 3000
"""Limit of the serialised RefusalDetail, before base64."""
MOST_DETAIL_BYTES: Final = 8000
"""Limit of the same within a message body, such as the answer of Plan."""
LONGEST_WORDS: Final = 600
"""Limit of a message or hint on the wire in bytes; where gRPC writes one into a header, a byte may become three."""
LONGEST_LINE: Final = 200
"""Limit of a line of the explanation on the wire, in bytes."""
LONGEST_NAME: Final = 128
"""Limit of any name in a blocker, in bytes."""
_ELLIPSIS: Final = "…"

STATUS: Final[Mapping[Reason, StatusCode]] = MappingProxyType(
    {
        Reason.INVALID_REQUEST: StatusCode.INVALID_ARGUMENT,
        Reason.UNKNOWN_PROFILE: StatusCode.NOT_FOUND,
        Reason.UNKNOWN_GPU: StatusCode.NOT_FOUND,
        Reason.TOO_LARGE: StatusCode.OUT_OF_RANGE,
        Reason.TOO_MANY_DEVICES: StatusCode.OUT_OF_RANGE,
        Reason.NO_MIG_GPU: StatusCode.FAILED_PRECONDITION,
        Reason.OUTSIDE_LIMITS: StatusCode.RESOURCE_EXHAUSTED,
        Reason.NO_CAPACITY: StatusCode.RESOURCE_EXHAUSTED,
        Reason.GPU_UNAVAILABLE: StatusCode.UNAVAILABLE,
        Reason.REVISION_CHANGED: StatusCode.ABORTED,
        Reason.WAITED_TOO_LONG: StatusCode.DEADLINE_EXCEEDED,
        Reason.QUEUE_FULL: StatusCode.RESOURCE_EXHAUSTED,
        Reason.LIMIT_EXCEEDED: StatusCode.RESOURCE_EXHAUSTED,
        Reason.DRIVER_FAILED: StatusCode.INTERNAL,
        Reason.LEDGER_FAILED: StatusCode.UNAVAILABLE,
        Reason.SHUTTING_DOWN: StatusCode.UNAVAILABLE,
        Reason.PAUSED: StatusCode.UNAVAILABLE,
        Reason.CANCELLED: StatusCode.CANCELLED,
        Reason.CANCEL_REQUESTED: StatusCode.ABORTED,
        Reason.UNKNOWN_REQUEST: StatusCode.NOT_FOUND,
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
"""gRPC status of every reason. A test holds it complete."""


def trailer_of(refusal: Refusal) -> bytes:
    """Return the trailer's value: the details, shortened to MOST_TRAILER_BYTES."""
    return detail_of(refusal, MOST_TRAILER_BYTES).SerializeToString()


def detail_of(refusal: Refusal, most_bytes: int = MOST_DETAIL_BYTES) -> pb.RefusalDetail:
    """Return the typed details of a refusal, shortened to `most_bytes`."""
    detail = pb.RefusalDetail(
        reason=refusal.reason.value,
        message=shortened(visible(refusal.message), LONGEST_WORDS),
        hint=shortened(visible(refusal.hint), LONGEST_WORDS),
        retryable=refusal.retryable,
        revision=refusal.revision,
        changed=refusal.changed,  # kinds of events: few and short
        end_reason=refusal.end_reason,  # a word
    )
    space = most_bytes - detail.ByteSize() - 8  # for blockers_left_off
    messages = [encode_blocker(each) for each in refusal.blockers]
    if sum(each.ByteSize() + 4 for each in messages) > space:
        messages = _first_of_each_gpu(messages)
    for message in messages:
        space -= message.ByteSize() + 4  # its tag and length
        if space < 0:
            break
        detail.blockers.append(message)
    detail.blockers_left_off = len(refusal.blockers) - len(detail.blockers)
    for line in refusal.explanation:
        words = shortened(visible(line), LONGEST_LINE)
        space -= len(words.encode()) + 4
        if space < 0:
            break
        detail.explanation.append(words)
    return detail


def shortened(text: str, most: int) -> str:
    """Return `text` in at most `most` bytes of UTF-8, with an ellipsis if it was cut."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= most:
        return text
    return encoded[: most - len(_ELLIPSIS.encode())].decode("utf-8", "ignore") + _ELLIPSIS


def _first_of_each_gpu(blockers: Sequence[pb.Blocker]) -> list[pb.Blocker]:
    """Return the blockers with the first one of each GPU first, then the second ones: no GPU is cut off as a whole."""
    ranks: Counter[int] = Counter()
    ranked = []
    for each in blockers:
        ranked.append((ranks[each.gpu_index], each))
        ranks[each.gpu_index] += 1
    return [each for _, each in sorted(ranked, key=lambda pair: pair[0])]


def encode_blocker(blocker: Blocker) -> pb.Blocker:
    """Encode a blocker, with its texts shortened."""
    return pb.Blocker(
        gpu_index=blocker.gpu_index,
        what=shortened(visible(blocker.what), LONGEST_NAME),
        state=shortened(blocker.state, LONGEST_NAME),
        lease=shortened(blocker.lease, LONGEST_NAME),
        holder=shortened(visible(blocker.holder), LONGEST_NAME),
        expires_at=blocker.expires_at,
    )
