"""The web page: who may read it, what it answers, and what it does to an agent that is asked too much."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import pytest

from mig_agent.daemon.web.application import content_policy
from mig_agent.daemon.web.feed import MOST_STREAMS
from mig_agent.engine.callers import Role
from support.agent import GENEROUS_SECONDS, Agent, eventually, short_folder
from support.web import EVENTS, FLAGS, USAGE, Web, first_line

PAGE = resources.files("mig_agent.daemon.web") / "page.html"


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    with short_folder() as folder, Agent(folder, flags=FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def web(agent: Agent) -> Web:
    return Web(agent)


def test_the_page_is_small_and_whole() -> None:
    page = PAGE.read_text()
    assert len(page.encode()) < 100_000
    assert re.findall(r"\b(?:src|href)=\"(?!data:,\")[^\"]*\"|@import|url\(|https?://|//cdn", page) == []
    assert "innerHTML" not in page  # nothing that a user writes becomes a part of the page


def test_the_page_needs_no_token_and_has_no_secrets(web: Web) -> None:
    status, headers, body = web.ask("/")
    assert (status, body) == (200, PAGE.read_bytes())
    assert headers["content-security-policy"] == content_policy(body)
    assert "'unsafe" not in headers["content-security-policy"]
    assert headers["x-frame-options"] == "DENY"
    assert headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in headers
    assert web.ask("/", method="HEAD")[2] == b""


@pytest.mark.parametrize("path", [EVENTS, USAGE])
def test_without_a_valid_token_nothing_is_shown(web: Web, path: str) -> None:
    right = web.token
    changed = right[:-1] + ("0" if right[-1] != "0" else "1")
    for token in ("", changed, right[:-1], right.upper(), right + "0", "0" * 64, "é"):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        status, answer, body = web.ask(path, headers={k: v.encode().decode("latin-1") for k, v in headers.items()})
        assert (status, answer["www-authenticate"]) == (401, "Bearer"), token
        assert b"cannot show this without a valid token" in body
    # A browser would send these by itself, or write them down.
    assert web.ask(f"{path}?token={right}")[0] == 401
    assert web.ask(path, headers={"Cookie": f"token={right}"})[0] == 401


@pytest.mark.parametrize(
    "host", ["example.com", "localhost.example.com", "127.0.0.1.nip.io", "10.0.0.1:7480", "", "[::2]"]
)
def test_under_another_name_nothing_is_shown(web: Web, host: str) -> None:
    """The host that a page of another site would have resolved to this machine."""
    for path in ("/", EVENTS, USAGE):
        status, _, body = web.ask(path, token=web.token, headers={"Host": host})
        assert (status, body[:33]) == (403, b"cannot answer under this name: us")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.1:9", "[::1]:7480"])
def test_a_tunnel_may_begin_at_any_port_of_another_machine(web: Web, host: str) -> None:
    assert web.ask(USAGE, token=web.token, headers={"Host": host})[0] == 200


@pytest.mark.parametrize("host", ["127.0.0.1:99999", "localhost:0", "[::1]:65536"])
def test_a_port_that_there_is_not_is_a_bad_request(web: Web, host: str) -> None:
    status, _, body = web.ask(USAGE, token=web.token, headers={"Host": host})
    assert (status, body) == (400, b"cannot understand the header Host: ports are from 1 to 65535\n")


def test_the_head_of_each_answer_is_that_of_the_answer(web: Web) -> None:
    status, headers, body = web.ask(EVENTS, token=web.token, method="HEAD")
    assert (status, headers["content-type"], body) == (200, "text/event-stream; charset=utf-8", b"")
    assert "content-length" not in headers, "a stream has none"
    assert web.ask(USAGE, token=web.token, method="HEAD")[1]["content-type"] == "application/json; charset=utf-8"
    for asked, code in ((EVENTS, 401), ("/nothing", 404)):
        with socket.create_connection(("127.0.0.1", web.port), timeout=GENEROUS_SECONDS) as opened:
            opened.sendall(f"HEAD {asked} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            with opened.makefile("rb") as answer:
                head, _, rest = answer.read().partition(b"\r\n\r\n")
        assert f" {code} ".encode() in head
        assert rest == b""


def test_who_has_no_token_keeps_nobody_with_one_out(web: Web) -> None:
    """Silent connections, half requests, and readers of the page that do not read."""
    with ExitStack() as stack:
        for number in range(200):
            opened = stack.enter_context(socket.socket())
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            opened.connect(("127.0.0.1", web.port))
            opened.sendall(
                (b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")[number % 3]
            )
        assert [web.ask(USAGE, token=web.token)[0] for _ in range(20)] == [200] * 20
        eventually(lambda: web.ask("/")[0] == 200, "the page is for those without one")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_nothing_can_be_changed(web: Web, method: str) -> None:
    status, headers, _ = web.ask(USAGE, token=web.token, method=method)
    assert (status, headers.get("allow")) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    ["/../state/web.key", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.html", "/api", "/api/v1/events/", "/\\"],
)
def test_there_are_no_files_to_reach(web: Web, path: str) -> None:
    status, _, body = web.ask(path, token=web.token)
    assert status == 404
    assert b"root:" not in body


def test_tokens_are_for_those_who_may_open_the_socket(agent: Agent) -> None:
    def access(name: str) -> int:
        return stat.S_IMODE((agent.folder / name).stat().st_mode)

    assert (access("agent.sock"), access("agent.sock.web-token")) == (0o660, 0o440)
    assert (access("admin.sock"), access("admin.sock.web-token")) == (0o600, 0o400)
    assert stat.S_IMODE((agent.state_dir / "web.key").stat().st_mode) == 0o600


def test_each_role_sees_what_migctl_would_show_it(agent: Agent, web: Web) -> None:
    lease = agent.ask("request", "--gpu-memory", "4G", "--name", "shown")["lease"]
    with agent.begin(
        "request", "--mig-profile", "7g.40gb", "--request-id", "secret-of-root", "--wait", "1m"
    ) as waiting:
        eventually(lambda: agent.ask("status")["queue"], "it waits")
        try:
            with web.frames(web.token) as users, web.frames(web.admin_token) as admins:
                user, admin = next(users), next(admins)
        finally:
            waiting.terminate()
            waiting.communicate()
    assert [each["lease"] for each in user["status"]["leases"]] == [lease]
    assert user["status"]["queue"][0]["request_id"] == ""
    assert admin["status"]["queue"][0]["request_id"] == "secret-of-root"
    assert "secret-of-root" not in json.dumps(user)
    assert user["waits"][0]["blocked"].startswith("GPU 0: ")
    assert "shown" in user["maps"][0]
    agent.migctl("release", lease)


def test_a_frame_comes_with_a_change(agent: Agent, web: Web) -> None:
    with web.frames(web.token) as frames:
        lease = agent.ask("request", "--gpu-memory", "4G")["lease"]
        held = ({one["lease"] for one in each["status"]["leases"]} for each in frames)
        assert next(each for each in held if lease in each)
        agent.migctl("release", lease)
        assert next(each for each in held if lease not in each) is not None


def test_what_was_leased_is_counted_by_user_and_name(agent: Agent, web: Web) -> None:
    agent.migctl("release", agent.ask("request", "--gpu-memory", "4G", "--name", "counted")["lease"])
    account = json.loads(web.ask(USAGE, token=web.admin_token)[2])
    assert account["user"]["total"]["leases"] >= 1
    assert {each["key"] for each in account["name"]["rows"]} >= {"counted"}


def test_a_thousand_streams_take_no_more_than_their_places(agent: Agent, web: Web) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    assert agent.process is not None
    tasks = Path(f"/proc/{agent.process.pid}/task")
    before = len(list(tasks.iterdir()))
    try:
        with ExitStack() as stack:
            opened = [stack.enter_context(web.begin(web.token)) for _ in range(1000)]
            lines = [first_line(each) for each in opened]
            served = sum(b" 200 " in each for each in lines)
            assert 1 <= served <= MOST_STREAMS[Role.USER]
            assert all(not each or b" 200 " in each or b" 503 " in each for each in lines)
            assert len(list(tasks.iterdir())) <= before + MOST_STREAMS[Role.USER] + 20
            # Neither requests for GPUs nor administrators are kept out.
            agent.migctl("release", agent.ask("request", "--gpu-memory", "4G")["lease"])

            def is_shown() -> bool:
                with web.begin(web.admin_token) as another:
                    return b" 200 " in first_line(another)

            eventually(is_shown, "an administrator reads")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def is_free() -> bool:
        with web.begin(web.token) as another:
            return b" 200 " in first_line(another)

    eventually(is_free, "the places are free again")
    assert "Traceback" not in agent.log()


def test_it_is_off_by_default_and_no_token_lies_about(folder: Path) -> None:
    with Agent(folder) as agent:
        assert agent.serving()["web"] == "off"
        assert list(folder.glob("*.web-token*")) == []


def test_a_taken_port_is_never_fatal(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with Agent(folder, flags=("--web", f"127.0.0.1:{port}")) as agent:
            problems = agent.ask("status")["problems"]
            assert [each for each in problems if each.startswith(f"web: off (cannot listen on 127.0.0.1:{port}: ")]
            agent.ask("request", "--gpu-memory", "4G")
            other.close()
            eventually(lambda: not agent.ask("status")["problems"], "it is served once the port is free")
            web = Web(agent, f"http://127.0.0.1:{port}/")
            assert web.ask(USAGE, token=web.token)[0] == 200


def test_a_token_stays_valid_after_a_restart_and_ends_with_its_key(folder: Path) -> None:
    with Agent(folder, flags=FLAGS) as agent:
        token = Web(agent).token
        agent.restart_after_crash()
        assert Web(agent).token == token
        agent.stop()
        (agent.state_dir / "web.key").unlink()
        agent.log_file.unlink()
        agent.start()
        web = Web(agent)
        assert web.token != token
        assert web.ask(USAGE, token=token)[0] == 401


def test_a_reload_turns_it_on_and_off_and_gives_the_tokens_to_others(folder: Path) -> None:
    config = folder / "config.yaml"
    config.write_text("web: off\n")
    with Agent(folder, flags=("--config", str(config))) as agent, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()

        def reload(text: str) -> None:
            assert agent.process is not None
            before = agent.log().count("config-reloaded")
            config.write_text(text)
            agent.process.send_signal(signal.SIGHUP)
            eventually(lambda: agent.log().count("config-reloaded") > before, "it is read again")

        reload(f"web: 127.0.0.1:{port}\n")
        web, token = Web(agent, f"http://127.0.0.1:{port}/"), folder / "agent.sock.web-token"
        eventually(token.exists, "the token is written")
        eventually(lambda: _answers(web), "it is served")
        with web.frames(web.token) as frames:
            assert next(frames)["counts"]["gpus"] == 2
            reload(f"web: 127.0.0.1:{port}\nsocket_mode: '0600'\n")
            eventually(lambda: stat.S_IMODE(token.stat().st_mode) == 0o400, "the group may not read it any more")
            assert list(frames) is not None  # the stream ends, and a browser begins another one
        eventually(lambda: _answers(web), "it is served again")
        reload("web: off\n")
        eventually(lambda: not list(folder.glob("*.web-token")), "no token is left")
        eventually(lambda: not _answers(web), "it is served no more")


def _answers(web: Web) -> bool:
    try:
        return web.ask("/")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    "address", ["0.0.0.0:7480", "[::]:7480", "192.0.2.1:7480", "gpu-17:7480", "localhost.example:1"]
)
def test_it_is_served_on_loopback_alone(folder: Path, address: str) -> None:
    agent = Agent(folder, flags=("--web", address))
    process = agent.launch()
    assert process.wait(60) != 0
    assert "it is for loopback alone" in agent.log()
    assert "ssh -L" in agent.log()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to any group")
def test_a_token_has_the_group_of_its_socket_whatever_the_folder_says(folder: Path) -> None:
    """New files belong to the folder's group where that has the set-group-ID bit."""
    group = 4711
    os.chown(folder, -1, group)
    folder.chmod(0o2755)
    with Agent(folder, flags=(*FLAGS, "--socket-group", "4712")) as agent:
        assert Web(agent).token
        assert (folder / "agent.sock.web-token").stat().st_gid == agent.socket.stat().st_gid == 4712
