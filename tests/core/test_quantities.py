"""Quantities as people type them."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import (
    format_duration,
    format_memory,
    parse_duration,
    parse_fraction,
    parse_memory,
    shown,
)

GI = 2**30


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4G", 4 * 10**9),
        ("4GB", 4 * 10**9),
        ("4Gi", 4 * GI),
        ("4GiB", 4 * GI),
        ("512M", 512 * 10**6),
        ("512MB", 512 * 10**6),
        ("4096Mi", 4 * GI),
        ("4096MiB", 4 * GI),
        ("9.5Gi", 19 * GI // 2),
        (".5G", 500_000_000),
        ("1T", 10**12),
        ("1Ti", 2**40),
        ("5000000k", 5 * 10**9),
        ("4194304Ki", 4 * GI),
        ("  4G ", 4 * 10**9),
        ("4 GiB", 4 * GI),
        ("+4G", 4 * 10**9),
        ("04G", 4 * 10**9),
        ("4.0Gi", 4 * GI),
        ("0.1G", 100_000_000),
        ("0.3Ki", 308),
        ("100B", 100),
        ("4g", 4 * 10**9),
        ("4gb", 4 * 10**9),
        ("4gi", 4 * GI),
        ("4gib", 4 * GI),
        ("512mb", 512 * 10**6),
        ("512mib", 512 * 2**20),
    ],
)
def test_memory(text: str, amount: int) -> None:
    assert parse_memory(text) == amount


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("4", "it has no unit", "write 4G, 4Gi, 4M or 4Mi"),
        ("4.5", "it has no unit", "4.5Gi"),
        ("40000000000000000000", "it has no unit", "4Gi"),
        ("0G", "it is zero", "4G"),
        ("0.000Gi", "it is zero", "4G"),
        ("-4G", "it is negative", "4G"),
        ("-4", "it is negative", "4G"),
        ("nan", "it is not a number", "4G"),
        ("NaNG", "it is not a number", "4G"),
        ("inf", "it is infinite", "4G"),
        ("-infinityGi", "it is infinite", "4G"),
        ("4Gb", "Gb is not a unit of memory", "did you mean 4G?"),
        ("512m", "m means thousandths to Kubernetes", "did you mean 512M?"),
        ("4Q", "Q is not a unit of memory", "4Gi"),
        ("4Giga", "Giga is not a unit of memory", "4Gi"),
        ("4,5G", "it has a comma", "write 4.5G"),
        ("4e9", "exponents are not understood", "4Gi"),
        ("1E3M", "exponents are not understood", "4Gi"),
        ("", "an empty text", "4G"),
        ("   ", "an empty text", "4G"),
        ("G", "cannot understand G as memory", "4G"),
        ("four", "cannot understand four as memory", "4G"),
        ("4G4G", "cannot understand 4G4G as memory", "4G"),
        ("1.2.3G", "cannot understand 1.2.3G as memory", "4G"),
        ("4.G", "cannot understand 4.G as memory", "4G"),
        ("--4G", "cannot understand --4G as memory", "4G"),
        ("٤G", "cannot understand ٤G as memory", "4G"),
        ("0x10G", "cannot understand 0x10G as memory", "4G"),
        ("9999999999T", "no GPU has that much", "4G"),
        ("1" * 50 + "G", "it is 51 characters long", "4G"),
        ("4\nG", "cannot understand 4\\u000aG", "4G"),
        ("4G\x1b[2J", "cannot understand 4G\\u001b[2J", "4G"),
    ],
)
def test_memory_that_cannot_be_meant(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_memory(text)
    assert str(caught.value).startswith("cannot ")
    assert message in str(caught.value)
    assert hint in caught.value.hint


@given(st.text(max_size=60))
@example("1\n2G")
@example("٣Gi")
@example("4\u00a0G")
def test_any_text_is_an_amount_or_a_usage_error(text: str) -> None:
    for parse in (parse_memory, parse_duration, parse_fraction):
        value: float = 1
        refusal = UsageError("cannot", "hint")
        try:
            value = parse(text)
        except UsageError as error:
            refusal = error
        assert value > 0
        assert math.isfinite(value)
        assert refusal.message.startswith("cannot")
        assert refusal.message.isprintable()
        assert refusal.hint


@given(st.integers(1, 2**60))
@example(9728 << 20)
@example(81152 << 20)
@example(10**9)
@example(1)
def test_formatting_memory_loses_nothing(amount: int) -> None:
    assert parse_memory(format_memory(amount)) == amount


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (4 * GI, "4Gi"),
        (9728 << 20, "9.5Gi"),
        (9984 << 20, "9.75Gi"),
        (5952 << 20, "5952Mi"),
        (4 * 10**9, "4G"),
        (1536 << 10, "1536Ki"),
        (1, "1B"),
    ],
)
def test_memory_is_written_as_people_write_it(amount: int, text: str) -> None:
    assert format_memory(amount) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("10m", 600),
        ("2h", 7200),
        ("1h30m", 5400),
        ("1w", 604_800),
        ("1w2d", 777_600),
        ("1d2h3m4s", 93784),
        ("1.5h", 5400),
        ("500ms", 0.5),
        ("1m500ms", 60.5),
        (" 10m ", 600),
    ],
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("10", "it has no unit", "write 10s, 10m or 10h"),
        ("0s", "it is zero", "90s"),
        ("-5m", "it is negative", "90s"),
        ("nan", "it is not a number", "90s"),
        ("inf", "it is infinite", "90s"),
        ("", "an empty text", "90s"),
        ("30m1h", "cannot understand 30m1h", "1h30m"),
        ("1m1m", "cannot understand 1m1m", "1h30m"),
        ("10min", "cannot understand 10min", "10m"),
        ("soon", "cannot understand soon", "10m"),
        ("1e3s", "exponents are not understood", "10m"),
        ("99999d", "more than ten years", "10m"),
    ],
)
def test_durations_that_cannot_be_meant(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration(text)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.4, "0s"), (45, "45s"), (90, "1m30s"), (3600, "1h"), (5400, "1h30m"), (93784, "1d2h"), (86405, "1d")],
)
def test_duration_in_words(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.25", 0.25),
        ("1", 1.0),
        ("1.0", 1.0),
        (".5", 0.5),
        ("0.001", 0.001),
        ("25%", 0.25),
        ("12.5 %", 0.125),
        ("100%", 1.0),
        ("1/4", 0.25),
        ("3 / 8", 0.375),
    ],
)
def test_fraction(text: str, value: float) -> None:
    assert parse_fraction(text) == value


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("0", "it is zero", "0.25"),
        ("-0.5", "it is negative", "0.25"),
        ("1.01", "more than a whole one", "--num-gpus"),
        ("5", "more than a whole one", "--num-gpus"),
        ("4G", "it is a quantity of memory", "--gpu-memory 4G"),
        ("150%", "more than a whole one", "0.25"),
        ("0%", "it is zero", "0.25"),
        ("0/4", "it is zero", "0.25"),
        ("1/0", "it is zero", "0.25"),
        ("5/4", "more than a whole one", "0.25"),
        ("1/", "cannot understand 1/", "0.25"),
        ("-25%", "cannot understand -25%", "0.25"),
        ("nan", "it is not a number", "0.25"),
        ("inf", "it is infinite", "0.25"),
        ("0,5", "it has a comma", "0.5"),
        ("", "an empty text", "0.25"),
    ],
)
def test_fractions_that_cannot_be_meant(text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_fraction(text)
    assert message in str(caught.value)
    assert hint in caught.value.hint


def test_a_fraction_too_small_for_a_float_is_still_above_zero() -> None:
    assert parse_fraction("0." + "0" * 36 + "1") > 0


def test_what_messages_repeat_is_short_and_printable() -> None:
    assert shown("a\nb\tc") == "a\\u000ab\\u0009c"
    assert len(shown("x" * 1000)) == 40
