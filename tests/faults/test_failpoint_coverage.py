"""Every change outside the process is made behind a door: a place to be killed at before it, and one after it."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.nvml.calls import CHANGING
from support.crashing import GPUS, Story
from support.doors import PACKAGE, Source, doors, nvml_calls, sources
from support.engine import start
from support.simulated import machine

READING = ("nvmlDeviceGet", "nvmlGpm", "nvmlGpuInstanceGet", "nvmlComputeInstanceGet", "nvmlSystemGet")
OF_THE_SESSION = {
    "nvmlInitWithFlags",
    "nvmlShutdown",
    "nvmlEventSetCreate",
    "nvmlEventSetFree",
    "nvmlEventSetWait_v2",
    "nvmlDeviceRegisterEvents",
}
"""They change what the library keeps for this process, and nothing on the machine."""
EXCEPTIONS = {
    ("adapters/nvml/calls.py", "_invoke", "any call of pynvml"),  # those that change nothing: see the test of it
    (
        "adapters/driver_libraries.py",
        "_outcome",
        "subprocess.Popen",
    ),  # `nvidia-ctk cdi generate` writes to its output alone
    ("adapters/ledger/inspection.py", "_opened", "SQL that writes"),  # BEGIN, on a connection that only reads
    ("daemon/log_writer.py", "_write_out", "os.write"),  # lines of the log: nothing is read back from them
    # A reload gives a bound socket other permissions, narrowest first: a crash leaves a socket without a listener.
    ("adapters/transport/unix_sockets.py", "change_access", "os.chown"),
    ("adapters/transport/unix_sockets.py", "change_access", "a file's chmod"),
    ("elastic/keras.py", "save", "open for writing"),  # a job calls it inside `checkpoint-state`
    ("daemon/hardware.py", "_open_simulated", "a file's mkdir"),  # the simulated machine's folder, as a person makes it
}

ROUND_THE_DOOR = {
    "mknod": "os.mknod(path, 0o444)",
    "an unlink": "path.unlink(missing_ok=True)",
    "a rename": "path.rename(other)",
    "a replace": "temporary.replace(path)",
    "text": 'path.write_text("{}")',
    "a file": 'open(path, "w")',
    "another file": 'path.open("wb")',
    "a descriptor": "os.open(path, os.O_WRONLY | os.O_CREAT)",
    "SQL": 'connection.execute("DELETE FROM lease")',
    "SQL of somebody else": "connection.execute(sql)",
    "a program": "subprocess.run([program])",
    "the driver": "pynvml.nvmlDeviceResetGpuLockedClocks(device)",
    "any call of the driver": "getattr(pynvml, name)(device)",
    "a folder": "shutil.rmtree(path)",
    "the API server": 'self._pool.request("PATCH", url, body=body)',
    "any request": "self._pool.request(method, url)",
}
HARMLESS = [
    'text.replace("a", "b")',
    "dataclasses.replace(instance, state=state)",
    'connection.execute("SELECT 1")',
    'connection.execute(f"SELECT {column} FROM lease")',
    "os.open(path, os.O_RDONLY)",
    "path.open()",
    'open(path, "rb")',
    'shutil.which("nvidia-modprobe")',
    'self._pool.request("GET", url)',
]


def found(code: str) -> list[str]:
    return [change.what for change in Source(Path("new.py"), code).round_the_door()]


def test_nothing_goes_round_the_door() -> None:
    strays = {
        (str(path), change.where.rpartition(" ")[2], change.what)
        for path, source in sources()
        for change in source.round_the_door()
    }
    assert strays == EXCEPTIONS


def test_the_calls_of_the_driver_outside_the_door_are_those_that_change_nothing() -> None:
    """`_invoke` has one way around failpoints, for names not in CHANGING; the rest of the module has none."""
    tree = ast.parse((PACKAGE / "adapters/nvml/calls.py").read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == "getattr"]
    ways = [ast.unparse(each) for each in ast.walk(tree) if isinstance(each, ast.If) and "CHANGING" in ast.dump(each)]
    assert len(calls) == 2
    assert ways == ["if name not in CHANGING:\n    return getattr(pynvml, name)(*arguments)"]
    unknown = {name for name in nvml_calls() if not name.startswith(READING)} - OF_THE_SESSION
    assert unknown == CHANGING


@pytest.mark.parametrize("code", ROUND_THE_DOOR.values(), ids=ROUND_THE_DOOR)
def test_a_change_that_goes_round_the_door_is_found(code: str) -> None:
    assert found(f"def remove(path):\n    {code}")
    assert found(f"{code}")
    door = "with FAILPOINTS.around('x'):"
    assert found(f"def remove(path):\n    {door}\n        pass\n    {code}")
    assert found(f"def _make():\n    {code}\ndef make():\n    _make()\n    {door}\n        _make()")
    assert found(f"def remove():\n    {door}\n        def later():\n            {code}\n    later()")
    assert not found(f"def remove(path):\n    {door}\n        {code}")
    assert not found(f"def _make():\n    {code}\ndef make():\n    {door}\n        _make()")


@pytest.mark.parametrize("code", HARMLESS)
def test_what_changes_nothing_needs_no_door(code: str) -> None:
    assert not found(code)


async def test_what_the_hardware_saw_came_through_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same proved from the other side: the simulator's counts of calls that change something."""
    reached: Counter[str] = Counter()
    monkeypatch.setattr(FAILPOINTS, "listener", lambda name: reached.update([name]))
    simulator = machine(tmp_path, GPUS)
    node = await start(tmp_path)
    story = Story(node, tmp_path)
    try:
        await story.tell()
    finally:
        story.close()
    monkeypatch.undo()
    calls = simulator.machine()["calls"]
    assert calls
    for name, count in calls.items():
        assert reached[f"before-{name}"] == reached[f"after-{name}"] == count
    nodes = list((simulator.host_root / "dev/nvidia-caps").iterdir())
    assert reached["before-device-node"] == reached["after-device-node"] == len(nodes) > 0
    names = {name.partition("-")[2] for name in reached}
    assert names <= doors()
