"""The gRPC servers: one for users (Unix sockets, TCP with certificates), one for administrators.

gRPC is reached only through relays: they report who is calling, and count connections before gRPC sees them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from mig_agent.adapters.lock_holders import HolderSearch
from mig_agent.adapters.private_dir import PrivateDir
from mig_agent.adapters.transport import tcp
from mig_agent.adapters.transport.connection_limits import ConnectionLimits, allow_open_files
from mig_agent.adapters.transport.http2_limits import Limits, Usages
from mig_agent.adapters.transport.peer_credentials import Peer, own_uid, peer_of
from mig_agent.adapters.transport.proxy_connection import ConnectionEnds
from mig_agent.adapters.transport.relay import Relay
from mig_agent.adapters.transport.tls import Certificates, Renewal
from mig_agent.adapters.transport.unix_sockets import OwnedSocket
from mig_agent.adapters.users import Users
from mig_agent.config import Address, Settings, TcpAddress, UnixAddress
from mig_agent.core.errors import ConfigError
from mig_agent.daemon.cert_reload import CertificateReloader, configured_certificates
from mig_agent.daemon.socket_watch import WatchedSocket
from mig_agent.frontends.grpc.call_limits import most_open
from mig_agent.frontends.grpc.handlers import SERVICE
from mig_agent.frontends.grpc.health_and_reflection import HEALTH, REFLECTION, probe_handlers

_ADMIN_MODE = 0o600
_ADMIN_CONNECTIONS = 64
"""Administrators have slots of their own, so that users cannot keep them out."""
_INNER_FOLDER = "sockets"
"""Folder of gRPC's own sockets, among them the one that requires certificates."""
_LAST_BYTES_SECONDS = 1.0
_ROOT = 0
_ALL: Final = ""
"""Health's name for the whole server."""
_MOST_HEADER_BYTES = 8192
_MOST_PENDING = 8192
_CAUGHT_UP_SECONDS = 60.0
_OWN_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
_CAUGHT_UP: Final = "/mig-agent/CaughtUp"
"""gRPC passes calls on in order, so when this one is answered, all calls before it have reached Python."""
_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.so_reuseport", 0),  # otherwise a second agent would silently share the port
    ("grpc.max_receive_message_length", 1 << 20),  # a Plan with the largest number of requests and the longest texts
    ("grpc.keepalive_time_ms", 60_000),  # a client machine that fails silently ends its Hold
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.server_handshake_timeout_ms", 20_000),  # an idle connection frees its slot after this time
    # Limits of one call's headers; our clients send less than 1 KiB. Above the first gRPC refuses at random.
    ("grpc.max_metadata_size", _MOST_HEADER_BYTES),
    ("grpc.absolute_max_metadata_size", _MOST_HEADER_BYTES),
    ("grpc.http.tarpit", 0),  # otherwise gRPC delays refusals by up to a second
    # Calls that wait for Python. Above it gRPC cancels without a message, so the agent's own limits must be lower.
    ("grpc.server.max_pending_requests", _MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
    ("grpc.server_max_unrequested_time_in_server", 600),
)

_MOST_PROBES = 500
"""Limit of concurrent calls of health and reflection."""
_MOST_AT_ONCE = 1000
"""Limit of one user's calls that begin or end, beside those that stay open."""
_MOST_REQUEST_BYTES = 16 << 20
"""Limit of request bytes of one user's open calls."""
_MOST_OF_ONE_USER = 256
"""Limit of one user's connections to the Unix sockets. One connection is enough for a thousand calls."""

Handlers: TypeAlias = "Mapping[str, grpc.RpcMethodHandler[Any, Any]]"


