"""The `limits` section: what it means, and how its mistakes are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mig_agent.config import load
from mig_agent.config.limits import ROLES
from mig_agent.config.load import read
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


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            ["roles: {user: {longest_ttl: 1d}}", "users: {alice: {default_ttl: 7d}}"],
            (
                "cannot use limits.users.alice.default_ttl in FILE, line 3: 7d is more than 1d, which "
                "limits.roles.user.longest_ttl in FILE, line 2 sets for alice, too"
            ),
        ),
        (
            ["roles: {user: {default_ttl: 7d}}", "users: {alice: {longest_ttl: 1d}}"],
            (
                "cannot use limits.users.alice.longest_ttl in FILE, line 3: 1d is less than 7d, which "
                "limits.roles.user.default_ttl in FILE, line 2 sets for alice, too"
            ),
        ),
        (
            ["roles: {user: {highest_priority: 5}}", "users: {alice: {lowest_priority: 6}}"],
            (
                "cannot use limits.users.alice.lowest_priority in FILE, line 3: 6 is more than 5, which "
                "limits.roles.user.highest_priority in FILE, line 2 sets for alice, too"
            ),
        ),
        (
            ['tenants: {"*": {longest_ttl: 1d}, vision: {default_ttl: 7d}}'],
            (
                "cannot use limits.tenants.vision.default_ttl in FILE, line 2: 7d is more than 1d, which "
                "limits.tenants.*.longest_ttl in FILE, line 2 sets for vision, too"
            ),
        ),
    ],
)
def test_a_value_that_contradicts_the_general_one_is_refused(lines: list[str], message: str, tmp_path: Path) -> None:
    """Else the default would never be given, but the longest, without a word."""
    path = tmp_path / "config.yaml"
    path.write_text("\n  ".join(["limits:", *lines]))
    (problem,) = read(path, environment={}).problems
    assert problem.message.startswith(message.replace("FILE", str(path)))
    assert problem.hint.startswith(("write limits.users.alice.", "write limits.tenants.vision."))


@pytest.mark.parametrize(
    "lines",
    [
        ["roles: {user: {longest_ttl: 1d}}", "users: {alice: {default_ttl: 7d, longest_ttl: 7d}}"],
        ["roles: {admin: {longest_ttl: 1d}}", "users: {alice: {default_ttl: 7d}}"],
        ["roles: {user: {longest_ttl: 7d}}", "users: {alice: {default_ttl: 1d}}"],
        ["roles: {user: {longest_ttl: 7d, default_ttl: 2d}}", "users: {alice: {leases: 1}}"],
    ],
)
def test_an_own_value_and_another_role_contradict_nothing(lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\n  ".join(["limits:", *lines]))
    assert not read(path, environment={}).problems


def test_the_role_of_a_user_is_the_one_that_the_settings_give(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    limits = "limits:\n  roles: {scheduler: {longest_ttl: 1d}}\n  users: {slurm: {default_ttl: 7d}}\n"
    path.write_text(f"socket_schedulers: slurm\n{limits}")
    (problem,) = read(path, environment={}).problems
    assert "limits.roles.scheduler.longest_ttl" in problem.message


def test_a_flag_takes_the_same_as_one_line() -> None:
    limits = load(flags={"limits": "{users: {alice: {leases: 4}}}"}).limits
    assert limits.users["alice"][Limit.LEASES].setting == "limits.users.alice.leases"
    assert not load().limits


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("limits: 4\n", "line 1", "{users: {alice: {leases: 4}}}"),
        ("limits: [a]\n", "line 1: cannot take a list", "{users: {alice: {leases: 4}}}"),
        ("limits:\n  user:\n    alice: {leases: 1}\n", "limits.user in", "did you mean users?"),
        ("limits:\n  roles:\n    root: {leases: 1}\n", "limits.roles.root in", "user, scheduler, admin"),
        ("limits:\n  users:\n    '*': {leases: 1}\n", "limits.users.* in", "limits.roles.user"),
        ("limits:\n  users:\n    alice: 4\n", "limits.users.alice in", "alice: {leases: 4}"),
        ("limits:\n  users:\n    alice:\n      lease: 4\n", "line 4", "did you mean leases?"),
        ("limits:\n  users:\n    alice:\n      leases: many\n", "line 4: cannot take many", "such as 4"),
        ("limits:\n  users:\n    alice: {memory: 4}\n", "limits.users.alice.memory in", "4G"),
        ("limits:\n  users:\n    alice: {memory: [4]}\n", "no list", "memory: 80Gi"),
        ("limits:\n  users:\n    alice: {leases: 1}\n    alice: {leases: 2}\n", "line 4: it is set twice", "remove"),
        (
            "limits:\n  users:\n    a: {lowest_priority: 5, highest_priority: 1}\n",
            "5 is more than",
            "lowest_priority: 1 or",
        ),
        (
            "limits:\n  users:\n    a: {default_ttl: 2h, longest_ttl: 1h}\n",
            "2h is more than",
            "default_ttl: 1h or less",
        ),
        ("reread: {a: b}\n", "a value or a plain list", "write reread: 30s"),
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


ALL_AT_ONCE = """\
limits:
  role: {user: {leases: 1}}
  roles:
    root: {leases: 1}
    user: {leases: many, memory: 4, share: 4G, waiting: [1]}
  users:
    "*": {leases: 1}
    alice: 4
    alice: {leases: 4}
    bob: {lowest_priority: 5, highest_priority: 1, colour: blue}
  tenants:
    vision: {share: 1.5, memory: }
