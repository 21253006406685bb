"""`migctl bundle`: writes one file for a bug report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import counted
from mig_agent.migctl import failures
from mig_agent.migctl.options import Common, Number, verb
from mig_agent.migctl.printing import print_json, print_whole

if TYPE_CHECKING:
    from mig_agent.client.to_json import Json

_MOST_LINES = 1_000_000


@verb(short_help="Write one tar.gz for a bug report.")
@click.argument("file", metavar="[FILE]", required=False, type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace the file if there is one.")
@click.option(
    "--lines", metavar="N", type=Number("a number of lines"), default=5000, help="Of the log, the last N lines."
)
@click.option("--log", metavar="FILE", type=click.Path(path_type=Path), help="The agent's log, where it is no journal.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The agent's settings, where no agent runs. Default: MIG_AGENT_CONFIG, else /etc/mig-agent/config.yaml.",
)
def bundle(common: Common, *, file: Path | None, force: bool, lines: int, log: Path | None, config: Path | None) -> int:
    """Write one tar.gz for a bug report: settings, status, events, doctor, log, and what plans depend on.

    No tokens, keys, passwords or environment variables are in it; names of users are. Made as root it has everything,
    otherwise what you may see; its manifest.json says what is missing. Whoever gets it can make the same plans with
    `mig-agent replay FILE`.
    """
    output = common.wants()
    if not 0 < lines <= _MOST_LINES:
        raise UsageError(f"cannot take {lines} lines of the log", f"give a number from 1 to {_MOST_LINES}")
    from mig_agent.bundle import archive  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.bundle.contents import gather_contents  # noqa: PLC0415 -- as above
    from mig_agent.client.addresses import resolve  # noqa: PLC0415 -- as above
    from mig_agent.doctor.probe import Probe  # noqa: PLC0415 -- as above
    from mig_agent.doctor.subject import gather  # noqa: PLC0415 -- as above

    endpoint = common.endpoint()
    address = resolve(endpoint.address)
    usual = time.strftime("mig-agent-bundle-%Y%m%d-%H%M%S.tar.gz")
    path = (file or Path(usual)).absolute()
    if path.is_dir():
        path /= usual
    if not force and path.exists():  # before all the work; it is checked again when the file is written
        raise UsageError(f"cannot write {path}: there is such a file", "give another name, or --force")
    subject = gather(Probe(), address, endpoint.tls, config)
    contents, manifest = gather_contents(subject, common.client, lines=lines, log=log)
    content = archive.pack(contents.files, manifest)
    archive.write(path, content, force=force)
    names: list[Json] = [*sorted([*contents.files, archive.MANIFEST])]
    if output == "json":
        print_json({"file": str(path), "bytes": len(content), "files": names, "missing": contents.missing})
        return failures.DONE
    size = f"{counted(len(names), 'file')}, {len(content) // 1024 + 1} KiB"
    found = [f"wrote {failures.one_line(str(path))}: {size}"]
    for each in contents.missing:
        if isinstance(each, dict):
            hint = f" ({each['hint']})" if each["hint"] else ""
            how = "incomplete" if each["file"] in contents.files else "not in it"
            found.append(f"  {how}: {each['file']}: {failures.one_line(str(each['why']))}{hint}")
    found.append("look through it before you send it: names of users and of their programs are in it, secrets are not")
    print_whole("\n".join(found))
    return failures.DONE
