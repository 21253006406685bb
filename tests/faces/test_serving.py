"""`mig-agent serve` from its start to its end, as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb
from mig_agent.pb.migagent.v1 import partition_manager_pb2_grpc as rpc
from support.acquire import asking
from support.agent import GENEROUS_SECONDS, SERVING, Agent, eventually, health
from support.service_manager import service_manager

SERVICE = "migagent.v1.PartitionManager"


def end(client: subprocess.Popen[str]) -> None:
    """It would look for the agent a while longer."""
    client.kill()
    client.communicate(timeout=GENEROUS_SECONDS)


def test_it_tells_of_its_health_and_its_api(agent: Agent) -> None:
    assert health(agent.address, SERVICE) == SERVING
    assert health(f"unix://{agent.folder}/admin.sock") == SERVING
    with grpc.insecure_channel(agent.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=GENEROUS_SECONDS)
        names = {each.name for each in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        (answer,) = stub.ServerReflectionInfo(iter([ask]), timeout=GENEROUS_SECONDS)
        assert answer.file_descriptor_response.file_descriptor_proto


def test_its_sockets_and_its_state_are_open_to_whom_they_should(folder: Path) -> None:
    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    with Agent(folder, flags=["--socket-mode", "0666", "--socket-group", str(os.getgid())]) as agent:
        assert mode(agent.socket) == 0o666
        assert agent.socket.stat().st_gid == os.getgid()
        assert mode(folder / "admin.sock") == 0o600
        assert mode(agent.state_dir) == 0o700


def test_it_stops_cleanly_on_sigterm_and_keeps_its_leases(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G")
    assert agent.stop() == 0
    assert not agent.socket.exists()
    assert not (agent.folder / "admin.sock").exists()
    agent.start()
    (kept,) = agent.ask("status")["leases"]
    assert kept["lease"] == lease["lease"]
    assert kept["devices"][0]["uuid"] == lease["devices"][0]["uuid"]
    agent.migctl("release", lease["lease"])


def test_it_stops_on_ctrl_c_too(agent: Agent) -> None:
    assert agent.signal(signal.SIGINT) == 0


@pytest.mark.parametrize("rounds", [3])
def test_it_comes_back_after_being_killed_with_all_its_leases(agent: Agent, rounds: int) -> None:
    leases = {agent.ask("request", "--gpu-memory", "4G")["lease"] for _ in range(rounds)}
    for _ in range(rounds):
        agent.restart_after_crash()
        assert {each["lease"] for each in agent.ask("status")["leases"]} == leases
        leases.add(agent.ask("request", "--gpu-memory", "4G")["lease"])
    assert len(agent.instances("leased")) == 2 * rounds
    for lease in leases:
        agent.migctl("release", lease)
    assert not agent.instances("leased")


def test_those_who_wait_are_answered_when_it_stops(agent: Agent) -> None:
    agent.ask("request", "--mig-profile", "7g.80gb")
    request = pb.Request(wants=[pb.Want(profile="7g.80gb")], request_id="waits", wait_seconds=600)
    with grpc.insecure_channel(agent.address) as channel:
        stream = rpc.PartitionManagerStub(channel).Acquire(asking(request))
        assert next(stream).queued.position == 1
        assert agent.stop() == 0
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    trailer = {each.key: each.value for each in caught.value.trailing_metadata()}
    assert pb.RefusalDetail.FromString(trailer["migagent-refusal-bin"]).reason == "shutting-down"


def test_a_driver_call_that_hangs_does_not_hold_up_the_end(folder: Path) -> None:
    with Agent(folder, flags=["--stop-deadline", "1s"], forked=False) as agent:
        agent.simulator.hang("nvmlDeviceCreateGpuInstanceWithPlacement")
        waiting = agent.begin("request", "--gpu-memory", "4G")
        eventually(lambda: agent.instances("creating"), "the creation is under way")
        assert agent.stop() == 0
        end(waiting)
        agent.simulator.clear()
        agent.start()
        assert agent.ask("request", "--gpu-memory", "4G")["devices"]


def test_a_second_signal_ends_it_at_once(folder: Path) -> None:
    with Agent(folder, flags=["--stop-deadline", "10m", "--call-deadline", "10m"], forked=False) as agent:
        agent.simulator.hang("nvmlDeviceCreateGpuInstanceWithPlacement")
        waiting = agent.begin("request", "--gpu-memory", "4G")
        eventually(lambda: agent.instances("creating"), "the creation is under way")
        assert agent.process is not None
        agent.process.send_signal(signal.SIGTERM)
        agent.process.send_signal(signal.SIGTERM)  # as timeout(1) does: the same wish, told twice
        eventually(lambda: '"stopping"' in agent.log(), "the first signal is heard")
        assert agent.process.poll() is None

        def ended() -> bool:
            assert agent.process is not None
            agent.process.send_signal(signal.SIGTERM)
            return agent.process.poll() is not None

        eventually(ended, "a second one ends it")
        assert agent.process.returncode == 128 + signal.SIGTERM
        end(waiting)


def test_a_driver_that_hangs_at_the_start_is_told(folder: Path) -> None:
    agent = Agent(folder, flags=["--call-deadline", "1s"], forked=False)
    with agent:
        agent.stop()
        agent.simulator.hang("nvmlDeviceGetHandleByIndex_v2")
        process = agent.launch()
        assert process.wait(GENEROUS_SECONDS) == 1
        assert "cannot" in agent.log().splitlines()[-1]
        assert "Traceback" not in agent.log()


def test_it_can_be_stopped_while_it_starts(folder: Path) -> None:
    with Agent(folder, forked=False) as agent:
        agent.stop()
        agent.simulator.hang("nvmlDeviceGetHandleByIndex_v2")
        process = agent.launch()
        eventually(agent.socket.exists, "it has come as far as the driver")
        assert health(agent.address) != SERVING
        assert agent.stop() == 0
        assert process.returncode == 0


def test_it_tells_systemd_how_it_goes(folder: Path) -> None:
    with service_manager(folder) as systemd:
        variables = systemd.variables | {"WATCHDOG_USEC": "1000000"}
        with Agent(folder, variables=variables, forked=False) as agent:
            heard = [systemd.next() for _ in range(3)]
            assert heard == [{"READY": "1", "STATUS": "2 GPUs, 0 leases"}, {"WATCHDOG": "1"}, {"WATCHDOG": "1"}]
            agent.stop()
            assert systemd.until("STOPPING")["STATUS"].startswith("stopping")


def test_its_log_is_json_for_machines_and_text_for_people(folder: Path) -> None:
    with Agent(folder, forked=False) as agent:
        agent.ask("request", "--gpu-memory", "4G", "--name", "alice")
        agent.stop()
        lines = [json.loads(line) for line in agent.log().splitlines()]
        assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
        assert [line["event"] for line in lines if line["event"] in {"serving", "stopping", "stopped"}] == [
            "serving",
            "stopping",
            "stopped",
        ]
        assert any(line.get("event_kind") == "lease-granted" and line["holder"] == "alice" for line in lines)


def test_its_log_tells_what_a_reboot_ended(agent: Agent) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
    agent.stop()
    agent.simulator.reboot(keep_mig_mode=True)
    agent.start()
    assert not agent.ask("status")["leases"]
    agent.stop()
    ended = [line for line in map(json.loads, agent.log().splitlines()) if line.get("event_kind") == "lease-ended"]
    assert [line["lease"] for line in ended] == [lease]


def test_its_log_can_be_text(folder: Path) -> None:
    with Agent(folder, flags=["--log-format", "text"], forked=False) as agent:
        agent.stop()
        assert " serving " in agent.log()
        assert "{" not in agent.log().splitlines()[-1]


def test_no_token_is_ever_logged(folder: Path) -> None:
    with Agent(folder, flags=["--log-level", "debug"]) as agent:
        token = agent.ask("request", "--gpu-memory", "4G")["token"]
        assert token
        agent.stop()
        assert token not in agent.log()


def test_metrics_can_be_scraped(folder: Path) -> None:
    with Agent(folder, flags=["--metrics", "127.0.0.1:0"]) as agent:
        lease = agent.ask("request", "--gpu-memory", "4G", "--name", "alice")
        serving = agent.serving()
        assert serving["metrics"].startswith("http://127.0.0.1:")
        with urllib.request.urlopen(serving["metrics"], timeout=GENEROUS_SECONDS) as answer:  # noqa: S310 -- our own
            text = answer.read().decode()
        assert lease["lease"] in text
        assert 'holder="alice"' in text
        assert "mig_agent_" in text


def test_a_start_that_fails_is_not_recorded_as_one(folder: Path) -> None:
    """Whatever fails: only who serves has started."""
    for flags in (["--socket-schedulers", "no-such-user"], ["--gpus", "7"]):
        assert Agent(folder, flags=flags).launch().wait(GENEROUS_SECONDS) == 1
    with Agent(folder) as agent:
        events = agent.ask("events", "--since", "1h")["events"]
        assert [each["kind"] for each in events] == ["agent-started"]


def test_a_busy_metrics_port_is_never_fatal_and_used_once_it_is_free(folder: Path) -> None:
    """A machine with GPUs usually has other exporters, and users matter more than figures."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Agent(folder, flags=["--metrics", f"127.0.0.1:{port}"]) as agent:
            taken = f"port {port} is taken by "
            (problem,) = agent.ask("status")["problems"]
            assert problem.startswith(f"metrics: off (cannot listen on 127.0.0.1:{port}: {taken}")
            assert f"(pid {os.getpid()})" in problem
            assert problem in agent.migctl("status").stdout
            assert taken in agent.serving()["metrics"]
            other.close()
            eventually(lambda: "serving metrics" in agent.log())
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=GENEROUS_SECONDS) as answer:
                assert b"mig_agent_" in answer.read()
            assert agent.ask("status")["problems"] == []


