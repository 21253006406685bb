"""Builds the callers: the stubs out of proto/, in a temporary folder, and the program over them.

What takes long is kept outside the checkout: Go's own caches, and the Python environment with protoc
(`MIG_AGENT_CALLERS_CACHE`, else ~/.cache/mig-agent-callers). The versions of gRPC for Go and of the generators are
those of go.mod; `go get MODULE@VERSION` in its folder changes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.agent import short_folder

ROOT = Path(__file__).resolve().parents[2]
GO_MODULE = ROOT / "tests/callers/go"
NO_GO = "cannot build the caller in Go: there is no `go` on the PATH; install Go (https://go.dev/dl), then run it again"
BUILD_SECONDS = 280


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


@pytest.fixture(scope="session")
def go_caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of tests/callers/go."""
    if shutil.which("go") is None:
        pytest.fail(NO_GO, pytrace=False)
    work = tmp_path_factory.mktemp("go") / "module"
    shutil.copytree(GO_MODULE, work)
    plugins = [f"--plugin={name}={_run('go', 'tool', '-n', name, cwd=work)}" for name in _GENERATORS]
    _run(
        *(str(_python_with_protoc()), "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}", *plugins),
        *("--go_out=.", "--go_opt=module=mig-agent.io", "--go-grpc_out=.", "--go-grpc_opt=module=mig-agent.io"),
        "migagent/v1/partition_manager.proto",
        cwd=work,
    )
    _run("go", "vet", "./...", cwd=work)
    _run("go", "build", "-trimpath", "-o", "caller", ".", cwd=work)
    return work / "caller"


_GENERATORS = ("protoc-gen-go", "protoc-gen-go-grpc")


def _python_with_protoc() -> Path:
    """An environment of its own, with the versions that our own stubs were made with."""
    made_from = (ROOT / "agent/mig_agent/pb/MADE-FROM").read_text().splitlines()
    tools = [line for line in made_from if "==" in line and not line.startswith("mypy-protobuf")]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(os.environ.get("MIG_AGENT_CALLERS_CACHE") or caches / "mig-agent-callers")
    key = hashlib.sha256(repr((tools, sys.version, sys.base_prefix)).encode()).hexdigest()[:16]
    there = cache / f"protoc-{key}"
    if not there.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="making-") as making:
            venv = Path(making) / "venv"
            _run(sys.executable, "-m", "venv", str(venv))
            _run(str(venv / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *tools)
            with contextlib.suppress(OSError):  # another one was quicker
                venv.rename(there)
    return there / "bin/python"


def _run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints, its errors aside."""
    # In its own words, whatever a workspace or vendor folder around it says.
    environment = os.environ | {"GOFLAGS": "-mod=readonly", "GOWORK": "off"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
    )
    if done.returncode != 0:
        pytest.fail(f"`{' '.join(command)}` ended with {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout.strip()
