"""Locks of the state directory and of GPUs: one agent each, and the second is told who has them."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.adapters import filelock
from mig_agent.adapters import lock_holders as holders
from mig_agent.adapters.filelock import FileLock, LockedError, lock_gpus, lock_state_directory
from mig_agent.adapters.lock_holders import HolderSearch, LockHolder, lock_holders
from mig_agent.core.model import GpuUuid
from support.agent import GENEROUS_SECONDS, short_folder

GPUS = [(0, GpuUuid("GPU-a")), (1, GpuUuid("GPU-b"))]


@pytest.fixture(autouse=True)
def searches_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine with many processes needs more than the second in which an agent searches for a lock's holder."""
    monkeypatch.setattr(HolderSearch.__init__, "__defaults__", (GENEROUS_SECONDS,))


def test_a_second_agent_is_told_who_has_the_directory(tmp_path: Path) -> None:
    with lock_state_directory(tmp_path):
        with pytest.raises(LockedError) as refused:
            lock_state_directory(tmp_path)
        assert str(refused.value) == (
            f"cannot use the state directory {tmp_path}: the agent with pid {os.getpid()} uses it already"
        )
        assert "--state-dir" in refused.value.hint
    lock_state_directory(tmp_path).release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from mig_agent.adapters.filelock import lock_state_directory
