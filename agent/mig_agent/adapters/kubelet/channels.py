"""Connections to the kubelet's sockets, and its errors in words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc

from mig_agent.core.texts import visible

_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.initial_reconnect_backoff_ms", 100),  # a kubelet that restarts is back within seconds
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 16 << 20),  # as the kubelet's own clients: a node has many pods
    ("grpc.use_local_subchannel_pool", 1),  # a new channel to a new kubelet never waits for the old one's back-off
)


def channel_to(socket: Path) -> grpc.aio.Channel:
    """A channel to a Unix socket, connected when first used."""
    return grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)


def why(error: grpc.aio.AioRpcError, socket: Path) -> str:
    """Why a call failed, in short."""
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        if not socket.exists():
            return f"there is no {socket}; is the kubelet running, and its folder mounted?"
        return f"nobody answers on {socket}; is the kubelet running?"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "the kubelet did not answer in time"
    return f"{error.code().name}: {one_line(error.details() or 'no details')}"


def one_line(text: str, most: int = 300) -> str:
    """A text of somebody else's on one line, not longer than so many characters."""
    clean = visible(" ".join(text.split()))
    return clean if len(clean) <= most else clean[: most - 3] + "..."
