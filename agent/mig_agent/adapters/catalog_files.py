"""The catalog's files, `profiles/*.yaml`: one GPU model each, checked with messages for people."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from mig_agent.adapters.plain_files import read_plain
from mig_agent.core.catalog import Catalog, CatalogEntry, full_size_profile
from mig_agent.core.errors import ConfigError
from mig_agent.core.model import Engines, Layout, Placement, Profile

_PACKAGE = Path(__file__).resolve().parent.parent
_FOLDERS = (_PACKAGE / "_profiles", _PACKAGE.parent.parent / "profiles")
"""Folder in the wheel, and in a checkout."""
_MOST_BYTES = 1 << 20
_ATTRIBUTE = re.compile(r"[+-][a-z][a-z.]*")
_MODEL_KEYS = {"product_names", "memory_mib", "memory_slices", "profiles", "sources", "uncertain"}
_PROFILE_KEYS = {"id", "name", "compute_slices", "memory_slices", "memory_mib", "starts", "engines"}
_ENGINES = 6
_MOST_SLICES = 64


def load(directory: Path | None = None) -> Catalog:
    """Return all models of a folder; by default the wheel's, otherwise the checkout's.

    Raises ConfigError, naming the file and what is wrong in it.
    """
    folder = directory or next((each for each in _FOLDERS if each.is_dir()), _FOLDERS[-1])
    if not folder.is_dir():
        raise ConfigError(f"cannot read GPU models: there is no folder {folder}", "reinstall mig-agent")
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise ConfigError(f"cannot read GPU models: there is no .yaml file in {folder}", "reinstall mig-agent")
    return Catalog(entries=tuple(load_model(path) for path in paths))


def load_model(path: Path) -> CatalogEntry:
    """Return one model. Raises ConfigError."""
    try:
        content: object = yaml.load(read_plain(path, _MOST_BYTES).decode(), Loader=_LOADER)  # noqa: S506 -- a safe loader
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        first_line = str(error).split("\n", maxsplit=1)[0]
        raise ConfigError(f"cannot read the GPU model in {path}: {first_line}") from error
    return _Reader(path).entry(content)


# The loader in C, if it was built, reads the catalog eight times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader:
    """Turns parsed YAML into an entry, or raises ConfigError with the place in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entry(self, content: object) -> CatalogEntry:
        model = self._mapping(content, "the file", _MODEL_KEYS, optional={"sources", "uncertain"})
        names = self._texts(model["product_names"], "product_names")
        if not names:
            raise self._error("product_names", "needs at least one name")
        slices = self._number(model["memory_slices"], "memory_slices", low=1, high=_MOST_SLICES)
        memory = self._number(model["memory_mib"], "memory_mib", low=1)
        rows = self._sequence(model["profiles"], "profiles")
        profiles = tuple(self._profile(row, f"profiles[{number}]", slices) for number, row in enumerate(rows))
        for what in ("id", "name"):
            values = [getattr(profile, what) for profile in profiles]
            if len(set(values)) != len(values):
                raise self._error("profiles", f"names one {what} twice")
        full = full_size_profile(profiles)
        if full is None:
            raise self._error("profiles", "needs at least one profile")
        layout = Layout(
            model=names[0], memory_slices=slices, memory_mib=memory, profiles=profiles, engines=full.engines
        )
        return CatalogEntry(
            product_names=names,
            layout=layout,
            sources=self._texts(model.get("sources", []), "sources"),
            uncertain=self._texts(model.get("uncertain", []), "uncertain"),
        )

    def _profile(self, row: object, where: str, slices: int) -> Profile:
        fields = self._mapping(row, where, _PROFILE_KEYS)
        name = fields["name"]
        if not isinstance(name, str) or not name:
            raise self._error(f"{where}.name", "must be a text")
        size = self._number(fields["memory_slices"], f"{where}.memory_slices", low=1, high=slices)
        starts = [
            self._number(start, f"{where}.starts", low=0, high=slices - size)
            for start in self._sequence(fields["starts"], f"{where}.starts")
        ]
        if not starts or len(set(starts)) != len(starts):
            raise self._error(f"{where}.starts", "must name at least one slice, and none twice")
        engines = [
            self._number(count, f"{where}.engines", low=0)
            for count in self._sequence(fields["engines"], f"{where}.engines")
        ]
        if len(engines) != _ENGINES:
            raise self._error(f"{where}.engines", f"must be {_ENGINES} numbers, not {len(engines)}")
        multiprocessors, copy, decoders, encoders, jpeg, ofa = engines
        return Profile(
            id=self._number(fields["id"], f"{where}.id", low=0),
            name=name,
            compute_slices=self._number(fields["compute_slices"], f"{where}.compute_slices", low=1),
            memory_slices=size,
            memory_mib=self._number(fields["memory_mib"], f"{where}.memory_mib", low=1),
            placements=tuple(Placement(start, size) for start in sorted(starts)),
            engines=Engines(
                multiprocessors=multiprocessors, copy=copy, decoders=decoders, encoders=encoders, jpeg=jpeg, ofa=ofa
            ),
            attributes=frozenset(_ATTRIBUTE.findall(name)),
        )

    def _mapping(
        self, value: object, where: str, keys: set[str], optional: set[str] | None = None
    ) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise self._error(where, "must be a mapping")
        missing = keys - (optional or set()) - value.keys()
        unknown = value.keys() - keys
        if missing:
            raise self._error(where, f"lacks {', '.join(sorted(missing))}")
        if unknown:
            raise self._error(where, f"has {', '.join(sorted(map(str, unknown)))}, which nothing here means")
        return value

    def _sequence(self, value: object, where: str) -> Sequence[object]:
        if not isinstance(value, list):
            raise self._error(where, "must be a list")
        return value

    def _texts(self, value: object, where: str) -> tuple[str, ...]:
        items = self._sequence(value, where)
        if not all(isinstance(item, str) and item for item in items):
            raise self._error(where, "must be a list of texts")
        return tuple(str(item) for item in items)

    def _number(self, value: object, where: str, *, low: int, high: int | None = None) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._error(where, f"must be a whole number, not {value!r}")
        if value < low or (high is not None and value > high):
            raise self._error(
                where,
                f"must be {low} or more, not {value}" if high is None else f"must be {low} to {high}, not {value}",
            )
        return value

    def _error(self, where: str, what: str) -> ConfigError:
        return ConfigError(f"cannot read the GPU model in {self._path}: {where} {what}")
