"""Locks of the state directory and of GPUs: one agent each, and the second is told who has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.adapters.filelock import FileLock, LockedError, lock_gpus, lock_state_directory
from mig_agent.core.model import GpuUuid

GPUS = [(0, GpuUuid("GPU-a")), (1, GpuUuid("GPU-b"))]


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


def test_a_holder_that_has_not_written_its_pid_yet(tmp_path: Path) -> None:
    with lock_state_directory(tmp_path) as lock:
        lock.path.write_text("")
        with pytest.raises(LockedError, match="another process uses it already"):
            lock_state_directory(tmp_path)


def test_a_place_that_cannot_be_locked_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockedError, match="cannot lock the thing"):
        FileLock.take(tmp_path / "file" / "lock", "the thing")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(LockedError, match="cannot lock the thing"):
        FileLock.take(tmp_path / "link", "the thing")


def test_a_released_lock_is_released_once(tmp_path: Path) -> None:
    lock = lock_state_directory(tmp_path)
    lock.release()
    other = lock_state_directory(tmp_path)
    lock.release()
    with pytest.raises(LockedError):
        lock_state_directory(tmp_path)
    other.release()
