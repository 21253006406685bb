"""Removes what must not leave the machine in a bundle: tokens, keys, passwords, settings that could hold one.

Nothing is added to a bundle that is known to hold a secret: no environment, no key files, no remembered tokens. This
module is the second line, for what people write into names, reasons and arguments, which logs and events repeat.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Final

from mig_agent.client.to_json import Json

if TYPE_CHECKING:
    from mig_agent.config import Settings
    from mig_agent.config.field_types import Row

LEFT_OUT: Final = "(left out)"
_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9a-fA-F]{64,}(?![0-9A-Za-z])")
"""A lease's token, or the agent's key in hexadecimal: 64 digits."""
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_WORDS: Final = r"(?:token|password|passwd|passphrase|secret|api[-_]?key|access[-_]?key|credentials?|authorization)"
_NAMED = re.compile(
    rf"(--[\w-]*{_WORDS}[\w-]*(?:=|\s+)|{_WORDS}[\"']?\s*[=:]\s*[\"']?(?:Bearer\s+)?)[^\s\"',;]+", re.IGNORECASE
)
"""An option with its value, or a name with a value behind `=` or `:`."""
_SECRET_KEYS: Final = frozenset({"token", "request_id", "env"})
"""Keys of the API's JSON: with the id of a request its lease and token could be asked for again."""
_SECRET_NAME = re.compile(r"token|password|secret|credential", re.IGNORECASE)
_PLAIN_TEXTS: Final = frozenset({"socket_group", "simulate"})
"""Settings that are free text and hold no secret. Another one is left out until somebody has thought of it."""


def redact(text: str) -> str:
    """Return a text without what looks like a token, a key or a password."""
    return _NAMED.sub(rf"\g<1>{LEFT_OUT}", _HEX.sub(LEFT_OUT, _KEY_BLOCK.sub(LEFT_OUT, text)))


def redact_json(value: Json) -> Json:
    """Return JSON with every text redacted, and without the values of keys that hold secrets."""
    match value:
        case str():
            return redact(value)
        case list():
            return [redact_json(each) for each in value]
        case dict():
            return {
                name: LEFT_OUT if name in _SECRET_KEYS and each else redact_json(each) for name, each in value.items()
            }
        case _:
            return value


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
