"""Quantities as people type them: memory (`4G`, `9.5Gi`), durations (`1h30m`) and fractions of a GPU (`0.25`).

Exact arithmetic on whole numbers: an amount of memory never passes through a float. Text that cannot be understood
raises UsageError with a hint, with a message for each kind of mistake.
"""

from __future__ import annotations

import math
import re

from mig_agent.core.errors import UsageError
from mig_agent.core.texts import visible

_MEMORY_UNITS = {
    "B": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_LOOSE_UNITS = {"g": "G", "t": "T", "gb": "G", "tb": "T", "mb": "M", "kb": "k", "gi": "Gi", "ti": "Ti", "mi": "Mi"}
_LOOSE_UNITS |= {f"{each}b": f"{each.capitalize()}" for each in ("gi", "ti", "mi", "ki")}
"""Units in lower case that can mean one thing only; `m` is a thousandth to Kubernetes."""
_DURATION_UNITS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
"""In milliseconds."""
_LONGEST_TEXT = 40
"""Characters that no quantity needs more of; longer texts are cut in messages."""
_MOST_BARE = 50_000
"""Numbers up to this are repeated with units in hints: with each of them they are an amount that is taken."""
_MOST_BYTES = 2**60
_MOST_SECONDS = 10 * 365 * 86400
_MIB_IN_GIB = 1024
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_QUANTITY = re.compile(rf"(?P<sign>[+-]?)(?P<number>{_NUMBER}) *(?P<unit>[A-Za-z]*)", re.ASCII)
_SPECIAL = re.compile(r"[+-]?(?P<word>nan|inf|infinity)[A-Za-z]*", re.ASCII | re.IGNORECASE)
_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+ *[A-Za-z]*", re.ASCII)
_EXPONENT = re.compile(rf"[+-]?{_NUMBER}[eE][+-]?[0-9]+ *[A-Za-z]*", re.ASCII)
_DURATION_PART = re.compile(rf"({_NUMBER}) *(w|d|h|ms|m|s)", re.ASCII)
_MEMORY_HINT = "write a number with a unit, such as 4G, 4Gi, 512M or 4096Mi"
_DURATION_HINT = "write a number with a unit, such as 90s, 10m, 2h or 1h30m"
_RATIO = re.compile(rf"(?P<percent>{_NUMBER}) *%|(?P<part>[0-9]+) */ *(?P<whole>[0-9]+)", re.ASCII)
_FRACTION_HINT = "write a number above 0 and up to 1, such as 0.25"


def shown(text: str) -> str:
    """Return `text` as messages repeat it: on one line, with nothing hidden in it, and cut to 40 characters."""
    clean = visible(text)
    return clean if len(clean) <= _LONGEST_TEXT else clean[: _LONGEST_TEXT - 3] + "..."


def counted(number: int, what: str) -> str:
    """Return a count with its noun: `1 lease`, `2 leases`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def parse_memory(text: str) -> int:
    """Return the bytes of a quantity as Kubernetes writes it (`4G`, `4Gi`, `512M`, `9.5Gi`).

    A `B` may follow, and units may be in lower case where that can mean one thing only (`4g`, `4gb`). G is 10^9 bytes
    and Gi is 2^30. A part of a byte counts as a whole one. Raises UsageError.
    """
    name = "memory"
    stripped = _checked(text, name, _MEMORY_HINT)
    match = _QUANTITY.fullmatch(stripped)
    if match is None:
        raise _junk(stripped, name, _MEMORY_HINT)
    number, unit = match["number"], match["unit"]
    if match["sign"] == "-":
        raise UsageError(f"cannot take {shown(stripped)} as memory: it is negative", _MEMORY_HINT)
    if not unit and not float(number):
        raise UsageError(f"cannot take {shown(stripped)} as memory: it is zero", _MEMORY_HINT)
    if not unit:
        raise UsageError(
            f"cannot take {shown(stripped)} as memory: it has no unit",
            f"write {number}G, {number}Gi, {number}M or {number}Mi" if float(number) <= _MOST_BARE else _MEMORY_HINT,
        )
    factor = _memory_factor(unit)
    if factor is None:
        raise _unknown_unit(stripped, number, unit)
    digits, scale = _exact(number)
    amount = -(-digits * factor // scale)
    if amount == 0:
        raise UsageError(f"cannot take {shown(stripped)} as memory: it is zero", _MEMORY_HINT)
    if amount > _MOST_BYTES:
        raise UsageError(f"cannot take {shown(stripped)} as memory: no GPU has that much", _MEMORY_HINT)
    return amount


def format_memory(amount: int) -> str:
    """Format bytes exactly, as people write them: `4Gi`, `9.5Gi`, `4G`, `5952Mi`; `parse_memory` reverses it."""
    hundredths, rest = divmod(amount * 100, 2**30)
    if rest == 0:
        return f"{_decimal(hundredths)}Gi"
    for unit in ("G", "Mi", "M", "Ki", "k"):
        if amount % _MEMORY_UNITS[unit] == 0:
            return f"{amount // _MEMORY_UNITS[unit]}{unit}"
    return f"{amount}B"


def format_mib(mib: int) -> str:
    """Format MiB for people: `9.75 GiB`, `512 MiB`. Rounded down, since people then request what they read."""
    return f"{mib} MiB" if mib < _MIB_IN_GIB else f"{_decimal(mib * 100 // _MIB_IN_GIB)} GiB"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `90s`, `10m`, `2h`, `1h30m` or `1d`. Raises UsageError."""
    name = "a duration"
    stripped = _checked(text, name, _DURATION_HINT)
    if stripped.startswith("-"):
        raise UsageError(f"cannot take {shown(stripped)} as a duration: it is negative", _DURATION_HINT)
    if re.fullmatch(_NUMBER, stripped, re.ASCII):
        if not float(stripped):
            raise UsageError(f"cannot take {shown(stripped)} as a duration: it is zero", _DURATION_HINT)
        hint = f"write {stripped}s, {stripped}m or {stripped}h" if float(stripped) <= _MOST_BARE else _DURATION_HINT
        raise UsageError(f"cannot take {shown(stripped)} as a duration: it has no unit", hint)
    total, smallest, position = 0.0, math.inf, 0
    while position < len(stripped):
        match = _DURATION_PART.match(stripped, position)
        unit = None if match is None else _DURATION_UNITS[match[2]]
        # From large to small, each unit once: 1h30m, not 30m1h.
        if match is None or unit is None or unit >= smallest:
            raise _junk(stripped, name, _DURATION_HINT)
        smallest = unit
        digits, scale = _exact(match[1])
        total += digits * unit / (1000 * scale)
        position = match.end()
    if total == 0:
        raise UsageError(f"cannot take {shown(stripped)} as a duration: it is zero", _DURATION_HINT)
    if total > _MOST_SECONDS:
        raise UsageError(f"cannot take {shown(stripped)} as a duration: it is more than ten years", _DURATION_HINT)
    return total


def format_duration(seconds: float) -> str:
    """Format seconds as people write them, with at most two units: `45s`, `1h30m`, `2d3h`."""
    whole = max(0, math.floor(seconds))
    parts: list[tuple[int, str]] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append((count, unit))
    return "".join(f"{count}{unit}" for count, unit in parts[:2] if count) or "0s"


def parse_fraction(text: str) -> float:
    """Parse a fraction of a GPU, above 0 and up to 1: `0.25`, `25%` or `1/4`. Raises UsageError."""
    name = "a fraction of a GPU"
    stripped = _checked(text, name, _FRACTION_HINT)
    ratio = _RATIO.fullmatch(stripped)
    if ratio is not None:
        return _fraction(stripped, *_ratio(ratio))
    match = _QUANTITY.fullmatch(stripped)
    if match is None or (match["unit"] and _memory_factor(match["unit"]) is None):
        raise _junk(stripped, name, _FRACTION_HINT)
    if match["unit"]:
        raise UsageError(
            f"cannot take {shown(stripped)} as a fraction of a GPU: it is a quantity of memory",
            f"--gpu-memory {shown(stripped)} asks for memory; {_FRACTION_HINT} for a fraction",
        )
    if match["sign"] == "-":
        raise UsageError(f"cannot take {shown(stripped)} as a fraction of a GPU: it is negative", _FRACTION_HINT)
    return _fraction(stripped, *_exact(match["number"]))


def _ratio(match: re.Match[str]) -> tuple[int, int]:
    """Return `25%` or `1/4` as a ratio of two whole numbers; the second may be 0."""
    if match["percent"] is None:
        return int(match["part"]), int(match["whole"])
    digits, scale = _exact(match["percent"])
    return digits, 100 * scale


def _fraction(text: str, digits: int, scale: int) -> float:
    if digits == 0 or scale == 0:
        raise UsageError(f"cannot take {shown(text)} as a fraction of a GPU: it is zero", _FRACTION_HINT)
    if digits > scale:
        raise UsageError(
            f"cannot take {shown(text)} as a fraction of a GPU: it is more than a whole one",
            f"{_FRACTION_HINT}; --num-gpus asks for several whole GPUs",
        )
    return digits / scale


def _exact(number: str) -> tuple[int, int]:
    """Return a decimal number as a ratio of two whole ones: 9.5 is 95 to 10."""
    whole, _, part = number.partition(".")
    return int(whole + part), int("1" + "0" * len(part))


def _checked(text: str, name: str, hint: str) -> str:
    """Return the text without surrounding blanks. Raises UsageError if it cannot be a quantity of any kind."""
    stripped = text.strip()
    if not stripped:
        raise UsageError(f"cannot take an empty text as {name}", hint)
    if len(stripped) > _LONGEST_TEXT:
        raise UsageError(f"cannot take {shown(stripped)} as {name}: it is {len(stripped)} characters long", hint)
    special = _SPECIAL.fullmatch(stripped)
    if special:
        words = "not a number" if special["word"].lower() == "nan" else "infinite"
        raise UsageError(f"cannot take {shown(stripped)} as {name}: it is {words}", hint)
    if _COMMA.fullmatch(stripped):
        raise UsageError(
            f"cannot take {shown(stripped)} as {name}: it has a comma",
            f"write {shown(stripped.replace(',', '.'))} if a decimal point is meant",
        )
    if _EXPONENT.fullmatch(stripped):
        raise UsageError(f"cannot take {shown(stripped)} as {name}: exponents are not understood", hint)
    return stripped


def _memory_factor(unit: str) -> int | None:
    """Return the bytes of one unit, with or without a final `B`; None for an unknown one."""
    known = _MEMORY_UNITS.get(unit)
    if known is None and unit.endswith("B"):
        known = _MEMORY_UNITS.get(unit[:-1])
    if known is None and unit in _LOOSE_UNITS:
        known = _MEMORY_UNITS[_LOOSE_UNITS[unit]]
    return known


def _unknown_unit(text: str, number: str, unit: str) -> UsageError:
    """Return the error for an unknown unit; its hint corrects a unit that is nearly right."""
    folded = unit.lower().removesuffix("ytes").removesuffix("yte")
    for candidate in ("M", "G", "T", "k", "Mi", "Gi", "Ti", "Ki"):
        if folded in {candidate.lower(), candidate.lower() + "b"}:
            why = "m means thousandths to Kubernetes" if unit == "m" else f"{shown(unit)} is not a unit of memory"
            return UsageError(f"cannot take {shown(text)} as memory: {why}", f"did you mean {number}{candidate}?")
    return UsageError(f"cannot take {shown(text)} as memory: {shown(unit)} is not a unit of memory", _MEMORY_HINT)


def _junk(text: str, name: str, hint: str) -> UsageError:
    return UsageError(f"cannot understand {shown(text)} as {name}", hint)


def _decimal(hundredths: int) -> str:
    whole, rest = divmod(hundredths, 100)
    return f"{whole}.{rest:02d}".rstrip("0").rstrip(".") if rest else str(whole)
