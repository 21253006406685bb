"""The table of settings, from which flags, the example file and the page of documentation are generated."""

# ruff: noqa: RUF009 -- setting() makes a dataclasses.field, which is no default that instances share

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from mig_agent.config import field_types
from mig_agent.config.addresses import Address, TcpAddress, UnixAddress
from mig_agent.config.field_types import ROW, Row, setting
from mig_agent.config.kubernetes import KubernetesSettings
from mig_agent.config.limits import contradictions as limit_contradictions
from mig_agent.config.problems import Problem
from mig_agent.config.share_settings import ShareSettings
from mig_agent.core.limits import NO_LIMITS, UsageLimits
from mig_agent.core.quantities import format_duration

DEFAULT_CONFIG = Path("/etc/mig-agent/config.yaml")
"""The file that the systemd unit has the agent read."""
DEFAULT_SOCKET = Path("/run/mig-agent/mig-agent.sock")
"""Where clients connect by default."""

_PLACE = "Where it lives and listens"
_TLS = "TCP, with certificates on both sides"
_GPUS = "GPUs"
_CHOOSING = "Choosing and waiting"
_SHARING = "Limits and fairness"
_LIMITS = "Time limits"
_TELLING = "Logs, metrics and the web page"
_SIMULATED = "Simulated GPUs"


