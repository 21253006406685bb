"""MPS control daemons, over the simulator's programs, which answer as NVIDIA's do."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mig_agent.adapters.shares.mps import LONGEST_PIPE_PATH, MpsDaemons, MpsTerms, shown_limit
from mig_agent.core.errors import ConfigError, DriverError, DriverErrorKind
from mig_agent.core.model import Generation, GpuUuid
from mig_agent.simulator import Simulator
from support.agent import short_folder
from support.mps import StandIn, stand_in
from support.simulated import machine

SHARE, OTHER = Generation(7), Generation(8)
SOMEBODY, ELSE = 4321, 65534
DEADLINE = 4.0
DRIVERS = ("535.261.03", "550.163.01", "615.71.03")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root starts daemons for others")


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        made.chmod(0o711)
        yield made


@pytest.fixture
def simulator(request: pytest.FixtureRequest, folder: Path) -> Simulator:
    return machine(folder, f"l40s,driver={getattr(request, 'param', DRIVERS[1])}")


@pytest.fixture
def programs(simulator: Simulator, folder: Path) -> StandIn:
    return stand_in(simulator, folder / "mps" / str(SHARE))


@pytest.fixture
def daemons(programs: StandIn, folder: Path) -> Iterator[MpsDaemons]:
    made = MpsDaemons(folder / "mps", search_path=programs.path, deadline_seconds=DEADLINE)
    yield made
    for generation in made.existing():
        made.stop(generation)


@pytest.fixture
def terms(simulator: Simulator) -> MpsTerms:
    return MpsTerms(gpu=GpuUuid(simulator.machine()["gpus"][0]["uuid"]), limit_mib=3815, uid=None)


def of_client(daemons: MpsDaemons, terms: MpsTerms) -> dict[str, str]:
    return {**daemons.environment(SHARE, terms), "CUDA_VISIBLE_DEVICES": terms.gpu}


@pytest.mark.parametrize("simulator", DRIVERS, indirect=True)
def test_a_client_gets_no_more_than_its_limit(daemons: MpsDaemons, terms: MpsTerms, programs: StandIn) -> None:
    daemons.start(SHARE, terms)
    daemons.check(SHARE, terms)
    assert daemons.existing() == (SHARE,)
    said = programs.cuda("alloc=3000", "alloc=1000", **of_client(daemons, terms))
    assert said[1].startswith("alloc=3000: ")
    assert "OUT_OF_MEMORY" in said[2].upper()


@pytest.fixture
def client(daemons: MpsDaemons, terms: MpsTerms, programs: StandIn) -> Iterator[subprocess.Popen[str]]:
    """A program with memory of the share, until the test ends."""
    daemons.start(SHARE, terms)
    with programs.start_cuda("alloc=100", "hold", **of_client(daemons, terms)) as program:
        assert program.stdout is not None
        while not program.stdout.readline().startswith("alloc"):
            assert program.poll() is None
        yield program
        program.kill()


@pytest.mark.parametrize("simulator", DRIVERS, indirect=True)
def test_clients_are_listed_and_ended(daemons: MpsDaemons, client: subprocess.Popen[str]) -> None:
    (pid,) = daemons.clients(SHARE)
    assert client.poll() is None
    daemons.terminate(SHARE, pid)
    daemons.terminate(SHARE, 1)  # none of its clients
    daemons.stop(SHARE)
    assert daemons.existing() == ()
    assert daemons.pids(SHARE) == ()


def test_the_end_of_a_daemon_does_not_wait_for_its_clients(daemons: MpsDaemons, client: subprocess.Popen[str]) -> None:
    daemons.stop(SHARE)
    assert daemons.pids(SHARE) == ()
    assert client.poll() is None, "the client is the lease's to end"


def test_a_stopped_daemon_holds_nothing_up(daemons: MpsDaemons, terms: MpsTerms) -> None:
    daemons.start(SHARE, terms)
    for pid in daemons.pids(SHARE):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DriverError) as caught:
        daemons.check(SHARE, terms)
    assert caught.value.kind is DriverErrorKind.TIMEOUT
    daemons.stop(SHARE)
    assert daemons.pids(SHARE) == ()


def test_a_killed_daemon_is_known_and_never_started_again(daemons: MpsDaemons, terms: MpsTerms) -> None:
    daemons.start(SHARE, terms)
    for pid in daemons.pids(SHARE):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(DriverError) as caught:
        daemons.check(SHARE, terms)
    assert caught.value.kind is DriverErrorKind.NOT_FOUND
    with pytest.raises(DriverError) as caught:
        daemons.start(SHARE, terms)
    assert caught.value.kind is DriverErrorKind.IN_USE
    assert not caught.value.left_behind
    daemons.stop(SHARE)
    daemons.stop(SHARE)
    daemons.start(SHARE, terms)


def test_a_daemon_whose_folder_is_gone_is_found_and_ended(daemons: MpsDaemons, terms: MpsTerms) -> None:
    daemons.start(SHARE, terms)
    shutil.rmtree(daemons.pipe_folder(SHARE).parent)
    assert daemons.daemon(SHARE) is None
    assert daemons.existing() == (SHARE,)
    daemons.stop(SHARE)
    assert (daemons.existing(), daemons.pids(SHARE)) == ((), ())


def test_a_daemon_that_lost_its_limit_is_noticed(daemons: MpsDaemons, terms: MpsTerms, programs: StandIn) -> None:
    daemons.start(SHARE, terms)
    programs.say("set_default_device_pinned_mem_limit 0 0\n")
    with pytest.raises(DriverError, match="its limit is none") as caught:
        daemons.check(SHARE, terms)
    assert caught.value.kind is DriverErrorKind.READ_BACK


def test_a_thread_percentage_is_set_and_read_back(daemons: MpsDaemons, terms: MpsTerms, programs: StandIn) -> None:
    wanted = MpsTerms(gpu=terms.gpu, limit_mib=512, uid=None, thread_percentage=25)
    daemons.start(SHARE, wanted)
    daemons.check(SHARE, wanted)
    assert daemons.environment(SHARE, wanted)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    programs.say("set_default_active_thread_percentage 50\n")
    with pytest.raises(DriverError, match=r"its thread percentage is 50\.0"):
        daemons.check(SHARE, wanted)


def test_only_the_holder_passes_into_the_pipe_folder(daemons: MpsDaemons, terms: MpsTerms) -> None:
    daemons.start(SHARE, MpsTerms(gpu=terms.gpu, limit_mib=1024, uid=SOMEBODY))
    pipe = daemons.pipe_folder(SHARE)
    assert _as(SOMEBODY, (pipe / "control").stat)
    assert not _as(ELSE, (pipe / "control").stat)
    for uid in (SOMEBODY, ELSE):
        assert not _as(uid, lambda: os.listdir(pipe))  # noqa: PTH208 -- names are all that is needed
        assert not _as(uid, (pipe / "mine").touch)
    assert stat.S_IMODE((pipe.parent / "log").stat().st_mode) == 0o700


def test_what_others_write_into_their_environment_counts_for_nothing(daemons: MpsDaemons, terms: MpsTerms) -> None:
    daemons.start(SHARE, replace(terms, uid=SOMEBODY))
    pipe = daemons.pipe_folder(SHARE)
    (pipe.parent.parent / "²").mkdir()
    names = (str(SHARE), "²", "9" * 5000, "x" * 300, "0")
    claims = [(ELSE, "sleep", pipe.parent.parent / name / "pipe") for name in names]
    claims += [(ELSE, "mps-control", pipe.parent.parent / name / "pipe") for name in ("8", "²", "x" * 300)]

    def begin(uid: int, name: str, claimed: Path) -> subprocess.Popen[bytes]:
        env = {"CUDA_MPS_PIPE_DIRECTORY": str(claimed)}
        return subprocess.Popen([name, "1000"], executable="/bin/sleep", env=env, user=uid)

    begun = [begin(*each) for each in claims]
    holder = begin(SOMEBODY, "sleep", pipe)
    try:
        assert daemons.users() == {SHARE: (holder.pid,)}
        assert daemons.existing() == (SHARE,)
        assert not daemons.terminate(SHARE, holder.pid)
    finally:
        for process in (*begun, holder):
            process.kill()
            process.wait()


def test_two_daemons_on_one_gpu_have_limits_of_their_own(daemons: MpsDaemons, terms: MpsTerms) -> None:
    larger = MpsTerms(gpu=terms.gpu, limit_mib=8192, uid=None)
    daemons.start(SHARE, terms)
    daemons.start(OTHER, larger)
    daemons.check(SHARE, terms)
    daemons.check(OTHER, larger)
    daemons.stop(SHARE)
    daemons.check(OTHER, larger)
    assert daemons.existing() == (OTHER,)


def test_a_machine_without_the_program(tmp_path: Path) -> None:
    daemons = MpsDaemons(Path("/run/m"), search_path=str(tmp_path))
    assert not daemons.is_installed
    assert daemons.existing() == ()


def test_a_program_that_fails_leaves_word_of_what_it_left(tmp_path: Path, folder: Path) -> None:
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text("#!/bin/sh\necho no luck >&2\nexit 1\n")
    program.chmod(0o755)
    daemons = MpsDaemons(folder / "mps", search_path=str(tmp_path), deadline_seconds=2.0)
    with pytest.raises(DriverError, match="no luck") as caught:
        daemons.start(SHARE, MpsTerms(gpu=GpuUuid("GPU-1"), limit_mib=1024, uid=None))
    assert caught.value.left_behind
    assert daemons.existing() == (SHARE,)
    began = time.monotonic()
    daemons.stop(SHARE)
    assert daemons.existing() == ()
    assert time.monotonic() - began < DEADLINE


def test_a_folder_whose_path_is_too_long_is_refused_at_once() -> None:
    fits = Path("/" + "a" * (LONGEST_PIPE_PATH - len("/") - len("/123456789012/pipe")))
    MpsDaemons(fits, search_path="")
    with pytest.raises(ConfigError, match="1 bytes too long"):
        MpsDaemons(fits.with_name(f"{fits.name}a"), search_path="")


@pytest.mark.parametrize(("mib", "text"), [(512, "512M"), (1023, "1023M"), (1024, "1G"), (3815, "3G"), (4096, "4G")])
def test_limits_are_shown_in_whole_g_rounded_down(mib: int, text: str) -> None:
    assert shown_limit(mib) == text


def _as(uid: int, act: Callable[[], object]) -> bool:
    """Return True if a user may do this."""
    os.seteuid(uid)
    try:
        act()
    except PermissionError:
        return False
    finally:
        os.seteuid(0)
    return True
