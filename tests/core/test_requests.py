"""Requests that can and cannot be meant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.core.errors import UsageError
from mig_agent.core.model import Holder, Request, RequestId, Want
from mig_agent.core.owner import ProcessOwner
from mig_agent.core.requests import (
    MOST_WANTS,
    fraction_want,
    memory_want,
    parse_attribute,
    parse_device,
    parse_gpu,
    profile_want,
    validate,
    whole_gpu_want,
)

GOOD = Request(wants=(Want(memory_bytes=4 << 30),))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("4G", memory_want("4G")),
        ("9.5Gi", memory_want("9.5Gi")),
        ("2g.10gb", profile_want("2g.10gb")),
        ("1g.5gb+me", profile_want("1g.5gb+me")),
        ("1g.24gb-me", profile_want("1g.24gb-me")),
        ("1g.24gb+me.all", profile_want("1g.24gb+me.all")),
        ("1c.3g.20gb", profile_want("1c.3g.20gb")),
        ("1g.5gb.me", profile_want("1g.5gb.me")),
        ("whole", whole_gpu_want()),
        (" 4G ", memory_want("4G")),
    ],
)
def test_a_device_is_a_profile_a_quantity_or_whole(text: str, want: Want) -> None:
    assert parse_device(text) == want


def test_wants_keep_the_words_of_the_person() -> None:
    assert memory_want(" 4G ").text == "4G"
    assert profile_want("2g.10gb").text == "2g.10gb"
    assert fraction_want("0.25").fraction == 0.25


@pytest.mark.parametrize("text", ["", "4", "x", "2g 10gb", "4g", "nan", "-1G"])
def test_a_device_that_is_neither(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "2g 10gb", "a\nb", "x" * 300])
def test_texts_that_are_no_profile(text: str) -> None:
    with pytest.raises(UsageError, match="profile"):
        profile_want(text)


@pytest.mark.parametrize(("text", "attribute"), [("+me", "+me"), ("me", "+me"), ("-me", "-me"), ("+ME.all", "+me.all")])
def test_attributes(text: str, attribute: str) -> None:
    assert parse_attribute(text) == attribute


@pytest.mark.parametrize("text", ["", "+", "++me", "+me!", "+" + "m" * 40, "1g"])
def test_texts_that_are_no_attribute(text: str) -> None:
    with pytest.raises(UsageError, match="attribute"):
        parse_attribute(text)


@pytest.mark.parametrize(("text", "gpu"), [("0", "0"), (" 12 ", "12"), ("007", "7"), ("GPU-1a2b-3c", "GPU-1a2b-3c")])
def test_gpus(text: str, gpu: str) -> None:
    assert parse_gpu(text) == gpu


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0.2", "--gpu-fraction 0.2"),
        (".5", "--gpu-fraction .5"),
        ("4G", "--gpu-memory 4G"),
        ("4Gi", "--gpu-memory 4Gi"),
        ("first", "its index"),
        ("-1", "its index"),
        ("", "its index"),
        ("99999", "its index"),
        ("GPU-", "its index"),
        ("1,2", "its index"),
    ],
)
def test_texts_that_are_no_gpu(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpu(text)
    assert hint in caught.value.hint


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    for parse in (parse_device, parse_gpu, parse_attribute, profile_want):
        refusal = UsageError("cannot")
        try:
            parse(text)
        except UsageError as error:
            refusal = error
        assert refusal.message.startswith("cannot")
        assert refusal.message.isprintable()


def test_good_requests() -> None:
    validate(GOOD)
    validate(
        replace(
            GOOD, gpus=("0", "GPU-abc"), wait_seconds=math.inf, ttl_seconds=60, owner=ProcessOwner(pid=1), priority=-5
        )
    )
    validate(Request(wants=(Want(whole_gpu=True),) * MOST_WANTS))
    validate(replace(GOOD, wait_seconds=0.0))


def with_want(**fields: object) -> Request:
    return replace(GOOD, wants=(replace(GOOD.wants[0], **fields),))  # type: ignore[arg-type] # fields differ by case


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request(wants=()), "for nothing"),
        (Request(wants=GOOD.wants * (MOST_WANTS + 1)), "at most 64"),
        (Request(wants=(Want(),)), "nothing asked for"),
        (with_want(profile="1g.5gb"), "more than one of"),
        (with_want(whole_gpu=True), "more than one of"),
        (with_want(memory_bytes=0), "it is zero"),
        (with_want(memory_bytes=-1), "it is negative"),
        (with_want(memory_bytes=None, fraction=0.0), "above 0 and at most 1"),
        (with_want(memory_bytes=None, fraction=1.5), "above 0 and at most 1"),
        (with_want(memory_bytes=None, fraction=math.nan), "above 0 and at most 1"),
        (with_want(memory_bytes=None, profile=""), "empty text as a profile"),
        (with_want(min_compute_slices=0), "compute slices"),
        (with_want(min_compute_slices=1000), "compute slices"),
        (with_want(attributes=frozenset({"me"})), "attribute"),
        (with_want(text="x" * 300), "300 bytes"),
        (with_want(text="ü" * 150), "300 bytes"),
        (with_want(attributes=frozenset(f"+{each}" for each in "abcdefghijklmnopq")), "17 attributes"),
        (replace(GOOD, gpus=("0.2",)), "as a GPU"),
        (replace(GOOD, gpus=("0",) * 65), "65 named GPUs"),
        (replace(GOOD, holder=Holder(name="x" * 300)), "name of the holder of 300 bytes"),
        (replace(GOOD, holder=Holder(tenant="\N{GRINNING FACE}" * 65)), "tenant of 260 bytes"),
        (replace(GOOD, holder=Holder(tenant="a\nb")), "as the tenant: it has the character U+000A"),
        (replace(GOOD, request_id=RequestId("x" * 200)), "as a request id"),
        (replace(GOOD, request_id=RequestId("a\x00b")), "as a request id"),
        (replace(GOOD, priority=2**31), "as a priority"),
        (replace(GOOD, wait_seconds=-1.0), "cannot wait"),
        (replace(GOOD, wait_seconds=math.nan), "cannot wait"),
        (replace(GOOD, ttl_seconds=0.0), "cannot lease"),
        (replace(GOOD, ttl_seconds=math.inf), "cannot lease"),
        (replace(GOOD, ttl_seconds=math.nan), "cannot lease"),
        (replace(GOOD, owner=ProcessOwner(pid=0)), "not a process id"),
        (replace(GOOD, owner=ProcessOwner(pid=2**40)), "not a process id"),
    ],
)
def test_requests_that_cannot_be_meant(request_: Request, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(request_)
    assert words in str(caught.value)
    assert str(caught.value).startswith("cannot ")