def test_a_path_as_long_as_the_kernel_takes_is_served_and_a_longer_one_refused_in_words(folder: Path) -> None:
    longest = folder / "x" / ("s" * (107 - len(str(folder)) - len("/x/")))
    with Agent(folder, listen=[f"unix://{longest}"]) as agent:
        assert len(str(longest)) == 107
        assert agent.stop() == 0
    too_long = Agent(folder, listen=[f"unix://{longest}s"])
    assert too_long.launch().wait(GENEROUS_SECONDS) == 2
    assert "at most 107" in too_long.log()


def test_gpus_can_be_selected(folder: Path) -> None:
    with Agent(folder, "h100-80gb:3", flags=["--gpus", "0,2"]) as agent:
        assert [gpu["index"] for gpu in agent.ask("status")["gpus"]] == [0, 2]
        uuid = agent.ask("status")["gpus"][1]["uuid"]
        agent.stop()
    with Agent(folder, "h100-80gb:3", flags=["--gpus", uuid]) as agent:
        assert [gpu["index"] for gpu in agent.ask("status")["gpus"]] == [2]


def test_where_the_driver_differs_from_the_catalog_is_logged_once(folder: Path) -> None:
    ours = Path(__file__).resolve().parents[2] / "profiles"
    mistaken = folder / "profiles"
    mistaken.mkdir()
    text = (ours / "a100-40gb.yaml").read_text()
    assert text.count("memory_mib: 4864") > 1
    (mistaken / "a100-40gb.yaml").write_text(text.replace("memory_mib: 4864", "memory_mib: 5000", 1))
    with Agent(folder, "a100-40gb:2", flags=["--profiles-dir", str(mistaken)]) as agent:
        answer = agent.ask("request", "--gpu-memory", "4G")
        assert answer["devices"][0]["memory_mib"] == 4864
        assert agent.stop() == 0
        lines = [json.loads(line) for line in agent.log().splitlines()]
    told = [line for line in lines if line.get("event_kind") == "profile-differs"]
    assert len(told) == 1
    assert told[0]["level"] == "warning"
    assert "profile 1g.5gb (id 19) with MiB 4864, 5000 in the catalog" in told[0]["event"]


