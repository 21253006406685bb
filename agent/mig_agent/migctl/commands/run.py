"""`migctl run`: runs a command on devices of its own, which are released when it ends."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mig_agent.core.backoff import Backoff
from mig_agent.core.errors import MigAgentError, UsageError
from mig_agent.core.quantities import format_duration, parse_duration
from mig_agent.migctl import failures
from mig_agent.migctl.commands.plan import check_explain, print_plan
from mig_agent.migctl.gpu_names import ONE_MIG_DEVICE, for_one_process, of_model
from mig_agent.migctl.options import Common, asking_of, asking_options, completer_of, verb
from mig_agent.migctl.printing import device_words
from mig_agent.migctl.progress import Progress

if TYPE_CHECKING:
    from mig_agent.client import Client, ClientError, Lease
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.migctl.launcher import Launcher

_MACHINES_PID_NAMESPACE = 0xEFFFFFFC
"""The number of the first PID namespace (PROC_PID_INIT_INO in Linux's include/linux/proc_ns.h)."""
_SHORT_SECONDS = 10.0
"""A run below this may be one that yields at once, again and again."""
_BACKOFF = Backoff(0.25, 60.0)
_EACH_HINT = "give --each to run the command once on each device"


@verb(
    context_settings={"allow_interspersed_args": False},
    short_help="Run a command on devices of its own; they end with it.",
)
@asking_options
@click.option("--each", is_flag=True, help="With several devices: run the command once on each, side by side.")
@click.option(
    "--kill-after",
    metavar="TIME",
    default="10s",
    help="How long after SIGTERM what has to end gets SIGKILL: 10s (default), 2m.",
)
@click.option(
    "--restart-on",
    metavar="yield",
    type=click.Choice(["yield"]),
    help="With `yield`: start the command again, on a new lease, whenever it ends with exit code 75.",
)
@click.argument(
    "command", metavar="[--] COMMAND...", nargs=-1, type=click.UNPROCESSED, shell_complete=completer_of("command")
)
def run(
    common: Common,
    *,
    each: bool,
    kill_after: str,
    restart_on: str | None,
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
    migctl's; 125 says that it was not run. What it leaves behind is ended when it ends. With --ttl it is ended when
    its time is over, by SIGTERM and then SIGKILL, and the exit code is 124.

    With --restart-on yield a command that ends with 75 gives its device back and is started again once it has another:
    for training that saves a checkpoint and goes on from it. What ends migctl ends the command for good.
    """  # noqa: D301 -- \b is click's mark for a paragraph that keeps its lines
    output = common.wants()
    check_explain(dry_run=dry_run, explain=explain)
    asking = asking_of(parameters)
    kill_after_seconds = parse_duration(kill_after)
    if command and not command[0].strip():
        raise UsageError("cannot run an empty text", "write the command after --")
    if not command and not dry_run:
        raise UsageError("cannot run nothing", "write it at the end: migctl run --gpu-memory 4G -- python x.py")
    _check_devices(asking, each=each)
    if restart_on is not None and asking["request_id"]:
        raise UsageError(
            "cannot restart with --request-id: each start has a lease of its own", "leave --request-id out"
        )
    if command and shutil.which(command[0]) is None:
        found = os.path.exists(command[0])  # noqa: PTH110 -- as typed, not as a path of ours
        why = "it cannot be executed" if found else "there is no such command"
        return failures.report_message(f"cannot run {command[0]}: {why}", code=failures.COULD_NOT_RUN)
    try:
        with common.client() as client:
            asking = of_model(client, asking, parameters["gpu_model"])
            if not each and _asks_for_whole_gpus(asking):
                asking = for_one_process(client, asking, hint=_EACH_HINT)
            if dry_run:
                return print_plan(client, asking, output, explain=explain)
            _check_machine(client)
            run_once = functools.partial(
                _run, client, asking, command, each=each, output=output, kill_after=kill_after_seconds
            )
            return _run_again_and_again(run_once) if restart_on is not None else run_once().code
    except (UsageError, failures.LeftQueueError):
        raise
    except MigAgentError as error:
        return failures.report(error, json=output == "json", code=failures.COULD_NOT_RUN)


@dataclass(frozen=True, slots=True)
class _Ended:
    """The end of a command on its lease."""

    code: int
    for_good: bool
    """True if migctl was asked to end it."""


def _run_again_and_again(run_once: Callable[[], _Ended]) -> int:
    """Run a command until it ends without having yielded; return its exit code.

    One that yields at once, again and again, is started at longer and longer intervals.
    """
    from mig_agent.elastic.environment import YIELD_CODE  # noqa: PLC0415 -- only for those who ask for it

    short_runs = 0
    while True:
        began = time.monotonic()
        ended = run_once()
        if ended.code != YIELD_CODE or ended.for_good:
            return ended.code
        short_runs = short_runs + 1 if time.monotonic() - began < _SHORT_SECONDS else 0
        _say("the command has yielded (exit code 75); its device is given back, and another is asked for")
        if short_runs:
            time.sleep(_BACKOFF.pause(short_runs))


def _run(
    client: Client, asking: RequestArgs, command: Sequence[str], *, each: bool, output: str, kill_after: float
) -> _Ended:
    from mig_agent.client import Refused  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC
    from mig_agent.migctl.launcher import Launcher, die_of_interrupt  # noqa: PLC0415 -- the same

    launcher = Launcher(kill_after)
    progress = Progress()
    held = _HeldByRun(launcher, progress, kill_after)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(launcher)
        except OSError as error:
            words = f"cannot run {command[0]}: {error.strerror or error}"
            return _Ended(failures.report_message(words, code=failures.COULD_NOT_RUN), for_good=True)
        try:
            asking = _handing_over(client, asking, launcher.pid)
            lease = client.lease(on_queued=progress, on_lost=held.lost, on_away=held.away, **asking)
            held.is_granted = True
        except KeyboardInterrupt:
            raise progress.interrupted() from None
        finally:
            progress.clear()
        stack.enter_context(_released_at_end(lease))
        if not each and len(lease.devices) > 1 and any(one.is_mig for one in lease.devices):
            raise Refused(
                reason="not-supported",
                message=f"cannot run one process on these {len(lease.devices)} devices: {ONE_MIG_DEVICE}",
                hint=_EACH_HINT,
            )
        if output == "json":
            import json  # noqa: PLC0415 -- beside its use

            from mig_agent.client import to_json  # noqa: PLC0415 -- the client is imported by now

            # stdout belongs to the command, and what it writes is kept in files: the token is left out.
            granted = to_json.encode(lease.grant)
            if isinstance(granted, dict):
                granted.pop("token")
            print(json.dumps(to_json.shown(granted)), file=sys.stderr, flush=True)
        shares = [device_words(one) for one in lease.devices if one.is_share]
        for note in (*shares, *lease.grant.notes):
            print(f"migctl: {failures.one_line(note)}", file=sys.stderr)
        code = launcher.run(command, _environments(lease, each=each))
    if held.is_over.is_set():
        return _Ended(failures.TIMED_OUT, for_good=True)
    if launcher.interrupted:
        die_of_interrupt()
    return _Ended(code, for_good=launcher.is_ending)


def _handing_over(client: Client, asking: RequestArgs, pid: int) -> RequestArgs:
    """Return the request with the process that starts the command, for limits that hold for processes.

    Not where the request names another process, and not where the agent may know this one by another number.
    """
    if asking.get("pid") is not None or client.address.path is None or not _has_machines_pids():
        return asking
    return {**asking, "pid": pid}


def _has_machines_pids() -> bool:
    """Return True if this process is in the machine's own PID namespace, as the agent is."""
    try:
        return os.readlink("/proc/self/ns/pid") == f"pid:[{_MACHINES_PID_NAMESPACE}]"  # noqa: PTH115 -- no file
    except OSError:
        return False


class _HeldByRun:
    """Reacts to what happens to the lease while the command runs; called from the thread that holds the lease."""

    def __init__(self, launcher: Launcher, progress: Progress, kill_after: float) -> None:
        self._launcher = launcher
        self._progress = progress
        self._kill_after = kill_after
        self.is_granted = False
        self.is_over = threading.Event()
        """Set when the command is ended since the lease has reached its deadline."""

    def lost(self, error: ClientError) -> None:
        """End the command if the lease has reached its deadline; after any other end it goes on, and may save its work.

        A process on the device keeps it from being leased to others.
        """
        if getattr(error, "end_reason", "") == "expired":
            self.is_over.set()
            self._launcher.end(self._kill_after)
            kill_after = format_duration(math.ceil(self._kill_after))
            _say(f"the time of this lease is over; ending the command: SIGTERM now, SIGKILL within {kill_after}")
        else:
            _say(f"{error}; the command goes on, and its device is leased to others once no process uses it")

    def away(self, error: ClientError | None) -> None:
        """Report once that the agent cannot be reached, and None: that it is back."""
        if not self.is_granted:
            self._progress.away(error)
        elif error is None:
            _say("the agent is back, and the lease is held as before")
        else:
            _say(f"{error}; the command goes on and keeps its device, and migctl waits for the agent to be back")


def _say(words: str) -> None:
    failures.report_message(words, code=failures.DONE)


def _check_machine(client: Client) -> None:
    """Raise Refused if the agent is on another machine, as far as can be known: its devices are there."""
    if client.address.path is not None:
        return
    from mig_agent.client import Refused  # noqa: PLC0415 -- the client is imported by now
    from mig_agent.client.addresses import is_on_this_machine  # noqa: PLC0415 -- the same

    status = client.status()
    if not is_on_this_machine(status.boot_id):
        raise Refused(
            reason="not-supported",
            message=f"cannot run the command here on a device of {failures.one_line(status.node)}: the agent at "
            f"{client.address} is on another machine",
            hint="run migctl there, by ssh; `migctl request` takes a device of another machine",
        )


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


def _check_devices(asking: RequestArgs, *, each: bool) -> None:
    """Reject early what cannot work whatever is granted. Raises UsageError."""
    devices = asking.get("devices", ())
    if len(devices) > 1 and not each and any(one.strip().lower() != "whole" for one in devices):
        raise UsageError(f"cannot run one process on {len(devices)} MIG devices: {ONE_MIG_DEVICE}", _EACH_HINT)


def _asks_for_whole_gpus(asking: RequestArgs) -> bool:
    """Return True for several whole GPUs; `_check_devices` has rejected several other devices."""
    return max(asking.get("num_gpus") or 0, len(asking.get("devices", ()))) > 1


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
            "MIG_AGENT_DEVICE_PROFILE": device.profile,
            "MIG_AGENT_DEVICE_MEMORY": str(device.memory_mib),
            "MIG_AGENT_DEVICE_INDEX": str(index),
            "MIG_AGENT_DEVICE_COUNT": str(len(lease.devices)),
        }
        for index, device in enumerate(lease.devices)
    ]
