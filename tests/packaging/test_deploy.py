"""What is deployed fits the program: the unit for systemd and the image."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from mig_agent.config import load
from mig_agent.config.settings import DEFAULT_CONFIG
from mig_agent.program import program

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    parser.read(ROOT / "deploy/mig-agent.service")
    return parser["Service"]


def test_the_unit_starts_what_there_is(unit: configparser.SectionProxy) -> None:
    name, verb, *flags = shlex.split(unit["ExecStart"])
    assert name == "mig-agent", "systemd looks in /usr/local/bin, for pip, and in /usr/bin, for the package"
    shown = CliRunner().invoke(program, [verb, "--help"]).output
    assert all(flag in shown for flag in flags if flag.startswith("--"))


def test_the_unit_makes_the_folders_that_the_defaults_name(unit: configparser.SectionProxy) -> None:
    settings = load()
    assert settings.state_dir == Path("/var/lib") / unit["StateDirectory"]
    runtime = Path("/run") / unit["RuntimeDirectory"]
    assert settings.admin_address.path.parent == runtime
    assert settings.lock_dir.is_relative_to(runtime)


def unit_lines(key: str) -> list[str]:
    """All values of a key that may come several times."""
    lines = (ROOT / "deploy/mig-agent.service").read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


def test_a_reload_checks_the_configuration_that_the_agent_reads_and_then_tells_it() -> None:
    (start,) = unit_lines("ExecStart")
    check, tell = unit_lines("ExecReload")
    program_path, _, *flags = shlex.split(start)
    assert shlex.split(check) == [program_path, "check", *flags]
    assert shlex.split(tell) == ["/bin/sh", "-c", "kill -HUP $MAINPID"]
    assert f"--config {DEFAULT_CONFIG}" in start, "so that `mig-agent check` alone checks the same file"


def test_the_unit_is_started_again_however_it_ends_but_not_for_a_wrong_configuration(
    unit: configparser.SectionProxy,
) -> None:
    assert unit["Restart"] == "always"
    assert unit["RestartPreventExitStatus"] == "2"
    # Not every few seconds for ever.
    assert int(unit["RestartSec"]) >= 5


def test_the_unit_waits_for_what_the_agent_tells(unit: configparser.SectionProxy) -> None:
    assert unit["Type"] == "notify"
    assert int(unit["TimeoutStopSec"]) > load().stop_deadline
    assert int(unit["WatchdogSec"]) > load().call_deadline


def test_the_unit_bounds_what_a_failing_agent_can_do(unit: configparser.SectionProxy) -> None:
    """No core, which would hold keys; and memory that no bound of the agent's comes near."""
    assert unit["LimitCORE"] == "0"
    assert unit["MemoryMax"] == "1G"
    assert unit["StateDirectoryMode"] == "0700"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here to read the unit")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """All of it: a word that it does not know is only a warning, and the line counts for nothing."""
    program = tmp_path / "mig-agent"
    program.touch(mode=0o755)
    text = (ROOT / "deploy/mig-agent.service").read_text()
    assert "ExecStart=mig-agent " in text
    unit = tmp_path / "mig-agent.service"
    # Here it is in no folder where systemd would look for it.
    unit.write_text(re.sub(r"^(Exec\w+=)mig-agent ", rf"\g<1>{program} ", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        check=False,
        env={"SYSTEMD_UNIT_PATH": f"{tmp_path}:", "PATH": os.environ["PATH"]},
    )
    words = [line for line in (done.stdout + done.stderr).splitlines() if "mig-agent.service" in line]
    assert not words
    assert done.returncode == 0


def test_the_guide_installs_the_configuration_that_the_unit_reads(unit: configparser.SectionProxy) -> None:
    guide = (ROOT / "docs/admin.md").read_text()
    config = re.search(r"--config (\S+)", unit["ExecStart"])
    assert config
    assert f"deploy/debian/config.yaml {config[1]}" in guide


def test_the_image_copies_what_is_there() -> None:
    for line in (ROOT / "Dockerfile.agent").read_text().splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            assert all((ROOT / source).exists() for source in sources), line
            # The list leaves out everything but what it names.
            assert {f"!{source}" for source in sources} <= set((ROOT / ".dockerignore").read_text().splitlines()), line
