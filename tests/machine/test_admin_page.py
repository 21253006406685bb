"""docs/admin.md, followed word by word on a fresh machine.

Blocks marked `sh root` and `sh alice` are typed as they are by root and by Alice, in the order of the page; those
marked `console` are examples with their output (`support.documents`), which root types. What `sh elsewhere` installs
without the package is typed on another machine. `sh build` is what `hack/package.sh` has done here, outside.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.documents import BLOCK, ROOT, blocks, examples_of, pattern_of
from support.machine import Machine, MachineError

PAGE = ROOT / "docs/admin.md"
CLONE = "/root/clone"
GPUS = 'simulate: "a100-80gb:1"'
_REMOVING = "apt remove"


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """All that pip needs to install the checkout: the machine has no network."""
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--require-hashes")
    for name in ("requirements.txt", "requirements-build.txt"):
        command = (*pip, "--only-binary", ":all:", "--dest", str(tmp_path / "wheels"), "-r", f"deploy/{name}")
        subprocess.run(command, cwd=ROOT, check=True)
    return tmp_path / "wheels"


def test_every_command_of_the_page_does_what_it_says(machine: Machine) -> None:
    machine.run(f"mkdir --parents {CLONE}/dist && cp /mnt/mig-agent_*.deb {CLONE}/dist/")
    last: list[str] = []
    ran: list[str] = []
    for block in BLOCK.finditer(PAGE.read_text()):
        match block["info"].split():
            case ["sh", "root" | "alice" as user]:
                # Whoever reads on has not removed it yet.
                if _REMOVING in block["body"]:
                    last.append(block["body"])
                    continue
                _type(machine, block["body"], user)
                ran.append(block["body"])
            case ["sh", "build"]:
                assert "hack/package.sh deb" in block["body"]
            case ["sh", "elsewhere"] | ["yaml"]:
                pass  # see below; a part of a configuration
            case ["console", *_]:
                for example in examples_of(PAGE):
                    if f"$ {example.command}\n" in block["body"]:
                        _compare(machine, example.command, example.output, example.code)
                        ran.append(example.command)
            case _:
                raise AssertionError(f"who types this?\n{block[0]}")
    for body in last:
        _type(machine, body, "root")
    machine.run("test ! -e /etc/mig-agent -a ! -e /usr/bin/migctl")
    assert any("adduser alice mig-agent" in each for each in ran)
    assert 'migctl cordon --gpu 1 --reason "fan is loud"' in ran


def test_without_the_package_it_serves_as_well(wheels: Path) -> None:
    ((lines, _),) = [each for each in blocks(PAGE, "sh") if each[1] == ["elsewhere"]]
    with Machine() as machine:
        machine.run("useradd --create-home alice")
        wheels.rename(machine.shared / "wheels")
        machine.run("printf '[global]\\nno-index = true\\nfind-links = /mnt/wheels\\n' >/etc/pip.conf")
        _copy_checkout(machine.shared / "clone")
        # The last line starts the service, which finds no driver here; see the next.
        machine.run(f"cp -r /mnt/clone {CLONE}; echo '{GPUS}' >>{CLONE}/deploy/debian/config.yaml")
        _type(machine, lines, "root")
        machine.run("usermod --append --groups mig-agent alice")
        shown = machine.run("migctl run --gpu-memory 4G -- printenv CUDA_VISIBLE_DEVICES", user="alice")
        assert shown.startswith("MIG-")
        # What the page says of PEP 668.
        assert "externally-managed-environment" in machine.run(f"cd {CLONE} && pip install .", code=1)


def _copy_checkout(folder: Path) -> None:
    """What `pip install .` and the page need of a clone."""
    for name in ("agent", "deploy", "docs", "profiles"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)


def _type(machine: Machine, lines: str, user: str) -> None:
    folder = CLONE if user == "root" else "~"
    machine.run(["bash", "-ec", f"cd {folder}\n{lines}"], user=user)


def _compare(machine: Machine, command: str, output: str, code: int) -> None:
    shown = machine.run(["bash", "-c", command], code=code)
    if not pattern_of(output).fullmatch(shown):
        raise MachineError(f"$ {shlex.quote(command)}\n{shown}")
