"""Debian's Prometheus, unpacked beside what clusters are made of and never installed, over what is to be scraped."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from support.agent import eventually
from support.cluster.failures import ClusterError
from support.cluster.programs import cache

SCRAPE = "250ms"


def folder() -> Path:
    """Where prometheus and promtool are; the package is fetched once."""
    unpacked = cache() / "prometheus"
    if not (unpacked / "usr/bin/prometheus").exists():
        cache().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache(), prefix="prometheus-") as made:
            fetched = _run(["apt-get", "download", "prometheus"], made)
            if fetched.returncode != 0:
                _run(["apt-get", "--quiet", "update"], made)
                fetched = _run(["apt-get", "download", "prometheus"], made)
            packages = list(Path(made).glob("prometheus_*.deb"))
            if not packages:
                raise ClusterError(f"cannot fetch Debian's prometheus: {fetched.stdout}{fetched.stderr}")
            whole = Path(made) / "unpacked"
            subprocess.run(["dpkg", "--extract", str(packages[0]), str(whole)], check=True)
            # Another process may have been quicker.
            with contextlib.suppress(OSError):
                whole.rename(unpacked)
    return unpacked / "usr/bin"


def _run(command: list[str], where: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)


def promtool(*arguments: str | Path) -> str:
    """What it prints; it has to succeed."""
    done = _run([str(folder() / "promtool"), *map(str, arguments)], ".")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one."""

    address: str

    def get(self, path: str, **query: str) -> Any:
        with urlopen(f"{self.address}/api/v1/{path}?{urlencode(query)}") as answer:  # noqa: S310 -- our own
            return json.load(answer)["data"]

    def ask(self, expression: str) -> list[Any]:
        """The samples that an expression has now."""
        samples: list[Any] = self.get("query", query=expression)["result"]
        return samples

    def series(self, metric: str) -> list[Any]:
        """The labels of all samples that this metric has had."""
        found: list[Any] = self.get("series", **{"match[]": metric})
        return found


@contextlib.contextmanager
def prometheus(targets: Mapping[str, str], rules: Path) -> Iterator[Prometheus]:
    """Scrapes these targets (by what they are called) as the job mig-agent, until the end of the block."""
    programs, port = folder(), _free_port()
    with tempfile.TemporaryDirectory(prefix="prometheus-", ignore_cleanup_errors=True) as made:
        configuration = {
            "global": {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {
                    "job_name": "mig-agent",
                    "static_configs": [
                        {"targets": [target], "labels": {"instance": name}} for name, target in targets.items()
                    ],
                }
            ],
        }
        (Path(made) / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        command = [
            str(programs / "prometheus"),
            f"--config.file={made}/prometheus.yml",
            f"--storage.tsdb.path={made}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with (Path(made) / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            running = Prometheus(f"http://127.0.0.1:{port}")
            try:
                eventually(lambda: _is_ready(running), "Prometheus is ready")
                yield running
            finally:
                process.terminate()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def _is_ready(running: Prometheus) -> bool:
    with contextlib.suppress(OSError), urlopen(f"{running.address}/-/ready") as answer:  # noqa: S310 -- our own
        return bool(answer.status == 200)
    return False