def test_how_it_chooses_and_how_long_nobody_is_passed_by_can_be_set(folder: Path) -> None:
    with Agent(folder, "h100-80gb", flags=["--creation-cost", "8", "--reservation-after", "90s"]) as agent:
        assert agent.ask("status")["reservation_after_seconds"] == 90
        fresh = agent.ask("plan", "--mig-profile", "7g.80gb", "--explain")
        agent.stop()
    with Agent(folder, "h100-80gb", flags=["--creation-cost", "0", "--reservation-after", "auto"]) as agent:
        assert agent.ask("status")["reservation_after_seconds"] == 300
        free = agent.ask("plan", "--mig-profile", "7g.80gb", "--explain")

    def cost(answer: dict[str, list[str]]) -> float:
        return float(answer["explanation"][1].split("costs ")[1].split(",")[0])

    assert cost(fresh) - cost(free) == pytest.approx(8)


def test_it_serves_where_some_gpus_have_no_mig(folder: Path) -> None:
    with Agent(folder, "l40s:1,a100-40gb+nomig:1,h100-80gb:1") as agent:
        states = [(gpu["state"], bool(gpu["reason"])) for gpu in agent.ask("status")["gpus"]]
        assert states == [("whole", True), ("whole", True), ("ready", False)]
        assert agent.ask("request", "--gpu-memory", "4G")["devices"][0]["gpu_index"] == 2
        assert agent.ask("request", "--num-gpus", "1")["devices"][0]["gpu_index"] in {0, 1}


