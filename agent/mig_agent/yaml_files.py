"""Reads YAML files that people write: mappings with the line of each key, and messages that name file and line."""

from __future__ import annotations

from pathlib import Path

import yaml

from mig_agent.core.errors import ConfigError

_MOST_BYTES = 1 << 20
"""The most of a file that is read."""
NULL = "tag:yaml.org,2002:null"
"""The tag of a value that is left empty."""


class YamlFileError(ConfigError):
    """A file that cannot be read, or is not YAML with a mapping; `line` where it is known."""

    def __init__(self, message: str, hint: str = "", line: int | None = None) -> None:
        super().__init__(message, hint)
        self.line = line


def read_mapping(path: Path, *, noun: str = "", holds: str, unreadable_hint: str = "") -> yaml.MappingNode | None:
    """Return what is in a file; None for an empty one. Raises YamlFileError.

    Messages have `noun` before the path, and say that a file without a mapping holds no `holds`.
    """
    text = _text(path, noun, unreadable_hint)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        number = error.problem_mark.line + 1 if error.problem_mark else None
        line = "" if number is None else f", line {number}"
        raise YamlFileError(
            f"cannot read {path}{line}: {error.problem}", "it must be YAML: `name: value`", number
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        what = (
            "is nested too deeply" if isinstance(error, RecursionError) else "has characters that YAML does not allow"
        )
        raise YamlFileError(f"cannot read {path}: it {what}") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise YamlFileError(f"cannot use {path}: it holds no {holds}", "write one `name: value` a line")
    return root


def _text(path: Path, noun: str, hint: str) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise OSError(0, "Is a directory" if path.is_dir() else "it is no plain file")  # noqa: TRY301 -- worded as the others below
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise OSError(0, f"it is larger than {_MOST_BYTES >> 20} MiB")  # noqa: TRY301 -- as above
        return raw.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise YamlFileError(f"cannot read {noun}{' ' if noun else ''}{path}: {why}", hint) from error
