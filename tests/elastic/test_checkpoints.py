"""A checkpoint is whole or is not there, and the last good one is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent.core.errors import UsageError
from mig_agent.elastic import checkpoints
from mig_agent.elastic.checkpoints import CheckpointError, CheckpointFolder
from mig_agent.elastic.sample_order import Position
from support.documents import ROOT


def at(step: int) -> Position:
    return Position(epoch=step // 10, sample=step % 10, step=step)


def filled(path: Path, *steps: int) -> CheckpointFolder:
    folder = CheckpointFolder(path)
    folder.open()
    for step in steps:
        folder.write(at(step), lambda path, step=step: path.write_text(f"weights of {step}"))  # type: ignore[misc] # bound
    return folder


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    folder = filled(tmp_path / "a" / "b", 9, 10, 1000)
    assert names(folder.path) == ["lock", "step-000000000010", "step-000000001000"]
    found = folder.newest()
    assert found is not None
    assert (found.position, found.state.read_text()) == (at(1000), "weights of 1000")


def test_a_folder_may_be_saved(tmp_path: Path) -> None:
    def save(path: Path) -> None:
        (path / "deep").mkdir(parents=True)
        (path / "model").write_bytes(b"m" * 3_000_000)
        (path / "deep" / "empty").touch()

    folder = filled(tmp_path)
    folder.write(at(1), save)
    found = folder.newest()
    assert found is not None
    assert names(found.state) == ["deep", "model"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "state").write_text("weigh"), "state has 5 of 12 bytes"),
        (lambda path: (path / "state").write_text("weights of 3"), "state is not what was written"),
        (lambda path: (path / "state").unlink(), "No such file"),
        (lambda path: (path / "manifest.json").write_text('{"version": 1'), "Expecting"),
        (lambda path: (path / "manifest.json").write_text('{"version": 2}'), "it has version 2"),
        (lambda path: (path / "manifest.json").write_text("[]"), "list indices"),
        (lambda path: (path / "manifest.json").unlink(), "No such file"),
    ],
)
def test_a_damaged_one_is_named_and_passed_over(
    damage: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = filled(tmp_path, 1, 2)
    assert callable(damage)
    damage(tmp_path / "step-000000000002")
    found = folder.newest()
    assert found is not None
    assert found.state.read_text() == "weights of 1"
    told = capsys.readouterr().err
    assert told.startswith(f"elastic: ignoring the checkpoint {tmp_path}/step-000000000002: ")
    assert words in told


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1, 2)
    (tmp_path / "step-000000000002" / "state").write_text("weigh")
    folder.write(at(2), lambda path: path.write_text("weights again"))
    found = folder.newest()
    assert found is not None
    assert found.state.read_text() == "weights again"


def test_one_whose_content_is_damaged_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    """Its files have the right sizes. It does not count as kept either."""
    filled(tmp_path, 1, 2).close()
    (tmp_path / "step-000000000002" / "state").write_text("weights of 3")
    folder = filled(tmp_path)
    assert folder.newest() is not None
    folder.write(at(2), lambda path: path.write_text("weights again"))
    found = folder.newest()
    assert found is not None
    assert found.state.read_text() == "weights again"


def test_damaged_ones_do_not_count_as_kept(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1, 2)
    (tmp_path / "step-000000000002" / "state").write_text("weigh")
    folder.write(at(3), lambda path: path.write_text("weights of 3"))
    (tmp_path / "step-000000000003" / "state").unlink()
    found = folder.newest()
    assert found is not None
    assert found.state.read_text() == "weights of 1"


def test_what_save_raises_leaves_the_one_before(tmp_path: Path) -> None:
    folder = filled(tmp_path, 1)

    def torn(path: Path) -> None:
        path.write_text("wei")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        folder.write(at(2), torn)
    with pytest.raises(UsageError, match="has written nothing"):
        folder.write(at(2), lambda _path: None)

    def full(_path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"cannot save a checkpoint in .*: No space left on device; the one before"
    ):
        folder.write(at(2), full)
    assert names(tmp_path) == ["lock", "step-000000000001"]


def test_what_a_crash_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".writing-x").mkdir()
    (tmp_path / "other").touch()
    filled(tmp_path)
    assert names(tmp_path) == ["lock", "other"]


def test_two_trainings_cannot_have_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed one lets go of it at once, also where processes that it has forked go on."""
    code = (
        "import os, sys, time; from pathlib import Path; from mig_agent.elastic.checkpoints import CheckpointFolder\n"
        "folder = CheckpointFolder(Path(sys.argv[1])); folder.open()\n"
        "worker = os.fork()\n"
        "if not worker: time.sleep(60); os._exit(0)\n"
        "print(worker, flush=True); time.sleep(60)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "agent")}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        worker = int(other.stdout.readline())
        try:
            with monkeypatch.context() as patch:
                patch.setattr(checkpoints, "_LOCK_SECONDS", 0.1)
                with pytest.raises(UsageError, match="another process does, and has not ended"):
                    CheckpointFolder(tmp_path).open()
            other.kill()
            filled(tmp_path, 1).close()
        finally:
            other.kill()
            os.kill(worker, 9)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot keep checkpoints in .*: Not a directory"):
        CheckpointFolder(tmp_path / "file" / "x").open()
    with pytest.raises(UsageError, match="cannot keep 0 checkpoints"):
        CheckpointFolder(tmp_path, keep=0)


def test_the_manifest_is_what_other_programs_may_read(tmp_path: Path) -> None:
    filled(tmp_path, 12)
    manifest = json.loads((tmp_path / "step-000000000012" / "manifest.json").read_text())
    assert manifest["position"] == {"epoch": 1, "sample": 2, "step": 12}
    assert manifest["files"]["state"][0] == len("weights of 12")
