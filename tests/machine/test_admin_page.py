"""docs/admin.md, followed word by word on a fresh machine.

Blocks marked `sh root` and `sh alice` are typed as they are by root and by Alice, in the order of the page; those
marked `console` are examples with their output (`support.documents`), which root types.
"""

from __future__ import annotations

import shlex

from support.documents import BLOCK, ROOT, examples_of, pattern_of
from support.machine import Machine, MachineError

PAGE = ROOT / "docs/admin.md"
_REMOVING = "apt remove"


def test_every_command_of_the_page_does_what_it_says(machine: Machine) -> None:
    machine.run("mkdir -p /root/clone/dist && cp /mnt/mig-agent_*.deb /root/clone/dist/")
    text = PAGE.read_text()
    last: list[str] = []
    ran: list[str] = []
    for block in BLOCK.finditer(text):
        language, *users = block["info"].split() or [""]
        if language == "sh" and users and users[0] in {"root", "alice"}:
            # Whoever reads on has not removed it yet.
            if _REMOVING in block["body"]:
                last.append(block["body"])
                continue
            _type(machine, block["body"], users[0])
            ran.append(block["body"])
        elif language == "console":
            for example in examples_of(PAGE):
                if f"$ {example.command}\n" in block["body"]:
                    _compare(machine, example.command, example.output, example.code)
                    ran.append(example.command)
    for body in last:
        _type(machine, body, "root")
    machine.run("test ! -e /etc/mig-agent -a ! -e /usr/bin/migctl")
    assert any("adduser alice mig-agent" in each for each in ran)
    assert 'migctl cordon --gpu 1 --reason "fan is loud"' in ran


def _type(machine: Machine, lines: str, user: str) -> None:
    folder = "/root/clone" if user == "root" else "~"
    machine.run(["bash", "-ec", f"cd {folder}\n{lines}"], user=user)


def _compare(machine: Machine, command: str, output: str, code: int) -> None:
    shown = machine.run(["bash", "-c", command], code=code)
    if not pattern_of(output).fullmatch(shown):
        raise MachineError(f"$ {shlex.quote(command)}\n{shown}")
