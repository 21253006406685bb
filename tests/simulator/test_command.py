"""`python -m mig_agent.simulator`, as a person types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from mig_agent.simulator import (
    STATE_FILE,
    GpuSpec,
    MachineSpec,
    Simulator,
    SimulatorError,
    open_or_create_machine,
    parse_gpus,
    parse_machine,
)
from mig_agent.simulator.__main__ import main

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(main, ["--state-dir", str(tmp_path), *arguments])
        assert result.exit_code == code, result.output
        return result.output.strip()

    return call


def test_a_day_on_a_simulated_machine(run: Run, tmp_path: Path) -> None:
    run("create", "a100-40gb:1,t4", "--no-latency")
    simulator = Simulator(tmp_path / STATE_FILE)
    where = run("create-foreign", "0", "2g.10gb")
    assert where == "0/5"
    pid = run("occupy", where, "--name", "python serve.py", "--memory-mib", "2000")
    assert "python serve.py 2000 MiB" in run("show")
    assert "the driver answers 19" in run("destroy-foreign", where, code=1)
    run("vacate", pid)
    holder = run("hold", where)
    assert f"held by {holder} dcgm-exporter" in run("show")
    run("vacate", holder)
    fault = run("inject", "fail", "nvmlGpuInstanceDestroy", "in-use", "--times", "2")
    assert f"fault {fault}: fail nvmlGpuInstanceDestroy gpu=None code=IN_USE" in run("show")
    run("clear", fault)
    run("inject", "hang", "nvmlDeviceGetMigMode", "--gpu", "0")
    run("inject", "remnant")
    run("inject", "stale")
    assert len(simulator.machine()["faults"]) == 3
    run("clear")
    run("destroy-foreign", where)
    run("lose-gpu", "0")
    assert "(lost)" in run("show")
    run("reset-gpu", "0")
    boot_id = simulator.machine()["boot_id"]
    run("reboot")
    machine = json.loads(run("show", "-o", "json"))
    assert machine["boot_id"] != boot_id
    assert [gpu["model"] for gpu in machine["gpus"]] == ["a100-40gb", "t4"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], "cannot find simulated GPUs"),
        (["create", "a101:1"], "cannot simulate a GPU 'a101'"),
    ],
)
def test_mistakes_without_a_machine(run: Run, arguments: list[str], words: str) -> None:
    assert words in run(*arguments, code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["create", "t4"], "there are some already"),
        (["occupy", "0"], "name an instance"),
        (["occupy", "0/3"], "cannot find 0/3"),
        (["occupy", "MIG-0"], "cannot find MIG-0"),
        (["vacate", "1"], "cannot end process 1"),
        (["create-foreign", "0", "9g.1gb"], "it offers 1g.5gb"),
        (["create-foreign", "3", "1g.5gb"], "cannot find GPU 3"),
        (["create-foreign", "0", "1g.5gb", "--start", "7"], "the driver answers 2"),
        (["lose-gpu", "4"], "cannot find GPU 4"),
        (["clear", "12"], "cannot clear fault 12"),
    ],
)
def test_mistakes(run: Run, arguments: list[str], words: str) -> None:
    run("create", "a100-40gb")
    assert words in run(*arguments, code=1)


def test_reading_what_to_simulate() -> None:
    assert parse_gpus("a100-40gb:1,H100-80GB:2 , a30:1:off,t4") == (
        GpuSpec(model="a100-40gb"),
        GpuSpec(model="h100-80gb"),
        GpuSpec(model="h100-80gb"),
        GpuSpec(model="a30", mig_mode=False),
        GpuSpec(model="t4"),
    )
    assert parse_machine("a100-40gb+nomig:1,l40s,driver=615.71.03,kernel=6.12") == MachineSpec(
        gpus=(GpuSpec(model="a100-40gb", mig_mode=False), GpuSpec(model="l40s")),
        driver_version="615.71.03",
        kernel_version="6.12",
    )


def test_a_machine_has_the_versions_that_it_was_made_with(tmp_path: Path) -> None:
    state_file = tmp_path / STATE_FILE
    simulator = open_or_create_machine(state_file, "l4,driver=615.71.03")
    assert simulator.machine()["driver_version"] == "615.71.03"
    open_or_create_machine(state_file, "l4")
    with pytest.raises(SimulatorError, match=r"l4, driver=580.1 in .*: it holds l4, driver=615.71.03;"):
        open_or_create_machine(state_file, "l4,driver=580.1")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a100-40gb:",
        "a100-40gb:x",
        "a100-40gb:0",
        "a100-40gb:1:maybe",
        "t4:1:1",
        "t4:65",
        "a30+mig",
        "t4,driver=",
        "t4,os=1.2",
    ],
)
def test_what_cannot_be_simulated(text: str) -> None:
    with pytest.raises(SimulatorError, match=r"^cannot"):
        parse_gpus(text)


@pytest.mark.parametrize("kind", [["fail"], ["hang"]], ids=["fail", "hang"])
def test_a_fault_in_an_unknown_function_is_refused(run: Run, kind: list[str]) -> None:
    run("create", "a30:1")
    code = ["in-use"] if kind == ["fail"] else []
    told = run("inject", *kind, "nvmlDeviceGetMigMod", *code, code=1)
    assert "did you mean nvmlDeviceGetMigMode?" in told
    assert told.count("\n") == 0
    # With or without the version that C adds.
    run("inject", *kind, "nvmlDeviceGetCount", *code)
    run("inject", *kind, "nvmlDeviceGetCount_v2", *code)
