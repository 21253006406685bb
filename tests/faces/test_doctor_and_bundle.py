"""`migctl doctor`, `migctl bundle` and `mig-agent replay` as people run them, with a real agent and without."""

from __future__ import annotations

import gzip
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mig_agent.adapters.tokens import KEY_FILE
from mig_agent.bundle import archive
from mig_agent.client.tokens import RememberedTokens
from support import forks
from support.agent import Agent, environment, eventually

ROOT = Path(__file__).resolve().parents[2]
CHECKS = "driver.nvml gpu.mig-mode managers.mig-manager devices.nodes containers.toolkit caller.socket agent.serves"


@pytest.fixture
def seen(folder: Path) -> Any:
    """An agent whose command line can be read, as that of a service can: not forked from the tests' server."""
    with Agent(folder, "a100-80gb:1,h100-80gb:1:off", forked=False) as running:
        yield running


def by_check(told: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for each in told["findings"]:
        found.setdefault(each["check"], []).append(each)
    return found


def test_doctor_with_no_agent(folder: Path) -> None:
    variables = environment(folder, MIG_AGENT_ADDRESS=f"unix://{folder}/none.sock")
    done = forks.run(*forks.MIGCTL, "doctor", env=variables)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"failed   there is no socket {folder}/none.sock" in done.stdout
    assert "-> sudo systemctl start mig-agent" in done.stdout
    assert "\033[" not in done.stdout
    assert "cannot complete this check" not in done.stdout


LIGHT = """
import sys
for name in ("pynvml", "yaml", "structlog", "prometheus_client", "rich", "kubernetes"):
    sys.modules[name] = None
from mig_agent.migctl.cli import run_command_line
sys.exit(run_command_line(sys.argv[1:]))
"""


def test_a_light_client_says_what_it_could_not_check(agent: Agent, folder: Path) -> None:
    done = forks.run("-c", LIGHT, "doctor", "-o", "json", env=agent.person({"PYTHONPATH": str(ROOT / "agent")}))
    found = by_check(json.loads(done.stdout))
    assert found["agent.serves"][0]["status"] == "ok"
    assert found["driver.nvml"][0]["hint"].startswith("pip install nvidia-ml-py")
    assert found["agent.settings"][0]["status"] == "unknown"
    assert "without yaml" in found["agent.settings"][0]["message"]
    path = folder / "b.tar.gz"
    done = forks.run("-c", LIGHT, "bundle", str(path), env=agent.person({"PYTHONPATH": str(ROOT / "agent")}))
    assert (done.returncode, done.stderr) == (0, "")
    assert "recording.json" not in done.stdout


def test_doctor_of_a_simulated_agent(seen: Agent) -> None:
    seen.migctl("request", "--gpu-memory", "4G")
    told = seen.ask("doctor")
    found = by_check(told)
    assert not [name for name in CHECKS.split() if name not in found]
    assert told["simulated"]
    assert told["summary"]["failed"] == 0
    assert [each["status"] for each in found["gpu.mig-mode"]] == ["ok", "warning"]
    assert found["gpu.mig-mode"][1]["hint"] == "sudo migctl mode enable --gpu 1"
    assert "1 lease" in found["ledger.file"][0]["message"]
    assert found["agent.settings"][0]["message"].startswith("settings of the agent (pid")
    seen.migctl("pause", "--reason", "driver 590")
    problems = seen.migctl("doctor", "--problems").stdout
    assert re.search("the agent is paused: .*driver 590", problems)
    assert "-> sudo migctl resume" in problems
    assert "  ok " not in problems


def test_a_bundle_is_planned_again_to_identical_plans(seen: Agent, folder: Path) -> None:
    granted = seen.ask("request", "--gpu-memory", "4G", "--name", "train")
    seen.migctl("request", "--mig-profile", "3g.40gb", "--ttl", "1h")
    waiting = seen.begin("request", "--mig-profile", "7g.80gb", "--wait", "60s")
    try:
        eventually(lambda: seen.ask("status")["queue"], "it waits")
        path = folder / "b.tar.gz"
        told = seen.ask("bundle", str(path), "--log", str(seen.log_file))
    finally:
        waiting.kill()
        waiting.communicate()
    assert told["missing"] == []
    with tarfile.open(path) as packed:
        assert told["files"] == sorted(name.removeprefix(f"{archive.FOLDER}/") for name in packed.getnames())
    assert path.stat().st_mode & 0o777 == 0o600

    # It is made again on a machine with no agent, from the file alone.
    seen.kill()
    replayed = forks.run(*forks.AGENT, "replay", str(path), "--verbose", env=environment(folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "7g.80gb (waiting): no-capacity" in replayed.stdout
    assert re.search(r"[0-9]+ plans and [0-9]+ refusals: identical", replayed.stdout)

    no_secrets(path, seen, folder, granted)
    another_planner_is_noticed(path, folder)


def no_secrets(path: Path, agent: Agent, folder: Path, granted: Any) -> None:
    """Searches the whole archive for all that must stay on the machine."""
    key = (agent.state_dir / KEY_FILE).read_bytes()
    remembered = RememberedTokens(folder / "person/mig-agent").token(granted["lease"])
    assert remembered == granted["token"]
    whole = gzip.decompress(path.read_bytes())
    for secret in (granted["token"].encode(), granted["request_id"].encode(), key, key.hex().encode()):
        assert secret not in whole
    assert b"XDG_STATE_HOME" not in whole
    assert not re.search(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", without_manifest(path))
    settings = json.loads(archive.read(path, "settings.json"))["settings"]
    assert settings["state_dir"] == {"value": str(agent.state_dir), "given": True}
    events = [json.loads(line) for line in archive.read(path, "events.jsonl").splitlines()]
    assert {"agent-started", "lease-granted"} <= {each["kind"] for each in events}
    assert json.loads(archive.read(path, "status.json"))["queue"][0]["request_id"] == "(left out)"
    assert "serving" in archive.read(path, "log.txt")


def without_manifest(path: Path) -> bytes:
    """All files but the manifest, which has checksums of them."""
    with tarfile.open(path) as opened:
        names = [each.name for each in opened.getmembers() if not each.name.endswith(archive.MANIFEST)]
        return b"".join((opened.extractfile(name) or opened).read() for name in names)  # type: ignore[union-attr]  # all are files


def another_planner_is_noticed(path: Path, folder: Path) -> None:
    """As an agent whose planner costs differently would have recorded it."""
    changed = folder / "recording.json"
    text = archive.read(path, "recording.json")
    changed.write_text(re.sub(r'"creation_cost": 2.0, "search_limit"', '"creation_cost": 7.5, "search_limit"', text))
    replayed = forks.run(*forks.AGENT, "replay", str(changed), env=environment(folder))
    assert replayed.returncode == 1, replayed.stdout
    assert "different" in replayed.stdout


@pytest.mark.parametrize("view", ['"x"', "[]", "null", '{"$": "MigMode", "capable": true}'])
def test_a_recording_that_was_tampered_with_gets_no_traceback(folder: Path, view: str) -> None:
    request = '{"$": "Request", "wants": [{"$": "Want", "profile": "1g.10gb"}]}'
    plans = f'[{{"$": "RecordedPlan", "request": {request}, "outcome": null}}]'
    fields = f'"version": "0.1.0", "now": 0, "policy": {{"$": "Policy"}}, "view": {view}, "plans": {plans}'
    (folder / "r.json").write_text(f'{{"format": 1, "recording": {{"$": "Recording", {fields}}}}}')
    done = forks.run(*forks.AGENT, "replay", str(folder / "r.json"), env=environment(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("mig-agent: cannot replay ")


def test_a_bundle_with_no_agent_says_what_is_missing(folder: Path) -> None:
    variables = environment(folder, MIG_AGENT_ADDRESS=f"unix://{folder}/none.sock")
    path = folder / "b.tar.gz"
    done = forks.run(*forks.MIGCTL, "bundle", str(path), env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert "not in it: status.json: cannot reach the agent" in done.stdout
    missing = {each["file"] for each in json.loads(archive.read(path, "manifest.json"))["missing"]}
    assert {"status.json", "recording.json"} <= missing
    again = forks.run(*forks.MIGCTL, "bundle", str(path), env=variables)
    assert (again.returncode, again.stdout) == (2, "")
    assert "there is such a file. Hint: give another name, or --force" in again.stderr
    replayed = forks.run(*forks.AGENT, "replay", str(path), env=environment(folder))
    assert replayed.returncode == 2
    assert "it has no recording.json" in replayed.stderr


@pytest.mark.parametrize("lines", ["0", "-3", "x"])
def test_mistakes(folder: Path, lines: str) -> None:
    done = forks.run(*forks.MIGCTL, "bundle", str(folder / "b"), "--lines", lines, env=environment(folder))
    assert done.returncode == 2
    assert done.stderr.startswith("migctl: cannot take")
