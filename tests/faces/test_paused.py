"""A paused agent as a process: started with no driver at all, and with some of the GPUs only."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import nobodys
from support.agent import SERVING, Agent, eventually, health, short_folder
from support.service_manager import service_manager


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="there is a driver on this machine")
def test_one_that_is_paused_starts_and_lives_on_with_no_driver_at_all(folder: Path) -> None:
    with Agent(folder, "a100-40gb") as agent:
        agent.migctl("pause", "--reason", "driver")
        assert agent.stop() == 0
    with Agent(folder, "") as agent:
        (reason,) = agent.ask("status")["paused"]
        assert reason.endswith(": driver")
        said = agent.ask("resume")
        assert said["driver_released"]
        assert said["message"].startswith("cannot take up again: cannot complete nvmlInitWithFlags: library: ")
        assert agent.ask("status")["paused"] == [said["message"]]
        assert health(agent.address) == SERVING
        # Whoever starts it now is not told that it is paused for a reason of an administrator's, but why it is still.
        assert agent.ask("request", "--gpu-memory", "4G", code=3)["error"]["reason"] == "paused"
        assert agent.stop() == 0
        # Without the pause there is nothing to wait for.
        assert agent.launch().wait() == 1
        assert "cannot serve: there is no usable NVIDIA driver" in agent.log()


@pytest.mark.skipif(has_driver(), reason="there is a driver on this machine")
def test_a_service_without_a_driver_waits_for_it_instead_of_being_restarted(folder: Path) -> None:
    """It may come with a package or a kernel module that is built still."""
    with service_manager(folder) as systemd, Agent(folder, "", variables=systemd.variables) as agent:
        told = systemd.until("READY")["STATUS"]
        assert told.startswith("0 GPUs, 0 leases; paused: cannot open the driver: cannot complete nvmlInitWithFlags: ")
        assert told.endswith("; it is tried every 10 s")
        (reason,) = agent.ask("status")["paused"]
        assert reason in told
        assert "--simulate" not in agent.log(), "that is no advice for a service"
        assert '"level": "error"' in next(line for line in agent.log().splitlines() if "driver-unavailable" in line)
        assert agent.ask("request", "--gpu-memory", "4G", code=3)["error"]["reason"] == "paused"
        assert agent.stop() == 0


@pytest.mark.skipif(has_driver(), reason="there is a driver on this machine")
def test_a_node_of_kubernetes_with_no_gpu_is_served_as_it_is(folder: Path) -> None:
    """Whether a DaemonSet goes there is not the agent's affair: it says so, offers nothing and lives on."""
    with Agent(folder, "", flags=nobodys.flags(folder)) as agent:
        status = agent.ask("status")
        assert (status["gpus"], status["paused"]) == ([], ["this node has no NVIDIA GPU"])
        refused = agent.ask("request", "--gpu-memory", "4G", code=3)["error"]
        assert "this node has no NVIDIA GPU" in refused["message"]
        assert agent.ask("pause")["driver_released"]
        assert agent.ask("resume")["driver_released"]
        assert agent.ask("status")["paused"] == ["this node has no NVIDIA GPU"]
        assert health(agent.address) == SERVING, "there is nothing to wait for"
        assert not list((folder / "kubelet/device-plugins").iterdir())
        assert not list((folder / "cdi").glob("*"))
        assert agent.stop() == 0


@pytest.mark.parametrize("named", ["1", "uuid", "beginning"])
def test_one_that_is_paused_takes_up_the_gpus_that_it_is_to_manage(folder: Path, named: str) -> None:
    with Agent(folder, "a100-40gb:2") as agent:
        uuid = agent.ask("status")["gpus"][1]["uuid"]
        agent.migctl("pause")
        assert agent.stop() == 0
    name = {"1": "1", "uuid": uuid, "beginning": uuid[:12]}[named]
    with Agent(folder, "a100-40gb:2", flags=("--gpus", name)) as agent:
        assert [each["uuid"] for each in agent.ask("status")["gpus"]] == [uuid]
        agent.migctl("resume")
        eventually(lambda: not agent.ask("status")["paused"], "it goes on")
        assert [each["uuid"] for each in agent.ask("status")["gpus"]] == [uuid]
        assert agent.ask("request", "--mig-profile", "1g.5gb")["devices"][0]["gpu"] == uuid
