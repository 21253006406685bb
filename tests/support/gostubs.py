"""What makes Go's stubs out of proto/: protoc, and its generators for Go.

What takes long is kept outside the checkout: Go's own caches, and the Python environment with protoc
(`MIG_AGENT_CALLERS_CACHE`, else ~/.cache/mig-agent-callers). The versions of the generators are those of
tests/callers/go/go.mod; `go get MODULE@VERSION` in its folder changes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = ROOT / "tests/callers/go"
"""The module whose tools they are."""
_NAMES = ("protoc-gen-go", "protoc-gen-go-grpc")
_SECONDS = 280


class GoError(Exception):
    """Something could not be built; with the words of whoever could not."""


def plugins() -> list[Path]:
    """The generators, built by Go where they are not in its cache."""
    return [Path(run("go", "tool", "-n", name, cwd=GENERATORS)) for name in _NAMES]


def protoc() -> list[str]:
    """The command line of protoc, of the version that our own stubs were made with, in an environment of its own."""
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
            run(sys.executable, "-m", "venv", str(venv))
            run(str(venv / "bin/python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", *tools)
            with contextlib.suppress(OSError):  # another one was quicker
                venv.rename(there)
    return [str(there / "bin/python"), "-m", "grpc_tools.protoc"]


def run(*command: str, cwd: Path | None = None, seconds: float = _SECONDS, **environment: str) -> str:
    """What a command prints, its errors aside. Raises GoError with all of its words where it fails."""
    # In its own words, whatever a workspace or vendor folder around it says.
    own = os.environ | {"GOFLAGS": "-mod=readonly", "GOWORK": "off"} | environment
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, check=False, timeout=seconds)
    if done.returncode != 0:
        raise GoError(f"`{' '.join(command)}` ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()