lock = lock_state_directory(Path({str(tmp_path)!r}))
print("locked", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(LockedError, match=f"the agent with pid {holder.pid} uses it already"):
            lock_state_directory(tmp_path)
        holder.kill()
        holder.wait()
        lock_state_directory(tmp_path).release()


def test_all_gpus_or_none(tmp_path: Path) -> None:
    with lock_gpus(tmp_path / "locks", GPUS[1:]):
        with pytest.raises(LockedError, match=r"cannot use GPU 1 \(GPU-b\): the agent with pid"):
            lock_gpus(tmp_path / "locks", GPUS)
        lock_gpus(tmp_path / "locks", GPUS[:1]).close()  # the failed attempt has left it free
    with lock_gpus(tmp_path / "locks", GPUS):
        pass


def test_whose_pid_is_not_in_the_file_is_named_all_the_same(tmp_path: Path) -> None:
    with lock_state_directory(tmp_path) as lock:
        for stale in ("", "4194304\n"):
            lock.path.write_text(stale)
            with pytest.raises(LockedError, match=f"the agent with pid {os.getpid()} uses it already"):
                lock_state_directory(tmp_path)


def test_a_holder_that_cannot_be_seen_is_not_given_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another PID namespace, say; the pid in the file is of that one."""
    monkeypatch.setattr(filelock, "lock_holders", lambda _: ())
    with (
        lock_state_directory(tmp_path),
        pytest.raises(LockedError, match="another process, which cannot be seen from here, uses it already"),
    ):
        lock_state_directory(tmp_path)


def test_a_place_that_cannot_be_locked_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockedError, match="cannot lock the thing"):
        FileLock.take(tmp_path / "file" / "lock", "the thing")
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o700)
    (folder / "link").symlink_to(tmp_path / "file")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    os.link(tmp_path / "file", folder / "file")
    for name in ("link", "folder", "pipe", "file"):
        with pytest.raises(LockedError, match="cannot lock the thing"):
            FileLock.take(folder / name, "the thing")


def test_locks_are_files_of_0600_in_folders_of_0700(tmp_path: Path) -> None:
    (tmp_path / "lock").touch(mode=0o644)
    with lock_state_directory(tmp_path) as lock, lock_gpus(tmp_path / "run", GPUS):
        found = {path for path in tmp_path.rglob("*") if path.is_file()}
        assert lock.path in found
        assert len(found) == 2 * 3
        assert {stat.S_IMODE(path.stat().st_mode) for path in found} == {0o600}
        assert stat.S_IMODE(lock.path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "run/private").stat().st_mode) == 0o700


def test_a_lock_that_somebody_made_wide_is_closed_again(tmp_path: Path) -> None:
    """And who holds it with no right to write to it is named as what he is."""
    with lock_state_directory(tmp_path) as lock:
        pass
    lock.path.chmod(0o644)
    lock.path.parent.chmod(0o755)
    with lock_state_directory(tmp_path):
        assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(lock.path.parent.stat().st_mode) == 0o700
    with lock.path.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=f"the process with pid {os.getpid()} of .* holds .*locks/state.lock"):
            lock_state_directory(tmp_path)


def test_who_locks_the_file_of_a_former_version_must_be_able_to_write_it(tmp_path: Path) -> None:
    former = tmp_path / "lock"
    former.touch(mode=0o644)
    with former.open("rb") as stranger:
        fcntl.flock(stranger, fcntl.LOCK_EX)
        with lock_state_directory(tmp_path):
            assert former.read_text() == ""
            assert stat.S_IMODE(former.stat().st_mode) == 0o600
    with former.open("rb") as stranger:  # it is 0600 by now, and opened before that all the same
        fcntl.flock(stranger, fcntl.LOCK_EX)
        lock_state_directory(tmp_path).release()
    with former.open("r+b") as agent:
        fcntl.flock(agent, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=f"the agent with pid {os.getpid()} uses it already"):
            lock_state_directory(tmp_path)
    with lock_state_directory(tmp_path):
        assert former.read_text() == f"{os.getpid()}\n"


def test_only_who_has_locked_a_file_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as looking, path.open("r+b") as writing, path.open("rb") as reading:
        assert lock_holders(looking.fileno()) == ()
        fcntl.flock(writing, fcntl.LOCK_SH)
        fcntl.flock(reading, fcntl.LOCK_SH)
        mine = {"pid": os.getpid(), "uid": os.geteuid()}
        assert set(lock_holders(looking.fileno())) == {
            LockHolder(writes=True, **mine),
            LockHolder(writes=False, **mine),
        }
        assert lock_holders(reading.fileno()) == (LockHolder(writes=True, **mine),)


def test_a_search_that_has_taken_its_time_finds_nobody_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as looking, path.open("r+b") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        assert len(HolderSearch().trusted(looking.fileno())) == 1
        assert HolderSearch(seconds=0).trusted(looking.fileno()) == ()
        search = HolderSearch(seconds=1e-9)
        for _ in range(2):
            assert search.everybody(looking.fileno()) == ()


def test_a_lock_is_found_among_thousands_of_others_of_its_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with path.open("rb") as looking, path.open("r+b") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        for each in range(2000):
            fcntl.lockf(writing, fcntl.LOCK_EX, 1, 2 * each)
        assert [each.writes for each in HolderSearch().trusted(looking.fileno())] == [True]


STRANGER = """
import fcntl, os, sys
os.setgroups([])
os.setresgid(*3 * [61001])
os.setresuid(*3 * [61001])
descriptor = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user as well")
def test_open_files_of_strangers_cost_a_start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    real = holders._names

    def names(folder: str) -> list[str]:
        looked.append(folder)
        return real(folder)

    with short_folder() as folder:
        folder.chmod(0o755)
        path = folder / "lock"
        path.touch(mode=0o644)
        command = [sys.executable, "-I", "-S", "-c", STRANGER, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "locked\n"
            with path.open("rb") as looking:
                assert [each.pid for each in lock_holders(looking.fileno())] == [stranger.pid]
                monkeypatch.setattr(holders, "_names", names)
                assert HolderSearch().trusted(looking.fileno()) == ()
            assert f"/proc/{os.getpid()}/fdinfo" in looked
            assert f"/proc/{stranger.pid}/fdinfo" not in looked
            lock_state_directory(folder).release()
            assert f"/proc/{stranger.pid}/fdinfo" not in looked
            stranger.kill()


def test_a_released_lock_is_released_once(tmp_path: Path) -> None:
    lock = lock_state_directory(tmp_path)
    lock.release()
    other = lock_state_directory(tmp_path)
    lock.release()
    with pytest.raises(LockedError):
        lock_state_directory(tmp_path)
    other.release()
