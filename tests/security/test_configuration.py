"""What the settings say of who may do what, and that nothing starts where sockets cannot be protected."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import stat
from pathlib import Path

import pytest

from mig_agent.adapters.private_dir import PrivateDir, refuse_if_replaceable
from mig_agent.adapters.transport.peer_credentials import Peer
from mig_agent.adapters.transport.unix_sockets import OwnedSocket
from mig_agent.adapters.users import Users, uid_named
from mig_agent.config import Settings
from mig_agent.core.errors import ConfigError
from mig_agent.daemon.roles import configured_roles
from mig_agent.engine.callers import Role
from support.agent import GENEROUS_SECONDS, Agent, eventually


def test_roles_are_as_the_settings_say() -> None:
    names: tuple[str, ...] = ("12345",)
    settings = Settings(tls_admins=("ops",), tls_schedulers=("slurm", "ops"), socket_schedulers=names)
    roles = configured_roles(settings, Users(lambda _: "x"))
    assert [roles.by_certificate(each).role for each in ("ops", "slurm", "alice")] == [
        Role.ADMIN,
        Role.SCHEDULER,
        Role.USER,
    ]
    found = [roles.by_kernel(Peer(uid, 1), admin=False).role for uid in (0, os.geteuid(), 12345, 4, None)]
    assert found == [Role.SCHEDULER, Role.SCHEDULER, Role.SCHEDULER, Role.USER, Role.USER]
    assert roles.by_kernel(Peer(4, 1), admin=True).role is Role.ADMIN


def test_a_scheduler_that_this_machine_does_not_know_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="cannot let nobody-has-this-name ask for others: there is no such user"):
        configured_roles(Settings(socket_schedulers=("nobody-has-this-name",)), Users())
    assert uid_named("root") == 0
    assert uid_named("4711") == 4711


def test_a_private_folder_is_entered_by_its_owner_alone(folder: Path) -> None:
    path = folder / "inner"
    for _ in range(2):  # made, then found
        private = PrivateDir.open(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        Path(private.path_of("x")).write_text("there")
        assert (path / "x").read_text() == "there"
        private.close()


def test_a_private_folder_that_others_may_enter_is_closed_to_them(folder: Path) -> None:
    """As the kubelet makes those of hostPath volumes; it was nobody else who made what is in it."""
    for mode in (0o755, 0o750, 0o711, 0o2755):
        path = folder / f"{mode:o}"
        path.mkdir()
        (path / "x").touch()
        path.chmod(mode)
        PrivateDir.open(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for mode in (0o777, 0o770):  # nothing is in them, so nobody put anything there
        path = folder / f"{mode:o}"
        path.mkdir()
        path.chmod(mode)
        PrivateDir.open(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_private_folder_that_others_may_write_in_is_refused(mode: int, folder: Path) -> None:
    path = folder / "open"
    path.mkdir()
    path.chmod(mode)
    if not mode & stat.S_ISVTX:
        (path / "x").touch()
    with pytest.raises(ConfigError, match=rf"others than the agent's own user may write in it \(mode {mode:04o}\)"):
        PrivateDir.open(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_is_no_folder_or_a_link_is_no_private_folder(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to(folder / "real")
    with pytest.raises(ConfigError, match="it is a link") as refused:
        PrivateDir.open(folder / "link")
    assert str(folder / "real") in refused.value.hint
    (folder / "nowhere").symlink_to(folder / "missing")
    with pytest.raises(ConfigError, match="it is a link"):
        PrivateDir.open(folder / "nowhere")
    assert not (folder / "missing").exists()
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="cannot use the folder"):
        PrivateDir.open(folder / "file")


def replaceable(path: Path) -> str:
    """Why a path cannot be protected, and what to change; empty where it can."""
    try:
        refuse_if_replaceable(path, "the thing", "go elsewhere")
    except ConfigError as error:
        return f"{error.message}; {error.hint}"
    return ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others")
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_whoever_may_rename_any_folder_above_could_replace_it(distance: int, folder: Path) -> None:
    path = folder / "a/b/c/state"
    path.mkdir(parents=True)
    above = path.parents[distance - 1]
    assert replaceable(path) == ""
    for gid in (0, os.getegid()):
        os.chown(above, 0, gid)
        above.chmod(0o775)
        assert replaceable(path) == ""
    os.chown(above, 0, 61001)
    assert replaceable(path) == (
        f"cannot protect the thing {path}: the group gid 61001 may rename files in {above}; "
        f"chmod g-w {above}, or go elsewhere"
    )
    above.chmod(0o1777)
    assert replaceable(path) == ""
    above.chmod(0o757)
    assert f"everybody may rename files in {above}; chmod o-w {above}" in replaceable(path)
    above.chmod(0o755)
    assert replaceable(path) == ""
    os.chown(above, 61001, 0)
    assert f"{above} belongs to uid 61001, who may rename files in it; chown {above}" in replaceable(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others")
def test_links_on_the_way_count_on_both_sides(folder: Path) -> None:
    for name in ("here", "there"):
        (folder / name).mkdir()
    (folder / "there/state").mkdir()
    (folder / "here/link").symlink_to(folder / "there")
    path = folder / "here/link/state"
    assert replaceable(path) == ""
    for name in ("here", "there"):
        os.chown(folder / name, 61001, 61001)
        assert "belongs to uid 61001" in replaceable(path)
        os.chown(folder / name, 0, 0)


# The state directory


def refusal(agent: Agent) -> str:
    """What an agent says that does not start."""
    assert agent.launch().wait(GENEROUS_SECONDS) == 1
    (line,) = map(json.loads, agent.log().splitlines())
    agent.log_file.unlink()
    return str(line["event"])


def test_a_state_directory_that_others_may_write_in_is_refused(folder: Path) -> None:
    with Agent(folder) as agent:
        assert agent.stop() == 0
        agent.log_file.unlink()
        for mode in (0o777, 0o770, 0o1777):
            agent.state_dir.chmod(mode)
            assert refusal(agent) == (
                f"cannot keep state in {agent.state_dir}: others than the agent's own user may write in it "
                f"(mode {mode:04o})"
            )
        agent.state_dir.chmod(0o755)  # as the kubelet makes it, and versions before left it
        agent.start()
        assert stat.S_IMODE(agent.state_dir.stat().st_mode) == 0o700


def test_a_folder_of_other_things_is_not_closed_to_others(folder: Path) -> None:
    """`--state-dir /var`, say: that would be the end of the machine."""
    agent = Agent(folder)
    agent.state_dir.mkdir()
    (agent.state_dir / "cache").mkdir()
    agent.state_dir.chmod(0o755)
    assert refusal(agent) == (
        f"cannot keep state in {agent.state_dir}: others may enter it (mode 0755), and there are files in it that are "
        "not the agent's"
    )
    assert stat.S_IMODE(agent.state_dir.stat().st_mode) == 0o755
    (agent.state_dir / "cache").rmdir()
    (agent.state_dir / "lost+found").mkdir()  # it is a disk of its own
    with agent:
        assert stat.S_IMODE(agent.state_dir.stat().st_mode) == 0o700


def test_a_state_directory_that_is_a_link_or_a_file_is_refused(folder: Path) -> None:
    agent = Agent(folder)
    (folder / "elsewhere").mkdir(mode=0o700)
    agent.state_dir.symlink_to(folder / "elsewhere")
    assert refusal(agent) == f"cannot keep state in {agent.state_dir}: it is a link, and links are not followed"
    agent.state_dir.unlink()
    agent.state_dir.touch()
    assert refusal(agent) == f"cannot keep state in {agent.state_dir}: File exists"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_state_directory_of_another_user_is_refused(folder: Path) -> None:
    agent = Agent(folder)
    agent.state_dir.mkdir(mode=0o700)
    os.chown(agent.state_dir, 61001, 61001)
    assert refusal(agent) == (
        f"cannot keep state in {agent.state_dir}: it belongs to uid 61001, and the agent runs as root (uid 0)"
    )
    os.chown(agent.state_dir, 0, 0)
    os.chown(folder, 61001, 61001)
    assert refusal(agent) == (
        f"cannot protect the state directory {agent.state_dir}: {folder} belongs to uid 61001, who may rename files in "
        "it"
    )
    os.chown(folder, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_socket_in_a_folder_of_another_user_is_refused(folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    os.chown(run, 61001, 61001)
    words = refusal(Agent(folder, listen=[f"unix://{run}/agent.sock"]))
    assert words == (
        f"cannot protect the socket {run}/agent.sock: {run} belongs to uid 61001, who may rename files in it"
    )


def test_nobody_is_let_in_before_the_permissions_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that keeps no permissions the check finds it, and there has been no moment to connect."""
    owned = OwnedSocket.own(folder / "agent.sock")
    monkeypatch.setattr(Path, "chmod", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=r"cannot protect the socket .* its mode is 0600"):
        owned.listen(0o660)
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(folder / "agent.sock"))
    owned.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sockets to any group")
