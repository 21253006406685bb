"""Types of settings: how each is read from text and shown, and the rows of tables and pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mig_agent.config.addresses import TcpAddress, UnixAddress, parse_address, parse_tcp_address
from mig_agent.config.fractions import EXAMPLE as FRACTIONS_EXAMPLE
from mig_agent.config.fractions import SECTION as FRACTIONS
from mig_agent.config.fractions import fractions_of, show_fractions
from mig_agent.config.limits import EXAMPLE, SECTION, limits_of, show_limits
from mig_agent.config.sections import Section, section_in
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import format_duration, format_memory, parse_duration, parse_memory, shown
from mig_agent.core.requests import parse_gpu
from mig_agent.core.texts import visible

OFF = "off"
AUTO = "auto"
_OCTAL = re.compile(r"(?:0o?)?[0-7]{3}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?", re.ASCII)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_YES = frozenset({"yes", "true", "on", "1"})
_NO = frozenset({"no", "false", "off", "0"})
_OWNER = 0o600
_BYTES_OF_MIB = 1 << 20
_EXECUTE = 0o111
_LONGEST_TEXT = 4095
"""Limit of a path on Linux (PATH_MAX, without the terminating null), and of any other text."""
_LONGEST_SECTION = 1 << 20
"""The size limit of a configuration file."""
_LONGEST_NAME = 253
"""Limit of a host's name, RFC 1035."""
_DOMAIN = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*"
_RESOURCE = re.compile(rf"{_DOMAIN}/[A-Za-z0-9](?:[A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?", re.ASCII)
"""An extended resource of Kubernetes, as `k8s.io/apimachinery` checks qualified names."""
_RESOURCE_PREFIX = re.compile(rf"{_DOMAIN}/(?:[A-Za-z0-9][A-Za-z0-9._-]{{0,31}})?", re.ASCII)
_MEMORY_CLASS = re.compile(r"[1-9][0-9]{0,3}g", re.ASCII)
_LABEL = re.compile(
    rf"(?:{_DOMAIN}/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?"
    r"=(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?",
    re.ASCII,
)
_LOOPBACK = re.compile(r"localhost|127(?:\.[0-9]{1,3}){3}|\[::1\]", re.ASCII)
"""Hosts that are this machine, whoever resolves names."""
_KUBERNETES_OWN = "kubernetes.io"
"""Extended resources cannot be under this domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How values of a setting are written."""

    metavar: str
    """Placeholder of the value in help: `DURATION`."""
    words: str
    """Description of valid values, for the documents."""
    parse: Callable[[str], object]
    """Parses one text; raises UsageError if it is invalid."""
    show: Callable[[object], str] = str
    """Formats a value as people write it."""
    many: bool = False
    """True if it is a list: several texts, or texts with commas between; its values are tuples."""
    is_switch: bool = False
    none: str = OFF
    """Text for None."""
    example: str = ""
    """A value for the hint where a list was given."""
    longest: int = _LONGEST_TEXT
    """The most characters of one text; longer ones are invalid."""
    yaml_types: tuple[str, ...] = ("string", "number", "boolean")
    """The types, by JSON schema's names, that a valid value may have in YAML: `off` is a boolean."""
    pattern: str = ""
    """A regular expression that every valid text matches, for schemas; empty: it is not told."""
    is_off_for_zero: bool = False
    """True if the number 0 means `off`, and no other number is valid."""
    choices: tuple[str, ...] = ()
    """The only words that are valid, if they are few."""
    section: Callable[[Section], object] | None = None
    """Reads a mapping, for a setting that is one; then `parse` reads the same as YAML on one line."""

    def read(self, given: str | tuple[str, ...] | Section) -> object:
        """Parse what was given for a setting: a text, several, or a section. Raises UsageError if it is invalid."""
        if isinstance(given, Section):
            if self.section is None:
                raise UsageError("cannot take names with values", "write one value")
            return self.section(given)
        if self.many:
            texts = (given,) if isinstance(given, str) else given
            parts = [part.strip() for each in texts for part in each.split(",")]
            return tuple(self._parse(part) for part in parts if part)
        if not isinstance(given, str):
            raise UsageError("cannot take a list", f"write {self.example or 'one value'}")
        return self._parse(given.strip())

    def _parse(self, text: str) -> object:
        if len(text) > self.longest:
            raise UsageError(
                f"cannot take {shown(text)}: it has {len(text)} characters", f"write at most {self.longest}"
            )
        return self.parse(text)

    def write(self, value: object) -> str:
        """Return the value as people write it; None as `off`, or as the kind says."""
        if value is None:
            return self.none
        if self.many and isinstance(value, tuple):
            return ", ".join(self.show(each) for each in value)
        return self.show(value)


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise UsageError("cannot take an empty text as a path", "write the path of a file or folder")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"cannot take {shown(text)} as a path: there is no such user") from error


