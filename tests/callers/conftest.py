"""Builds the callers: the stubs out of proto/, in a temporary folder, and the program over them.

The versions of gRPC for Go and of the generators are those of go.mod; `go get MODULE@VERSION` in its folder changes
them. What takes long is kept outside the checkout (support/gostubs.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import gostubs
from support.agent import short_folder

NO_GO = "cannot build the caller in Go: there is no `go` on the PATH; install Go (https://go.dev/dl), then run it again"


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
    shutil.copytree(gostubs.GENERATORS, work)
    try:
        plugins = [f"--plugin={each.name}={each}" for each in gostubs.plugins()]
        gostubs.run(
            *(*gostubs.protoc(), f"--proto_path={gostubs.ROOT / 'proto'}", *plugins),
            *("--go_out=.", "--go_opt=module=mig-agent.io", "--go-grpc_out=.", "--go-grpc_opt=module=mig-agent.io"),
            "migagent/v1/partition_manager.proto",
            cwd=work,
        )
        gostubs.run("go", "vet", "./...", cwd=work)
        gostubs.run("go", "build", "-trimpath", "-o", "caller", ".", cwd=work)
    except gostubs.GoError as error:
        pytest.fail(str(error), pytrace=False)
    return work / "caller"
