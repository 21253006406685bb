"""Gathers what goes into a bundle, and says of each part that could not be had why not."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mig_agent import __version__
from mig_agent.adapters.plain_files import read_end
from mig_agent.bundle.redaction import redact, redact_json, settings_json
from mig_agent.client import Client, UsageError
from mig_agent.client.to_json import Json, encode, moment, profiles
from mig_agent.core.quantities import counted
from mig_agent.doctor.examination import examine
from mig_agent.doctor.report import to_json as doctor_json
from mig_agent.doctor.subject import AGENT_SECONDS, Answered, Subject, within, words_of

if TYPE_CHECKING:
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.client.types import Event, GpuModel

RECORDING: Final = "recording.json"
"""Name of the file that `mig-agent replay` reads."""
_PACKAGES: Final = ("click", "grpcio", "protobuf", "nvidia-ml-py", "pyyaml", "rich", "structlog")
_MOST_EVENTS: Final = 1000
"""As many as an agent gives at once."""
_MOST_REQUESTS: Final = 256
"""As many as an agent plans at once."""
_AMOUNTS: Final = ("1G", "4G", "10G", "20G", "40G")
_FRACTIONS: Final = (0.125, 0.25, 0.5, 1.0)
_AS_ROOT: Final = "sudo migctl bundle"
_MOST_LOG_BYTES: Final = 16 << 20
"""The most of the end of a log that is read."""
_LONGEST_LINE: Final = 1 << 16
_LOG: Final = "log.txt"
_NAME_LOG: Final = "name the agent's log with --log FILE"


@dataclass(slots=True, kw_only=True)
class BundleContents:
    """The files of a bundle by name, and what is missing."""

    files: dict[str, str] = field(default_factory=dict)
    missing: list[Json] = field(default_factory=list)
    by_root: bool = False

    def add_json(self, name: str, value: Json) -> None:
        """Add a file of JSON, redacted."""
        self.files[name] = json.dumps(redact_json(value), indent=2) + "\n"

    def miss(self, name: str, why: str, hint: str = "") -> None:
        """Record that a file is missing or not whole, and why."""
        hint = "" if self.by_root and hint == _AS_ROOT else hint
        self.missing.append({"file": name, "why": redact(why), "hint": hint or None})


def gather_contents(
    subject: Subject, open_client: Callable[[], Client], *, lines: int, log: Path | None
) -> tuple[BundleContents, dict[str, Json]]:
    """Return all parts that this user may see, and the manifest's facts. Raises nothing: what fails is missing."""
    contents = BundleContents(by_root=subject.probe.person.is_root)
    contents.add_json("doctor.json", doctor_json(subject, examine(subject)))
    _add_settings(contents, subject)
    _add_answers(contents, subject, open_client)
    _add_log(contents, subject, lines, log)
    return contents, {
        "made_by": f"migctl {__version__}",
        "at": moment(subject.now),
        "node": None if subject.node is None else subject.node.node,
        "agent_version": None if subject.node is None else subject.node.version,
        "as_root": subject.probe.person.is_root,
        "simulated": subject.simulated,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "missing": contents.missing,
        "note": "Names of users and of what they run are in here; tokens, keys and environment variables are not.",
    }


def _version(package: str) -> Json:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _add_settings(contents: BundleContents, subject: Subject) -> None:
    found = subject.found
    if found.settings is None:
        contents.miss("settings.json", words_of(found.error), _AS_ROOT)
        return
    contents.add_json("settings.json", {"of": found.where, "settings": settings_json(found.settings, found.given)})
    if found.partly:
        contents.miss("settings.json", "the agent's environment is hidden from this user: it may set more", _AS_ROOT)


def _add_answers(contents: BundleContents, subject: Subject, open_client: Callable[[], Client]) -> None:
    node = subject.node
    if node is None:
        for name in ("status.json", "profiles.json", RECORDING):
            contents.miss(name, words_of(subject.status.error), "start the agent, and make the bundle again")
        _add_events(contents, subject, Answered(error=subject.status.error))
        return
    contents.add_json("status.json", encode(node))
    with open_client() as client:
        models = within(AGENT_SECONDS, client.profiles)
        events = within(AGENT_SECONDS, lambda: client.events(since=0.0, limit=_MOST_EVENTS))
        _add_events(contents, subject, events)
        if models.value is None:
            contents.miss("profiles.json", words_of(models.error))
            contents.miss(RECORDING, words_of(models.error))
            return
        contents.add_json("profiles.json", profiles(models.value))
        asked = requests_for(models.value)
        recording = within(AGENT_SECONDS, lambda: client.record_plans(asked))
    if recording.value:
        # Redacted alike in holders and in refusals that name them, so that the plans stay the same.
        contents.files[RECORDING] = json.dumps(redact_json(json.loads(recording.value))) + "\n"
    else:
        why = "the agent is too old to record its plans" if recording.value == "" else words_of(recording.error)
        contents.miss(RECORDING, why)


