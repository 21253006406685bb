"""Elastic training with PyTorch and Keras, where they are: in this environment, Debian's, or one that is named.

All checks of one framework run in one process, since importing it takes longer than they do. `hack/elastic.sh` installs
both.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.documents import ROOT, blocks

FRAMEWORKS = ("torch", "keras")


def script(framework: str) -> Path:
    return ROOT / f"tests/support/elastic_{framework}.py"


CHECKS = [
    (framework, each.name)
    for framework in FRAMEWORKS
    for each in ast.parse(script(framework).read_text()).body
    if isinstance(each, ast.FunctionDef) and each.name.startswith("check_")
]


@functools.cache
def python_with(framework: str) -> str:
    """The first interpreter that has the framework; empty if none does."""
    named = os.environ.get(f"ELASTIC_{framework.upper()}_PYTHON", "")
    for each in (named, sys.executable, "/usr/bin/python3"):
        program = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({framework!r}) is None)"
        if each and Path(each).exists() and not subprocess.run([each, "-c", program], check=False).returncode:
            return each
    return ""


@functools.cache
def outcomes(framework: str, folder: Path) -> Mapping[str, str]:
    """For each check what it failed with; empty for one that passed."""
    folder.mkdir()
    done = subprocess.run(
        [python_with(framework), str(script(framework)), str(folder)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}/agent:{ROOT}/tests", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(each) for each in done.stdout.splitlines() if each.startswith("{")]
    return {each["check"]: each["failed"] for each in lines}


@pytest.mark.parametrize(("framework", "check"), CHECKS)
def test_it(framework: str, check: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not python_with(framework):
        pytest.skip(f"no {framework} here: hack/elastic.sh installs it")
    failed = outcomes(framework, tmp_path_factory.getbasetemp() / framework)[check]
    assert not failed, failed


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_program_of_the_page(framework: str, tmp_path: Path) -> None:
    """Told to yield when it has saved nothing yet, and then started again until it is done."""
    if not python_with(framework):
        pytest.skip(f"no {framework} here: hack/elastic.sh installs it")
    (program,) = (body for body, settings in blocks(ROOT / "docs/elastic.md", "python") if settings == [framework])
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/agent",
        "CUDA_VISIBLE_DEVICES": "",
        "MIG_AGENT_DEVICE_MEMORY": "4864",
        "KERAS_BACKEND": "jax",
    }
    told = program + "\nassert job.position.epoch == 3 and job.steps in {3, 4}\n"
    early = program.replace("job.epochs(3)", "job.epochs(__import__('signal').raise_signal(10) or 3)").replace(
        "model.fit(", "__import__('signal').raise_signal(10); model.fit("
    )
    command = [python_with(framework), "-c"]
    for text, code in ((early, 75), (told, 0), (told, 0)):
        done = subprocess.run(
            [*command, text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == code, done.stderr
    assert sorted(each.name for each in (tmp_path / "checkpoints/c").iterdir()) == ["lock", "step-000000000001"]


def test_without_frameworks_the_rest_works() -> None:
    """Nothing of one is imported with the package, and what needs one says which."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['keras'] = None\n"
        "from mig_agent import elastic\n"
        "assert elastic.init(8, 2).steps == 4\n"
        "for name in ('torch', 'keras'):\n"
        "    try: getattr(elastic, name)\n"
        "    except ModuleNotFoundError as error: print(error.name)\n"
        "print(*sorted(each for each in ('grpc', 'google', 'numpy', 'click', 'asyncio') if each in sys.modules))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "agent")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch", "keras"]
