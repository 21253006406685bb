"""What the Debian package installs works, for those who may use it and only for them."""

from __future__ import annotations

import json
from pathlib import Path

from support.debian import build
from support.machine import Machine


def test_the_service_runs_from_the_package(installed: Machine) -> None:
    told = installed.run("systemctl show mig-agent -p ActiveState,UnitFileState,FragmentPath,Documentation")
    found = dict(line.split("=", 1) for line in told.splitlines())
    assert found["ActiveState"] == "active"
    assert found["UnitFileState"] == "enabled"
    assert found["FragmentPath"].endswith("/lib/systemd/system/mig-agent.service")
    for address in found["Documentation"].split():
        kind, _, name = address.strip('"').partition(":")
        if kind == "file":
            installed.run(["test", "-s", name.removeprefix("//")])
        else:
            assert kind == "man"
            section, page = name.rpartition("(")[2].rstrip(")"), name.partition("(")[0]
            installed.run(["man", "--where", section, page])


def test_a_member_of_the_group_gets_devices(installed: Machine) -> None:
    shown = installed.run("migctl run --gpu-memory 4G -- printenv CUDA_VISIBLE_DEVICES", user="alice")
    assert shown.startswith("MIG-")
    lease = json.loads(installed.run("migctl request --gpu-memory 4G --name notebook -o json", user="alice"))
    (held,) = json.loads(installed.run("migctl status -o json"))["leases"]
    assert (held["lease"], held["holder"], held["tenant"]) == (lease["lease"], "alice (notebook)", "alice")
    installed.run(f"migctl release {lease['lease']}", user="alice")
    assert not json.loads(installed.run("migctl status -o json"))["leases"]


def test_others_are_refused_in_words(installed: Machine) -> None:
    told = installed.run("migctl request --gpu-memory 4G", user="dave", code=4)
    assert "permission denied" in told
    assert "root:mig-agent" in told
    assert "Traceback" not in told


def test_members_are_no_administrators(installed: Machine) -> None:
    told = installed.run("migctl cordon --gpu 0", user="alice", code=3)
    assert "cannot" in told
    assert "Traceback" not in told


def test_what_users_have_in_their_python_path_does_no_harm(installed: Machine) -> None:
    """Clusters set PYTHONPATH for everybody, to libraries of other versions."""
    installed.run("mkdir -p /tmp/other/grpc && echo 'raise SystemExit(\"another grpc\")' >/tmp/other/grpc/__init__.py")
    installed.run("PYTHONPATH=/tmp/other migctl status", user="alice")


def test_the_kubectl_plugin_has_all_that_it_needs(installed: Machine) -> None:
    """Kubectl starts `kubectl-mig` from PATH; here is no cluster to look at."""
    told = installed.run("kubectl-mig status", user="alice", code=2)
    assert "cannot reach the API server with your kubeconfig" in told
    assert "pip install" not in told
    assert "Traceback" not in told


def test_bash_completes_the_verbs(installed: Machine) -> None:
    shown = installed.run(
        "source /usr/share/bash-completion/bash_completion; _completion_loader migctl;"
        "function=$(complete -p migctl | sed 's/.*-F //; s/ .*//');"
        'COMP_WORDS=(migctl rel) COMP_CWORD=1; $function migctl rel migctl; echo "${COMPREPLY[@]}"',
        user="alice",
    )
    assert shown.split() == ["release"]


def test_the_man_pages_are_there(installed: Machine) -> None:
    for page in ("1 migctl", "1 kubectl-mig", "5 mig-agent-config", "8 mig-agent"):
        assert installed.run(f"man --where {page}").startswith("/usr/share/man/")


def test_a_restart_and_a_reboot_keep_leases_and_the_service(installed: Machine) -> None:
    """The simulated GPUs do not notice that the machine was rebooted, so their instances are still there."""
    lease = json.loads(installed.run("migctl request --gpu-memory 4G -o json", user="alice"))["lease"]
    installed.run("systemctl restart mig-agent")
    assert lease in installed.run("migctl status -o json", user="alice")
    if installed.run("systemctl show -p CanReload --value mig-agent").strip() == "yes":
        installed.run("systemctl reload mig-agent")
        assert lease in installed.run("migctl status -o json", user="alice")
    installed.reboot()
    assert lease in installed.run("migctl status -o json", user="alice")
    installed.run(f"migctl release {lease}", user="alice")


def test_the_unit_finds_programs_that_were_installed_without_the_package(installed: Machine) -> None:
    """Its copy in the checkout names no folder: with `pip` they are in /usr/local/bin."""
    (installed.shared / "checkout.service").write_text(Path("deploy/mig-agent.service").read_text())
    installed.run(
        "install -m 644 /mnt/checkout.service /etc/systemd/system/mig-agent.service;"
        "ln -s /usr/lib/mig-agent/bin/mig-agent /usr/local/bin/; systemctl daemon-reload; systemctl restart mig-agent"
    )
    try:
        started = installed.run("tr '\\0' ' ' </proc/$(systemctl show -p MainPID --value mig-agent)/cmdline")
        assert "/usr/local/bin/mig-agent serve" in started
        installed.run("migctl status", user="alice")
    finally:
        installed.run(
            "rm /etc/systemd/system/mig-agent.service /usr/local/bin/mig-agent; systemctl daemon-reload;"
            "systemctl restart mig-agent"
        )


def test_the_same_checkout_gives_the_same_package(package: Path, tmp_path: Path) -> None:
    again = build(tmp_path)
    assert again.read_bytes() == package.read_bytes()