@dataclass(frozen=True, kw_only=True)
class Settings(KubernetesSettings, ShareSettings):
    """All settings of `mig-agent serve`; durations are seconds. Raises ConfigError if they do not fit together."""

    state_dir: Path = setting(
        Path("/var/lib/mig-agent"),
        "Folder of the ledger of leases and its key: of the agent's own user, mode 0700, and no link. One agent a "
        "folder.",
        kind=field_types.PATH,
        group=_PLACE,
        example="/var/lib/mig-agent",
    )
    listen: tuple[Address, ...] = setting(
        (UnixAddress(DEFAULT_SOCKET),),
        "Where clients connect. Unix sockets get `socket_mode` and `socket_group`; TCP needs the three `tls_` files.",
        kind=field_types.ADDRESSES,
        group=_PLACE,
        example="unix:///run/mig-agent/mig-agent.sock, 0.0.0.0:7400",
    )
    admin_listen: UnixAddress | None = setting(
        None,
        "Unix socket, mode 0600, where its owner may do what concerns others: cordon, switch MIG mode, reclaim, pause, "
        "and release any lease.",
        kind=field_types.UNIX_ADDRESS,
        group=_PLACE,
        example="unix:///run/mig-agent/admin.sock",
        when_unset="`admin.sock` beside the first Unix socket of `listen`",
    )
    socket_mode: int = setting(
        0o660,
        "Who may use the Unix sockets of `listen`, in octal.",
        kind=field_types.SOCKET_MODE,
        group=_PLACE,
        example="0660",
        live=True,
    )
    socket_group: str = setting(
        "",
        "Group that the Unix sockets of `listen` belong to; its members may ask for GPUs.",
        kind=field_types.TEXT,
        group=_PLACE,
        example="gpu-users",
        live=True,
        when_unset="the agent's own group",
    )
    socket_schedulers: tuple[str, ...] = setting(
        (),
        "Users of this machine, by name or number, who may ask for others on the Unix sockets of `listen`, under any "
        "tenant and name. Root and the agent's own user always may.",
        kind=field_types.NAMES,
        group=_PLACE,
        example="slurm",
        live=True,
        when_unset="nobody else",
    )
    max_connections: int = setting(
        4096,
        "The most clients that may be connected to the Unix sockets of `listen` at once, and the most over TCP. One "
        "user may have half of them, at most 256, and one address half of those over TCP. There are fewer where the "
        "process may not open three files for each.",
        kind=field_types.COUNT,
        group=_PLACE,
        example="4096",
        at_least=2,
    )
    lock_dir: Path = setting(
        Path("/run/mig-agent/locks"),
        "Folder of one lock for each managed GPU, the same for all agents of a machine. For simulated GPUs it lies in "
        "the simulated machine.",
        kind=field_types.PATH,
        group=_PLACE,
        example="/run/mig-agent/locks",
    )
    max_calls: int = setting(
        2000,
        "How many requests and watches may be open at once on each of `listen` and `admin_listen`, and as many other "
        "calls; more are refused. A request that waits is one.",
        kind=field_types.COUNT,
        group=_PLACE,
        example="2000",
        at_least=1,
    )
    node: str | None = setting(
        None,
        "Name of this node, as Status shows it.",
        kind=field_types.NAME,
        group=_PLACE,
        example="gpu-17",
        when_unset="the host's name",
    )
    tls_cert: Path | None = setting(
        None,
        "The agent's certificate chain (PEM).",
        kind=field_types.PATH,
        group=_TLS,
        example="/etc/mig-agent/tls/server.pem",
        when_unset="no TCP",
    )
    tls_key: Path | None = setting(
        None,
        "The private key of `tls_cert` (PEM): a file of root's or of the agent's user, which nobody else may read.",
        kind=field_types.PATH,
        group=_TLS,
        example="/etc/mig-agent/tls/server.key",
        when_unset="no TCP",
    )
    tls_client_ca: Path | None = setting(
        None,
        "The authority that signed the clients' certificates (PEM); others are turned away.",
        kind=field_types.PATH,
        group=_TLS,
        example="/etc/mig-agent/tls/clients-ca.pem",
        when_unset="no TCP",
    )
    tls_admins: tuple[str, ...] = setting(
        (),
        "Clients who may do over TCP what administrators may, by the common name in their certificates.",
        kind=field_types.NAMES,
        group=_TLS,
        example="ops",
        live=True,
        when_unset="nobody",
    )
    tls_schedulers: tuple[str, ...] = setting(
        (),
        "Clients who may ask over TCP for others, under any tenant and name; common names, too.",
        kind=field_types.NAMES,
        group=_TLS,
        example="scheduler.cluster-a",
        live=True,
        when_unset="nobody",
    )
    tls_users: tuple[str, ...] | None = setting(
        None,
        "Clients who may ask over TCP for themselves; the common name in the certificate is their tenant.",
        kind=field_types.NAMES,
        group=_TLS,
        example="alice, bob",
        live=True,
        when_unset="everybody with a certificate of `tls_client_ca`",
    )
    gpus: tuple[str, ...] | None = setting(
        None,
        "The GPUs to manage, by index or UUID. The others are left alone.",
        kind=field_types.GPUS,
        group=_GPUS,
        example="0, 2",
        when_unset="those in CUDA_VISIBLE_DEVICES where it is set, else all",
    )
    foreign: Literal["respect", "adopt"] = setting(
        "respect",
        "Instances that somebody else made: `respect` never touches them, `adopt` takes over those that nobody uses.",
        kind=field_types.choice("respect", "adopt"),
        group=_GPUS,
        example="adopt",
        live=True,
    )
    reuse: Literal["any", "same-tenant", "never"] = setting(
        "any",
        "Which idle instances are reused for a request: `any`, those that the `same-tenant` held last, or none "
        "(`never`). The others are destroyed and created again. See security.md.",
        kind=field_types.choice("any", "same-tenant", "never"),
        group=_GPUS,
        example="same-tenant",
        live=True,
    )
    profiles_dir: Path | None = setting(
        None,
        "Folder with one YAML file for each GPU model.",
        kind=field_types.PATH,
        group=_GPUS,
        example="/etc/mig-agent/profiles",
        when_unset="the profiles that come with the agent",
    )
    idle_limit: float | None = setting(
        None,
        "Destroy an instance that has been idle for this time. `off` keeps it until its slices are needed.",
        kind=field_types.DURATION_OR_OFF,
        group=_GPUS,
        example="2h",
        live=True,
    )
    creation_cost: float = setting(
        2.0,
        "What creating an instance costs against reusing one in a worse place; towards 8 where creating is slow.",
        kind=field_types.NUMBER,
        group=_CHOOSING,
        example="2",
        live=True,
        at_least=0.0,
        at_most=1000.0,
    )
    strict_fifo: bool = setting(
        False,
        "Serve waiting requests strictly in order, instead of letting a later one start when it fits.",
        kind=field_types.SWITCH,
        group=_CHOOSING,
        example="yes",
        live=True,
    )
    reservation_after: float | None = setting(
        None,
        "After this time GPUs are reserved for the first waiting request. `auto` is as long as leases last on "
        "average, between 10s and 24h, starting from a guess of 5m.",
        kind=field_types.DURATION_OR_AUTO,
        group=_CHOOSING,
        example="5m",
        live=True,
    )
    max_waiting: int = setting(
        1000,
        "How many requests may wait; more are refused.",
        kind=field_types.COUNT,
        group=_CHOOSING,
        example="1000",
        live=True,
    )
    limits: UsageLimits = setting(
        NO_LIMITS,
        "The most that may be held, waited for and asked for: below `roles` by each user of a role, below `users` by "
        'one user, below `tenants` by all leases of one tenant together, or of each (`"*"`). A refusal names the '
        "entry and its line.",
        kind=field_types.LIMITS,
        group=_SHARING,
        example="{roles: {user: {memory: 80Gi, leases: 8, longest_ttl: 7d}}, tenants: {vision: {share: 0.5}}}",
        when_unset="no limits",
        live=True,
    )
    fair_share: bool = setting(
        False,
        "Within a priority, serve the tenant first that used least of the GPUs lately, instead of first come. A "
        "request that has waited for `reservation_after` is not overtaken any more.",
        kind=field_types.SWITCH,
        group=_SHARING,
        example="yes",
    )
    fair_share_half_life: float = setting(
        604800.0,
        "With `fair_share`: after this time what a tenant used counts half.",
        kind=field_types.DURATION,
        group=_SHARING,
        example="7d",
        at_least=60.0,
    )
    idle_after: float = setting(
        3600.0,
        "A lease on whose devices no process was seen for this time is idle: its holder is warned. Never one of a pod.",
        kind=field_types.DURATION,
        group=_SHARING,
        example="1h",
        live=True,
        at_least=60.0,
    )
    end_idle_after: float | None = setting(
        None,
        "End a lease that has been idle for this time, at least `idle_after`. Time in which the driver did not tell "
        "which processes there are does not count. `off` ends none.",
        kind=field_types.DURATION_OR_OFF,
        group=_SHARING,
        example="12h",
        live=True,
    )
    reread: float = setting(
        30.0,
        "How often the driver is asked what it really has.",
        kind=field_types.DURATION,
        group=_LIMITS,
        example="30s",
        live=True,
        at_least=1.0,
    )
    call_deadline: float = setting(
        30.0,
        "A call of the driver that takes longer counts as hung: its GPU is cordoned.",
        kind=field_types.DURATION,
        group=_LIMITS,
        example="30s",
        at_least=1.0,
        at_most=3600.0,
    )
    stop_deadline: float = setting(
        15.0,
        "How long a step in progress may take after SIGTERM before the agent ends anyway.",
        kind=field_types.DURATION,
        group=_LIMITS,
        example="15s",
        live=True,
        at_most=3600.0,
    )
    metrics: TcpAddress | None = setting(
        TcpAddress("127.0.0.1", 7481),
        "Where Prometheus reads metrics over HTTP, without a password: think before leaving loopback.",
        kind=field_types.TCP_OR_OFF,
        group=_TELLING,
        example="0.0.0.0:7481",
        live=True,
    )
    web: TcpAddress | None = setting(
        None,
        "Where the web page is served over HTTP: on loopback alone, for whoever can read a token beside a socket. See "
        "web.md.",
        kind=field_types.LOOPBACK_OR_OFF,
        group=_TELLING,
        example="127.0.0.1:7480",
        live=True,
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info",
        "The least important messages that are logged.",
        kind=field_types.choice("debug", "info", "warning", "error"),
        group=_TELLING,
        example="debug",
        live=True,
    )
    log_format: Literal["auto", "text", "json"] = setting(
        "auto",
        "`auto` writes text to a terminal and JSON elsewhere.",
        kind=field_types.choice("auto", "text", "json"),
        group=_TELLING,
        example="json",
    )
    sample_usage: float | None = setting(
        30.0,
        "How often memory and compute in use on leased devices are read, for accounting and metrics; `off`: never.",
        kind=field_types.DURATION_OR_OFF,
        group=_TELLING,
        example="30s",
        at_least=0.1,
    )
    keep_accounting: float = setting(
        400 * 86_400.0,
        "How long `migctl usage` remembers a lease that has ended. More than 100000 devices are merged by day, tenant, "
        "user and profile, the oldest first.",
        kind=field_types.DURATION,
        group=_TELLING,
        example="400d",
        live=True,
        at_least=3600.0,
    )
    simulate: str = setting(
        "",
        "Simulate these GPUs instead of opening the driver, as MODEL:COUNT; `+nomig` behind the model leaves MIG mode "
        "off, and `driver=615.71` is the driver's version.",
        kind=field_types.TEXT,
        group=_SIMULATED,
        example="a100-40gb:1,h100-80gb:2",
        when_unset="the real GPUs",
    )
    simulate_dir: Path | None = setting(
        None,
        "Folder of the simulated machine.",
        kind=field_types.PATH,
        group=_SIMULATED,
        example="/tmp/simulated",  # noqa: S108 -- an example for people who try things
        when_unset="`state_dir`",
    )
    simulate_create_seconds: float = setting(
        0.16,
        "How long creating a GPU instance takes on a new simulated machine.",
        kind=field_types.NUMBER,
        group=_SIMULATED,
        example="0.16",
        at_most=3600.0,
    )
    simulate_destroy_seconds: float = setting(
        0.10,
        "How long destroying a GPU instance takes on a new simulated machine.",
        kind=field_types.NUMBER,
        group=_SIMULATED,
        example="0.10",
        at_most=3600.0,
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that contradict each other."""
        for each in self.contradictions():
            raise each.error()

    def contradictions(self) -> Iterator[Problem]:
        """Yield what is wrong with the settings together, though each of them could be meant."""
        yield from self._tls_contradictions()
        yield from self._address_contradictions()
        yield from self._kubernetes_contradictions()
        yield from limit_contradictions(self.limits, self._role_of)
        if self.end_idle_after is not None and self.end_idle_after < self.idle_after:
            yield Problem(
                message=f"cannot end idle leases after {format_duration(self.end_idle_after)}: their holders are "
                f"warned after {format_duration(self.idle_after)} (idle_after)",
                hint="make end_idle_after longer than idle_after",
                setting="end_idle_after",
                involved=("idle_after",),
            )
        if self.gpus is not None and not self.gpus:
            yield Problem(
                message="cannot serve: gpus names none",
                hint="name at least one, or leave it out for all",
                setting="gpus",
            )

    def _role_of(self, name: str) -> str:
        """Return the role of a user or certificate, as far as the settings tell."""
        if name in self.tls_admins:
            return "admin"
        return "scheduler" if name in {*self.socket_schedulers, *self.tls_schedulers} else "user"

    def _tls_contradictions(self) -> Iterator[Problem]:
        files = {"tls_cert": self.tls_cert, "tls_key": self.tls_key, "tls_client_ca": self.tls_client_ca}
        missing = [name for name, path in files.items() if path is None]
        tcp = [each for each in self.listen if isinstance(each, TcpAddress)]
        if tcp and missing:
            yield Problem(
                message=f"cannot listen on {tcp[0]}: TCP is served only with certificates on both sides, and "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
                hint="set them, or listen on a Unix socket (unix:///path)",
                setting="listen",
                involved=tuple(files),
            )
        elif missing and len(missing) < len(files):
            present = [name for name in files if name not in missing]
            yield Problem(
                message=f"cannot use {' and '.join(present)} without {' and '.join(missing)}",
                hint="set all three or none",
                setting=present[0],
                involved=tuple(files),
            )

    def _address_contradictions(self) -> Iterator[Problem]:
        if not self.listen:
            yield Problem(
                message="cannot serve: listen is empty", hint="write unix:///path/to/socket", setting="listen"
            )
        elif self.admin_listen is None and not any(isinstance(each, UnixAddress) for each in self.listen):
            yield Problem(
                message="cannot tell where administrators connect: listen has no Unix socket beside which it could be",
                hint="set admin_listen, such as unix:///run/mig-agent/admin.sock",
                setting="listen",
                involved=("admin_listen",),
            )
        elif len({*self.listen}) < len(self.listen):
            twice = next(each for each in self.listen if self.listen.count(each) > 1)
            yield Problem(message=f"cannot listen on {twice} twice", hint="remove one of them", setting="listen")
        elif self.metrics is not None and self.metrics.port and self.metrics in self.listen:
            yield Problem(
                message=f"cannot use {self.metrics} for clients and for metrics alike",
                hint="give metrics another port",
                setting="metrics",
                involved=("listen",),
            )
        elif self.admin_address in self.listen:
            yield Problem(
                message=f"cannot use {self.admin_address} for everybody and for administrators alike",
                hint="set another admin_listen",
                setting="admin_listen",
                involved=("listen",),
            )

    @property
    def admin_address(self) -> UnixAddress:
        """Where administrators connect."""
        if self.admin_listen is not None:
            return self.admin_listen
        first = next(each for each in self.listen if isinstance(each, UnixAddress))
        return UnixAddress(first.path.with_name("admin.sock"))

    @property
    def node_name(self) -> str:
        """The node's name, given or the host's."""
        return self.node or platform.node() or "node"

    @property
    def simulated_dir(self) -> Path:
        """Where the simulated machine lives."""
        return self.simulate_dir or self.state_dir


ROWS: Mapping[str, Row] = MappingProxyType(
    {
        each.name: Row(name=each.name, **each.metadata[ROW])
        # Those of shares and of Kubernetes, which are inherited, come last.
        for each in sorted(fields(Settings), key=lambda each: each.name not in Settings.__annotations__)
        if ROW in each.metadata
    }
)
"""Every setting by its name, in the order of the table."""


def groups() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows by their heading."""
    found: dict[str, list[Row]] = {}
    for row in ROWS.values():
        found.setdefault(row.group, []).append(row)
    return MappingProxyType({group: tuple(members) for group, members in found.items()})
