"""The wheel, built and installed as anybody would, has everything that the checkout has."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from mig_agent import __version__
from support.wheel import installed

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


def test_the_wheel_holds_profiles_types_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for profile in (ROOT / "profiles").glob("*.yaml"):
        assert f"mig_agent/_profiles/{profile.name}" in names
    assert "mig_agent/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "hack"))]


def test_the_wheel_holds_every_module_of_the_checkout(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {path.relative_to(ROOT / "agent").as_posix() for path in (ROOT / "agent/mig_agent").rglob("*.py")}
    assert modules <= names


def test_its_programs_run(programs: Path) -> None:
    for way in ("version", "--version"):
        assert installed(programs, "mig-agent", way).strip() == f"mig-agent {__version__}"
    assert "--simulate" in installed(programs, "mig-agent", "serve", "--help")
    assert "request" in installed(programs, "migctl", "--help")
    assert "leases" in installed(programs, "kubectl-mig", "--help")


def test_it_finds_its_own_profiles(programs: Path) -> None:
    code = (
        "import mig_agent, pathlib\n"
        "from mig_agent.adapters import catalog_files\n"
        "print(pathlib.Path(mig_agent.__file__).parent)\n"
        "print(len(catalog_files.load().entries))\n"
    )
    folder, count = installed(programs, "python", "-c", code).split()
    assert Path(folder).is_relative_to(programs.parent)
    assert int(count) == len(list((ROOT / "profiles").glob("*.yaml")))


def test_it_shows_the_demo(programs: Path) -> None:
    assert "Where to go next" in installed(programs, "mig-agent", "demo", "--fast")
