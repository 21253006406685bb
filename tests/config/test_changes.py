"""What a running agent takes up of a changed configuration."""

from __future__ import annotations

from mig_agent.config import load
from mig_agent.config.changes import compare
from mig_agent.config.load import Flags


def test_nothing_changed() -> None:
    changes = compare(load(), load())
    assert not changes.live
    assert not changes.at_restart
    assert changes.settings == load()


def test_what_can_change_does_and_what_cannot_is_named() -> None:
    wanted = load(flags={"max_waiting": "5", "state_dir": "/elsewhere", "log_level": "debug"})
    changes = compare(load(), wanted)
    assert list(map(str, changes.live)) == ["max_waiting is 5 (was 1000)", "log_level is debug (was info)"]
    assert list(map(str, changes.at_restart)) == ["state_dir is /elsewhere (was /var/lib/mig-agent)"]
    assert (changes.settings.max_waiting, changes.settings.log_level) == (5, "debug")
    assert changes.settings.state_dir == load().state_dir
    # The next comparison is against what is in use, so what needs a restart is named again.
    assert [each.name for each in compare(changes.settings, wanted).at_restart] == ["state_dir"]


def test_values_are_written_as_people_write_them() -> None:
    flags: Flags = {
        "tls_users": ("alice", "bob"),
        "metrics": "off",
        "idle_limit": "1h",
        "socket_mode": "0600",
        "reservation_after": "5m",
        "socket_group": "gpu",
    }
    changes = compare(load(), load(flags=flags))
    assert list(map(str, changes.live)) == [
        "socket_mode is 0600 (was 0660)",
        "socket_group is gpu (was not set)",
        "tls_users is alice, bob (was not set)",
        "idle_limit is 1h (was off)",
        "reservation_after is 5m (was auto)",
        "metrics is off (was 127.0.0.1:7481)",
    ]
    back = compare(load(flags=flags), load())
    assert str(back.live[1]) == "socket_group is not set (was gpu)"
