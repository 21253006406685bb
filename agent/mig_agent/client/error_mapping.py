"""Turns failed calls into errors with messages: refusals by their typed details, others by the connection's failure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import grpc

from mig_agent.client.addresses import Address, diagnose
from mig_agent.client.decode import blockers
from mig_agent.client.errors import ClientError, NoAgent, Refused
from mig_agent.pb.migagent.v1 import partition_manager_pb2 as pb

TRAILER = "migagent-refusal-bin"
"""Trailing-metadata key of a refusal's typed details; defined by the API."""

_NEVER_CONNECTED = "failed to connect to all addresses"
_CLOSED = ("Socket closed", "Connection reset", "Broken pipe", "andshake")
"""Errors of a peer that was there but ended the connection during its setup."""


class Dropped(NoAgent):
    """The connection broke after it was, or may have been, established: the call may have been carried out."""


class TooSlow(NoAgent):
    """The agent took the call and did not answer in time; a repeated call would only wait as long again."""


def failure_of(error: grpc.RpcError, address: Address) -> ClientError:
    """Return the error that a failed call means."""
    refused = _refusal(error)
    if refused is not None:
        return refused
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if _NEVER_CONNECTED in details:
            return diagnose(address) or _not_reached(address, _last_error(details))
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
            return Dropped(f"cannot reach the agent at {address}: the connection broke", "it may be back soon")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TooSlow(f"cannot get an answer from the agent at {address} in time", "look at its log; it may hang")
        case code:
            words = details if details.startswith("cannot ") else f"cannot go on: {details or code}"
            old = code is grpc.StatusCode.UNIMPLEMENTED
            return ClientError(words, "the agent may be of another version" if old else "")


def _refusal(error: grpc.RpcError) -> Refused | None:
    # Both kinds of grpc error give pairs; the type stubs know only one.
    pairs = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    for key, value in pairs:
        if key == TRAILER and isinstance(value, bytes):
            detail = pb.RefusalDetail.FromString(value)
            return Refused(
                reason=detail.reason,
                message=detail.message,
                hint=detail.hint,
                retryable=detail.retryable,
                blockers=blockers(detail.blockers),
                explanation=tuple(detail.explanation),
                revision=detail.revision if detail.HasField("revision") else None,
                changed=tuple(detail.changed),
                end_reason=detail.end_reason,
            )
    return None


def _not_reached(address: Address, why: str) -> NoAgent:
    """Return the error of a failed TCP connection; names certificate problems (seen with gRPC 1.74 to 1.85)."""
    if "Hostname Verification Check failed" in why:
        return NoAgent(
            f"cannot trust the agent at {address}: its certificate has another name",
            "give the name that it has: --tls-server-name, MIG_AGENT_TLS_SERVER_NAME, or Tls(server_name=...)",
        )
    if "CERTIFICATE_VERIFY_FAILED" in why:
        reason = why.rpartition("CERTIFICATE_VERIFY_FAILED: ")[2].removesuffix(": OK")
        return NoAgent(
            f"cannot trust the agent at {address}: its certificate is not good ({reason})",
            "is --tls-ca the authority that signed it?",
        )
    if "create security handshaker" in why:
        return NoAgent(
            f"cannot connect to the agent at {address}: TLS cannot use the own certificate and key",
            "do they belong together, and are both PEM?",
        )
    closed = any(words in why for words in _CLOSED)
    if closed and address.path is not None:
        return NoAgent(
            f"cannot reach the agent at {address}: it closed the connection", "it may be back soon; try again"
        )
    hint = "does it accept your certificate? That has to be of its clients' authority, valid, and made for clients"
    return NoAgent(f"cannot reach the agent at {address}: {why}", hint if closed else "")


def _last_error(details: str) -> str:
    return details.rpartition("last error: ")[2] or details
