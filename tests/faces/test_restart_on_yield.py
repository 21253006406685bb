"""`migctl run --restart-on yield`: a training that ends with 75 is started again on a new lease."""

from __future__ import annotations

import shlex
import signal
import sys
from pathlib import Path

from support.agent import GENEROUS_SECONDS, Agent, eventually
from support.documents import ROOT
from support.elastic_training import SAMPLES

RUN = ("run", "--gpu-memory", "4G", "--restart-on", "yield", "--")


def test_it_is_started_again_until_it_does_not_yield(agent: Agent, folder: Path) -> None:
    leases = folder / "leases"
    script = f'echo "$MIG_AGENT_LEASE" >>{leases}; [ "$(wc -l <{leases})" -lt 3 ] && exit 75; exit 6'
    said = agent.migctl(*RUN, "sh", "-c", script, code=6).stderr
    assert len(set(leases.read_text().split())) == 3
    words = "migctl: the command has yielded (exit code 75); its device is given back, and another is asked for\n"
    assert said == 2 * words
    assert not agent.ask("status")["leases"]


def test_what_ends_migctl_ends_it_for_good(agent: Agent, folder: Path) -> None:
    script = f"trap 'exit 75' TERM; echo >>{folder}/starts; while :; do sleep 0.05; done"
    running = agent.begin(*RUN, "bash", "-c", script)
    eventually((folder / "starts").exists, "it runs")
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=GENEROUS_SECONDS)
    assert running.returncode == 75
    assert (folder / "starts").read_text() == "\n"


def test_without_the_option_75_is_an_exit_code_like_others(agent: Agent) -> None:
    agent.migctl(*RUN[:3], "--", "sh", "-c", "exit 75", code=75)


def test_it_has_a_lease_of_its_own_each_time(agent: Agent) -> None:
    said = agent.migctl(*RUN[:-1], "--request-id", "x", "--", "true", code=2).stderr
    assert "cannot restart with --request-id" in said


def test_the_command_learns_how_large_its_device_is(agent: Agent) -> None:
    code = "import os; print(os.environ['MIG_AGENT_DEVICE_PROFILE'], os.environ['MIG_AGENT_DEVICE_MEMORY'])"
    printed = agent.migctl("run", "--gpu-memory", "4G", "--", sys.executable, "-c", code).stdout
    (idle,) = agent.instances()
    assert printed.split() == [idle["profile"], str(idle["memory_mib"])]


def test_a_training_goes_on_over_its_leases(agent: Agent, folder: Path) -> None:
    """It is told to yield by a notice after every seventh step."""
    notice = shlex.quote(str(folder / "notice"))
    script = f"""
import os, sys
from pathlib import Path
from mig_agent import elastic
from support.elastic_training import Network, train
job, network = elastic.init(12, {{"4G": 5, "30G": 12}}), Network()
job.checkpoint(network.save, network.load, folder={str(folder / "checkpoints")!r})
def told(step):
    if step % 7 == 0: Path(os.environ["MIG_AGENT_NOTICE_FILE"]).write_text(str(step))
train(network, job, 5, told)
print(job.steps, job.position.step, len(network.taken))
"""
    variables = {"MIG_AGENT_NOTICE_FILE": notice, "PYTHONPATH": f"{ROOT}/agent:{ROOT}/tests"}
    done = agent.migctl(*RUN, sys.executable, "-c", script, variables=variables)
    assert done.stdout.split() == ["3", "20", str(5 * SAMPLES)]
    assert done.stderr.count("migctl: the command has yielded") == 2