def test_the_sockets_have_the_mode_and_the_group_that_are_configured(folder: Path) -> None:
    with Agent(folder, flags=["--socket-mode", "0666", "--socket-group", "4711"]) as agent:
        there = agent.socket.stat()
        assert (stat.S_IMODE(there.st_mode), there.st_gid) == (0o666, 4711)
        assert stat.S_IMODE((folder / "admin.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE((agent.state_dir / "sockets").stat().st_mode) == 0o700


def test_a_socket_where_everybody_may_rename_files_is_refused(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    agent = Agent(folder, listen=[f"unix://{shared}/agent.sock"])
    assert agent.launch().wait(GENEROUS_SECONDS) == 1
    (line,) = map(json.loads, agent.log().splitlines())
    assert line["event"] == f"cannot protect the socket {shared}/agent.sock: everybody may rename files in {shared}"
    shared.chmod(0o1777)  # as /tmp: everybody may make files there, and rename none of others'
    with Agent(folder, listen=[f"unix://{shared}/agent.sock"]):
        assert (shared / "agent.sock").is_socket()


def test_a_state_directory_with_a_long_path_is_no_obstacle(folder: Path) -> None:
    long = folder / ("x" * 120)
    with Agent(folder, flags=["--state-dir", str(long)]) as agent:
        assert (long / "sockets" / "users").is_socket()
        assert agent.ask("status")["node"] == "tested"


def test_too_many_connections_are_told_so(folder: Path) -> None:
    with Agent(folder, flags=["--max-connections", "3"]) as agent, contextlib.ExitStack() as held:

        def refused_with_one_more() -> str:
            client = held.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(agent.socket))
            answer = json.loads(agent.migctl("status", "-o", "json", code=None).stdout)
            return f"{answer['error']['reason']}: {answer['error']['message']}" if "error" in answer else ""

        told = eventually(refused_with_one_more)
        assert told.startswith("queue-full: cannot serve this connection: as many are open as there may be")
        # Administrators have places of their own.
        agent.migctl("status", "--address", f"unix://{folder}/admin.sock")
        held.close()
        eventually(lambda: agent.migctl("status", code=None).returncode == 0)


def test_whatever_is_sent_to_the_socket_the_agent_goes_on(folder: Path) -> None:
    noise = random.Random(5)  # noqa: S311 -- not a secret
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    with Agent(folder) as agent:
        for number in range(60):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(agent.socket))
                with contextlib.suppress(OSError):  # it hangs up on nonsense, sometimes in the middle
                    client.sendall((preface if number % 2 else b"") + noise.randbytes(noise.randrange(1, 200_000)))
                    if number % 3:
                        client.shutdown(socket.SHUT_WR)
        assert agent.ask("status")["node"] == "tested"
        assert agent.stop() == 0
        assert "did not expect" not in agent.log()
        assert "Traceback" not in agent.log()