def requests_for(models: Iterable[GpuModel]) -> list[RequestArgs]:
    """Return requests for everything that these GPUs offer: each profile anywhere and on each GPU, sizes, shares."""
    offered = list(models)
    names = sorted({each.name for model in offered for each in model.profiles if each.name != "whole"})
    sizes = sorted({each.memory_mib for model in offered for each in model.profiles})
    found: list[RequestArgs] = [{"mig_profile": name} for name in names]
    found += [{"gpu_memory": f"{mib}Mi"} for mib in sizes]
    found += [{"gpu_memory": amount} for amount in _AMOUNTS]
    found += [{"gpu_fraction": fraction} for fraction in _FRACTIONS]
    found += [{"num_gpus": number} for number in (1, 2)]
    found += [{"devices": [names[0], names[-1]]}] if names else []
    found += [
        {"mig_profile": each.name, "gpus": [str(index)]}
        for model in offered
        for index in model.gpus
        for each in model.profiles
        if each.name != "whole"
    ]
    return found[:_MOST_REQUESTS]


def _add_events(contents: BundleContents, subject: Subject, told: Answered[tuple[Event, ...]]) -> None:
    """Add the events: all that the ledger keeps where this user may read it, else those that the agent gives."""
    name = "events.jsonl"
    kept = _events_of_ledger(subject)
    if kept.value is not None:
        lines = [encode(each) for each in kept.value]
    elif told.value is not None:
        lines = [encode(each) for each in told.value]
        if len(lines) >= _MOST_EVENTS:
            why = f"only the newest {counted(len(lines), 'event')}: the ledger, which has all, is not readable here"
            contents.miss(name, why, _AS_ROOT)
    else:
        contents.miss(name, words_of(kept.error or told.error), _AS_ROOT)
        return
    contents.files[name] = "".join(json.dumps(redact_json(each)) + "\n" for each in lines)


def _events_of_ledger(subject: Subject) -> Answered[tuple[Event, ...]]:
    folder = subject.state_dir
    if folder is None or subject.address.path is None:
        return Answered(error=UsageError("the agent's settings are not known"))

    def read() -> tuple[Event, ...]:
        from mig_agent.adapters.ledger.inspection import ledger_in, read_all_events  # noqa: PLC0415 -- imports sqlite3
        from mig_agent.client.types import Event  # noqa: PLC0415 -- as above

        return tuple(
            Event(
                kind=each.kind.value,
                at=each.at,
                revision=each.revision,
                message=each.message,
                gpu=each.gpu or "",
                gpu_index=each.gpu_index,
                lease=each.lease or "",
                generation=each.generation,
                holder=each.holder,
                data=each.data,
            )
            for each in read_all_events(ledger_in(folder))
        )

    return within(AGENT_SECONDS, read)


def add_log_file(contents: BundleContents, log: Path, lines: int) -> None:
    """Add the last lines of a log that is a plain file, or why it cannot be read."""
    try:
        raw, is_all = read_end(log, _MOST_LOG_BYTES)
    except OSError as error:
        contents.miss(_LOG, f"{log}: {error.strerror or error}", _NAME_LOG)
        return
    found = raw.decode(errors="replace").splitlines(keepends=True)
    contents.files[_LOG] = redact("".join(each[-_LONGEST_LINE:] for each in found[-lines:]))
    if not is_all and len(found) <= lines:
        contents.miss(_LOG, f"only the last {_MOST_LOG_BYTES >> 20} MiB of {log} are read")


def _add_log(contents: BundleContents, subject: Subject, lines: int, log: Path | None) -> None:
    name = _LOG
    if log is not None:
        add_log_file(contents, log, lines)
        return
    journal = subject.probe.run(
        ("journalctl", "--unit=mig-agent", f"--lines={lines}", "--no-pager", "--quiet", "--output=short-iso-precise")
    )
    if journal:
        contents.files[name] = redact(journal[-_MOST_LOG_BYTES:])
    elif journal is None:
        contents.miss(name, "there is no journalctl here", _NAME_LOG)
    elif subject.probe.person.is_root:
        contents.miss(name, "the journal has nothing of mig-agent.service", _NAME_LOG)
    else:
        contents.miss(name, "the journal has nothing of mig-agent.service that this user may read", _AS_ROOT)
