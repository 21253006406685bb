"""Which characters a text may have that others read, and how the rest is shown."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from mig_agent.core.errors import UsageError
from mig_agent.core.texts import check_text, visible

HOSTILE = {
    "NUL": "\0",
    "newline": "\n",
    "tab": "\t",
    "escape": "\x1b",
    "delete": "\x7f",
    "CSI": "\x9b",
    "no-break space": "\xa0",
    "soft hyphen": "\xad",
    "grapheme joiner": "\u034f",
    "Arabic letter mark": "\u061c",
    "Hangul filler": "\u3164",
    "zero-width space": "\u200b",
    "zero-width joiner": "\u200d",
    "right-to-left mark": "\u200f",
    "line separator": "\u2028",
    "paragraph separator": "\u2029",
    "right-to-left override": "\u202e",
    "isolate": "\u2066",
    "braille blank": "\u2800",
    "surrogate": "\udcff",
    "private use": "\ue000",
    "variation selector": "\ufe0f",
    "byte-order mark": "\ufeff",
    "no character": "\uffff",
    "tag": "\U000e0041",
    "variation selector 17": "\U000e0100",
}
HARMLESS = (
    "",
    "train (2), 50 %",
    r"C:\temp\u202e",
    "Zoë Müller-Łukasz",
    "Zoe\u0308 with a mark of its own",
    "Ελένη Иван 中村 김민준",
    "שָׁלוֹם",
    "علي",
    "हिन्दी",
    "Việt",
    "ภาษาไทย",
    "…—„“ ± µ 🚀",
)


@pytest.mark.parametrize("character", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_character_is_refused_with_its_place_and_shown_escaped(character: str) -> None:
    text = f"été{character}!"
    with pytest.raises(UsageError, match=rf"U\+{ord(character):04X}, at position 4") as raised:
        check_text(text, "a name")
    number = ord(character)
    escaped = f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
    assert visible(text) == f"été{escaped}!"
    assert (
        raised.value.message
        == f"cannot take été{escaped}! as a name: it has the character U+{number:04X}, at position 4"
    )
    assert raised.value.hint
    with pytest.raises(UsageError, match=r"^cannot take this text as a token"):
        check_text(text, "a token", repeat=False)


@pytest.mark.parametrize("text", HARMLESS)
def test_letters_of_all_languages_stay_as_they_are(text: str) -> None:
    check_text(text, "a name")
    assert visible(text) == text


def test_a_heap_of_marks_is_refused() -> None:
    heap = "a" + "\u0301" * 6
    with pytest.raises(UsageError, match="more than 4 combining marks on one letter, at position 6"):
        check_text(heap, "a name")
    assert visible(heap) == "a" + "\u0301" * 4 + "\\u0301" * 2


def test_no_character_that_is_shown_is_of_a_category_that_hides_or_moves() -> None:
    for number in range(sys.maxunicode + 1):
        character = chr(number)
        if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
            assert visible(character).startswith("\\"), hex(number)
        elif unicodedata.category(character)[0] == "L" and visible(character) != character:
            assert "FILLER" in unicodedata.name(character), hex(number)


def test_what_is_shown_is_fit_to_be_taken() -> None:
    for each in (*HOSTILE.values(), "a" + "\u0301" * 6):
        check_text(visible(f"a{each}b"), "a name")
