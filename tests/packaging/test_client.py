"""The distribution mig-agent-client, in environments that have nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent import __version__
from support.agent import Agent, short_folder
from support.wheel import ROOT, run

pytestmark = pytest.mark.timeout(600)

DECLARED = tomllib.loads((ROOT / "client/pyproject.toml").read_text())["project"]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
OLD_PYTHON = next(
    (
        each
        for each in ("python3.10", *sorted(map(str, Path.home().glob(".pyenv/versions/3.10.*/bin/python"))))
        if shutil.which(each) and not subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode
    ),
    None,
)
IMPORTED = """
import importlib, json, pkgutil, sys
import mig_agent.client as client, mig_agent.client.aio as aio
for package in (client, aio):
    for each in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if each.name != "mig_agent.client.health":  # of the program mig-agent, for probes
            importlib.import_module(each.name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules} - {*sys.stdlib_module_names})))
"""
PROGRAM = """
from mig_agent.client import Client
with Client() as client, client.lease(gpu_memory="4G") as lease:
    print(lease.devices[0].uuid)
"""
VERBS = "from mig_agent.migctl.cli import cli\nfor each in cli.list_commands(None): assert cli.get_command(None, each)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(*_PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT / "client", cwd=folder)
    (found,) = folder.glob("mig_agent_client-*.whl")
    return found


def environment(wheel: Path, folder: Path, extra: str = "") -> Path:
    """The programs of a new environment with the client, and what it declares to need, from the package index."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    run(*_PIP, "--python", folder / "bin/python", "install", "--prefer-binary", f"{wheel}{extra}", cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(wheel, tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def with_migctl(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(wheel, tmp_path_factory.mktemp("migctl"), "[migctl]")


@pytest.fixture
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder) as running:
        yield running


def test_it_declares_grpc_and_protobuf_and_nothing_else() -> None:
    """In the ranges of the whole, of which this is a part."""
    names = [each.partition(">")[0] for each in DECLARED["dependencies"]]
    assert names == ["grpcio", "protobuf"]
    declared = [*DECLARED["dependencies"], *DECLARED["optional-dependencies"]["migctl"]]
    assert {*declared} <= {*WHOLE["dependencies"]}


def test_its_oldest_protobuf_is_that_of_the_generated_code() -> None:
    """Generated code refuses a library that is older than itself."""
    tools = (ROOT / "agent/mig_agent/pb/MADE-FROM").read_text().splitlines()
    (made,) = (each.partition("==")[2] for each in tools if each.startswith("protobuf=="))
    oldest = next(each for each in DECLARED["dependencies"] if each.startswith("protobuf"))
    assert f">={'.'.join(made.split('.')[:2])}," in oldest


def test_the_client_imports_nothing_else(light: Path) -> None:
    imported = set(json.loads(run(light / "python", "-I", "-c", IMPORTED, cwd=light)))
    # typing_extensions is grpcio's, cython_runtime is how its compiled part shows.
    ours = {each for each in imported if "cython" not in each} - {"__main__", "_distutils_hack"}
    assert ours == {"google", "grpc", "mig_agent", "typing_extensions"}


def test_a_program_gets_a_device_with_it(light: Path, agent: Agent) -> None:
    shown = run(light / "python", "-I", "-c", PROGRAM, cwd=light, MIG_AGENT_ADDRESS=agent.address)
    assert shown.startswith("MIG-")


def test_the_blocking_client_is_also_for_python_3_10(tmp_path: Path) -> None:
    """Where there is one to run it is run below; here the types of each version's library say what it has."""
    files = sorted(
        str(path) for name in ("client", "elastic") for path in (ROOT / "agent/mig_agent" / name).glob("*.py")
    )
    command = (sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), "--python-version", "3.10", *files)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # The package for asyncio refuses to be imported there.
    assert not [line for line in done.stdout.splitlines() if ": error: " in line and "client/aio/" not in line]
    assert not done.stderr


@pytest.mark.skipif(OLD_PYTHON is None, reason="no Python 3.10 here")
def test_it_runs_with_python_3_10(wheel: Path, agent: Agent, tmp_path: Path) -> None:
    assert OLD_PYTHON
    run(OLD_PYTHON, "-m", "venv", tmp_path / "old", cwd=tmp_path)
    python = tmp_path / "old/bin/python"
    run(python, "-m", "pip", "--quiet", "install", wheel, cwd=tmp_path)
    assert run(python, "-I", "-c", PROGRAM, cwd=tmp_path, MIG_AGENT_ADDRESS=agent.address).startswith("MIG-")
    elastic = "from mig_agent import elastic; print(elastic.init(256, 64, devices=1).steps)"
    assert run(python, "-I", "-c", elastic, cwd=tmp_path).strip() == "4"
    code = "try: from mig_agent.client import AsyncClient\nexcept ImportError as error: print(error)"
    assert "it needs Python 3.11 or newer" in run(python, "-I", "-c", code, cwd=tmp_path)
    done = subprocess.run([tmp_path / "old/bin/migctl", "status"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("migctl: cannot start: it needs Python 3.11 or newer")


def test_migctl_says_what_it_lacks(light: Path) -> None:
    done = subprocess.run([light / "migctl", "status"], capture_output=True, text=True, check=False, env=os.environ)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "migctl: cannot start: there is no click. Hint: pip install 'mig-agent-client[migctl]'\n"


def test_migctl_is_an_extra(with_migctl: Path, agent: Agent) -> None:
    variables = agent.person({"PATH": os.environ["PATH"]})
    assert run(with_migctl / "migctl", "--version", cwd=with_migctl).strip() == __version__
    lease = json.loads(
        run(with_migctl / "migctl", "request", "--gpu-memory", "4G", "-o", "json", cwd=agent.folder, **variables)
    )
    run(with_migctl / "migctl", "release", lease["lease"], cwd=agent.folder, **variables)
    run(with_migctl / "python", "-I", "-c", VERBS, cwd=with_migctl)
