"""The report on modules at the end of `hack/test.sh`: it tells, and fails nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def report(source: Path) -> str:
    program = "import sys; from pathlib import Path; import modules; sys.exit(modules.main(Path(sys.argv[1])))"
    done = subprocess.run(
        (sys.executable, "-c", program, str(source)), cwd=ROOT / "hack", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_long_modules_and_those_with_one_importer_are_named(tmp_path: Path) -> None:
    package = tmp_path / "mig_agent"
    (package / "pb").mkdir(parents=True)
    texts = {
        "__init__": "",
        "long": "x = 1\n" * 601,
        "short": "x = 1\n" * 600,
        "one": "from mig_agent.short import x\nfrom mig_agent import long\n",
        "two": "import mig_agent.short\nimport mig_agent.one\nimport os\n",
        "pb/made_pb2": "x = 1\n" * 2000,
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    assert report(tmp_path) == (
        "modules above 600 lines: 1\n"
        "  mig_agent.long: 601\n"
        "modules with a single importer: 2\n"
        "  mig_agent.long <- mig_agent.one\n"
        "  mig_agent.one <- mig_agent.two\n"
    )


def test_the_report_of_the_agent_comes_with_every_run() -> None:
    assert report(ROOT / "agent").startswith("modules above 600 lines: ")
    assert "hack/modules.py || true" in (ROOT / "hack/test.sh").read_text()
