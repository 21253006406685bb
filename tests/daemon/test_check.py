"""`mig-agent check`: what is wrong with a configuration, without starting."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mig_agent.config.load import read
from mig_agent.core.errors import DriverError, DriverErrorKind
from mig_agent.daemon import check as check_module
from mig_agent.daemon.check import findings
from support import forks
from support.agent import environment
from support.certificates import Authority

MISTAKES = """\
max_wating: 5
reread: soon
listen: [unix:///run/a.sock, 0.0.0.0:7400]
"""


class DriverOfTwo:
    """A driver with two GPUs."""

    @classmethod
    def open(cls) -> DriverOfTwo:
        return cls()

    @staticmethod
    def uuids() -> dict[int, str]:
        return {0: "GPU-a", 1: "GPU-b"}

    @staticmethod
    def close_at_exit() -> None:
        return


class NoDriver:
    """A machine without a driver."""

    @staticmethod
    def open() -> DriverOfTwo:
        raise DriverError(DriverErrorKind.LIBRARY, "nvmlInitWithFlags")


def check(folder: Path, text: str | None, *arguments: str, code: int) -> tuple[str, str]:
    """What it prints, on standard output and on standard error."""
    config = folder / "config.yaml"
    given: tuple[str, ...] = ()
    if text is not None:
        config.write_text(text)
        given = ("--config", str(config))
    done = forks.run(*forks.AGENT, "check", *given, *arguments, env=environment(folder))
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def asked(folder: Path, text: str, code: int) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(check(folder, text, "-o", "json", code=code)[0])
    return answer


def local(folder: Path, text: str = "") -> str:
    """A configuration that needs nothing of this machine but a folder."""
    return f"state_dir: {folder}/state\nlisten: unix://{folder}/run/agent.sock\nsimulate: a30\n{text}"


def test_a_configuration_that_can_be_used_is_said_to_be_so_and_nothing_is_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    printed, errors = check(tmp_path, local(tmp_path), code=0)
    assert printed == f"{tmp_path}/config.yaml: 0 errors, 0 warnings\n"
    assert not errors
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    assert asked(tmp_path, local(tmp_path), 0) == {
        "config": f"{tmp_path}/config.yaml",
        "valid": True,
        "errors": [],
        "warnings": [],
    }


def test_all_mistakes_come_in_one_run_with_their_places(tmp_path: Path) -> None:
    printed, errors = check(tmp_path, MISTAKES, code=1)
    config = tmp_path / "config.yaml"
    assert printed == f"{config}: 3 errors, 0 warnings\n"
    assert [line.split(": ")[0] for line in errors.splitlines()] == ["error"] * 3
    assert f"error: cannot use max_wating in {config}, line 1: it is not a setting. Hint: did you mean" in errors
    assert f"error: cannot use reread in {config}, line 2: cannot understand soon" in errors
    assert f"(listen in {config}, line 3)" in errors
    told = asked(tmp_path, MISTAKES, 1)
    assert not told["valid"]
    assert [(each["setting"], each["file"], each["line"]) for each in told["errors"]] == [
        (None, str(config), 1),
        ("reread", str(config), 2),
        ("listen", str(config), 3),
    ]


def test_what_depends_on_the_machine_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "state").write_text("no folder")
    text = local(
        tmp_path,
        f"tls_cert: {tmp_path}/c.pem\ntls_key: {tmp_path}/k.pem\ntls_client_ca: {tmp_path}/ca.pem\n"
        "socket_group: no-such-group\nsocket_schedulers: [no-such-user]\n",
    )
    told = asked(tmp_path, text, 0)
    assert told["valid"]
    assert [(each["setting"], each["line"]) for each in told["warnings"]] == [
        ("state_dir", 1),
        ("socket_group", 7),
        ("socket_schedulers", 8),
        ("tls_cert", 4),
    ]
    assert f"{tmp_path}/state is no folder" in told["warnings"][0]["message"]
    printed, errors = check(tmp_path, text, code=0)
    assert printed.endswith(": 0 errors, 4 warnings\n")
    assert errors.count("warning: cannot ") == 4


def test_a_key_that_others_may_read_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    authority = Authority(tmp_path, "ca")
    pem = authority.issue("server")
    text = local(tmp_path, f"tls_cert: {pem.cert}\ntls_key: {pem.key}\ntls_client_ca: {authority.ca}\n")
    pem.key.chmod(stat.S_IRUSR | stat.S_IWUSR)
    assert asked(tmp_path, text, 0)["warnings"] == []
    pem.key.chmod(0o644)
    (warning,) = asked(tmp_path, text, 0)["warnings"]
    assert str(pem.key) in warning["message"]


@pytest.mark.parametrize(
    ("line", "setting"), [("simulate: b9000:1", "simulate"), ("profiles_dir: {folder}/profiles", "profiles_dir")]
)
def test_what_is_a_mistake_on_any_machine_is_an_error(tmp_path: Path, line: str, setting: str) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles/x.yaml").write_text("nonsense: yes\n")
    text = local(tmp_path).replace("simulate: a30\n", "") + line.format(folder=tmp_path)
    (error,) = asked(tmp_path, text, 1)["errors"]
    assert (error["setting"], error["line"]) == (setting, 3)


def test_gpus_are_looked_up_where_the_driver_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, since the driver of the tests is not one that a process finds by itself."""
    tmp_path.chmod(0o755)
    config = tmp_path / "config.yaml"
    config.write_text(local(tmp_path).replace("simulate: a30", "gpus: [0, 7]"))
    monkeypatch.setattr(check_module, "Driver", DriverOfTwo)
    (finding,) = findings(read(config))
    assert not finding.is_error
    assert finding.problem.line == 3
    assert "cannot manage GPU 7: there is no such GPU" in finding.problem.message
    monkeypatch.setattr(check_module, "Driver", NoDriver)
    assert findings(read(config)) == ()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_of_others_is_told(tmp_path: Path) -> None:
    (warning,) = asked(tmp_path, local(tmp_path).replace(f"{tmp_path}/state", "/proc/state"), 0)["warnings"]
    assert "permission denied in /proc" in warning["message"]


def test_a_missing_file_is_an_error_and_a_mistyped_option_wrong_usage(tmp_path: Path) -> None:
    assert "No such file" in check(tmp_path, None, "--config", str(tmp_path / "none"), code=1)[1]
    assert "error: cannot read the configuration" in check(tmp_path, None, "--config", str(tmp_path), code=1)[1]
    check(tmp_path, None, "--confg", "x", code=2)
    check(tmp_path, None, "-o", "xml", code=2)
