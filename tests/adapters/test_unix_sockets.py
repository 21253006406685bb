"""Who owns a Unix socket, and who may use it."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mig_agent.adapters.filelock import LockedError
from mig_agent.adapters.transport.unix_sockets import OwnedSocket
from mig_agent.core.errors import ConfigError
from support.agent import short_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as path:
        yield path


def bound(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    return listening


@pytest.mark.parametrize("mode", [0o660, 0o600, 0o666])
def test_a_socket_gets_its_mode_and_was_never_open_to_more(mode: int, folder: Path) -> None:
    owned = OwnedSocket.own(folder / "a.sock")
    with owned.being_bound(mode), bound(owned.path):
        born = stat.S_IMODE(owned.path.stat().st_mode)
    assert born == 0o600
    assert stat.S_IMODE(owned.path.stat().st_mode) == mode


def test_the_umask_is_as_before_afterwards(folder: Path) -> None:
    before = os.umask(0o027)
    try:
        owned = OwnedSocket.own(folder / "a.sock")
        with owned.being_bound(0o660), bound(owned.path):
            pass
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_a_socket_gets_its_group(folder: Path) -> None:
    group = os.getgroups()[0] if os.getgroups() else os.getgid()
    owned = OwnedSocket.own(folder / "a.sock")
    with owned.being_bound(0o660, str(group)), bound(owned.path):
        pass
    assert owned.path.stat().st_gid == group


def test_a_group_that_is_not_there_is_refused_before_anything_is_bound(folder: Path) -> None:
    owned = OwnedSocket.own(folder / "a.sock")
    with pytest.raises(ConfigError, match="no such group"), owned.being_bound(0o660, "nobody-has-this-group"):
        pytest.fail("it must not come this far")


def test_a_second_owner_is_refused_and_the_first_goes_on(folder: Path) -> None:
    first = OwnedSocket.own(folder / "a.sock")
    with first.being_bound(0o600):
        listening = bound(first.path)
    with pytest.raises(LockedError, match=rf"cannot use the socket .*pid {os.getpid()}"):
        OwnedSocket.own(folder / "a.sock")
    with listening, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(first.path))
    first.close()
    OwnedSocket.own(folder / "a.sock").close()


def test_the_socket_of_a_dead_agent_is_taken_over(folder: Path) -> None:
    bound(folder / "a.sock").close()
    assert (folder / "a.sock").is_socket()
    owned = OwnedSocket.own(folder / "a.sock")
    assert not (folder / "a.sock").exists()
    with owned.being_bound(0o600), bound(owned.path):
        pass


def test_a_socket_on_which_another_program_listens_is_left_to_it(folder: Path) -> None:
    with bound(folder / "a.sock"):
        with pytest.raises(LockedError, match="another program listens there"):
            OwnedSocket.own(folder / "a.sock")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(folder / "a.sock"))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_is_no_socket_is_never_removed(kind: str, folder: Path) -> None:
    path = folder / "a.sock"
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case _:
            (folder / "precious").write_text("precious")
            path.symlink_to(folder / "precious")
    with pytest.raises(ConfigError, match="no socket"):
        OwnedSocket.own(path)
    assert path.lstat()


def test_a_refused_path_is_not_kept_locked(folder: Path) -> None:
    path = folder / "a.sock"
    path.write_text("in the way")
    with pytest.raises(ConfigError):
        OwnedSocket.own(path)
    path.unlink()
    OwnedSocket.own(path).close()


def test_only_one_of_many_at_once_gets_it(folder: Path) -> None:
    got: list[OwnedSocket] = []
    refused: list[LockedError] = []

    def try_it() -> None:
        try:
            got.append(OwnedSocket.own(folder / "a.sock"))
        except LockedError as error:
            refused.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


def test_folders_of_the_path_are_made(folder: Path) -> None:
    OwnedSocket.own(folder / "run" / "mig-agent" / "a.sock").close()
    assert (folder / "run" / "mig-agent").is_dir()
    (folder / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        OwnedSocket.own(folder / "file" / "a.sock")