reread: soon
"""


def test_all_mistakes_of_the_section_are_told_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(ALL_AT_ONCE)
    problems = read(path).problems
    assert sorted((each.line or 0, each.setting) for each in problems) == sorted(
        [(line, "limits") for line in (2, 4, 5, 5, 5, 5, 7, 8, 9, 10, 10, 12, 12)] + [(13, "reread")]
    )
    assert all(each.message.startswith("cannot use ") and "\n" not in each.message for each in problems)
    assert not [each for each in problems if not each.hint]
    with pytest.raises(ConfigError, match=r"limits\.role "):
        load(path)


MENDED = [
    ("limits: 4\n", None),
    ("limits: [a]\n", None),
    ("limits:\n  users:\n    alice: 4\n", ("alice: 4", None)),
    ("limits:\n  user:\n    alice: {leases: 1}\n", ("user:", "{}:")),
    ("limits:\n  users:\n    alice: {lease: 1}\n", ("lease:", "{}:")),
    ("limits:\n  roles:\n    usr: {leases: 1}\n", ("usr:", "{}:")),
    ("limits:\n  users:\n    alice: {memory: 4}\n", ("4", "{}")),
    ("limits:\n  users:\n    alice: {memory: 0}\n", ("0", "{}")),
    ("limits:\n  users:\n    alice: {memory: [4]}\n", ("memory: [4]", "{}")),
    ("limits:\n  users:\n    alice: {share: 4G}\n", ("4G", "{}")),
    ("limits:\n  users:\n    alice: {share: 1.5}\n", ("1.5", "{}")),
    ("limits:\n  users:\n    alice: {leases: many}\n", ("many", "{}")),
    ("limits:\n  users:\n    alice: {highest_priority: x}\n", ("x}", "{}}}")),
    ("limits:\n  users:\n    alice: {default_ttl: 5}\n", ("5", "{}")),
    ("limits:\n  users:\n    alice: {default_ttl: 99999999999}\n", ("99999999999", "{}")),
    ("reread: 99999999999\n", ("99999999999", "{}")),
    ("max_calls: 0\n", ("0", "{}")),
    ("max_wating: 4\n", ("max_wating", "{}")),
]
"""A configuration, and what of it is replaced by what its hint suggests; all of it where there is nothing named."""
_SUGGESTED = tuple(
    re.compile(rf"{before} (?P<what>\{{.*\}}|[\w]+: [^,?]+|[-\w.%]+)")
    for before in ("did you mean", "such as", "write")
)


@pytest.mark.parametrize(("text", "place"), MENDED)
def test_a_hint_that_is_followed_mends_it(text: str, place: tuple[str, str | None] | None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    (problem,) = read(path).problems
    found = next((match for each in _SUGGESTED if (match := each.search(problem.hint))), None)
    assert found, problem.hint
    suggested = found["what"]
    if place is None:
        text = f"limits: {suggested}\n"
    else:
        old, new = place
        text = text.replace(old, new.format(suggested) if new else suggested)
    path.write_text(text)
    assert read(path).problems == (), text


def test_what_has_nothing_below_it_limits_nothing(tmp_path: Path) -> None:
    """Entries that were commented out leave such a section."""
    path = tmp_path / "config.yaml"
    path.write_text("limits:\n  users:\n  #  alice: {leases: 4}\n  roles:\n    user:\n")
    assert not load(path).limits.users


@pytest.mark.parametrize(
    "text",
    [
        "limits: " + "{a: " * 5000 + "1" + "}" * 5000,
        "limits: " + "{a: " * 60 + "1" + "}" * 60,
        "limits: &a {users: *a}",
        "limits: &a\n  users: {alice: *a}",
        "limits: " + "[" * 5000 + "]" * 5000,
        "a: " + "[" * 5000 + "]" * 5000,
        "a: " + "{a: " * 100000,
        "limits: {users: {" + ", ".join(f"u{n}: &n{n} {{x: {f'*n{n - 1}' if n else 1}}}" for n in range(60)) + "}}",
    ],
    ids=["deep", "less-deep", "of-itself", "of-itself-below", "deep-list", "deep-other", "open", "aliases"],
)
def test_deep_yaml_is_refused_in_words(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    problems = read(path).problems
    assert problems
    assert all(each.message.startswith("cannot ") and len(each.message) < 400 for each in problems)
    (one, *_) = read(None, {"limits": text.removeprefix("limits: ")}).problems
    assert one.message.startswith("cannot ")


def test_the_roles_are_those_of_callers() -> None:
    assert set(ROLES) == {each.value for each in Role}
