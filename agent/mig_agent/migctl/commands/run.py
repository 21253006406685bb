"""`migctl run`: runs a command on devices of its own, which are released when it ends."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.migctl import failures
from mig_agent.migctl.commands.plan import check_explain, print_plan
from mig_agent.migctl.options import Common, asking_of, asking_options, completer_of, verb
from mig_agent.migctl.progress import Progress

if TYPE_CHECKING:
    from mig_agent.client import Client, ClientError, Lease
    from mig_agent.client.request_args import RequestArgs

_SEVERAL = "a process sees only one MIG device at a time"
_EACH_HINT = "give --each to run the command once on each device"


@verb(context_settings={"allow_interspersed_args": False})
@asking_options
@click.option("--each", is_flag=True, help="With several devices: run the command once on each, side by side.")
@click.argument(
    "command", metavar="[--] COMMAND...", nargs=-1, type=click.UNPROCESSED, shell_complete=completer_of("command")
)
def run(
    common: Common,
    *,
    each: bool,
    command: tuple[str, ...],
    dry_run: bool,
    explain: bool,
    **parameters: Any,  # noqa: ANN401 -- what asking_options made
) -> int:
    """Run a command on devices of its own, and give them back when it ends, however it ends.

    \b
      migctl run --gpu-memory 4G -- python train.py
      migctl run --device 1g.10gb --device 1g.10gb --each -- python worker.py

    It finds its device in CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES. Signals reach it, and its exit code is
    migctl's; 125 says that it was not run.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    output = common.wants()
    check_explain(dry_run=dry_run, explain=explain)
    asking = asking_of(parameters)
    if not command and not dry_run:
        raise UsageError("cannot run nothing", "write it at the end: migctl run --gpu-memory 4G -- python x.py")
    _check_devices(asking, each=each)
    if command and shutil.which(command[0]) is None:
        found = os.path.exists(command[0])  # noqa: PTH110 -- as typed, not as a path of ours
        why = "it cannot be executed" if found else "there is no such command"
        return failures.report_message(f"cannot run {command[0]}: {why}", code=failures.COULD_NOT_RUN)
    try:
        with common.client() as client:
            if dry_run:
                return print_plan(client, asking, output, explain=explain)
            return _run(client, asking, command, each=each, output=output)
    except (UsageError, failures.LeftQueueError):
        raise
    except MigAgentError as error:
        return failures.report(error, json=output == "json", code=failures.COULD_NOT_RUN)


def _run(client: Client, asking: RequestArgs, command: Sequence[str], *, each: bool, output: str) -> int:
    from mig_agent.client import Refused  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.migctl.launcher import Launcher, die_of_interrupt  # noqa: PLC0415 -- the same

    launcher = Launcher()
    progress = Progress()
    try:
        lease = client.lease(on_queued=progress, on_lost=_report_lost, **asking)
    except KeyboardInterrupt:
        raise progress.interrupted() from None
    finally:
        progress.clear()
    with _released_at_end(lease):
        if not each and len(lease.devices) > 1 and any(one.is_mig for one in lease.devices):
            raise Refused(
                reason="not-supported",
                message=f"cannot run one process on these {len(lease.devices)} devices: {_SEVERAL}",
                hint=_EACH_HINT,
            )
        if output == "json":
            import json  # noqa: PLC0415 -- beside its use

            from mig_agent.client import to_json  # noqa: PLC0415 -- the client is imported by now

            # stdout belongs to the command.
            print(json.dumps(to_json.shown(to_json.encode(lease.grant))), file=sys.stderr, flush=True)
        for note in lease.grant.notes:
            print(f"migctl: {failures.one_line(note)}", file=sys.stderr)
        try:
            code = launcher.run(command, _environments(lease, each=each))
        except OSError as error:
            words = f"cannot run {command[0]}: {error.strerror or error}"
            return failures.report_message(words, code=failures.COULD_NOT_RUN)
    if launcher.interrupted:
        die_of_interrupt()
    return code


@contextlib.contextmanager
def _released_at_end(lease: Lease) -> Iterator[None]:
    """Release the lease at the end. If the agent is down, that is no failure of the command.

    The agent ends the lease when it is back.
    """
    try:
        yield
    finally:
        try:
            lease.release()
        except MigAgentError as error:
            failures.report_message(
                f"cannot release lease {lease.id}: {error}", "the agent does it by itself", code=failures.DONE
            )


def _report_lost(error: ClientError) -> None:
    failures.report_message(f"{error}; the command goes on, and its device may be given to others", code=failures.DONE)


def _check_devices(asking: RequestArgs, *, each: bool) -> None:
    """Reject early what cannot work whatever is granted. Raises UsageError."""
    devices = asking.get("devices", ())
    if len(devices) > 1 and not each and any(one.strip().lower() != "whole" for one in devices):
        raise UsageError(f"cannot run one process on {len(devices)} MIG devices: {_SEVERAL}", _EACH_HINT)


def _environments(lease: Lease, *, each: bool) -> list[Mapping[str, str]]:
    """Return the environment of each process."""
    from mig_agent.client.leases import environment_of  # noqa: PLC0415 -- the client is imported by now

    if not each:
        return [os.environ | environment_of(lease.grant)]
    return [
        os.environ
        | environment_of(lease.grant)
        | {
            "CUDA_VISIBLE_DEVICES": device.uuid,
            "NVIDIA_VISIBLE_DEVICES": device.uuid,
            "MIG_AGENT_DEVICE_INDEX": str(index),
            "MIG_AGENT_DEVICE_COUNT": str(len(lease.devices)),
        }
        for index, device in enumerate(lease.devices)
    ]
