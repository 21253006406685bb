"""Why a GPU without MIG mode cannot be shared, and what to type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.client.types import Status
from mig_agent.config.settings import Settings
from mig_agent.core.shares import Fractions
from mig_agent.doctor.agent_settings import FoundSettings
from mig_agent.doctor.checks.shares import sharing
from mig_agent.doctor.examination import run
from support.answers import SHARED_GPU
from support.examined import OFF, gpu, only, status, subject, survey, tree

CGROUP2 = {"sys/fs/cgroup/cgroup.controllers": "dmem"}
PROGRAM = {"usr/bin/nvidia-cuda-mps-control": ""}
L40S = replace(gpu(0, OFF, "NVIDIA L40S"), compute_mode="DEFAULT")


def known(*, shared: bool) -> Status:
    """What the agent says of that GPU."""
    found = replace(SHARED_GPU, index=0, uuid="GPU-0")
    return status(gpus=(found if shared else replace(found, shared_memory=None),))


def test_a_gpu_that_the_agent_shares_is_well(tmp_path: Path) -> None:
    found = only(sharing, subject(tmp_path, driver=survey(L40S), node=known(shared=True)))
    assert (found.status, found.check) == ("ok", "gpu.sharing")
    assert "GPU 0 can be shared, enforced by MPS" in found.message


def test_gpus_in_mig_mode_are_not_looked_at(tmp_path: Path) -> None:
    assert run(sharing, subject(tmp_path, driver=survey(gpu(0)))) == []


def test_a_missing_program_and_an_old_driver_are_named_together(tmp_path: Path) -> None:
    found = only(sharing, subject(tmp_path, driver=survey(L40S), node=known(shared=False)))
    assert found.status == "warning"
    assert found.message == (
        "GPU 0 cannot be shared: cgroup: driver 580.95.05 has no memory limits, 615 has; "
        "mps: nvidia-cuda-mps-control is not installed"
    )
    assert "apt install nvidia-cuda-mps" in found.hint


def test_the_compute_mode_is_set_back_by_one_command(tmp_path: Path) -> None:
    tree(tmp_path, PROGRAM)
    exclusive = replace(L40S, compute_mode="EXCLUSIVE_PROCESS")
    found = only(sharing, subject(tmp_path, driver=survey(exclusive), node=known(shared=False)))
    assert "mps: its compute mode is EXCLUSIVE_PROCESS" in found.message
    assert found.hint == "sudo nvidia-smi -i 0 -c DEFAULT"


def test_cgroup_v1_is_the_reason_with_a_driver_that_has_limits(tmp_path: Path) -> None:
    found = only(sharing, subject(tmp_path, driver=survey(L40S, driver="615.71"), node=known(shared=False)))
    assert "cgroup: cgroup v2 is not mounted" in found.message


def test_an_old_driver_has_no_mps_whose_limits_hold(tmp_path: Path) -> None:
    tree(tmp_path, PROGRAM)
    found = only(sharing, subject(tmp_path, driver=survey(L40S, driver="535.261")))
    assert "mps: driver 535.261 lets holders lift their limits" in found.message


def test_what_is_seen_is_not_called_a_reason_where_something_works(tmp_path: Path) -> None:
    tree(tmp_path, PROGRAM)
    assert only(sharing, subject(tmp_path, driver=survey(L40S))).status == "ok", "no agent: nothing is in the way"
    assert only(sharing, subject(tmp_path, driver=survey(L40S), node=known(shared=False))).status == "unknown"
    tree(tmp_path, CGROUP2)
    assert only(sharing, subject(tmp_path, driver=survey(L40S, driver="615.71"))).status == "ok"


@pytest.mark.parametrize(
    ("settings", "way"),
    [
        (Settings(fractions="off"), "off"),
        (Settings(fractions_by_gpu=(("0", Fractions.OFF),)), "off"),
        (Settings(fractions="off", fractions_by_gpu=(("GPU-0", Fractions.MPS),)), "mps"),
    ],
)
def test_what_the_administrator_has_set_is_said(tmp_path: Path, settings: Settings, way: str) -> None:
    found = only(
        sharing, subject(tmp_path, driver=survey(L40S), found=FoundSettings(where="the defaults", settings=settings))
    )
    if way == "off":
        assert (found.status, found.message) == ("ok", "GPU 0 is leased whole only: `fractions` is off")
    else:
        assert found.message == "GPU 0 cannot be shared: mps: nvidia-cuda-mps-control is not installed"
