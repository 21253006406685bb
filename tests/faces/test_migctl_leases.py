"""Leases as people name and look at them: `migctl show`, names and beginnings of ids, `--mine`, `status --watch`."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.client import Client
from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder
from support.people import BOB, Person, needs_root


@pytest.fixture(scope="module")
def shared() -> Iterator[Agent]:
    """One agent for the tests of this page: two H100-80GB."""
    with short_folder() as folder:
        folder.chmod(0o711)  # other users may reach the socket
        with Agent(folder, "h100-80gb:2", flags=["--socket-mode", "0666"]) as running:
            yield running


@pytest.fixture
def agent(shared: Agent) -> Iterator[Agent]:
    yield shared
    shared.migctl("release", "--mine")


@pytest.fixture
def mixed() -> Iterator[Agent]:
    """Two models of GPU."""
    with short_folder() as folder, Agent(folder, "a100-40gb:1,h100-80gb:1") as running:
        yield running


def test_show_has_everything_about_a_lease_but_its_token(agent: Agent) -> None:
    granted = agent.ask("request", "--device", "1g.10gb", "--device", "2g.20gb", "--name", "train", "--ttl", "2h")
    pid = agent.simulator.occupy(granted["devices"][0]["uuid"], used_mib=1234)
    first, second = (each["uuid"] for each in granted["devices"])
    page = agent.migctl("show", "train").stdout
    for words in (
        granted["lease"],
        "train",
        f"uid {os.getuid()}",
        "in 2h",
        first,
        second,
        "1g.10gb",
        "slice",
        "2g.20gb",
    ):
        assert words in page
    assert f"CUDA_VISIBLE_DEVICES={first},{second}" in page
    assert "when it is released, or at its deadline" in page
    assert granted["token"] not in page
    answer = agent.ask("show", granted["lease"][:6])
    agent.simulator.vacate(pid)
    assert granted["token"] not in json.dumps(answer)
    assert answer["request_id"] == granted["request_id"]
    assert answer["env"]["MIG_AGENT_LEASE"] == granted["lease"]
    assert [each["uuid"] for each in answer["devices"]] == [first, second]
    assert answer["usage"][0]["memory_used_mib"] >= 1234
    assert answer["usage"][1]["processes"] == []


def test_names_and_beginnings_of_ids_work_wherever_a_lease_is_named(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--name", "sweep-1")["lease"]
    assert "sweep-1" in agent.migctl("events", "--lease", "sweep-1").stdout
    assert {each["lease"] for each in agent.ask("events", "--lease", lease[:8])["events"]} == {lease}
    assert agent.ask("renew", "sweep-1", "--ttl", "2h")["lease"] == lease
    assert agent.migctl("release", lease[:5]).stdout == f"released {lease}\n"
    assert "no lease of tested is called so" in agent.migctl("show", "sweep-1", code=3).stderr
    assert agent.ask("release", "sweep-1", code=3)["error"]["reason"] == "unknown-lease"
    assert f"`migctl events --lease {lease}` shows" in agent.migctl("show", lease, code=3).stderr
    assert lease in agent.migctl("events", "--lease", lease).stdout, "also of one that has ended"
    ended = agent.migctl("events", "--lease", "sweep-1")
    assert lease in ended.stdout
    assert ended.stderr == f"migctl: sweep-1 is lease {lease}\n"
    assert {each["lease"] for each in agent.ask("events", "--lease", lease[:6])["events"]} == {lease}
    unknown = agent.migctl("events", "--lease", "sweep-9", code=3).stderr
    assert unknown.startswith(
        "migctl: cannot find lease sweep-9: none is called so, and none of which an event is remem"
    )
    late = agent.migctl("events", "--lease", "sweep-1", "--since", "1ms")
    assert (late.stdout, late.stderr) == (
        "",
        "migctl: nothing is remembered of lease sweep-1 in this time; --since 30d looks further back\n",
    )
    another = agent.ask("request", "--gpu-memory", "4G", "--name", "sweep-2")["lease"]
    agent.migctl("release", "sweep-2", "sweep-3", code=3)
    assert [each["lease"] for each in agent.ask("status")["leases"]] == [another], "a mistake releases none"


def test_an_ambiguous_name_is_refused_with_its_candidates(agent: Agent) -> None:
    leases = [agent.ask("request", "--gpu-memory", "4G", "--name", "twin")["lease"] for _ in range(2)]
    for typed in (
        ["release", "twin"],
        ["show", "twin"],
        ["renew", "twin", "--ttl", "1h"],
        ["release", leases[0], "twin"],
    ):
        refused = agent.migctl(*typed, code=2).stderr
        assert refused.startswith("migctl: cannot tell which lease twin is: 2 leases match: ")
        for lease in leases:
            assert f"{lease} of twin: 1g.10gb on GPU " in refused
    assert len(agent.ask("status")["leases"]) == 2, "nothing was released"


@needs_root
def test_mine_is_what_this_user_requested(agent: Agent, folder: Path) -> None:
    person = Person(BOB, agent.socket, folder)
    try:
        with Client(f"unix://{person.path}") as bob:
            theirs = bob.acquire(gpu_memory="4G", name="theirs")
            mine = agent.ask("request", "--gpu-memory", "4G", "--name", "mine")["lease"]
            assert [each["lease"] for each in agent.ask("status", "--mine")["leases"]] == [mine]
            assert [each["lease"] for each in agent.ask("status", "--user", str(BOB))["leases"]] == [theirs.id]
            page = agent.migctl("status", "--mine").stdout
            assert mine in page
            assert theirs.id not in page
            # One's own go before those of others with the same name.
            agent.ask("request", "--gpu-memory", "4G", "--name", "theirs")
            assert agent.ask("show", "theirs")["holder_uid"] == os.getuid()
            assert len(agent.ask("release", "--mine")["released"]) == 2
            assert [each["lease"] for each in agent.ask("status")["leases"]] == [theirs.id]
            assert agent.migctl("release", "--mine").stdout == "you hold no lease here\n"
            nothing = agent.migctl("status", "--mine").stdout.splitlines()[-1]
            assert nothing == "you hold no lease here, and no request of yours waits"
            nothing = agent.migctl("status", "--user", "carol").stdout.splitlines()[-1]
            assert nothing == "no lease is held by carol, and no request of that user, tenant or pod waits"
            theirs.release()
    finally:
        person.close()


def test_release_mine_says_what_it_released(agent: Agent) -> None:
    lease = agent.ask("request", "--mig-profile", "1g.10gb", "--gpu", "1", "--name", "train")["lease"]
    assert agent.migctl("release", "--mine").stdout.startswith(f"released {lease} of train: 1g.10gb on GPU 1, slice")


def test_status_of_one_gpu(agent: Agent) -> None:
    agent.ask("request", "--mig-profile", "1g.10gb", "--gpu", "0", "--name", "zero")
    agent.ask("request", "--mig-profile", "1g.10gb", "--gpu", "1", "--name", "one")
    page = agent.migctl("status", "--gpu", "1").stdout
    assert "│one" in page
    assert "GPU 1: NVIDIA H100" in page
    assert "zero" not in page
    answer = agent.ask("status", "--gpu", "1")
    assert [each["index"] for each in answer["gpus"]] == [1]
    assert [each["holder"] for each in answer["leases"]] == ["one"]
    assert "cannot find GPU 7 on tested. Hint: it has GPU 0, 1" in agent.migctl("status", "--gpu", "7", code=3).stderr


def test_a_request_for_a_model_of_gpu(mixed: Agent) -> None:
    for verb in ("plan", "request", "run --dry-run"):
        answer = mixed.ask(*verb.split(), "--gpu-memory", "4G", "--gpu-model", "h100")
        assert {each["gpu_index"] for each in answer["devices"]} == {1}, "the smaller instance is on the A100"
    assert mixed.ask("plan", "--gpu-memory", "4G")["devices"][0]["gpu_index"] == 0
    for wrong in (("--gpu-model", "b200"), ("--gpu-model", "h100", "--gpu", "0")):
        error = mixed.ask("request", "--gpu-memory", "4G", *wrong, code=3)["error"]
        assert error["reason"] == "unknown-gpu"
        assert error["message"].startswith(f"cannot find a GPU of model {wrong[1]} on tested")
        assert "NVIDIA A100" in error["hint"]


def test_an_unknown_gpu_is_refused_alike_by_all_commands(agent: Agent) -> None:
    for typed in ("status", "reclaim", "cordon", "drain", "undrain", "mode enable", "request --gpu-memory 4G"):
        error = agent.ask(*typed.split(), "--gpu", "9", code=3)["error"]
        assert error["reason"] == "unknown-gpu"
        assert error["message"].startswith(("cannot find GPU 9", "cannot use GPU 9"))


def test_what_fits_now_and_what_is_unusable(agent: Agent) -> None:
    for _ in range(7):
        agent.ask("request", "--mig-profile", "1g.10gb", "--gpu", "0")
    answer = agent.ask("status")
    assert [each["unusable_slices"] for each in answer["gpus"]] == [[7], []]
    assert {each["profile"]: each["count"] for each in answer["available"]}["1g.10gb"] == 7
    assert "fits now (up to 79.25 GiB), any one of: 7 x 1g.10gb, " in agent.migctl("status").stdout


def test_cordon_several(agent: Agent) -> None:
    assert agent.migctl("cordon", "0", "--gpu", "1,0", "--reason", "fans").stdout.splitlines() == [
        "GPU 0 is cordoned by root: fans",
        "GPU 1 is cordoned by root: fans",
    ]
    assert agent.migctl("uncordon", "0,1").stdout == "GPU 0 is ready\nGPU 1 is ready\n"


def test_events_are_cut_aloud(agent: Agent) -> None:
    agent.ask("request", "--gpu-memory", "4G")
    total = len(agent.ask("events")["events"])
    cut = agent.migctl("events", "--limit", "2")
    assert (
        cut.stderr == f"migctl: showing the last 2 of {total} events; --limit {total} or --limit all shows the others\n"
    )
    answer = agent.ask("events", "--limit", "2")
    assert (len(answer["events"]), answer["truncated"], answer["earlier"]) == (2, True, total - 2)
    for all_of_them in (["--limit", "all"], ["--limit", "0"], ["--since", "1w"]):
        done = agent.migctl("events", *all_of_them)
        assert len(done.stdout.splitlines()) == total
        assert done.stderr == ""
    assert agent.ask("events")["truncated"] is False


def test_following_begins_with_the_last_ten(agent: Agent) -> None:
    for _ in range(5):
        agent.migctl("release", agent.ask("request", "--gpu-memory", "4G")["lease"])
    following = agent.begin("events", "-f")
    assert following.stdout is not None
    try:
        lines = [following.stdout.readline() for _ in range(10)]
        lease = agent.ask("request", "--gpu-memory", "4G", "--name", "eleventh")["lease"]
        while "eleventh" not in lines[-1]:
            lines.append(following.stdout.readline())
    finally:
        following.kill()
        following.communicate()
    assert lease
    assert len(lines) <= 13, "what the last request led to, after ten"


def test_watching_prints_each_change_in_a_pipe(agent: Agent) -> None:
    watching = agent.begin("status", "--watch", "-o", "json")
    assert watching.stdout is not None
    try:
        assert json.loads(watching.stdout.readline())["leases"] == []
        lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
        while not (seen := json.loads(watching.stdout.readline())["leases"]):
            pass
        assert [each["lease"] for each in seen] == [lease]
    finally:
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=GENEROUS_SECONDS)
    assert watching.returncode == 0


def test_watching_on_a_terminal_redraws_and_restores_the_screen(agent: Agent) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "mig_agent.migctl", "status", "--watch"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=agent.person()) as watching:
        os.close(theirs)
        seen = b""

        def read_until(words: bytes) -> None:
            nonlocal seen
            deadline = time.monotonic() + GENEROUS_SECONDS
            while words not in seen:
                assert time.monotonic() < deadline, seen
                if select.select([ours], [], [], 0.1)[0]:
                    seen += os.read(ours, 65536)

        read_until(b"0 leases")
        agent.ask("request", "--gpu-memory", "4G", "--name", "drawn")
        read_until(b"drawn")
        watching.send_signal(signal.SIGINT)
        read_until(b"\x1b[?1049l")
        assert watching.wait(GENEROUS_SECONDS) == 0
    os.close(ours)
    assert seen.startswith(b"\x1b[?1049h")


def test_watching_goes_on_when_the_agent_restarts(folder: Path) -> None:
    with Agent(folder, "h100-80gb:1") as own:
        watching = own.begin("status", "--watch", "-o", "json")
        assert watching.stdout is not None
        try:
            before = json.loads(watching.stdout.readline())
            own.restart_after_crash()
            lease = own.ask("request", "--gpu-memory", "4G")["lease"]
            while not (after := json.loads(watching.stdout.readline()))["leases"]:
                pass
            assert after["leases"][0]["lease"] == lease
            assert after["started_at"] > before["started_at"]
        finally:
            watching.kill()
            watching.communicate()
    eventually(lambda: watching.returncode is not None, "it has ended")
