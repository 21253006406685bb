"""Every verb of `migctl` as a person types it, against a real agent."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.agent import GENEROUS_SECONDS, PROCESS_SECONDS, Agent, eventually


def device_of(answer: dict[str, Any]) -> dict[str, Any]:
    (device,) = answer["devices"]
    found: dict[str, Any] = device
    return found


def test_the_main_job(agent: Agent) -> None:
    """Memory becomes the smallest profile; a release leaves it idle; the next one gets it; 7g takes what it needs."""
    first = agent.ask("request", "--gpu-memory", "4G", "--gpu", "0")
    assert device_of(first)["profile"] == "1g.5gb"
    assert not device_of(first)["reused"]
    second = agent.ask("request", "--gpu-memory", "4G", "--gpu", "1")
    assert device_of(second)["profile"] == "1g.10gb"
    assert device_of(agent.ask("request", "--mig-profile", "2g.10gb"))["gpu_index"] == 0

    agent.migctl("release", second["lease"])
    (idle,) = agent.instances("idle")
    assert idle["uuid"] == device_of(second)["uuid"]
    created = agent.simulator.calls("nvmlDeviceCreateGpuInstanceWithPlacement")
    third = agent.ask("request", "--gpu-memory", "4G", "--gpu", "1")
    assert device_of(third)["reused"]
    assert device_of(third)["uuid"] == device_of(second)["uuid"]
    assert agent.simulator.calls("nvmlDeviceCreateGpuInstanceWithPlacement") == created

    agent.migctl("release", third["lease"])
    assert device_of(agent.ask("request", "--mig-profile", "7g.80gb"))["gpu_index"] == 1
    assert not agent.instances("idle")
    assert len(agent.instances("leased")) == 3


def test_request_for_people(agent: Agent) -> None:
    printed = agent.migctl("request", "--gpu-memory", "4G", "--gpu", "0").stdout
    lease = agent.ask("status")["leases"][0]["lease"]
    assert f"migctl release {lease}" in printed
    assert "1g.5gb" in printed
    assert "MIG-" in printed


def test_request_for_a_shell(agent: Agent) -> None:
    exports = agent.migctl("request", "--gpu-memory", "4G", "-o", "env").stdout
    script = f'{exports}\nprintf %s "$CUDA_VISIBLE_DEVICES"'
    seen = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert seen == agent.instances("leased")[0]["uuid"]
    # `eval` of nothing would succeed, and what follows would run with the devices of before.
    for refused, code in ((["--gpu-memory", "900G"], 3), (["--gpu-memory", "4"], 2), (["--memory", "4G"], 2)):
        failed = agent.migctl("request", *refused, "-o", "env", code=code).stdout
        assert subprocess.run(["sh", "-c", failed], check=False).returncode == 1, failed


def test_request_several_devices_at_once(agent: Agent) -> None:
    answer = agent.ask("request", "--device", "2g.10gb", "--device", "4G")
    assert len(answer["devices"]) == 2
    assert answer["devices"][0]["profile"] == "2g.10gb"


def test_a_dry_run_explains_itself(agent: Agent) -> None:
    agent.migctl("request", "--mig-profile", "7g.40gb", "--name", "bob")
    for typed in (["plan", "--gpu-memory", "4G"], ["request", "--gpu-memory", "4G", "--dry-run"]):
        lines = agent.migctl(*typed, "--explain").stdout.splitlines()
        assert lines[0].startswith("GPU 1: create 1g.10gb")
        assert "  GPU 0: no place, slices 0-7 are leased to bob" in lines
        assert sum("(chosen)" in line for line in lines) == 1
        assert "(chosen)" not in agent.migctl(*typed).stdout
        assert agent.ask(*typed, "--explain")["explanation"][-1] == lines[-1]
    full = agent.migctl("plan", "--mig-profile", "2g.10gb", "--explain", code=3)
    assert full.stdout.splitlines()[:2] == ["2g.10gb:", "  GPU 0: no place, slices 0-7 are leased to bob"]
    assert full.stderr.startswith("migctl: cannot place 2g.10gb")
    error = agent.ask("plan", "--mig-profile", "2g.10gb", "--explain", code=3)["error"]
    assert error["explanation"] == full.stdout.splitlines()
    # Also where it was no dry run.
    assert agent.ask("request", "--mig-profile", "2g.10gb", code=3)["error"]["explanation"] == error["explanation"]


def test_what_is_done_is_not_explained(agent: Agent) -> None:
    for verb in ("request", "run"):
        wrong = agent.migctl(verb, "--gpu-memory", "4G", "--explain", *(["true"] if verb == "run" else []), code=2)
        assert wrong.stderr.startswith("migctl: cannot explain what is done")
        assert wrong.stderr.count("\n") == 1
    assert not agent.instances()


def test_status_shows_after_how_long_gpus_are_kept(agent: Agent) -> None:
    assert agent.ask("status")["reservation_after_seconds"] == 300
    assert "GPUs are reserved" not in agent.migctl("status").stdout
    agent.migctl("request", "--mig-profile", "7g.40gb")
    waiting = agent.begin("request", "--mig-profile", "7g.40gb", "--wait", "5m")
    try:
        eventually(lambda: agent.ask("status")["queue"], "it waits")
        assert "after 5m in the queue, GPUs are reserved for the request that is first" in agent.migctl("status").stdout
    finally:
        waiting.kill()
        waiting.communicate()


def test_request_a_fraction_and_a_whole_gpu(agent: Agent) -> None:
    assert device_of(agent.ask("request", "--gpu-fraction", "0.5", "--gpu", "1"))["profile"] == "3g.40gb"
    assert device_of(agent.ask("request", "--num-gpus", "1"))["profile"] == "7g.40gb"


def test_request_for_a_while(agent: Agent) -> None:
    assert agent.ask("request", "--gpu-memory", "4G", "--ttl", "1s")["expires_at"]
    eventually(lambda: not agent.ask("status")["leases"], "the lease has ended by itself")


def test_request_for_the_life_of_a_process(agent: Agent) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        agent.ask("request", "--gpu-memory", "4G", "--pid", str(process.pid))
        assert agent.ask("status")["leases"][0]["pid"] == process.pid
        process.kill()


def test_who_asked_is_named_by_its_process_as_long_as_that_lives(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
    running = agent.begin("run", "--gpu-memory", "4G", "--", "sleep", "600")
    eventually(lambda: len(agent.ask("status")["leases"]) == 2, "it runs")
    pids = {each["lease"]: each["holder_pid"] for each in agent.ask("status")["leases"]}
    assert pids.pop(lease) is None
    assert list(pids.values()) == [running.pid]
    running.kill()
    running.communicate(timeout=GENEROUS_SECONDS)


def test_the_same_request_id_gives_the_same_lease(agent: Agent) -> None:
    first = agent.ask("request", "--gpu-memory", "4G", "--request-id", "once")
    again = agent.ask("request", "--gpu-memory", "4G", "--request-id", "once")
    assert (again["lease"], again["token"]) == (first["lease"], first["token"])
    other = agent.ask("request", "--gpu-memory", "8G", "--request-id", "once", code=3)
    assert other["error"]["reason"] == "request-id-reused"


def test_release_with_a_token_and_with_none(agent: Agent, folder: Path) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G")
    stranger = {"XDG_STATE_HOME": str(folder / "stranger")}
    agent.migctl("release", lease["lease"], "--token", "0" * 64, code=3)
    agent.migctl("release", lease["lease"], "--token", lease["token"], variables=stranger)
    assert not agent.ask("status")["leases"]


def test_release_by_force(agent: Agent) -> None:
    """As root here: on the administrators' socket."""
    lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
    assert agent.ask("release", "--force", lease) == {"released": [lease]}
    assert not agent.ask("status")["leases"]