class _DeferredService(grpc.GenericRpcHandler):
    """Answers UNAVAILABLE for the service's methods until they are set."""

    def __init__(self, probes: Handlers) -> None:
        """`probes` are the handlers of health and reflection, by the full names of their methods."""
        self._handlers: Handlers | None = None
        self._probes = probes

    def open(self, handlers: Handlers) -> None:
        """Answer the service's methods with these handlers from now on."""
        self._handlers = handlers

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of a call."""
        if handler_call_details.method == _CAUGHT_UP:
            return grpc.unary_unary_rpc_method_handler(_nothing)
        path = str(handler_call_details.method).lstrip("/")
        service, _, method = path.partition("/")
        if service != SERVICE.full_name:
            return self._probes.get(path)
        if self._handlers is None:
            return grpc.unary_unary_rpc_method_handler(_not_yet)
        return self._handlers.get(method)


async def _nothing(_request: bytes, _context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return b""


async def _not_yet(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "cannot answer yet: the agent is starting")
    raise AssertionError("abort returns never")


class _Server:
    """One gRPC server with health and reflection; its service is set later."""

    def __init__(
        self,
        name: str,
        most_calls: int,
        folder: PrivateDir,
        limits: ConnectionLimits,
        *,
        users: Users,
        ends: ConnectionEnds,
    ) -> None:
        """`name` is the name of its socket in the folder."""
        self._name = name
        self._folder = folder
        self._limits = limits
        self._names = users
        self._ends = ends
        self._inner: set[str] = set()
        self.relays: list[Relay] = []
        self._remote: list[Relay] = []
        """The relays for connections with certificates."""
        self.reloader: CertificateReloader | None = None
        """None without certificates."""
        stay_open = most_open(most_calls) + _MOST_PROBES
        self._usages = Usages(
            Limits(calls=stay_open + _MOST_AT_ONCE, unseen_calls=_MOST_AT_ONCE, request_bytes=_MOST_REQUEST_BYTES),
            self._caught_up,
        )
        self._own_channel: grpc.aio.Channel | None = None
        # A connection may have as many calls as may be open in all, or a client's library would hold them back.
        self.grpc = grpc.aio.server(options=(*_OPTIONS, ("grpc.max_concurrent_streams", stay_open + _MOST_AT_ONCE)))
        self.health = health.HealthServicer()
        reflected = reflection.aio.ReflectionServicer((SERVICE.full_name, HEALTH.full_name, REFLECTION.full_name))
        self.deferred = _DeferredService(probe_handlers(self.health, reflected, _MOST_PROBES))
        self.grpc.add_generic_rpc_handlers((self.deferred,))

    def relay_from(self, address: UnixAddress, owned: OwnedSocket, mode: int, group: str) -> Relay:
        """Serve connections to this Unix socket. Raises ConfigError."""
        inner = self._inner_port(address, self._name, None)
        return self._relay(owned.listen(mode, group), inner, peer_of, self._limits, usages=self._usages)

    def relay_tcp(self, address: TcpAddress, certificates: Certificates, limits: ConnectionLimits) -> TcpAddress:
        """Serve connections to this port with certificates; return the address with its port. Raises ConfigError."""
        inner = self._inner_port(address, f"{self._name}-tls", certificates)
        if self.reloader is None:
            self.reloader = CertificateReloader(certificates, self.drop_remote)
        listeners, port = tcp.listen(address.host, address.port)
        for listener in listeners:
            self._remote.append(self._relay(listener, inner, tcp.client_of, limits, before=self.reloader.check))
        return TcpAddress(address.host, port)

    def drop_remote(self) -> None:
        """Close all TCP connections: clients that reconnect show a certificate again; held leases wait for that."""
        for relay in self._remote:
            relay.drop()

    def _inner_port(self, address: Address, name: str, certificates: Certificates | None) -> str:
        """Return gRPC's own socket for relays, plain or with certificates. `address` is for messages."""
        inner = self._folder.path_of(name)
        if inner not in self._inner:
            self._inner.add(inner)
            # A killed agent's socket is taken over: the state directory is locked by now.
            if certificates is None:
                _add_port(address, lambda: self.grpc.add_insecure_port(f"unix:{inner}"))
            else:
                _add_port(address, lambda: self.grpc.add_secure_port(f"unix:{inner}", certificates.credentials()))
        return inner

    def _relay(
        self,
        listener: socket.socket,
        inner: str,
        who: Callable[[socket.socket], Peer],
        limits: ConnectionLimits,
        *,
        before: Callable[[], Awaitable[None]] | None = None,
        usages: Usages | None = None,
    ) -> Relay:
        names, ends = self._names, self._ends
        relay = Relay(listener, inner, who=who, limits=limits, users=names, ends=ends, before=before, usages=usages)
        self.relays.append(relay)
        return relay

    async def _caught_up(self) -> bool:
        """Return True once all calls that had reached gRPC have been passed on to Python; False if asking failed."""
        if self._own_channel is None:
            self._own_channel = grpc.aio.insecure_channel(f"unix:{self._folder.path_of(self._name)}", _OWN_OPTIONS)
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = self._own_channel.unary_unary(_CAUGHT_UP)
        try:
            await call(b"", timeout=_CAUGHT_UP_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def start(self) -> None:
        """Listen without serving yet."""
        await self.set_serving(SERVICE.full_name, _ALL, serving=False)
        await self.grpc.start()
        for relay in self.relays:
            relay.start()
        if self.reloader is not None:
            self.reloader.start()

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls, and end open ones after the grace period."""
        if self.reloader is not None:
            self.reloader.stop()
        for relay in self.relays:
            relay.stop_accepting()
        # gRPC waits for clients that do not read what was sent to them, which may be for ever.
        stopping = asyncio.ensure_future(self.grpc.stop(grace_seconds))
        await asyncio.wait({stopping}, timeout=grace_seconds + _LAST_BYTES_SECONDS)
        for relay in self.relays:
            await relay.close(_LAST_BYTES_SECONDS)
        self._usages.close()
        if self._own_channel is not None:
            await self._own_channel.close()
        await asyncio.wait({stopping}, timeout=_LAST_BYTES_SECONDS)

    async def set_serving(self, *names: str, serving: bool) -> None:
        """Set the health status of these names: the service, or "" for all functions of the agent."""
        kind = health_pb2.HealthCheckResponse.ServingStatus
        status = kind.Value("SERVING" if serving else "NOT_SERVING")
        for name in names:
            await self.health.set(name, status)


class Servers:
    """Both servers, from taking their addresses to releasing them.

    They listen from the start, so that probes see NOT_SERVING instead of nothing, and serve after `open`.
    """

    def __init__(self, settings: Settings, search: HolderSearch | None = None) -> None:
        """Take the addresses; `search` finds holders of their locks.

        Raises LockedError if another process has an address, ConfigError if one cannot be used.
        """
        self._sockets = ExitStack()
        self._search = search or HolderSearch()
        self.user_names = Users()
        """Names of users who have connected to a Unix socket."""
        self.addresses: list[str] = []
        """Where users connect, with the TCP port that the kernel chose."""
        self.connection_ends = ConnectionEnds()
        """How connections ended."""
        self._closing = False
        self.sockets: list[WatchedSocket] = []
        """The Unix sockets to watch."""
        self._user_sockets: list[WatchedSocket] = []
        """Those among them that users connect to."""
        with ExitStack() as undo:
            undo.callback(self._sockets.close)
            folder = PrivateDir.open(_inner_folder(settings))
            self._sockets.callback(folder.close)
            calls, names, ends = settings.max_calls, self.user_names, self.connection_ends
            local, remote = _limits(settings)
            self._users = _Server("users", calls, folder, local, users=names, ends=ends)
            apart = ConnectionLimits(_ADMIN_CONNECTIONS)
            self._admins = _Server("admins", calls, folder, apart, users=names, ends=ends)
            certificates = configured_certificates(settings)
            for address in settings.listen:
                if isinstance(address, UnixAddress):
                    bound = self._bind_unix(self._users, address, settings.socket_mode, settings.socket_group)
                    self._user_sockets.append(bound)
                    self.addresses.append(str(address))
                else:
                    self.addresses.append(str(_bind_tcp(self._users, address, certificates, remote)))
            self._bind_unix(self._admins, settings.admin_address, _ADMIN_MODE, "")
            undo.pop_all()

    async def start(self) -> None:
        """Listen without serving yet."""
        for server in (self._users, self._admins):
            await server.start()

    async def open(self, users: Handlers, admins: Handlers) -> None:
        """Serve; health reports only the service as serving until `ready`."""
        self._users.deferred.open(users)
        self._admins.deferred.open(admins)
        for server in (self._users, self._admins):
            await server.set_serving(SERVICE.full_name, serving=True)

    async def ready(self, is_ready: bool) -> None:  # noqa: FBT001 -- the only argument of a setter
        """Set whether all functions of the agent are available, such as devices for pods."""
        if not self._closing:
            for server in (self._users, self._admins):
                await server.set_serving(_ALL, serving=is_ready)

    def drop_remote(self) -> None:
        """Close all TCP connections, so that clients come back and get the roles that their certificates have now."""
        self._users.drop_remote()

    async def check_certificates(self) -> None:
        """Take up renewed certificates now, if there are any."""
        if self._users.reloader is not None:
            await self._users.reloader.check()

    def change_access(self, mode: int, group: str) -> None:
        """Give the users' Unix sockets other permissions. Raises ConfigError, and then all have the former ones."""
        with ExitStack() as undo:
            for each in self._user_sockets:
                undo.callback(each.change_access(mode, group))
            undo.pop_all()

    def on_renewal(self, report: Callable[[Renewal], None]) -> None:
        """Report renewed certificates, and failures to renew them, to this function instead of the log."""
        if self._users.reloader is not None:
            self._users.reloader.report_to(report)

    async def set_not_serving(self) -> None:
        """Set health to NOT_SERVING, so that probes and load balancers turn away before the sockets are gone."""
        self._closing = True
        for server in (self._users, self._admins):
            await server.set_serving(SERVICE.full_name, _ALL, serving=False)

    async def stop(self, grace_seconds: float) -> None:
        """Take no new calls, and end open ones after the grace period."""
        await asyncio.gather(*(server.stop(grace_seconds) for server in (self._users, self._admins)))
        self._sockets.close()

    def _bind_unix(self, server: _Server, address: UnixAddress, mode: int, group: str) -> WatchedSocket:
        owned = OwnedSocket.own(address.path, self._search)
        self._sockets.callback(owned.close)
        relay = server.relay_from(address, owned, mode, group)
        self.sockets.append(WatchedSocket(owned, relay, mode, group))
        return self.sockets[-1]


def _inner_folder(settings: Settings) -> Path:
    return settings.state_dir / _INNER_FOLDER


def _limits(settings: Settings) -> tuple[ConnectionLimits, ConnectionLimits]:
    """Return separate limits for connections to Unix sockets and over TCP, so that neither takes the other's slots."""
    kinds = 1 + any(isinstance(address, TcpAddress) for address in settings.listen)
    most = max(min(settings.max_connections, allow_open_files() // kinds), 1)
    half = max(most // 2, 1)
    # Root and the agent's own user could stop it anyway.
    local = ConnectionLimits(most, most_of_one=min(half, _MOST_OF_ONE_USER), unbounded=(_ROOT, own_uid()))
    return local, ConnectionLimits(most, most_of_one=half)


def _bind_tcp(
    server: _Server, address: TcpAddress, certificates: Certificates | None, limits: ConnectionLimits
) -> TcpAddress:
    if certificates is None:
        raise ConfigError(f"cannot listen on {address} without certificates")
    return server.relay_tcp(address, certificates, limits)


def _add_port(address: Address, add: Callable[[], int]) -> int:
    try:
        return add()
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {_why(error)}", "give another address") from error


def _why(error: RuntimeError) -> str:
    """Return in short why a port is not available."""
    text = str(error)
    return "the address is in use" if "in use" in text else text.partition(";")[0].strip() or "it failed"
