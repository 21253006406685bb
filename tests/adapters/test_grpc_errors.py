"""Refusals on the wire."""

from __future__ import annotations

import grpc
import pytest

from mig_agent.adapters.grpc_errors import MOST_TRAILER_BYTES, STATUS, trailer_of
from mig_agent.core.errors import Blocker, Reason, Refusal
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb


def test_every_reason_has_a_status() -> None:
    assert set(STATUS) == set(Reason)
    assert grpc.StatusCode.OK not in STATUS.values()
    assert grpc.StatusCode.UNKNOWN not in STATUS.values()


@pytest.mark.parametrize("reason", Reason)
def test_details_say_whether_to_try_again(reason: Reason) -> None:
    refusal = Refusal(reason=reason, message="cannot do that", hint="do this")
    detail = pb.RefusalDetail.FromString(trailer_of(refusal))
    assert (detail.reason, detail.message, detail.hint) == (reason.value, "cannot do that", "do this")
    assert detail.retryable == refusal.retryable


@pytest.mark.parametrize("number", [0, 1, 10, 1000])
@pytest.mark.parametrize("length", [1, 50, 10_000])
def test_details_stay_within_what_headers_have_room_for(number: int, length: int) -> None:
    blockers = tuple(
        Blocker(gpu_index=each, what="w" * length, state="leased", lease="l" * length, holder="h" * length)
        for each in range(number)
    )
    refusal = Refusal(reason=Reason.NO_CAPACITY, message="cannot " + "ä" * length, hint="ß" * length, blockers=blockers)
    serialised = trailer_of(refusal)
    assert len(serialised) <= MOST_TRAILER_BYTES
    detail = pb.RefusalDetail.FromString(serialised)
    assert len(detail.blockers) + detail.blockers_left_off == number
    assert [each.gpu_index for each in detail.blockers] == list(range(len(detail.blockers)))
    if number and length < 100:
        assert detail.blockers


@pytest.mark.parametrize("lines", [0, 3, 1000])
@pytest.mark.parametrize("length", [10, 10_000])
def test_the_explanation_takes_what_room_is_left(lines: int, length: int) -> None:
    explanation = tuple(f"{each}: " + "ä" * length for each in range(lines))
    blocker = Blocker(gpu_index=0, what="w", state="leased")
    refusal = Refusal(
        reason=Reason.NO_CAPACITY, message="cannot", hint="h", blockers=(blocker,) * 10, explanation=explanation
    )
    serialised = trailer_of(refusal)
    assert len(serialised) <= MOST_TRAILER_BYTES
    detail = pb.RefusalDetail.FromString(serialised)
    assert len(detail.blockers) == 10
    assert [each[:2] for each in detail.explanation] == [each[:2] for each in explanation[: len(detail.explanation)]]
    if lines:
        assert detail.explanation
    if lines == 3:
        assert len(detail.explanation) == 3
    if length == 10:
        assert tuple(detail.explanation) == explanation[: len(detail.explanation)]


def test_no_gpu_is_left_out_as_a_whole_where_blockers_are() -> None:
    blockers = tuple(
        Blocker(gpu_index=gpu, what=f"1g.10gb on slice {at}", state="leased", lease=16 * "0", holder="alice (train)")
        for gpu in range(8)
        for at in range(7)
    )
    detail = pb.RefusalDetail.FromString(
        trailer_of(Refusal(reason=Reason.NO_CAPACITY, message="cannot", blockers=blockers))
    )
    assert detail.blockers_left_off
    assert [each.gpu_index for each in detail.blockers][:16] == [*range(8), *range(8)]
    assert len({(each.gpu_index, each.what) for each in detail.blockers}) == len(detail.blockers)
