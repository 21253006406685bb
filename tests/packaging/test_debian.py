"""What the Debian package is made of fits the programs. tests/machine installs it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

import manpages
from mig_agent.config import load
from mig_agent.config.settings import ROWS
from mig_agent.kubectl.cli import cli as kubectl_cli
from mig_agent.migctl.cli import cli
from mig_agent.program import program

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = ROOT / "deploy/debian"

pytestmark = pytest.mark.usefixtures("clean_environment")


def plain(roff: str) -> str:
    """What a reader sees, more or less."""
    return re.sub(r"\\f[BIR]", "", roff).replace("\\-", "-").replace("\\&", "").replace("\\e", "\\")


@pytest.mark.parametrize(
    ("page", "group"), [("man1/migctl.1", cli), ("man1/kubectl-mig.1", kubectl_cli), ("man8/mig-agent.8", program)]
)
def test_a_man_page_has_every_command_and_option(page: str, group: click.Group) -> None:
    shown = plain(manpages.pages()[page]())
    context = click.Context(group, info_name=group.name)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        assert re.search(rf"^\.SS [\w -]+ {name}\b", shown, re.MULTILINE)
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden and parameter.name not in ROWS:
                assert all(re.search(rf"^\S*.*{re.escape(each)}\b", shown, re.MULTILINE) for each in parameter.opts)


def test_the_man_page_of_the_configuration_has_every_setting() -> None:
    shown = plain(manpages.pages()["man5/mig-agent-config.5"]())
    assert re.findall(r"^([a-z_]+): .+$", shown, re.MULTILINE) == [*ROWS]


@pytest.mark.parametrize("page", manpages.pages())
def test_groff_understands_the_man_pages(page: str, tmp_path: Path) -> None:
    """Where it is here; a word that it does not know would be shown as it is, or left out."""
    manpages.main(tmp_path)
    try:
        done = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww", "-z", tmp_path / page], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("groff is not here")
    assert (done.returncode, done.stderr) == (0, "")


def test_its_configuration_is_the_defaults_but_for_the_group() -> None:
    settings, defaults = load(DEBIAN / "config.yaml"), load()
    changed = {name for name in ROWS if getattr(settings, name) != getattr(defaults, name)}
    assert changed == {"socket_group"}
    assert settings.socket_group == "mig-agent"
    assert (DEBIAN / "mig-agent.sysusers").read_text().splitlines()[-1] == f"g {settings.socket_group} -"


def test_its_folders_are_those_of_the_unit() -> None:
    unit = (ROOT / "deploy/mig-agent.service").read_text()
    for line in (DEBIAN / "mig-agent.tmpfiles").read_text().splitlines()[1:]:
        _, path, mode, *_ = line.split()
        kind = {"/var/lib/": "State", "/run/": "Runtime"}[path.removesuffix("mig-agent")]
        assert f"{kind}Directory=mig-agent\n{kind}DirectoryMode={mode}\n" in unit


@pytest.mark.parametrize("script", ["postinst", "postrm", "prerm"])
def test_its_scripts_are_scripts(script: str) -> None:
    subprocess.run(["sh", "-n", DEBIAN / script], check=True)
    assert "set -e\n" in (DEBIAN / script).read_text()
