"""Registration of resources with the kubelet: its folders and sockets, channels to them, and the Register call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast

import grpc

from mig_agent.core.errors import MigAgentError
from mig_agent.core.texts import visible
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2 as pb
from mig_agent.pb.kubelet.deviceplugin.v1beta1 import deviceplugin_pb2_grpc as rpc


class KubeletError(MigAgentError):
    """The kubelet does not answer, or not as expected; the message says what could not be done and why."""


class Identity(NamedTuple):
    """Distinguishes a file from another that has replaced it: inode numbers are reused, the time of change is not."""

    device: int
    inode: int
    changed_ns: int

    @classmethod
    def of(cls, path: Path) -> Identity | None:
        """Return the identity of the file now at the path; None if there is none."""
        try:
            there = path.stat(follow_symlinks=False)
        except OSError:
            return None
        return cls(there.st_dev, there.st_ino, there.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class KubeletPaths:
    """Paths below the kubelet's folder, `/var/lib/kubelet`."""

    folder: Path

    @property
    def plugins(self) -> Path:
        """Folder of the device plugins' sockets; the kubelet empties it when it starts."""
        return self.folder / "device-plugins"

    @property
    def registration(self) -> Path:
        """Socket on which the kubelet accepts registrations; recreated whenever it starts."""
        return self.plugins / "kubelet.sock"

    @property
    def checkpoint(self) -> Path:
        """The kubelet's record of the devices of its pods."""
        return self.plugins / "kubelet_internal_checkpoint"

    @property
    def plugin_registry(self) -> Path:
        """Folder that the kubelet watches for sockets on which plugins register, such as DRA drivers."""
        return self.folder / "plugins_registry"

    def driver_folder(self, driver: str) -> Path:
        """Return the folder of a driver's own sockets."""
        return self.folder / "plugins" / driver

    @property
    def pod_resources(self) -> Path:
        """Socket of the kubelet's pod resources API."""
        return self.folder / "pod-resources" / "kubelet.sock"


_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.initial_reconnect_backoff_ms", 100),  # a kubelet that restarts is back within seconds
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 16 << 20),  # as the kubelet's own clients: a node has many pods
    ("grpc.use_local_subchannel_pool", 1),  # a new channel to a new kubelet never waits for the old one's back-off
)


def channel_to(socket: Path) -> grpc.aio.Channel:
    """Return a channel to a Unix socket, connected on first use."""
    return grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)


def why(error: grpc.aio.AioRpcError, socket: Path) -> str:
    """Return in short why a call failed."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        if not socket.exists():
            return f"there is no {socket}; is the kubelet running, and its folder mounted?"
        return f"nobody answers on {socket}; is the kubelet running?"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the kubelet did not answer in time"
    return f"{error.code().name}: {one_line(error.details() or 'no details')}"


def one_line(text: str, most: int = 300) -> str:
    """Return a foreign text on one line, cut to `most` characters."""
    clean = visible(" ".join(text.split()))
    return clean if len(clean) <= most else clean[: most - 3] + "..."


API_VERSION = "v1beta1"
_SECONDS = 15.0
"""Deadline of a registration, in seconds. The kubelet takes up to 10 s to connect back."""


async def register(paths: KubeletPaths, *, resource: str, socket_name: str, pre_start: bool) -> None:
    """Register a resource that is served on a socket in the plugins' folder. Raises KubeletError."""
    request = pb.RegisterRequest(
        version=API_VERSION,
        endpoint=socket_name,
        resource_name=resource,
        options=pb.DevicePluginOptions(pre_start_required=pre_start),
    )
    async with channel_to(paths.registration) as channel:
        try:
            stub = cast("rpc.RegistrationAsyncStub", rpc.RegistrationStub(channel))
            await stub.Register(request, timeout=_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise KubeletError(f"cannot register {resource}: {why(error, paths.registration)}") from error
