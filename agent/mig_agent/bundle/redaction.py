"""Removes what must not leave the machine in a bundle: tokens, keys, passwords, settings that could hold one.

Nothing is added to a bundle that is known to hold a secret: no environment, no key files, no remembered tokens. This
module is the second line, for what people write into names, reasons and arguments, which logs and events repeat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from mig_agent.client.to_json import Json

if TYPE_CHECKING:
    from mig_agent.config import Settings
    from mig_agent.config.field_types import Row

LEFT_OUT: Final = "(left out)"
_DONE: Final = r"(?!\(left out\))"
_HEX: Final = r"(?<![0-9A-Za-z])(?<!sha256[:=])(?<!\"sha256\": \")[0-9a-fA-F]{64,}(?![0-9A-Za-z])"
"""A lease's token, or the agent's key in hexadecimal: 64 digits. A digest that says so is none."""
_KEY_BLOCK: Final = (
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
)
_KNOWN_FORMS: Final = (
    r"(?<![A-Za-z0-9])(?:(?:AKIA|ASIA|AIDA|AROA|AGPA|ANPA)[A-Z0-9]{16}(?![A-Z0-9])"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*){0,3}"
    r"|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|npm_[A-Za-z0-9]{30,}"
    r"|pypi-[\w-]{20,}|xox[abeprs]-[\w-]{10,}|sk-[\w-]{20,}|AIza[\w-]{30,})"
)
"""Tokens that tell by their form what they are: of AWS, JWT, Hugging Face, GitHub, GitLab, npm, PyPI and others."""
_WORDS: Final = (
    r"(?:token(?!s|i[sz])|password|passwd|passphrase|\w_pwd|secret(?!ar)|signature|credentials?"
    r"|(?:api|access|private|secret|signing|encryption)[-_]?key)"
)
_VALUE: Final = (
    r"(?:\\\"(?:(?!\\\").)*(?:\\\")?|\"(?:[^\"\\\n]|\\.)*\"?|'[^'\n]*'?|"
    + _DONE
    + r"[^\s\"']\S*)"  # quoted, or up to a blank
)
_WHOLE: Final = tuple(re.compile(each, re.DOTALL) for each in (_KEY_BLOCK, _HEX, _KNOWN_FORMS))
"""Patterns of text that is left out as a whole."""
_BEHIND: Final = tuple(
    re.compile(rf"(?P<before>{before}){value}", re.IGNORECASE)
    for before, value in (
        # Headers, to the end of the line or of the quotation.
        (r"(?:authorization|cookie)\\?[\"']?[ \t]{0,20}[=:][ \t]{0,20}\\?[\"']?(?=\S)", rf"{_DONE}[^\n\"'\\]+"),
        (r"\b(?:bearer|basic)[ \t]{1,20}", rf"{_DONE}[\w.~+/=-]{{8,}}"),
        # The user and the password in an address.
        (r"://", r"[^\s/\"'?#]{1,300}(?=@)"),
        # A name with a value behind `=` or `:`, and an option with its value.
        (rf"{_WORDS}\\?[\"']?\s{{0,20}}[=:]\s{{0,20}}", _VALUE),
        (rf"(?<![\w-])--(?:[\w-]{{0,40}}{_WORDS}[\w-]{{0,40}}|key|pass)(?:=|\s{{1,20}})(?!--)", _VALUE),
        (r"[?&](?:sig|key|code)=", rf"{_DONE}[^&\s#\"']+"),
        # Options of programs that take a password in their own way.
        (r"(?<![\w-])(?:-u|--user)(?:=|\s{1,20})[^\s:\"'/]{1,100}:", rf"{_DONE}[^\s\"']+"),
        (r"\b(?:mysql|mysqldump|mariadb)\b[^\n|;]{0,200}?\s-p", rf"{_DONE}[^\s\"']+"),
        (r"\bsshpass\s{1,20}-p\s{0,20}", _VALUE),
    )
)
"""Patterns of text that is left out behind something that stays."""
_JSON_LINE = re.compile(r"\{.*\}(?=\s*$)", re.MULTILINE)
_SECRET_KEYS: Final = frozenset({"token", "request_id", "env"})
"""Keys of the API's JSON: with the id of a request its lease and token could be asked for again."""
_SECRET_KEY = re.compile(rf"{_WORDS}\Z", re.IGNORECASE)
_SECRET_NAME = re.compile(r"token|password|secret|credential", re.IGNORECASE)
_PLAIN_TEXTS: Final = frozenset({"socket_group", "simulate"})
"""Settings that are free text and hold no secret. Another one is left out until somebody has thought of it."""


def redact(text: str) -> str:
    """Return a text without what looks like a token, a key or a password. JSON in its lines is looked at as such."""
    for pattern in _WHOLE[:1]:  # a key has several lines
        text = pattern.sub(LEFT_OUT, text)
    text = _JSON_LINE.sub(lambda match: _redact_object(match[0]), text)
    for pattern in _WHOLE[1:]:
        text = pattern.sub(LEFT_OUT, text)
    for pattern in _BEHIND:
        text = pattern.sub(_without_value, text)
    return text


def _without_value(match: re.Match[str]) -> str:
    """Return what stands before a value, and in its place that it is left out, in the same quotation marks."""
    value = match[0][len(match["before"]) :]
    mark = next((each for each in ('\\"', '"', "'") if value.startswith(each)), "")
    return f"{match['before']}{mark}{LEFT_OUT}{mark}"


def _redact_object(text: str) -> str:
    try:
        value = json.loads(text)
        redacted = redact_json(value)
    except (ValueError, RecursionError):
        return text
    return text if redacted == value else json.dumps(redacted)


def redact_json(value: Json) -> Json:
    """Return JSON with every text redacted, and without the values of keys that hold secrets."""
    match value:
        case str():
            return redact(value)
        case list():
            return [redact_json(each) for each in value]
        case dict():
            return {
                name: LEFT_OUT if each and _is_secret(name, each) else redact_json(each) for name, each in value.items()
            }
        case _:
            return value


def _is_secret(name: str, value: Json) -> bool:
    return name in _SECRET_KEYS or (isinstance(value, str) and _SECRET_KEY.search(name) is not None)


def settings_json(settings: Settings, given: AbstractSet[str]) -> dict[str, Json]:
    """Return the settings as people write them, with whether each was given.

    Paths of keys and certificates are kept, their contents are never read. Free text that could be a secret is left
    out.
    """
    from mig_agent.config.settings import ROWS  # noqa: PLC0415 -- a light client has none

    return {
        name: {
            "value": row.kind.write(getattr(settings, name)) if _is_public(row) else LEFT_OUT,
            "given": name in given,
        }
        for name, row in ROWS.items()
    }


def _is_public(row: Row) -> bool:
    if _SECRET_NAME.search(row.name):
        return False
    return row.name in _PLAIN_TEXTS or row.kind.metavar != "TEXT"
