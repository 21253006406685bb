"""Sources of settings: file, environment and flags; each value has its place for messages."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mig_agent.config.field_types import ENVIRONMENT_PREFIX
from mig_agent.config.settings import ROWS
from mig_agent.core.errors import ConfigError
from mig_agent.core.quantities import shown

_CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
_OTHERS = frozenset(
    ENVIRONMENT_PREFIX + name
    for name in (
        *("ADDRESS", "LEASE", "DEVICE_INDEX", "DEVICE_COUNT", "TLS_CA", "TLS_SERVER_NAME"),
        *("CONFIG", "CRASH_AT", "CHECK_THREADS"),
    )
)
"""Variables of the clients, and of this program, that are no settings."""
_NULL = "tag:yaml.org,2002:null"
_SIMILARITY = 0.8
"""Similarity from which a variable counts as a mistyped setting.

A Kubernetes service of this name makes variables such as MIG_AGENT_PORT, which are no mistake.
"""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was written, and where."""

    value: str | tuple[str, ...]
    where: str
    """Place for messages: `reread in /etc/mig-agent/config.yaml, line 4`, `MIG_AGENT_REREAD`, `--reread`."""


def from_flags(flags: Mapping[str, str | tuple[str, ...] | None]) -> dict[str, Given]:
    """Return the values of the command line; None is a flag that was not given."""
    return {name: Given(value, ROWS[name].flag) for name, value in flags.items() if value is not None}


def from_environment(environment: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """Return the values of MIG_AGENT_ variables. Raises ConfigError for a mistyped one."""
    variables = {row.variable: row.name for row in ROWS.values()}
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in variables and variable not in _OTHERS:
            near = difflib.get_close_matches(variable, variables, n=1, cutoff=_SIMILARITY)
            if near:
                raise ConfigError(f"cannot use {variable}: it is not a setting", f"did you mean {near[0]}?")
    set_ones = {variable: environment.get(variable, "") for variable in variables}
    # A service file or a pod unsets a variable by making it empty.
    return {variables[variable]: Given(text, variable) for variable, text in set_ones.items() if text}


def from_cuda(environment: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves visible. Raises ConfigError if none are."""
    text = environment.get(_CUDA_VARIABLE)
    if text is None or text.strip() in {"all", "void"}:
        return {}
    names = [part.strip() for part in text.split(",") if part.strip()]
    if any(name.startswith("MIG-") for name in names):
        raise ConfigError(
            f"cannot use {_CUDA_VARIABLE}={shown(text)}: it names MIG devices, and the agent manages whole GPUs",
            "unset it, or name the GPUs with --gpus",
        )
    # CUDA uses the names before the first invalid one.
    seen = names[: next((n for n, name in enumerate(names) if name.startswith("-")), len(names))]
    if not seen:
        raise ConfigError(
            f"cannot serve: {_CUDA_VARIABLE}={shown(text)} leaves no GPU visible", "unset it, or use --gpus"
        )
    return {"gpus": Given(tuple(seen), _CUDA_VARIABLE)}


def from_file(path: Path) -> dict[str, Given]:
    """Return the values of a YAML file. Raises ConfigError, which names the line of a mistake."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the configuration {path}: {why}", "give another with --config") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"cannot read {path}{line}: {error.problem}", "it must be YAML: `name: value`") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"cannot read {path}: it has characters that YAML does not allow") from error
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"cannot use {path}: it holds no settings", "write one `name: value` a line")
    return _settings_of(root, path)


def _settings_of(root: yaml.MappingNode, path: Path) -> dict[str, Given]:
    found: dict[str, Given] = {}
    lines: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else "this key"
        place = f"{shown(name)} in {path}, line {line}"
        if name not in ROWS:
            raise ConfigError(f"cannot use {place}: it is not a setting", _nearest(name))
        if name in lines:
            raise ConfigError(f"cannot use {place}: line {lines[name]} sets it already", "remove one of them")
        lines[name] = line
        if value.tag != _NULL:
            found[name] = Given(_value(value, place), place)
    return found


def _value(node: yaml.Node, place: str) -> str | tuple[str, ...]:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    if isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        return tuple(str(each.value) for each in node.value)
    raise ConfigError(f"cannot use {place}: it takes a value or a plain list", "docs/configuration.md has examples")


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), ROWS, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "docs/configuration.md lists them all"
