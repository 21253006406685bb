"""Options that several verbs share, and the values made of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mig_agent import bootstrap
from mig_agent.core.errors import UsageError
from mig_agent.core.quantities import parse_duration, shown

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from mig_agent.client import Client
    from mig_agent.client.request_args import RequestArgs
    from mig_agent.migctl.completions import Completer
    from mig_agent.migctl.contexts import Endpoint

_Command = TypeVar("_Command", bound=Callable[..., Any])
OptionMaker = Callable[[], click.Option]


def completer_of(kind: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return what completes a value: the function `complete_KIND` of `completions`, imported when it is used."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from mig_agent.migctl import completions  # noqa: PLC0415 -- a command that is run needs none of it

        completer: Completer = getattr(completions, f"complete_{kind}")
        return completer(context, parameter, incomplete)

    return complete


COMMON_OPTIONS: tuple[OptionMaker, ...] = (
    partial(
        click.Option,
        ["--address"],
        metavar="ADDRESS",
        help="Where the agent is: unix:///path or host:port. Default: MIG_AGENT_ADDRESS, else the node's own agent.",
    ),
    partial(
        click.Option,
        ["--context"],
        metavar="NAME",
        shell_complete=completer_of("context"),
        help="The agent that has this name in your contexts: `migctl context list`. Default: MIG_AGENT_CONTEXT.",
    ),
    partial(
        click.Option,
        ["--tls-ca"],
        metavar="FILE",
        shell_complete=completer_of("file"),
        help="Over TCP: who may sign the agent's certificate (PEM).",
    ),
    partial(
        click.Option,
        ["--tls-cert"],
        metavar="FILE",
        shell_complete=completer_of("file"),
        help="Over TCP: your certificate (PEM).",
    ),
    partial(
        click.Option,
        ["--tls-key"],
        metavar="FILE",
        shell_complete=completer_of("file"),
        help="Over TCP: your certificate's key (PEM).",
    ),
    partial(
        click.Option,
        ["--tls-server-name"],
        metavar="NAME",
        help="Over TCP: the name in the agent's certificate, where it is not the address's host.",
    ),
    partial(
        click.Option,
        ["-o", "--output"],
        metavar="FORMAT",
        shell_complete=completer_of("output"),
        help="text (default) or json.",
    ),
)
"""Accepted by every verb, and before the verb, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """The values of COMMON_OPTIONS; an empty text means that the option was not given."""

    address: str = ""
    context: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_server_name: str = ""
    output: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str | None]) -> Common:
        """Return the values made of click's parameters."""
        return cls(**{name: value or "" for name, value in given.items()})

    def overridden_by(self, given: Mapping[str, str | None]) -> Common:
        """Return these with the options given after the verb in place of those given before it."""
        return replace(self, **{name: value for name, value in given.items() if value})

    def wants(self, *formats: str) -> str:
        """Return the output format: one of `text`, `json` and `formats`. Raises UsageError."""
        known = ("text", "json", *formats)
        chosen = self.output or "text"
        if chosen not in known:
            raise UsageError(f"cannot print as {shown(chosen)}", f"-o takes {', '.join(known[:-1])} or {known[-1]}")
        return chosen

    def client(self, **settings: float) -> Client:
        """Return a client of the agent, not yet connected; `settings` are the Client's own. Raises UsageError."""
        from mig_agent.client import Client  # noqa: PLC0415 -- a mistyped command line costs no import of gRPC

        bootstrap.raise_when_interrupted()  # from here on there may be a place in the queue, or a lease
        chosen = self.endpoint()
        return Client(chosen.address, tls=chosen.tls, **settings)

    def endpoint(self) -> Endpoint:
        """Return where the agent is, by these options, else the context, else the environment. Raises UsageError."""
        from mig_agent.migctl import contexts  # noqa: PLC0415 -- as above

        return contexts.endpoint_of(asdict(self))


CONNECTION = """\
Connection options, of every command; each is taken before the command, too.

  --address ADDRESS       Where the agent is: unix:///path or host:port.
                          Default: MIG_AGENT_ADDRESS, else this machine's own agent.
  --context NAME          The agent that has this name in your contexts
                          (migctl context list). Default: MIG_AGENT_CONTEXT, else the
                          current one (migctl context use). An address comes before it.
Over TCP, where both sides show a certificate:
  --tls-ca FILE           Who may sign the agent's certificate (PEM).
  --tls-cert FILE         Your certificate (PEM).
  --tls-key FILE          Its key (PEM).
  --tls-server-name NAME  The name in the agent's certificate, where that is not
                          the host of the address.
Defaults: MIG_AGENT_TLS_CA, _CERT, _KEY and _SERVER_NAME.
"""
"""The topic `migctl help connection`."""
_CONNECTION_LINE = "Where the agent is (--address, --tls-...): migctl help connection"