def _parse_switch(text: str) -> bool:
    if text.lower() in _YES | _NO:
        return text.lower() in _YES
    raise UsageError(f"cannot take {_named(text)} as yes or no", "write yes or no")


def _parse_mode(text: str) -> int:
    if not _OCTAL.fullmatch(text):
        raise UsageError(
            f"cannot take {_named(text)} as the permissions of a socket", "write three octal digits, such as 0660"
        )
    mode = int(text.removeprefix("0o"), 8)
    if mode & _EXECUTE or mode & _OWNER != _OWNER:
        raise UsageError(
            f"cannot take {shown(text)} as the permissions of a socket: its owner reads and writes, nobody executes",
            "write 0660 for owner and group, 0600 for the owner alone, 0666 for everybody",
        )
    return mode


def _parse_count(text: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise UsageError(f"cannot take {_named(text)} as a whole number", "write one such as 1000")
    return int(text)


def _parse_number(text: str) -> float:
    if not _NUMBER.fullmatch(text):
        raise UsageError(f"cannot take {_named(text)} as a number", "write one such as 0 or 2.5")
    return float(text)


def _parse_mib(text: str) -> int:
    """Return an amount of memory in MiB, rounded up."""
    return -(-parse_memory(text) // _BYTES_OF_MIB)


def _parse_duration_or_off(text: str) -> float | None:
    return None if text.lower() in _NO else parse_duration(text)


def _parse_duration_or_auto(text: str) -> float | None:
    return None if text.lower() == AUTO else parse_duration(text)


def _parse_tcp_or_off(text: str) -> TcpAddress | None:
    return None if text.lower() == OFF else parse_tcp_address(text)


def _parse_loopback_or_off(text: str) -> TcpAddress | None:
    address = _parse_tcp_or_off(text)
    if address is not None and not _LOOPBACK.fullmatch(address.host.lower()):
        raise UsageError(
            f"cannot serve the web page on {address}: it is for loopback alone, since its token is not encrypted",
            f"write 127.0.0.1:{address.port}, and from elsewhere: ssh -L {address.port}:127.0.0.1:{address.port} HOST",
        )
    return address


def _parse_selected_gpu(text: str) -> str:
    try:
        return parse_gpu(text)
    except UsageError as error:
        raise UsageError(error.message, "write indices or UUIDs, such as 0,2 or GPU-...") from error


def _parse_name(text: str) -> str:
    if not text or visible(text) != text or len(text) > _LONGEST_NAME:
        raise UsageError(f"cannot take {_named(text)} as a name", "write a name without line ends")
    return text


def _parse_unix_address(text: str) -> UnixAddress:
    address = parse_address(text)
    if isinstance(address, UnixAddress):
        return address
    raise UsageError(f"cannot listen on {address} for administrators: it is not a Unix socket", "write unix:///path")


def _parse_resource(text: str) -> str:
    if not _RESOURCE.fullmatch(text) or len(text) > _LONGEST_NAME or _is_of_kubernetes(text):
        raise UsageError(f"cannot take {_named(text)} as an extended resource", "write one such as nvidia.com/gpu")
    return text


def _parse_resource_prefix(text: str) -> str:
    if not _RESOURCE_PREFIX.fullmatch(text) or len(text) > _LONGEST_NAME or _is_of_kubernetes(text):
        raise UsageError(
            f"cannot take {_named(text)} as the beginning of extended resources", "write one such as nvidia.com/mig-"
        )
    return text


def _is_of_kubernetes(resource: str) -> bool:
    domain = resource.partition("/")[0]
    return domain == _KUBERNETES_OWN or domain.endswith(f".{_KUBERNETES_OWN}")


def _parse_memory_class(text: str) -> str:
    if not _MEMORY_CLASS.fullmatch(text.lower()):
        raise UsageError(f"cannot take {_named(text)} as a class of memory", "write decimal gigabytes, such as 10g")
    return text.lower()


def _parse_label(text: str) -> str:
    if not _LABEL.fullmatch(text):
        raise UsageError(
            f"cannot take {_named(text)} as a label of a node", "write KEY=VALUE, such as mig-agent.io/managed=true"
        )
    return text


def _named(text: str) -> str:
    return shown(text) or "an empty text"


def _show_duration(value: object) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return format_duration(value) if value >= 1 else f"{value * 1000:g}ms"


def choice(*choices: str) -> Kind:
    """Return a kind with one of a few words, in any case."""
    either = _either(choices)

    def parse(text: str) -> str:
        if OFF in choices and text.lower() in _NO:
            return OFF  # YAML takes `off` for a boolean, and Helm writes it as false
        if text.lower() not in choices:
            raise UsageError(f"cannot take {_named(text)}", f"write {either}")
        return text.lower()

    words = _either([f"`{each}`" for each in choices])
    return Kind(metavar="WORD", words=words, parse=parse, yaml_types=("string",), choices=choices)


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _matching(pattern: str) -> str:
    return rf"^\s*(?:{pattern})\s*$"


_DURATION = r"(?:[0-9.]+ *(?:w|d|h|ms|m|s) *)+"
_DURATION_WORDS = "a duration such as 90s, 10m or 1h30m"

PATH = Kind(metavar="PATH", words="a path", parse=_parse_path)
TEXT = Kind(metavar="TEXT", words="a text", parse=str)
NAME = Kind(metavar="NAME", words="a name", parse=_parse_name)
SWITCH = Kind(
    metavar="", words="yes or no", parse=_parse_switch, show=lambda value: "yes" if value else "no", is_switch=True
)
SOCKET_MODE = Kind(metavar="MODE", words="three octal digits", parse=_parse_mode, show=lambda value: f"{value:04o}")
COUNT = Kind(
    metavar="NUMBER",
    words="a whole number",
    parse=_parse_count,
    yaml_types=("integer", "string"),
    pattern=_matching(_WHOLE_NUMBER.pattern),
)
NUMBER = Kind(
    metavar="NUMBER",
    words="a number of 0 or more",
    parse=_parse_number,
    show=lambda value: f"{value:g}",
    yaml_types=("number", "string"),
    pattern=_matching(_NUMBER.pattern),
)
DURATION = Kind(
    metavar="DURATION",
    words=_DURATION_WORDS,
    parse=parse_duration,
    show=_show_duration,
    yaml_types=("string",),
    pattern=_matching(_DURATION),
)
DURATION_OR_OFF = Kind(
    metavar="DURATION",
    words=f"{_DURATION_WORDS}, or `off`",
    parse=_parse_duration_or_off,
    show=_show_duration,
    yaml_types=("string", "boolean", "integer"),
    is_off_for_zero=True,
    pattern=_matching(f"{_DURATION}|[Oo][Ff][Ff]|[Nn][Oo]|[Ff][Aa][Ll][Ss][Ee]|0"),
)
DURATION_OR_AUTO = Kind(
    metavar="DURATION",
    words=f"{_DURATION_WORDS}, or `auto`",
    parse=_parse_duration_or_auto,
    show=_show_duration,
    none=AUTO,
    yaml_types=("string",),
    pattern=_matching(f"{_DURATION}|[Aa][Uu][Tt][Oo]"),
)
ADDRESSES = Kind(metavar="ADDRESS", words="a list of `unix:///PATH` and `HOST:PORT`", parse=parse_address, many=True)
UNIX_ADDRESS = Kind(metavar="ADDRESS", words="`unix:///PATH`", parse=_parse_unix_address)
TCP_OR_OFF = Kind(metavar="ADDRESS", words="`HOST:PORT`, or `off`", parse=_parse_tcp_or_off)
LOOPBACK_OR_OFF = Kind(metavar="ADDRESS", words="`HOST:PORT` on loopback, or `off`", parse=_parse_loopback_or_off)
NAMES = Kind(metavar="NAME,...", words="a list of names", parse=_parse_name, many=True)
GPUS = Kind(metavar="GPU,...", words="a list of indices and UUIDs", parse=_parse_selected_gpu, many=True)
RESOURCE = Kind(metavar="RESOURCE", words="an extended resource", parse=_parse_resource)
RESOURCE_PREFIX = Kind(metavar="PREFIX", words="the beginning of extended resources", parse=_parse_resource_prefix)
MEMORY_CLASSES = Kind(
    metavar="CLASS,...", words="a list of decimal gigabytes such as `10g`", parse=_parse_memory_class, many=True
)
LIMITS = Kind(
    metavar="YAML",
    words="a mapping (see admin.md)",
    parse=lambda text: limits_of(section_in(text, SECTION, EXAMPLE)),
    show=show_limits,
    example=EXAMPLE,
    longest=_LONGEST_SECTION,
    section=limits_of,
)
FRACTIONS_BY_GPU = Kind(
    metavar="YAML",
    words="a mapping of indices and UUIDs to `auto`, `cgroup`, `mps` or `off`",
    parse=lambda text: fractions_of(section_in(text, FRACTIONS, FRACTIONS_EXAMPLE)),
    show=show_fractions,
    example=FRACTIONS_EXAMPLE,
    section=fractions_of,
)
MIB = Kind(
    metavar="SIZE",
    words="memory such as 512Mi or 1Gi",
    parse=_parse_mib,
    show=lambda value: format_memory(int(str(value)) << 20),
)
LABEL = Kind(metavar="KEY=VALUE", words="a label of a node", parse=_parse_label)


ENVIRONMENT_PREFIX = "MIG_AGENT_"
"""`MIG_AGENT_STATE_DIR` sets `state_dir`."""
ROW = "row"
"""Key of the row in a field's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting, as all that is generated from the table sees it."""

    name: str
    """Name in the file: `state_dir`."""
    kind: Kind
    words: str
    """Description in a sentence or two."""
    group: str
    """Heading of its group."""
    example: str
    default: str
    """The default as people write it; empty where `when_unset` describes a missing value."""
    when_unset: str
    live: bool
    """True if a running agent takes up a change of it when it reads the configuration again."""
    at_least: float | None = None
    """The least and the most value of a number or a duration with which an agent can work; None for no bound."""
    at_most: float | None = None

    def read(self, given: str | tuple[str, ...] | Section) -> object:
        """Parse what was given, as its kind does, and check the bounds. Raises UsageError and InvalidConfigError."""
        value = self.kind.read(given)
        if isinstance(value, int | float):
            if self.at_least is not None and value < self.at_least:
                least = self.kind.write(self.at_least)
                raise UsageError(f"{given} is less than {least}", f"write {least} or more")
            if self.at_most is not None and value > self.at_most:
                most = self.kind.write(self.at_most)
                raise UsageError(f"{given} is more than {most}", f"write {most} or less")
        return value

    @property
    def bounds(self) -> str:
        """The bounds in words: `at least 1s, at most 1h`; empty if there are none."""
        pairs = (("at least", self.at_least), ("at most", self.at_most))
        return ", ".join(f"{words} {self.kind.write(each)}" for words, each in pairs if each is not None)

    @property
    def flag(self) -> str:
        """The flag: `--state-dir`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable: `MIG_AGENT_STATE_DIR`."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def setting(
    default: object,
    words: str,
    *,
    kind: Kind,
    group: str,
    example: str,
    when_unset: str = "",
    live: bool = False,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Any:  # noqa: ANN401 -- as dataclasses.field
    """Return a dataclass field that carries its row of the settings table; the setting is named after the field."""
    row = {
        "kind": kind,
        "words": words,
        "group": group,
        "example": example,
        "default": "" if when_unset else kind.write(default),
        "when_unset": when_unset,
        "live": live,
        "at_least": at_least,
        "at_most": at_most,
    }
    return field(default=default, metadata={ROW: row})
