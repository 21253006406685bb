"""The `limits` section: what it means, and how its mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from mig_agent.config import load
from mig_agent.config.limits import ROLES
from mig_agent.core.errors import ConfigError
from mig_agent.core.limits import Limit
from mig_agent.engine.callers import Role

GOOD = """\
reread: 30s
limits:
  roles:
    user: {memory: 80Gi, leases: 8, longest_ttl: 7d}
  users:
    alice:
      memory: 160Gi
  tenants:
    "*": {share: 0.5}
"""


def test_each_value_knows_the_line_that_sets_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    limits = load(path).limits
    bound = limits.users["alice"][Limit.MEMORY]
    assert (bound.value, bound.text) == (160 << 30, "160Gi")
    assert bound.setting == f"limits.users.alice.memory in {path}, line 7"
    assert limits.tenants["*"][Limit.SHARE].value == 0.5
    assert limits.roles["user"][Limit.LONGEST_TTL].value == 7 * 86400


def test_a_flag_takes_the_same_as_one_line() -> None:
    limits = load(flags={"limits": "{users: {alice: {leases: 4}}}"}).limits
    assert limits.users["alice"][Limit.LEASES].setting == "limits.users.alice.leases"
    assert not load().limits


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("limits: 4\n", "line 1", "docs/configuration.md"),
        ("limits: [a]\n", "line 1: cannot take a list", "write one value"),
        ("limits:\n  user:\n    alice: {leases: 1}\n", "limits.user in", "did you mean users?"),
        ("limits:\n  roles:\n    root: {leases: 1}\n", "limits.roles.root in", "user, scheduler, admin"),
        ("limits:\n  users:\n    '*': {leases: 1}\n", "limits.users.* in", "limits.roles.user"),
        ("limits:\n  users:\n    alice: 4\n", "limits.users.alice in", "example"),
        ("limits:\n  users:\n    alice:\n      lease: 4\n", "line 4", "did you mean leases?"),
        ("limits:\n  users:\n    alice:\n      leases: many\n", "line 4: cannot take many", "such as 4"),
        ("limits:\n  users:\n    alice: {memory: 4}\n", "limits.users.alice.memory in", "4G"),
        ("limits:\n  users:\n    alice: {memory: [4]}\n", "no list", "example"),
        ("limits:\n  users:\n    alice: {leases: 1}\n    alice: {leases: 2}\n", "line 4: it is set twice", "remove"),
        ("limits:\n  users:\n    a: {lowest_priority: 5, highest_priority: 1}\n", "5 is more than", "fit"),
        ("limits:\n  users:\n    a: {default_ttl: 2h, longest_ttl: 1h}\n", "2h is more than", "fit"),
        ("reread: {a: b}\n", "a value or a plain list", "docs/configuration.md"),
        ("end_idle_after: 10m\n", "cannot end idle leases after 10m", "idle_after"),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, message: str, hint: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.message.startswith("cannot ")
    assert message in caught.value.message
    assert hint in caught.value.hint + caught.value.message


def test_the_roles_are_those_of_callers() -> None:
    assert set(ROLES) == {each.value for each in Role}