class Verb(click.Command):
    """A command whose help has its own options, and of the common ones only --output and where the others are."""

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 -- click's own settings
        hidden_options: frozenset[str] = frozenset(),
        other_help: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,  # noqa: ANN401 -- click's own settings
    ) -> None:
        """Take what click.Command takes; `hidden_options` are accepted and not in the help.

        `other_help`: by name the help of shared options for which this command needs other words.
        """
        super().__init__(*arguments, **settings)
        for each in self.params:
            if isinstance(each, click.Option):
                each.help = other_help.get(each.name or "", each.help)
        self._unlisted = hidden_options | (Common.__dataclass_fields__.keys() - {"output"})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse this command's arguments. Raises click.UsageError, always with its context."""
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise
        for each in self.get_params(ctx):
            given = ctx.params.get(each.name or "")
            if isinstance(each, click.Option) and "--" in (given if isinstance(given, tuple) else (given,)):
                name = max(each.opts, key=len)
                raise UsageError(f"cannot take '--' as the value of {name}", f"write {name} {each.metavar}, then --")
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the listed options."""
        # Arguments are in the usage line and in the text.
        params = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        listed = [each for each in params if each.name not in self._unlisted]
        records = [record for each in listed if (record := each.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(records)
        formatter.write_paragraph()
        formatter.write_text(_CONNECTION_LINE)


def verb(**settings: Any) -> Callable[[Callable[..., int]], click.Command]:  # noqa: ANN401 -- click's own settings
    """Return a decorator that makes a function a verb of its name.

    The verb gets COMMON_OPTIONS after its own, passed to the function first, as `common`.
    """

    def make(function: Callable[..., int]) -> click.Command:
        def call(**parameters: Any) -> int:  # noqa: ANN401 -- each verb has its own
            given = {each: parameters.pop(each) for each in Common.__dataclass_fields__}
            before = click.get_current_context().find_object(Common) or Common()
            return function(before.overridden_by(given), **parameters)

        own = reversed(getattr(function, "__click_params__", []))  # where click's decorators leave them
        params = [*own, *(option() for option in COMMON_OPTIONS)]
        words = inspect.cleandoc(function.__doc__ or "")
        return Verb(function.__name__, callback=call, params=params, help=words, **settings)

    return make


if TYPE_CHECKING:
    _NumberType = click.ParamType[int]
else:
    _NumberType = click.ParamType  # generic since click 8.3 only


_LONGEST_NUMBER = 19
"""Digits of 64 bits."""


class Number(_NumberType):
    """A whole number. A mistake is reported in migctl's form."""

    name = "number"

    def __init__(self, what: str) -> None:
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401, ARG002 -- click's signature
        """Return the number. Raises UsageError."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if not text.lstrip("+-").isdecimal():
            raise UsageError(f"cannot take {shown(text) or 'an empty text'} as {self._what}", "write a whole number")
        if len(text) > _LONGEST_NUMBER:
            raise UsageError(f"cannot take {shown(text)} as {self._what}: it is too large", "write a smaller one")
        return int(text)


_REQUEST_OPTIONS: tuple[Callable[[_Command], _Command], ...] = (
    click.option("--gpu-memory", metavar="SIZE", help="One device with at least this much memory: 4G, 9.5Gi, 512M."),
    click.option(
        "--mig-profile",
        metavar="PROFILE",
        shell_complete=completer_of("profile"),
        help="One device of exactly this profile: 1g.10gb.",
    ),
    click.option(
        "--gpu-fraction", metavar="FRACTION", help="One device with at least this share of a GPU: 0.25, 25% or 1/4."
    ),
    click.option("--num-gpus", metavar="N", type=Number("a number of GPUs"), help="This number of whole GPUs."),
    click.option(
        "--device",
        "devices",
        metavar="DEVICE",
        multiple=True,
        shell_complete=completer_of("profile"),
        help="Repeat for several devices, all or nothing: a profile, a size of memory, or whole.",
    ),
    click.option(
        "--min-compute",
        metavar="N",
        type=Number("a number of compute slices"),
        help="At least this many compute slices, with --gpu-memory or --gpu-fraction.",
    ),
    click.option(
        "--attribute", "attributes", metavar="ATTR", multiple=True, help="Take profiles with this attribute: +me, +gfx."
    ),
    click.option(
        "--isolation",
        metavar="LEVEL",
        shell_complete=completer_of("isolation"),
        help="any: a share of a GPU where no MIG instance fits; mig: never a share.",
    ),
    click.option(
        "--compute",
        metavar="PERCENT",
        help="At most this part of the multiprocessors, 25%; of a share that MPS enforces.",
    ),
    click.option(
        "--gpu",
        "gpus",
        metavar="GPU",
        multiple=True,
        shell_complete=completer_of("gpu"),
        help="Only this GPU, by index or UUID. Repeatable.",
    ),
    click.option(
        "--gpu-model",
        metavar="MODEL",
        shell_complete=completer_of("gpu_model"),
        help="Only GPUs whose model has this in its name, as `profiles` lists them: h100.",
    ),
    click.option("--wait", metavar="TIME", help="Wait for a place for at most this time: 10m, 2h, forever."),
    click.option(
        "--priority", metavar="N", type=Number("a priority"), default=0, help="Higher goes first in the queue."
    ),
    click.option("--ttl", metavar="TIME", help="The lease ends after this time unless it is renewed: 2h."),
    click.option("--pid", metavar="PID", type=Number("a process id"), help="The lease ends when this process ends."),
    click.option("--dry-run", is_flag=True, help="Only say what would be done."),
    click.option("--explain", is_flag=True, help="With a dry run: what was weighed, and what blocks which GPU."),
    click.option("--request-id", metavar="ID", help="Repeat an earlier request: the same id gives the same lease."),
    click.option("--tenant", metavar="NAME", default="", help="The account that it counts for."),
    click.option("--name", metavar="NAME", help="Who holds it, as others see it. Default: your login name."),
)


def asking_options(function: _Command) -> _Command:
    """Add the options of a request, which `asking_of` takes, to a verb."""
    for option in reversed(_REQUEST_OPTIONS):
        function = option(function)
    return function


def asking_of(parameters: Mapping[str, Any]) -> RequestArgs:
    """Return the request of a command line from the parameters of `asking_options`. Raises UsageError.

    Everything is checked here, so that a mistyped command line never reaches the agent.
    """
    from mig_agent.client.request_args import request_for  # noqa: PLC0415 -- a mistyped option costs no import of gRPC

    asking: RequestArgs = {
        "gpu_memory": parameters["gpu_memory"],
        "mig_profile": parameters["mig_profile"],
        "gpu_fraction": parameters["gpu_fraction"],
        "num_gpus": parameters["num_gpus"],
        "devices": parameters["devices"],
        "min_compute": parameters["min_compute"],
        "attributes": parameters["attributes"],
        "isolation": parameters["isolation"],
        "compute": parameters["compute"],
        "gpus": split(parameters["gpus"]),
        "wait": parameters["wait"],
        "priority": parameters["priority"],
        "ttl": parameters["ttl"],
        "pid": parameters["pid"],
        "request_id": parameters["request_id"],
        "tenant": parameters["tenant"],
        "name": parameters["name"],
    }
    request_for(asking)
    return asking


def check_user(name: str | None) -> None:
    """Raise UsageError for an empty `--user`."""
    if name is not None and not name.strip():
        raise UsageError("cannot take an empty text as a user", "write a name as `migctl status --leases` shows it")


def split(gpus: tuple[str, ...]) -> list[str]:
    """Return `--gpu 0,2 --gpu 3` as a list."""
    return [each for given in gpus for each in given.split(",")]


def moment(text: str, now: float) -> float:
    """Return a moment, given as a time ago (`7d`) or as a date in local time (`2026-01-31`, `2026-01-31T12:00`).

    In seconds since the epoch. Raises UsageError.
    """
    stripped = text.strip()
    if stripped[:4].isdecimal() and stripped[4:5] == "-":
        try:
            return datetime.fromisoformat(stripped).timestamp()
        except (ValueError, OverflowError, OSError):
            raise UsageError(f"cannot take {shown(text)} as a date", "write one such as 2026-01-31") from None
    try:
        return now - parse_duration(text)
    except UsageError as error:
        raise UsageError(error.message, f"{error.hint}, or a date such as 2026-01-31") from None
