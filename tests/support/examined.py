"""Machines for the checks of `migctl doctor`: a tree of files, and what agent and driver answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from mig_agent import __version__
from mig_agent.adapters.host import Host
from mig_agent.adapters.nvml.survey import Survey, SurveyedGpu
from mig_agent.client.addresses import Address
from mig_agent.client.types import Status
from mig_agent.core.model import MigMode
from mig_agent.doctor.agent_settings import FoundSettings
from mig_agent.doctor.examination import Check, run
from mig_agent.doctor.findings import Finding
from mig_agent.doctor.probe import Person, Probe
from mig_agent.doctor.subject import Answered, Subject

_Answer = TypeVar("_Answer")
ROOT = Person(uid=0, name="root", groups=frozenset({0}), database_groups=frozenset({0}))
ALICE = Person(uid=1000, name="alice", groups=frozenset({1000}), database_groups=frozenset({1000}))
NOW = 1_800_000_000.0
ON, OFF = MigMode(capable=True, current=True, pending=True), MigMode(capable=True)


def tree(root: Path, files: Mapping[str, str]) -> Path:
    """Writes files under a root."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def process(root: Path, pid: int, command: str, *opened: str) -> None:
    """A process of the tree, with these device nodes open."""
    words = command.split()
    tree(
        root,
        {f"proc/{pid}/comm": f"{words[0].rsplit('/', 1)[-1][:15]}\n", f"proc/{pid}/cmdline": "\0".join(words) + "\0"},
    )
    (root / f"proc/{pid}/stat").write_text(f"{pid} ({words[0][:15]}) S 1{' 0' * 17} 4711 0 0\n")
    (root / f"proc/{pid}/fd").mkdir(exist_ok=True)
    for number, each in enumerate(opened):
        (root / f"proc/{pid}/fd/{number}").symlink_to(each)


def gpu(index: int = 0, mode: MigMode = ON, model: str = "NVIDIA H100 80GB HBM3") -> SurveyedGpu:
    return SurveyedGpu(index=index, uuid=f"GPU-{index}", model=model, minor=index, mode=mode, processes=())


def survey(*gpus: SurveyedGpu, driver: str = "580.95.05") -> Survey:
    return Survey(driver_version=driver, nvml_version=f"13.{driver}", gpus=gpus)


def status(**more: object) -> Status:
    facts: dict[str, object] = {
        "node": "gpu-17",
        "revision": 7,
        "gpus": (),
        "leases": (),
        "queue": (),
        "started_at": NOW - 60,
        "ledger_error": "",
        "version": __version__,
        "driver_version": "580.95.05",
        "strict_fifo": False,
    }
    return Status(**(facts | more))  # type: ignore[arg-type]  # each test gives the right ones


def subject(
    root: Path,
    *,
    person: Person = ROOT,
    node: Status | Exception | None = None,
    driver: Survey | Exception | None = None,
    found: FoundSettings | None = None,
    address: Address | None = None,
    programs: Mapping[str, str] | None = None,
    simulated: bool = False,
) -> Subject:
    """A machine under `root`; `programs` are what programs print, by name."""

    def run_program(command: Sequence[str]) -> str | None:
        return (programs or {}).get(command[0])

    return Subject(
        probe=Probe(root=root, person=person, run=run_program, environment={}),
        address=address or Address(root / "run/mig-agent/mig-agent.sock"),
        status=_answered(node),
        found=found or FoundSettings(where="the defaults"),
        survey=_answered(driver),
        host=Host(root, simulated=True),
        simulated=simulated,
        now=NOW,
    )


def _answered(value: _Answer | Exception | None) -> Answered[_Answer]:
    return Answered(error=value) if isinstance(value, Exception) else Answered(value=value)


def only(check: Check, of: Subject) -> Finding:
    """The one finding of a check."""
    (found,) = run(check, of)
    return found


def found_by(check: Check, of: Subject) -> list[tuple[str, str]]:
    """What a check finds, by name and status."""
    return [(each.check, each.status.value) for each in run(check, of)]
