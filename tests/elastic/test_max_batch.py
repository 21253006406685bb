"""The most samples that fit: a number, a table by memory, or `auto`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mig_agent import elastic
from mig_agent.core.errors import UsageError
from mig_agent.elastic.max_batch import BatchSizeCache, default_cache, from_table, is_out_of_memory
from support.documents import ROOT
from support.reached import REACHED

TABLE = {"40G": 40, "10G": 8}


@pytest.mark.parametrize(("memory_mib", "most"), [(9728, 8), (19968, 8), (40192, 40), (81920, 40)])
def test_a_table_by_memory(memory_mib: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_table(TABLE, memory_mib) == most
    monkeypatch.setenv("MIG_AGENT_DEVICE_MEMORY", str(memory_mib))
    assert elastic.init(256, TABLE).max_batch == most


@pytest.mark.parametrize(
    ("table", "memory_mib", "words"),
    [
        (TABLE, 4864, "the device has 4864 MiB, and the table begins with 10G"),
        (TABLE, None, "the memory of the device is not known"),
        ({}, 9728, "the table is empty"),
        ({"10": 8}, 9728, "it has no unit"),
        ({"10G": 0}, 9728, "it must be at least 1"),
    ],
)
def test_a_table_that_does_not_help(table: dict[str, int], memory_mib: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_table(table, memory_mib)


def test_a_word_that_is_none() -> None:
    with pytest.raises(UsageError, match="cannot take 'automatic' as max_batch"):
        elastic.init(8, "automatic")


def test_what_fits_is_remembered_by_name_and_profile(tmp_path: Path) -> None:
    cache = BatchSizeCache(tmp_path / "new" / "sizes.json")
    assert cache.get("a", "1g.10gb") is None
    cache.put("a", "1g.10gb", 8)
    cache.put("a", "3g.40gb", 32)
    cache.put("a", "1g.10gb", 4)
    assert (cache.get("a", "1g.10gb"), cache.get("a", "3g.40gb"), cache.get("b", "1g.10gb")) == (4, 32, None)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["sizes.json"]


def test_the_cache_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps({f'["job {number}", "x"]': 1 for number in range(1005)}))
    cache = BatchSizeCache(path)
    cache.put("new", "x", 2)
    assert len(json.loads(path.read_text())) == 1000
    assert (cache.get("new", "x"), cache.get("job 1004", "x"), cache.get("job 5", "x")) == (2, 1, None)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"[\\"a\\", \\"x\\"]": "8"}', b'{"a": -1}'])
def test_a_damaged_cache_counts_as_empty(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_bytes(content)
    cache = BatchSizeCache(path)
    assert cache.get("a", "x") is None
    cache.put("a", "x", 8)
    assert cache.get("a", "x") == 8


def test_where_it_is_kept(tmp_path: Path) -> None:
    assert default_cache({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "mig-agent/batch-sizes.json"
    assert default_cache({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache/mig-agent/batch-sizes.json"


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (OutOfMemoryError("anything"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (MemoryError(), False),
    ],
)
def test_how_frameworks_say_it(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


PROGRAM = """
import os
from mig_agent import elastic
job = elastic.init(24, "auto", name="net")
print(job.max_batch, flush=True)
if job.batch_size > int(os.environ["FITS"]):
    raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB")
"""


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "agent"),
        "XDG_CACHE_HOME": str(folder),
        "MIG_AGENT_DEVICE_PROFILE": "1g.10gb",
        **more,
    }


def start(folder: Path, program: str = PROGRAM, **more: str) -> tuple[int, str, str]:
    # A new interpreter: what ends the program is its own handling of an error that is not caught.
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment(folder, **more), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip(), done.stderr


def test_auto_halves_until_it_fits(tmp_path: Path) -> None:
    """Each time the program ends with 75; what fits is where it begins the next time, on this profile alone."""
    for most in (24, 12, 6):
        code, told, errors = start(tmp_path, FITS="3")
        assert (code, told) == (75, str(most))
        assert errors == f"elastic: {most} samples do not fit on this device (1g.10gb); trying {most // 2}\n"
    assert start(tmp_path, FITS="3") == (0, "3", "")
    assert start(tmp_path, FITS="99", MIG_AGENT_DEVICE_PROFILE="7g.80gb") == (0, "24", "")


def test_where_one_sample_does_not_fit_the_program_fails_as_it_would_have(tmp_path: Path) -> None:
    assert [start(tmp_path, FITS="0")[0] for _ in range(6)] == [75, 75, 75, 75, 1, 1]
    code, told, errors = start(tmp_path, FITS="0")
    assert (code, told) == (1, "1")
    assert errors.rstrip().endswith("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB")


def test_other_errors_end_the_program_as_ever(tmp_path: Path) -> None:
    code, _, errors = start(tmp_path, PROGRAM.replace("CUDA out of memory", "nonsense"), FITS="0")
    assert code == 1
    assert "RuntimeError: nonsense" in errors
    assert start(tmp_path, FITS="99")[1] == "24"


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "mig-agent").write_text("no folder")
    code, _, errors = start(tmp_path, FITS="1")
    assert code == 1
    assert "elastic: cannot remember that 24 samples do not fit" in errors
    assert "RuntimeError: CUDA out of memory" in errors


@pytest.mark.parametrize("door", sorted(REACHED["batch size remembered"]))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_leaves_the_old_sizes_or_the_new_ones(when: str, door: str, tmp_path: Path) -> None:
    path = default_cache(environment(tmp_path))
    BatchSizeCache(path).put("net", "1g.10gb", 20)
    assert start(tmp_path, FITS="0", MIG_AGENT_CRASH_AT=f"{when}-{door}")[0] == -9
    assert BatchSizeCache(path).get("net", "1g.10gb") == (10 if (when, door) == ("after", "batch-size-rename") else 20)
    assert start(tmp_path, FITS="10")[0] in {0, 75}


def test_the_hook_that_was_there_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: seen.append(str(error)))
    elastic.init(8, "auto", name="x")
    sys.excepthook(ValueError, ValueError("v"), None)
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(RuntimeError, RuntimeError("out of memory"), None)
    assert (seen, ended.value.code) == (["v"], 75)
