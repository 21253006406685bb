"""What a person reads of a wait: when it is likely to end, by what that is judged, and what blocks it."""

from __future__ import annotations

import io
import sys
import time

import pytest

from mig_agent.client import decode
from mig_agent.client.types import QueuePosition, StartEstimate
from mig_agent.core.errors import Blocker
from mig_agent.migctl.progress import Progress
from mig_agent.migctl.wait_words import basis, blocked_by, start_interval, wait_line
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

MINUTE = 60.0


def estimate(
    earliest: float | None, latest: float | None, *, median: float | None = None, by: str = "leases"
) -> StartEstimate:
    return StartEstimate(earliest=earliest, median=median, latest=latest, basis=by, leases=57 if by == "leases" else 0)


def held_by(holder: str, gpu: int = 0, **fields: float) -> Blocker:
    return Blocker(gpu_index=gpu, what="7g.80gb on slices 0-7", state="leased", lease="l", holder=holder, **fields)


@pytest.mark.parametrize(
    ("earliest", "latest", "words"),
    [
        (4 * MINUTE, 12 * MINUTE, "in 4-12 min"),
        (30.0, 6 * MINUTE, "in 30 s to 6 min"),
        (2.0, 20.0, "within 20 s"),
        (3 * 3600.0, 5 * 3600.0, "in 3-5 h"),
        (4 * MINUTE, None, "in 4 min or later"),
        (5 * MINUTE, 5 * MINUTE, "in about 5 min"),
        (0.0, 0.0, "within 1 s"),
        (2.0, None, ""),
        (None, None, ""),
    ],
)
def test_the_interval(earliest: float | None, latest: float | None, words: str) -> None:
    assert start_interval(estimate(earliest, latest)) == words


def test_the_basis() -> None:
    assert basis(estimate(240, 720, median=7 * MINUTE)) == "from the last 57 leases: half wait under 7 min"
    assert basis(estimate(240, None)) == "from the last 57 leases"
    assert basis(estimate(0, 17, by="deadlines")) == "from deadlines"
    assert basis(StartEstimate(earliest=1, median=2, latest=3, basis="7")) == "from 7: half wait under 2 s", (
        "a newer one"
    )


def test_what_blocks() -> None:
    soon = time.time() + 3600
    at = time.strftime("%H:%M", time.localtime(soon))
    assert blocked_by([held_by("bob (train)", expires_at=soon)]) == f"GPU 0 is held by bob (train), until {at}"
    assert blocked_by([held_by("bob"), held_by("bob"), held_by("ann")]) == "GPU 0 is held by bob and ann"
    assert blocked_by([held_by("a"), held_by("b"), held_by("c"), held_by("d", gpu=1)]) == (
        "GPU 0 is held by a and b and 1 more"
    )
    assert blocked_by([Blocker(gpu_index=2, what="the GPU", state="reserved")]) == "GPU 2 is reserved"
    assert blocked_by([held_by("bob\x1b[2J\n", expires_at=1e300)]).isprintable()
    assert blocked_by([held_by("bob"), held_by("ann")], brief=True) == "GPU 0: bob and ann"
    assert blocked_by([]) == ""


def test_the_line_has_as_much_as_fits() -> None:
    position = QueuePosition(2, estimate(4 * MINUTE, 12 * MINUTE, median=7 * MINUTE), (held_by("bob (train)"),))
    whole = wait_line("migctl: waiting, ", position, "")
    assert whole == (
        "migctl: waiting, place 2 in the queue; likely to start in 4-12 min (from the last 57 leases: half wait under "
        "7 min); GPU 0 is held by bob (train)"
    )
    for columns in range(40, 200):
        line = wait_line("migctl: waiting, ", position, " (Ctrl-C leaves it)", columns)
        assert len(line) < columns or line == "migctl: waiting, place 2 in the queue"


def test_80_columns_have_the_place_the_start_and_who_blocks() -> None:
    prefix, hint, interval = "migctl: waiting, ", " (Ctrl-C leaves it)", estimate(4 * MINUTE, 12 * MINUTE)
    until = held_by("bob (train)", expires_at=time.time() + 3600)
    several = tuple(held_by(each) for each in ("hog (eval)", "bob", "ann"))
    assert wait_line(prefix, QueuePosition(1, interval, (until,)), hint, 80) == (
        "migctl: waiting, next in the queue; likely in 4-12 min; GPU 0: bob (train)"
    )
    assert wait_line(prefix, QueuePosition(1, interval, several), hint, 86) == (
        "migctl: waiting, next in the queue; likely in 4-12 min; GPU 0: hog (eval) and 2 more"
    )
    assert wait_line(prefix, QueuePosition(1, None, (until,)), hint, 80).startswith(
        "migctl: waiting, next in the queue; GPU 0 is held by bob (train), until "
    )
    limited = QueuePosition(1, None, (), "bob holds 1 of at most 1 lease (set by limits.roles.user.leases)")
    assert wait_line(prefix, limited, hint, 80) == "migctl: waiting, next in the queue; waits for a limit of its own"


def test_the_line_of_one_that_waits_for_its_own_limit_says_which() -> None:
    limit = "cannot serve 7g.80gb: bob holds 1 of at most 1 lease (set by limits.roles.user.leases)"
    position = QueuePosition(1, None, (), limit)
    assert wait_line("waiting, ", position, "") == f"waiting, next in the queue; waits for a limit of its own: {limit}"
    assert wait_line("waiting, ", position, "", 80) == "waiting, next in the queue; waits for a limit of its own"
    assert wait_line("waiting, ", position, "", 30) == "waiting, next in the queue"


def test_a_log_gets_a_line_for_each_position_and_for_the_first_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    progress = Progress()
    for position in (
        QueuePosition(2),
        QueuePosition(2, estimate(40, 80)),
        QueuePosition(2, estimate(50, 80)),
        QueuePosition(1, estimate(50, 80)),
    ):
        progress(position)
    first, second, third = log.getvalue().splitlines()
    assert first == "migctl: waiting, place 2 in the queue"
    assert "likely to start in 40-80 s" in second
    assert third.startswith("migctl: waiting, next in the queue; likely to start in 50-80 s")


def test_a_position_of_an_older_agent_is_only_a_number() -> None:
    position = decode.queue_position(pb.Queued(position=3))
    assert (position, position.estimate, position.blockers, position.limit) == (3, None, (), "")
    assert wait_line("", position, "") == "place 3 in the queue"


def test_what_is_absent_on_the_wire_is_not_known() -> None:
    message = pb.Queued(position=1, estimate=pb.StartEstimate(latest=17, basis=pb.ESTIMATE_BASIS_DEADLINES))
    message.blockers.add(gpu_index=1, what="x", state="leased", expires_at=5.0)
    message.limit = "bob holds 1 of at most 1 lease"
    position = decode.queue_position(message)
    assert position.limit == message.limit
    assert position.estimate == StartEstimate(earliest=None, median=None, latest=17, basis="deadlines")
    assert position.blockers[0].expires_at == 5.0
    assert start_interval(position.estimate) == "within 17 s"