def test_renew(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--ttl", "10m")["lease"]
    later = agent.ask("renew", lease, "--ttl", "20h")["expires_at"]
    assert later > agent.ask("renew", lease, "--ttl", "1h")["expires_at"]
    before = agent.ask("status")["leases"][0]["expires_at"]
    error = agent.ask("renew", lease, code=2)["error"]
    assert error["message"] == "cannot renew a lease without --ttl"
    assert error["hint"] == "--ttl 2h sets a deadline, --ttl none removes it"
    assert agent.ask("status")["leases"][0]["expires_at"] == before, "a forgotten option removes no deadline"
    assert agent.ask("renew", lease, "--ttl", "None")["expires_at"] is None
    told = [line.rpartition(" goes on ")[2] for line in agent.migctl("events", "--lease", lease).stdout.splitlines()]
    assert told[-3:] == ["for 20h", "for 1h", "without a deadline"]


def test_wait_and_be_served(agent: Agent) -> None:
    blocking = agent.ask("request", "--mig-profile", "7g.80gb")["lease"]
    waiting = agent.begin("request", "--mig-profile", "7g.80gb", "--wait", "10m", "--name", "bob", "-o", "json")
    (queued,) = eventually(lambda: agent.ask("status")["queue"], "it waits")
    assert (queued["holder"], queued["position"]) == ("bob", 1)
    agent.migctl("release", blocking)
    out, _ = waiting.communicate(timeout=GENEROUS_SECONDS)
    assert waiting.returncode == 0
    assert device_of(json.loads(out))["profile"] == "7g.80gb"


def test_wait_and_give_up(agent: Agent) -> None:
    agent.ask("request", "--mig-profile", "7g.80gb")
    answer = agent.ask("request", "--mig-profile", "7g.80gb", "--wait", "1s", code=5)
    assert answer["error"]["reason"] == "waited-too-long"


def test_status_for_people_in_80_columns_without_colour(agent: Agent) -> None:
    agent.migctl("request", "--gpu-memory", "4G", "--gpu", "1", "--name", "alice")
    printed = agent.migctl("status", variables={"COLUMNS": "80", "LC_ALL": "C", "PYTHONUTF8": "0"}).stdout
    assert "\x1b" not in printed
    assert printed.isascii()
    assert max(len(line) for line in printed.splitlines()) <= 80
    for words in ("alice", "leased", "free", "1g.10gb", "GPU 0", "GPU 1"):
        assert words in printed


def test_status_in_json_has_the_documented_shape(agent: Agent) -> None:
    agent.ask("request", "--gpu-memory", "4G", "--tenant", "team-a", "--name", "alice")
    status = agent.ask("status")
    assert {"node", "revision", "gpus", "leases", "queue"} <= status.keys()
    gpu = status["gpus"][0]
    assert {"index", "uuid", "model", "mig", "state", "memory_slices", "instances"} <= gpu.keys()
    assert {"current", "pending"} <= gpu["mig"].keys()
    (instance,) = agent.instances()
    assert instance.keys() >= {
        *("uuid", "profile", "memory_mib", "placement", "gpu_instance_id", "compute_instance_id"),
        *("state", "lease", "holder", "tenant", "since"),
    }
    assert (instance["state"], instance["holder"], instance["tenant"]) == ("leased", "alice", "team-a")


def test_profiles(agent: Agent) -> None:
    printed = agent.migctl("profiles").stdout
    assert "1g.5gb" in printed
    assert "3g.40gb" in printed
    assert "1g.10gb" in json.dumps(agent.ask("profiles"))


def test_plan_changes_nothing(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--gpu", "1")["lease"]
    agent.migctl("release", lease)
    before = agent.ask("status")
    printed = agent.migctl("plan", "--mig-profile", "7g.80gb").stdout
    assert "destroy" in printed
    assert "create 7g.80gb" in printed
    assert agent.migctl("request", "--dry-run", "--mig-profile", "7g.80gb").stdout == printed
    assert agent.ask("status") == before


def test_reclaim(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--gpu", "1")["lease"]
    kept = agent.ask("request", "--gpu-memory", "4G", "--gpu", "0")
    agent.migctl("release", lease)
    (destroyed,) = agent.ask("reclaim")["destroyed"]
    assert destroyed["profile"] == "1g.10gb"
    assert [each["uuid"] for each in agent.instances()] == [device_of(kept)["uuid"]]


def test_cordon_and_uncordon(agent: Agent) -> None:
    agent.migctl("cordon", "--gpu", "1", "--reason", "a new fan")
    assert agent.ask("status")["gpus"][1]["state"] == "cordoned"
    answer = agent.ask("request", "--mig-profile", "7g.80gb", code=3)
    assert "a new fan" in json.dumps(answer)
    agent.migctl("uncordon", "--gpu", "1")
    agent.ask("request", "--mig-profile", "7g.80gb")


def test_pause_and_resume(agent: Agent) -> None:
    """Over a restart, too: the driver is not asked before it goes on, and the leases stand."""
    lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
    said = agent.migctl("pause", "--reason", "driver 590").stdout
    assert said.startswith("paused, and the driver is released: by ")
    assert said.endswith(": driver 590\n")
    agent.stop()
    agent.start()
    status = agent.ask("status")
    assert [each["lease"] for each in status["leases"]] == [lease]
    (reason,) = status["paused"]
    assert f"paused: {reason}" in agent.migctl("status").stdout
    refused = agent.ask("request", "--gpu-memory", "4G", code=3)["error"]
    assert (refused["reason"], refused["retryable"]) == ("paused", True)
    assert reason in refused["message"]
    agent.simulator.fail("nvmlInitWithFlags", 9)
    assert agent.migctl("resume").stdout.startswith("still paused: cannot take up again: ")
    # Whoever asks again has it tried at once.
    assert agent.migctl("resume").stdout == "the agent serves again\n"
    assert agent.ask("status")["paused"] == []
    assert [each["lease"] for each in agent.instances("leased")] == [lease]
    agent.ask("request", "--gpu-memory", "4G")


def test_what_is_for_administrators_is_refused_on_the_users_socket(agent: Agent, folder: Path) -> None:
    (folder / "admin.sock").rename(folder / "hidden.sock")
    for verb in (("reclaim",), ("cordon", "--gpu", "0"), ("mode", "disable", "--gpu", "0"), ("pause",), ("resume",)):
        assert agent.ask(*verb, code=3)["error"]["reason"] == "not-permitted"
    (folder / "hidden.sock").rename(folder / "admin.sock")
    agent.migctl("reclaim")


def test_mode(agent: Agent) -> None:
    agent.migctl("mode", "disable", "--gpu", "1")
    eventually(lambda: agent.ask("status")["gpus"][1]["state"] == "whole", "the H100 is a whole GPU now")
    assert device_of(agent.ask("request", "--num-gpus", "1"))["gpu_index"] == 1
    assert agent.migctl("mode", "enable", "--gpu", "1", code=3).stderr
    said = agent.migctl("mode", "disable", "--gpu", "0", code=None)
    assert "reset" in said.stdout + said.stderr
    assert agent.ask("status")["gpus"][0]["mig"] == {"capable": True, "current": True, "pending": False}


def test_events(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--gpu", "1", "--name", "alice")["lease"]
    agent.migctl("release", lease)
    kinds = [each["kind"] for each in agent.ask("events", "--since", "2h", "--gpu", "1")["events"]]
    assert {"instance-created", "lease-granted", "lease-ended"} <= set(kinds)
    assert not agent.ask("events", "--since", "2h", "--gpu", "0")["events"]
    assert "alice" in agent.migctl("events", "--since", "2h").stdout


def test_top_where_it_is_not_a_terminal(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--name", "alice")
    agent.simulator.occupy(device_of(lease)["uuid"], used_mib=1234)
    assert "alice" in agent.migctl("top", "--once").stdout


def test_every_verb_speaks_json(agent: Agent) -> None:
    """One document on stdout, whatever the verb, with the keys that a program looks for."""
    lease = agent.ask("request", "--gpu-memory", "4G", "--ttl", "2h")["lease"]
    expected = {
        ("status",): {"node", "revision", "gpus", "leases", "queue"},
        ("profiles",): {"models"},
        ("plan", "--gpu-memory", "4G"): {"devices", "steps", "score", "notes", "revision"},
        ("request", "--gpu-memory", "4G", "--dry-run"): {"devices", "steps", "score"},
        ("run", "--gpu-memory", "4G", "--dry-run"): {"devices", "steps", "score"},
        ("renew", lease, "--ttl", "1h"): {"lease", "expires_at"},
        ("top", "--once"): {"instances"},
        ("events", "--since", "2h"): {"events"},
        ("release", lease): {"released"},
        ("reclaim",): {"destroyed"},
        ("cordon", "--gpu", "1"): {"index", "state", "reason"},
        ("uncordon", "--gpu", "1"): {"index", "state"},
        ("mode", "disable", "--gpu", "1"): {"gpu", "mig", "needs", "message"},
        ("pause",): {"paused", "driver_released", "message"},
        ("resume",): {"paused", "driver_released", "message"},
    }
    for typed, keys in expected.items():
        verb, *rest = typed
        answer = json.loads(agent.migctl(verb, "-o", "json", *rest).stdout)
        assert keys <= set(answer), typed
    # What runs has stdout for itself.
    ran = agent.migctl("run", "-o", "json", "--gpu-memory", "4G", "--", "echo", "hello")
    assert ran.stdout == "hello\n"
    said = json.loads(ran.stderr)
    assert {"lease", "devices", "env"} <= set(said)
    assert "token" not in said, "what a job writes is kept in files"
    refused: dict[tuple[str, ...], tuple[int, str]] = {
        ("request", "--gpu-memory", "900G"): (3, "too-large"),
        ("plan", "--mig-profile", "9g.99gb"): (3, "unknown-profile"),
        ("run", "--gpu-memory", "900G", "--", "true"): (125, "too-large"),
        ("release", "nope"): (3, "unknown-lease"),
        ("renew", "nope", "--ttl", "1h"): (3, "unknown-lease"),
        ("cordon", "--gpu", "9"): (3, "unknown-gpu"),
        ("mode", "enable", "--gpu", "9"): (3, "unknown-gpu"),
        ("reclaim", "--gpu", "9"): (3, "unknown-gpu"),
        **{
            (*verb, "--gpu", "0,9"): (3, "unknown-gpu")
            for verb in (("cordon",), ("uncordon",), ("drain",), ("undrain",), ("reclaim",), ("adopt",), ("status",))
        },
        ("request", "--gpu-memory", "1G", "--gpu", "0,9"): (3, "unknown-gpu"),
        ("request", "--gpu-memory", "1G", "--gpu", "0,9", "--wait", "1h"): (3, "unknown-gpu"),
        ("plan", "--gpu-memory", "1G", "--gpu", "0,9"): (3, "unknown-gpu"),
        ("plan", "--gpu-memory", "1G", "--gpu", "0,9", "--explain"): (3, "unknown-gpu"),
        ("run", "--gpu-memory", "1G", "--gpu", "0,9", "--", "true"): (125, "unknown-gpu"),
        ("events", "--gpu", "9"): (3, "unknown-gpu"),
        ("events", "--gpu", "0,9"): (2, "invalid-request"),
        ("mode", "enable", "--gpu", "0,9"): (2, "invalid-request"),
        ("events", "--since", "soon"): (2, "invalid-request"),
    }
    for typed, (code, reason) in refused.items():
        verb, *rest = typed
        done = agent.migctl(verb, "-o", "json", *rest, code=code)
        assert json.loads(done.stdout)["error"]["reason"] == reason, typed
        assert done.stderr.startswith("migctl: cannot ")
    # Nothing was done to the GPU that there is.
    assert "cordoned" not in {each["state"] for each in agent.ask("status")["gpus"]}


def test_completion_for_every_shell(agent: Agent) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "migctl" in agent.migctl("completion", shell).stdout


class TestRun:
    """`migctl run` is a good launcher."""

    def test_it_sets_the_environment_and_releases(self, agent: Agent) -> None:
        code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['NVIDIA_VISIBLE_DEVICES'])"
        printed = agent.migctl("run", "--gpu-memory", "4G", "--", sys.executable, "-c", code).stdout
        (idle,) = agent.instances()
        assert printed.split() == [idle["uuid"]] * 2
        assert idle["state"] == "idle"

    @pytest.mark.parametrize("code", [0, 1, 42])
    def test_it_gives_the_commands_own_code(self, code: int, agent: Agent) -> None:
        agent.migctl("run", "--gpu-memory", "4G", "--", "sh", "-c", f"exit {code}", code=code)

    def test_it_tells_of_its_own_failures_with_125(self, agent: Agent) -> None:
        agent.migctl("run", "--gpu-memory", "900G", "--", "true", code=125)
        said = agent.migctl("run", "--gpu-memory", "4G", "--", "/no/such/program", code=125).stderr
        assert "there is no such command" in said
        assert not agent.ask("status")["leases"]

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    def test_it_forwards_signals(self, number: signal.Signals, agent: Agent, folder: Path) -> None:
        script = f"trap 'exit 7' {number.name.removeprefix('SIG')}; touch {shlex.quote(str(folder))}/up; "
        running = agent.begin("run", "--gpu-memory", "4G", "--", "bash", "-c", script + "while :; do sleep 0.05; done")
        eventually((folder / "up").exists, "it runs")
        running.send_signal(number)
        running.communicate(timeout=GENEROUS_SECONDS)
        assert running.returncode == 7
        assert not agent.ask("status")["leases"]

    def test_its_command_reads_standard_input(self, agent: Agent) -> None:
        command = [sys.executable, "-m", "mig_agent.migctl", "run", "--gpu-memory", "4G", "--", "cat"]
        done = subprocess.run(
            command,
            input="through",
            capture_output=True,
            text=True,
            check=True,
            env=agent.person(),
            timeout=PROCESS_SECONDS,
        )
        assert done.stdout == "through"

    def test_several_devices_for_one_process_are_refused_unless_each_gets_its_own(self, agent: Agent) -> None:
        devices = ("--device", "4G", "--device", "4G")
        refused = agent.migctl("run", *devices, "--", "true", code=None)
        assert refused.returncode in {2, 125}
        assert "--each" in refused.stderr
        code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        printed = agent.migctl("run", *devices, "--each", "--", sys.executable, "-c", code).stdout
        # Both print at once, so their lines may run into each other.
        assert len(set(re.findall(r"MIG-[0-9a-f-]{36}", printed))) == 2

    def test_whole_gpus_in_mig_mode_are_refused_to_one_process_before_anything_is_created(self, agent: Agent) -> None:
        said = agent.migctl("run", "--num-gpus", "2", "--", "true", code=125).stderr
        assert said == (
            "migctl: cannot run one process on 2 whole GPUs: GPU 0, 1 are in MIG mode, and a process sees only one MIG "
            "device at a time. Hint: give --each to run the command once on each device; an administrator switches MIG "
            "mode off with `migctl mode disable --gpu 0`\n"
        )
        asked = ("run", "--device", "whole", "--device", "whole", "--dry-run", "--", "true")
        assert "cannot run one process on 2 whole GPUs" in agent.migctl(*asked, code=125).stderr
        status = agent.ask("status")
        assert not [instance for gpu in status["gpus"] for instance in gpu["instances"]]
        code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        printed = agent.migctl("run", "--num-gpus", "2", "--each", "--", sys.executable, "-c", code).stdout
        assert printed.count("MIG-") == 2

    def test_several_whole_gpus_for_one_process_are_those_without_mig_mode(self, folder: Path) -> None:
        with Agent(folder, gpus="a100-40gb:2,h100-80gb:2:off") as agent:
            code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
            printed = agent.migctl("run", "--num-gpus", "2", "--", sys.executable, "-c", code).stdout
            assert printed.count("GPU-") == 2
            refused = agent.migctl("run", "--num-gpus", "2", "--gpu", "0,1,2", "--", "true", code=125).stderr
            assert "only GPU 2 is without MIG mode" in refused
            agent.ask("request", "--num-gpus", "1", "--gpu", "3")
            full = agent.migctl("run", "--num-gpus", "2", "--", "true", code=125).stderr
            assert "cannot place 2 whole GPUs together: only 1 of them fits now" in full
            assert not [instance for gpu in agent.ask("status")["gpus"][:2] for instance in gpu["instances"]]

    def test_it_ends_its_command_when_its_time_is_over(self, agent: Agent) -> None:
        limits = ("--gpu-memory", "4G", "--ttl", "300ms", "--kill-after", "100ms")
        ended = agent.migctl("run", *limits, "--", "sh", "-c", "trap '' TERM; while :; do sleep 0.05; done", code=124)
        words = "migctl: the time of this lease is over; ending the command: SIGTERM now, SIGKILL within 1s\n"
        assert ended.stderr == words
        saved = agent.migctl("run", *limits[:4], "--", "sh", "-c", "trap 'exit 0' TERM; sleep 600 & wait", code=124)
        assert "Traceback" not in saved.stderr
        assert not agent.ask("status")["leases"]

    def test_its_command_goes_on_when_somebody_else_ends_the_lease(self, agent: Agent, folder: Path) -> None:
        """It may save its work; its device is not leased to others while it is used."""
        script = f"until [ -e {shlex.quote(str(folder))}/end ]; do sleep 0.05; done; exit 6"
        running = agent.begin("run", "--gpu-memory", "4G", "--ttl", "1h", "--", "sh", "-c", script)
        (lease,) = eventually(lambda: agent.ask("status")["leases"], "it runs")
        agent.migctl("release", lease["lease"])
        assert running.stderr is not None
        assert "the command goes on" in running.stderr.readline()
        (folder / "end").touch()
        running.communicate(timeout=GENEROUS_SECONDS)
        assert running.returncode == 6

    def test_nothing_of_it_outlives_migctl(self, agent: Agent, folder: Path) -> None:
        script = f"sleep 600 & echo $! > {shlex.quote(str(folder))}/pid; wait"
        running = agent.begin("run", "--gpu-memory", "4G", "--", "sh", "-c", script)
        started = int(eventually(lambda: (folder / "pid").exists() and (folder / "pid").read_text(), "it runs"))
        running.kill()
        running.communicate(timeout=GENEROUS_SECONDS)
        eventually(lambda: not psutil.pid_exists(started), "it has ended")

    def test_it_survives_a_restart_of_the_agent(self, agent: Agent, folder: Path) -> None:
        script = (
            f"touch {shlex.quote(str(folder))}/up; until [ -e {shlex.quote(str(folder))}/end ]; do sleep 0.05; done"
        )
        running = agent.begin("run", "--gpu-memory", "4G", "--", "sh", "-c", script)
        eventually((folder / "up").exists, "it runs")
        agent.restart_after_crash()
        assert len(agent.ask("status")["leases"]) == 1
        (folder / "end").touch()
        _, words = running.communicate(timeout=PROCESS_SECONDS)
        assert running.returncode == 0, words
        eventually(lambda: not agent.ask("status")["leases"], "its lease has ended")


def test_status_as_a_picture(agent: Agent) -> None:
    agent.migctl("request", "--gpu-memory", "4G", "--name", "drawn")
    picture = agent.migctl("status", "-o", "svg", "--gpu", "0").stdout
    assert picture.startswith("<svg ")
    assert "drawn" in picture
    assert "GPU 1" not in picture
    refused = agent.migctl("status", "-o", "svg", "--watch", code=2).stderr
    assert "cannot show a picture at each change" in refused