def test_a_state_directory_of_another_machine_is_refused(folder: Path) -> None:
    with Agent(folder, "a30:1", forked=False):
        pass
    process = (agent := Agent(folder, "h100-80gb:1")).launch()
    assert process.wait(GENEROUS_SECONDS) == 1
    assert "cannot simulate h100-80gb" in agent.log()


def test_it_needs_no_more_than_its_flags(folder: Path) -> None:
    """`--state-dir` and `--listen` are all that a newcomer gives; the rest follows."""
    program = str(Path(sys.executable).parent / "mig-agent")
    command = [program, "serve", "--simulate", "a30", "--state-dir", str(folder / "s"), "--metrics", "off"]
    command += ["--listen", f"unix://{folder}/agent.sock"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            eventually(lambda: health(f"unix://{folder}/agent.sock") == SERVING, "it serves")
            assert (folder / "admin.sock").is_socket()
        finally:
            process.terminate()
            process.wait(GENEROUS_SECONDS)


def test_clients_that_are_stopped_while_they_wait_or_confirm_do_not_keep_it_from_stopping(agent: Agent) -> None:
    requests = [agent.begin("request", "--mig-profile", "7g.80gb", "--wait", "forever") for _ in range(3)]
    try:
        eventually(lambda: len(agent.ask("status")["queue"]) == 2, "one has it, two wait")
        for each in requests:
            each.send_signal(signal.SIGSTOP)
        assert agent.stop() == 0
    finally:
        for each in requests:
            each.kill()
            each.communicate(timeout=GENEROUS_SECONDS)


def test_a_client_that_does_not_read_does_not_keep_it_from_stopping(agent: Agent) -> None:
    ping = b"\0\0\x08\6\0\0\0\0\0" + b"x" * 8  # RFC 9113 6.7: it has to be answered
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(agent.address.removeprefix("unix://"))
        client.settimeout(2)
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
        with contextlib.suppress(OSError):
            for _ in range(200):
                client.sendall(ping * 500)
        assert agent.stop() == 0
