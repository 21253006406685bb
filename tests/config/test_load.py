"""Where settings come from, and which source wins."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from mig_agent.config import DEFAULT_SOCKET, TcpAddress, UnixAddress, load
from mig_agent.core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_defaults_are_those_of_the_design() -> None:
    settings = load()
    assert settings.state_dir == Path("/var/lib/mig-agent")
    assert settings.listen == (UnixAddress(DEFAULT_SOCKET),)
    assert settings.admin_address == UnixAddress(Path("/run/mig-agent/admin.sock"))
    assert settings.socket_mode == 0o660
    assert settings.gpus is None
    assert settings.foreign == "respect"
    assert settings.idle_limit is None
    assert settings.reservation_after is None
    assert settings.metrics == TcpAddress("127.0.0.1", 7481)
    assert settings.max_waiting == 1000


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "max_waiting: 1\nreread: 1s\ncall_deadline: 1s\n")
    monkeypatch.setenv("MIG_AGENT_MAX_WAITING", "2")
    monkeypatch.setenv("MIG_AGENT_REREAD", "2s")
    settings = load(file, {"max_waiting": "3", "reread": None})
    assert (settings.max_waiting, settings.reread, settings.call_deadline) == (3, 2.0, 1.0)


def test_every_kind_of_value_is_read_from_the_file(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        listen: [unix:///tmp/a.sock, "[::1]:7400"]
        tls_cert: /t/c.pem
        tls_key: /t/k.pem
        tls_client_ca: /t/ca.pem
        socket_mode: 0666
        gpus: [0, GPU-0123abcd]
        idle_limit: 1h30m
        creation_cost: 8
        strict_fifo: yes
        metrics: off
        node: "17"
        profiles_dir: ~
        """,
    )
    settings = load(file)
    assert settings.listen == (UnixAddress(Path("/tmp/a.sock")), TcpAddress("[::1]", 7400))  # noqa: S108 -- never made
    assert settings.socket_mode == 0o666
    assert settings.gpus == ("0", "GPU-0123abcd")
    assert settings.idle_limit == 5400.0
    assert settings.creation_cost == 8.0
    assert settings.strict_fifo is True
    assert settings.metrics is None
    assert settings.node_name == "17"
    assert settings.profiles_dir is None
    assert settings.admin_address == UnixAddress(Path("/tmp/admin.sock"))  # noqa: S108 -- never made


@pytest.mark.parametrize("text", ["0,2", "0, 2", "2,0"])
def test_lists_are_written_with_commas_in_flags_and_environment(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_AGENT_GPUS", text)
    assert set(load().gpus or ()) == {"0", "2"}
    assert load(flags={"gpus": ("1", "3,4")}).gpus == ("1", "3", "4")


def test_an_empty_file_and_an_empty_variable_set_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIG_AGENT_REREAD", "")
    assert load(write(tmp_path, "# nothing\n")).reread == 30.0


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(load(), "max_waiting", 5)  # noqa: B010 -- mypy refuses the plain way, as it should


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", ("0",)), ("2,0", ("2", "0")), ("1,-1,0", ("1",)), ("GPU-8932f937", ("GPU-8932f937",)), ("all", None)],
)
def test_gpus_come_from_cuda_visible_devices(
    visible: str, expected: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert load().gpus == expected


def test_cuda_visible_devices_says_nothing_about_simulated_gpus_nor_over_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert load(flags={"simulate": "a30"}).gpus is None
    assert load(flags={"gpus": ("1",)}).gpus == ("1",)


@pytest.mark.parametrize(
    ("visible", "words"), [("", "no GPU visible"), ("-1", "no GPU visible"), ("MIG-1234", "names MIG devices")]
)
def test_cuda_visible_devices_without_a_gpu_is_refused(
    visible: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=words):
        load()


def test_variables_of_clients_and_of_kubernetes_services_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADDRESS", "TLS_CA", "LEASE", "PORT", "SERVICE_HOST", "PORT_7481_TCP_ADDR", "CONFIG"):
        monkeypatch.setenv(f"MIG_AGENT_{name}", "x")
    assert load().max_waiting == 1000


@pytest.mark.parametrize(("written", "seconds"), [("auto", None), ("Auto", None), ("90s", 90.0), ("1h30m", 5400.0)])
def test_the_reservation_limit_is_a_duration_or_found_out(tmp_path: Path, written: str, seconds: float | None) -> None:
    assert load(write(tmp_path, f"reservation_after: {written}\n")).reservation_after == seconds
