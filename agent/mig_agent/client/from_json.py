"""Decodes JSON that `to_json` wrote back into the answers of the client, such as that of `migctl status -o json`.

It may be of another version: keys that this one does not know are left out, and what is missing is empty.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from mig_agent.client import types
from mig_agent.client.to_json import KEYS, TIMES, Json


def status(value: Json) -> types.Status:
    """Decode a node. Raises ValueError if it is no status of a node."""
    if not isinstance(value, dict) or "node" not in value or not isinstance(value.get("gpus"), list):
        raise ValueError("cannot decode a node: it is no answer of `migctl status -o json`")
    missing = value.get("missing_gpus")
    found: types.Status = _object(types.Status, {name: each for name, each in value.items() if name != "missing_gpus"})
    if not isinstance(missing, list):
        return found
    silent = {int(str(each["index"])): str(each["reason"]) for each in missing if isinstance(each, dict)}
    return replace(found, missing_gpus=silent)


def top(value: Json) -> tuple[types.Status, dict[int, types.Usage]]:
    """Decode `migctl top -o json`: the node as far as that shows it, and what is used on each instance, by generation.

    Raises ValueError if it is no such answer.
    """
    instances = value.get("instances") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(instances, list):
        raise ValueError("cannot decode what is used on a node: it is no answer of `migctl top -o json`")  # noqa: TRY004 -- as of `status`
    gpus: dict[Json, dict[str, Json]] = {}
    leases: dict[Json, Json] = {}
    usage: dict[int, types.Usage] = {}
    for each in (each for each in instances if isinstance(each, dict)):
        index, lease, used = each.get("gpu_index"), each.get("lease"), each.get("usage")
        gpu = gpus.setdefault(str(index), {"uuid": each.get("gpu"), "index": index, "instances": []})
        gpu["instances"] = [*_list(gpu["instances"]), each]
        if lease:
            leases[str(lease)] = {"lease": lease, "unused": each.get("unused")}
        if isinstance(used, dict):
            usage[int(str(each.get("generation", 0)))] = _object(types.Usage, used)
    found: dict[str, Json] = {"node": value.get("node"), "gpus": [*gpus.values()], "leases": [*leases.values()]}
    node: types.Status = _object(types.Status, found)
    return node, usage


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


@cache
def _plan(kind: type) -> tuple[tuple[Field[Any], Any, str], ...]:
    """Return each field of a dataclass with its type and its key in JSON."""
    keys = {}
    for each in KEYS[kind].split():
        key, _, attribute = each.rstrip("?-").partition("=")
        keys[attribute or key] = key
    hints = get_type_hints(kind)
    return tuple((each, hints[each.name], keys.get(each.name, "")) for each in fields(kind))


def _object(kind: type, value: Mapping[str, Json]) -> Any:  # noqa: ANN401 -- one of `kind`
    found: dict[str, object] = {}
    for each, hint, key in _plan(kind):
        if key and value.get(key) is not None:
            found[each.name] = _value(hint, value[key], key)
        elif each.default is MISSING and each.default_factory is MISSING:
            found[each.name] = _empty(hint)
    return kind(**found)


def _value(hint: Any, value: Json, key: str = "") -> object:  # noqa: ANN401 -- any type of a field
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {Union, python_types.UnionType}:
        return _value(next(each for each in inner if each is not type(None)), value, key)
    if origin is tuple:
        return tuple(_value(inner[0], each) for each in value) if isinstance(value, list) else ()
    if is_dataclass(hint) and isinstance(hint, type):
        return _object(hint, value) if isinstance(value, dict) else _empty(hint)
    if key in TIMES and isinstance(value, str):
        return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()  # noqa: FURB162 -- Python 3.10 needs it
    if hint is float and isinstance(value, int):
        return float(value)
    return value if origin is not None or isinstance(value, hint) else _empty(hint)


def _empty(hint: Any) -> object:  # noqa: ANN401 -- any type of a field
    """Return what a field without a value holds: None where it may, else empty text, 0, or nothing."""
    if type(None) in get_args(hint):
        return None
    if is_dataclass(hint) and isinstance(hint, type):
        return _object(hint, {})
    return () if get_origin(hint) is tuple else {} if get_origin(hint) is not None else hint()
