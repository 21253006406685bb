"""deploy/monitoring: each panel of the dashboard shows something, and each alert fires when it should and only then.

A real Prometheus scrapes real agents, over a simulated A100 and a simulated H100, to which all sorts of things happen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from mig_agent.simulator import Code
from support.agent import Agent, eventually, short_folder
from support.documents import ROOT
from support.prometheus import Prometheus, prometheus, promtool

DASHBOARD = ROOT / "deploy/monitoring/grafana-dashboard.json"
RULES = ROOT / "deploy/monitoring/prometheus-rules.yaml"
WINDOW = "5s"
"""In place of Grafana's `$__rate_interval`: some scrapes."""
NODES = {"a100": "a100-40gb:2", "h100": "h100-80gb:2"}
CREATE = "nvmlDeviceCreateGpuInstanceWithPlacement"
_METRIC = re.compile(r"\bmig_agent_[a-z_]+")


def expressions() -> dict[str, str]:
    """Those of the dashboard, by panel and number."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {
        f"{panel['title']} {number}": target["expr"]
        for panel in panels
        for number, target in enumerate(panel.get("targets", ()))
    }


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


@pytest.fixture(scope="module")
def agents() -> Iterator[dict[str, Agent]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                Agent(
                    stack.enter_context(short_folder()),
                    gpus,
                    flags=["--metrics", "127.0.0.1:0", "--sample-usage", "1s"],
                )
            )
            for name, gpus in NODES.items()
        }


@pytest.fixture(scope="module")
def scraping(agents: dict[str, Agent]) -> Iterator[Prometheus]:
    targets = {
        name: agent.serving()["metrics"].removeprefix("http://").removesuffix("/metrics")
        for name, agent in agents.items()
    }
    with prometheus(targets, RULES) as running:
        eventually(lambda: len(running.ask("mig_agent_info")) == len(NODES), "both agents are scraped")
        yield running


def live(agents: dict[str, Agent]) -> None:
    """Has all that the dashboard shows happen on each node."""
    for agent in agents.values():
        agent.ask("request", "--gpu-memory", "4G", "--name", "kept")
        again = agent.ask("request", "--gpu-memory", "4G", "--name", "released")
        agent.migctl("release", again["lease"], "--token", again["token"])
        agent.ask("request", "--gpu-memory", "4G", "--name", "reuses")
        agent.simulator.fail(CREATE, Code.UNKNOWN)
        agent.ask("request", "--gpu-memory", "9G", "--name", "at the second try")
        agent.migctl("request", "--gpu-memory", "70G", "--gpu", "0", code=None)
        agent.migctl("request", "--gpu-memory", "400G", code=3)


def test_each_panel_shows_something(agents: dict[str, Agent], scraping: Prometheus) -> None:
    live(agents)
    waiting = [agent.begin("request", "--gpu-memory", "30G", "--gpu", "0", "--wait", "5m") for agent in agents.values()]
    try:
        eventually(lambda: len(scraping.ask("mig_agent_queue_oldest_timestamp_seconds")) == len(NODES), "they wait")
        for name, expression in expressions().items():
            asked = expression.replace("$instance", ".*").replace("$__rate_interval", WINDOW)
            eventually(partial(scraping.ask, asked), f"{name}: {asked} has samples")
        counted = sum(
            float(each["value"][1]) for each in scraping.ask(expressions()["Leases 0"].replace("$instance", ".*"))
        )
        assert counted == sum(len(agent.ask("status")["leases"]) for agent in agents.values())
        busy = scraping.series("mig_agent_instance_compute_utilization_ratio")
        assert {each["instance"] for each in busy} == {"h100"}, "before Hopper it is not known, and so not 0"
        nodes = {each["metric"]["instance"] for each in scraping.ask("mig_agent_memory_slices")}
        assert nodes == set(NODES)
    finally:
        for each in waiting:
            each.kill()
            each.communicate()


def test_each_metric_that_is_named_exists(agents: dict[str, Agent], scraping: Prometheus) -> None:
    live(agents)
    words = " ".join([*expressions().values(), *(str(rule["expr"]) for rule in alerts().values())])
    for name in sorted(set(_METRIC.findall(words))):
        eventually(partial(scraping.series, name), f"{name} is scraped")


def test_rules_are_evaluated_and_a_dead_agent_is_noticed(agents: dict[str, Agent], scraping: Prometheus) -> None:
    def rules() -> list[Any]:
        (group,) = scraping.get("rules")["groups"]
        return [rule for rule in group["rules"] if rule["health"] == "ok" and float(rule["evaluationTime"]) > 0]

    eventually(lambda: len(rules()) == len(alerts()), "each rule is evaluated without an error")
    assert not [rule["name"] for rule in rules() if rule["name"] == "MigAgentDown" and rule["state"] != "inactive"]
    agents["h100"].kill()
    down = eventually(
        lambda: [rule for rule in rules() if rule["name"] == "MigAgentDown" and rule["state"] == "pending"],
        "the dead agent is noticed",
    )
    assert [each["labels"]["instance"] for each in down[0]["alerts"]] == ["h100"]
    agents["h100"].start()


HEALTHY = {
    'up{job="mig-agent", instance="n1"}': "1x320",
    'mig_agent_ledger_writable{job="mig-agent", instance="n1"}': "1x320",
    'mig_agent_ledger_in_doubt{job="mig-agent", instance="n1"}': "0x320",
    'mig_agent_gpus{job="mig-agent", instance="n1", state="lost"}': "0x320",
    'mig_agent_gpus{job="mig-agent", instance="n1", state="cordoned"}': "0x320",
    'mig_agent_instances{job="mig-agent", instance="n1", profile="1g.10gb", state="blocked"}': "0x320",
    'mig_agent_sockets_missing{job="mig-agent", instance="n1"}': "0x320",
    'mig_agent_paused{job="mig-agent", instance="n1"}': "0x320",
    'mig_agent_queue_oldest_timestamp_seconds{job="mig-agent", instance="n1"}': "0+300x320",
    'mig_agent_events_total{job="mig-agent", instance="n1", kind="step-failed"}': "0x320",
    'mig_agent_nvml_call_errors_total{job="mig-agent", instance="n1", call="c", error="unknown"}': "0x320",
    'mig_agent_log_lines_dropped_total{job="mig-agent", instance="n1"}': "0x320",
    'mig_agent_leases_unused{job="mig-agent", instance="n1"}': "0x320",
}
"""A day and more of an agent that is well, a sample every five minutes."""
WRONG = {
    "MigAgentDown": ("up", "0x320"),
    "MigAgentLedgerNotWritable": ("mig_agent_ledger_writable", "0x320"),
    "MigAgentLedgerInDoubt": ("mig_agent_ledger_in_doubt", "1x320"),
    "MigAgentGpuLost": ('state="lost"', "1x320"),
    "MigAgentGpuCordoned": ('state="cordoned"', "1x320"),
    "MigAgentInstanceBlocked": ('state="blocked"', "2x320"),
    "MigAgentSocketMissing": ("mig_agent_sockets_missing", "1x320"),
    "MigAgentPaused": ("mig_agent_paused", "1x320"),
    "MigAgentQueueStuck": ("mig_agent_queue_oldest_timestamp_seconds", "0x320"),
    "MigAgentStepsFail": ('kind="step-failed"', "0+5x320"),
    "MigAgentDriverErrors": ("mig_agent_nvml_call_errors_total", "0+150x320"),
    "MigAgentLogLinesDropped": ("mig_agent_log_lines_dropped_total", "0+25x320"),
    "MigAgentLeasesUnused": ("mig_agent_leases_unused", "3x320"),
}
"""What has to be otherwise for each alert: a part of the series' name, and its values."""


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    assert set(WRONG) == set(alerts())
    tests = [_case({}, frozenset())]
    for alert, (which, values) in WRONG.items():
        (series,) = [name for name in HEALTHY if which in name and (which != "up" or name.startswith("up{"))]
        tests.append(_case({series: values}, frozenset({alert})))
    file = tmp_path / "tests.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5m", "tests": tests}))
    promtool("test", "rules", file)


def _case(otherwise: dict[str, str], firing: frozenset[str]) -> dict[str, Any]:
    return {
        "interval": "5m",
        "input_series": [{"series": name, "values": values} for name, values in (HEALTHY | otherwise).items()],
        "promql_expr_test": [
            {
                "expr": f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})',
                "eval_time": "25h",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert in firing else [],
            }
            for alert in alerts()
        ],
    }
