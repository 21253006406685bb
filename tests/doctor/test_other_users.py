"""Checks by other users: what they cannot see is unknown, with the reason; what fails has a command that mends it."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.client.addresses import Address
from mig_agent.client.errors import NoAgent
from mig_agent.config import Settings
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind
from mig_agent.doctor.agent_settings import FoundSettings
from mig_agent.doctor.checks import caller, driver, gpus, ledger, machine
from mig_agent.doctor.findings import CheckStatus
from mig_agent.doctor.probe import SUDO_HINT
from support import answers
from support.examined import ALICE, ROOT, only, status, subject, tree

NO_LIBRARY = DriverError(DriverErrorKind.LIBRARY, "nvmlInit", "Shared Library Not Found")
GPU = replace(answers.GPU, instances=())
HIDDEN = FoundSettings(settings=Settings(), where="the agent (pid 4711)", partly=True)


@pytest.mark.parametrize("check", [driver.kernel_module, driver.nvml, gpus.present])
def test_a_driver_that_only_the_agent_sees_is_unknown(tmp_path: Path, check: object) -> None:
    """Its GPUs are simulated, and its settings are hidden from the user."""
    (tmp_path / "sys/bus").mkdir(parents=True)
    of = subject(tmp_path, person=ALICE, node=status(gpus=(GPU,)), driver=NO_LIBRARY, found=HIDDEN)
    found = only(check, of)  # type: ignore[arg-type]  # each is a check
    assert found.status is CheckStatus.UNKNOWN
    assert found.hint == SUDO_HINT
    assert "1 GPU" in found.message or "not read" in found.message
    # With no agent, or one without a GPU that works, it is what keeps requests from being served.
    for node in (NoAgent("there is no such socket"), status(), status(gpus=(replace(GPU, state="lost"),))):
        if check is not gpus.present:
            lost = only(check, subject(tmp_path, person=ALICE, node=node, driver=NO_LIBRARY, found=HIDDEN))  # type: ignore[arg-type]  # as above
            assert lost.status is CheckStatus.FAILED


def test_the_default_folder_is_not_taken_for_the_agents(tmp_path: Path) -> None:
    """The agent, whose environment is hidden, may have another state directory."""
    of = subject(tmp_path, person=ALICE, node=status(), found=HIDDEN)
    assert of.state_dir is None
    for check in (ledger.file, machine.disk):
        found = only(check, of)
        assert (found.status, found.hint) == (CheckStatus.UNKNOWN, SUDO_HINT)
    given = replace(HIDDEN, given=frozenset({"state_dir"}))
    assert subject(tmp_path, person=ALICE, found=given).state_dir == Settings().state_dir


def test_settings_with_a_mistake_are_mended_first(tmp_path: Path) -> None:
    wrong = FoundSettings(where="x", error=ConfigError("cannot use max_calls in x, line 1: ...", "write 1 or more"))
    denied = FoundSettings(where="x", error=ConfigError("cannot read the configuration x: Permission denied", ""))
    light = FoundSettings(where="x", error=ConfigError("cannot read: installed without yaml", "run the other migctl"))
    for check in (ledger.file, machine.disk):
        assert (
            only(check, subject(tmp_path, found=wrong)).hint
            == "sudo mig-agent check tells what to mend in the settings"
        )
        assert only(check, subject(tmp_path, found=denied, person=ALICE)).hint == SUDO_HINT
        assert only(check, subject(tmp_path, found=light)).hint == "run the other migctl"


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling", "bytes", "sparse"])
def test_a_ledger_that_is_none_is_failed_at_once(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    path = folder / "ledger.sqlite3"
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "dangling":
            path.symlink_to("nothing")
        case "bytes":
            path.write_bytes(b"no ledger" * 1000)
        case "sparse":
            with path.open("wb") as file:
                file.truncate(10 << 30)
    settings = FoundSettings(settings=Settings(state_dir=folder), where="x")
    found = only(ledger.file, subject(tmp_path, found=settings))
    assert found.status is CheckStatus.FAILED
    assert found.hint.startswith("sudo ")


def test_what_is_no_folder_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    settings = FoundSettings(settings=Settings(state_dir=tmp_path / "state"), where="x")
    found = only(ledger.file, subject(tmp_path, found=settings, person=ROOT))
    assert (found.status, found.message) == (CheckStatus.FAILED, f"{tmp_path}/state is no folder")


def test_files_of_others_do_not_make_it_wait(tmp_path: Path) -> None:
    of = subject(tree(tmp_path, {"etc/cdi/x": ""}))
    os.mkfifo(tmp_path / "etc/cdi/nvidia.yaml")
    with pytest.raises(OSError, match="it is no plain file"):
        of.probe.read("/etc/cdi/nvidia.yaml")


def test_a_socket_for_its_owner_alone_names_the_whole_way(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        path.chmod(0o600)
        found = only(caller.socket, subject(tmp_path, person=ALICE, address=Address(path)))
    assert found.status is CheckStatus.FAILED
    assert found.hint.endswith("; sudo systemctl reload mig-agent")
