"""Leases and waiting requests as people name them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mig_agent.client import Client, Refused, UsageError
from mig_agent.client.types import Status, Waiting
from mig_agent.migctl.lease_names import find_lease, find_request, own_requests, short_ids
from migctl.test_rendering import NODE

ME = os.getuid()
MINE = Waiting(
    request_id="3f2a91c0d4e54b0f",
    holder="alice (train)",
    tenant="alice",
    priority=0,
    position=1,
    since=0.0,
    wants="4G",
    holder_uid=ME,
)
THEIRS = replace(MINE, request_id="", holder="bob (sweep)", tenant="team-b", position=2, holder_uid=ME + 1)
TOLD = replace(THEIRS, request_id="3f2a0000d4e54b0f", position=3)
"""Request of another user, as an administrator sees it."""
QUEUE: Status = replace(NODE, queue=(MINE, THEIRS, TOLD))
HERE = Client("unix:///nowhere/agent.sock")


def test_ids_are_cut_to_what_is_unique() -> None:
    assert short_ids([]) == {}
    assert short_ids(["abc", ""]) == {"abc": "abc"}
    assert short_ids(["a" * 32]) == {"a" * 32: "a" * 8}
    twins = ["0123456789abcdefXX", "0123456789abcdefYY", "01234567ffffffffff"]
    assert list(short_ids(twins).values()) == ["0123456789abcdefX", "0123456789abcdefY", "01234567f"]
    inside = ["0123456789abcdef", "0123456789abcdef0"]
    assert short_ids(inside) == {inside[0]: inside[0], inside[1]: inside[1]}


def test_own_requests_are_those_of_this_uid() -> None:
    assert own_requests(HERE, QUEUE) == (MINE,)


@pytest.mark.parametrize("text", ["3f2a9", "train", "alice (train)", MINE.request_id])
def test_a_waiting_request_by_id_beginning_or_name(text: str) -> None:
    assert find_request(HERE, text, QUEUE) == MINE


def test_of_several_ones_own_is_meant_and_of_several_of_those_none() -> None:
    assert find_request(HERE, "3f2a", QUEUE) == MINE
    twin = replace(MINE, request_id="3f2a91c0d4e54b0e", position=4)
    with pytest.raises(UsageError) as mistake:
        find_request(HERE, "train", replace(QUEUE, queue=(MINE, twin)))
    assert mistake.value.message == (
        "cannot tell which waiting request train is: 2 waiting requests match: "
        "3f2a91c0d4e54b0f of alice (train): 4G, place 1; 3f2a91c0d4e54b0e of alice (train): 4G, place 4"
    )
    assert mistake.value.hint == "write the beginning of its id instead, up to where it differs from the others"


def test_ones_own_name_goes_before_the_id_and_the_name_of_another_users_request() -> None:
    """An administrator sees the ids of all; what others call their requests must not catch what he types."""
    theirs = replace(TOLD, request_id="train", holder="bob (x)", position=4)
    also = replace(TOLD, request_id="other", holder="carol (train)", position=5)
    assert find_request(HERE, "train", replace(QUEUE, queue=(theirs, also, MINE))) == MINE
    assert find_request(HERE, "train", replace(QUEUE, queue=(theirs, also, MINE)), "carol") == also
    assert find_request(HERE, "train", replace(QUEUE, queue=(theirs, also))) == theirs, "a whole id goes before names"


def test_two_requests_with_one_id_are_told_apart_by_their_callers() -> None:
    one = replace(TOLD, request_id="train", holder="alice", caller="uid 1000", position=1)
    two = replace(TOLD, request_id="train", holder="bob (sweep)", caller="name bob", position=2)
    node = replace(QUEUE, queue=(one, two))
    with pytest.raises(UsageError) as mistake:
        find_request(HERE, "train", node)
    assert mistake.value.message == (
        "cannot tell which waiting request train is: 2 waiting requests match: "
        "train of alice: 4G, place 1 (uid 1000); train of bob (sweep): 4G, place 2 (name bob)"
    )
    assert mistake.value.hint == "say whose it is: `migctl cancel train --user NAME`"
    for user in ("bob", "name bob", "bob (sweep)"):
        assert find_request(HERE, "train", node, user) == two
    assert find_request(HERE, "sweep", node) == two, "also by a name that only one has"
    with pytest.raises(Refused, match="no request of dora of that id or name waits"):
        find_request(HERE, "train", node, "dora")


def test_a_label_and_a_users_name_are_two_leases() -> None:
    """`show alice` must not take what bob calls alice for the lease of alice."""
    of_alice = replace(NODE.leases[0], id="a" * 16, holder="alice (train)", holder_uid=ME + 1)
    of_bob = replace(NODE.leases[0], id="b" * 16, holder="bob (alice)", holder_uid=ME + 2)
    node = replace(NODE, leases=(of_alice, of_bob))
    with pytest.raises(UsageError, match=r"2 leases match: a{16} of alice \(train\).*; b{16} of bob \(alice\)"):
        find_lease(HERE, "alice", node)
    assert find_lease(HERE, "alice", replace(NODE, leases=(of_alice,))) == of_alice.id
    assert find_lease(HERE, "alice", replace(NODE, leases=(of_bob,))) == of_bob.id


def test_what_is_not_found_says_what_it_is_instead() -> None:
    with pytest.raises(Refused) as refused:
        find_request(HERE, "sweep", replace(QUEUE, queue=(MINE, THEIRS)))
    assert refused.value.message == "cannot cancel sweep: it is a request of bob (sweep)"
    assert refused.value.hint == "ask team-b or an administrator"
    with pytest.raises(Refused, match="no request of that id or name waits"):
        find_request(HERE, "nothing", QUEUE)
    lease = NODE.leases[0]
    with pytest.raises(Refused) as refused:
        find_request(HERE, lease.id, QUEUE)
    assert refused.value.hint == f"`migctl release {lease.id}` ends it"
