"""Runs a program in a container of a pod, as `kubectl exec` does, over a websocket of the `kubernetes` library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from mig_agent.adapters.kubeapi.credentials import Credentials
from mig_agent.adapters.kubeapi.objects import NO_ANSWER, KubeApiError

_ERROR_CHANNEL = 3
_MOST_WORDS = 500
NOT_STARTED = -1
"""Exit code of a program that the container does not have, or that could not be started."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A program that has ended in a pod."""

    code: int
    """The command's exit code, or NOT_STARTED."""
    stdout: str
    stderr: str
    message: str
    """Why it failed, as Kubernetes words it; empty if it did not."""


def exec_in_pod(
    credentials: Credentials, *, namespace: str, pod: str, container: str, command: Sequence[str], seconds: float
) -> Finished:
    """Run a program in a pod's container without input, and return how it ended. Raises KubeApiError.

    Once connected it takes at most `seconds`. To connect may take longer where the API server hangs, so call it in a
    daemonic thread.
    """
    from kubernetes.stream.ws_client import WSClient  # noqa: PLC0415 -- see credentials

    query = [("command", each) for each in command]
    query += [("container", container), ("stdin", "false"), ("stdout", "true"), ("stderr", "true"), ("tty", "false")]
    path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}/exec"
    what = f"exec in pod {namespace}/{pod}"
    headers = {name.lower(): value for name, value in credentials.headers().items()}
    try:
        client: Any = WSClient(  # type: ignore[no-untyped-call] # it has no types
            credentials.configuration,
            f"ws{credentials.address.removeprefix('http')}{path}?{urlencode(query)}",
            headers,
            capture_all=False,
            binary=True,  # its texts are cut within characters
        )
        try:
            return _finished(client, what, seconds)
        finally:
            client.close(timeout=0)
    except KubeApiError:
        raise
    except Exception as error:  # the websocket library's, ssl's, and those of programs that give tokens
        status, words = _refusal(error)
        raise KubeApiError(f"cannot {what}: {words[:_MOST_WORDS]}", status) from error


def _finished(client: Any, what: str, seconds: float) -> Finished:  # noqa: ANN401 -- the library has no types
    client.run_forever(timeout=seconds)
    if client.is_open():
        raise KubeApiError(f"cannot {what}: no answer within {seconds:g} s", NO_ANSWER)
    out, err, ended = (client.read_channel(each) for each in (1, 2, _ERROR_CHANNEL))
    stdout, stderr = (each.decode(errors="replace") for each in (out, err))
    if not ended:
        raise KubeApiError(f"cannot {what}: the connection was lost", NO_ANSWER)
    code, message = _ending(ended)
    return Finished(code, stdout, stderr, message)


def _ending(status: bytes) -> tuple[int, str]:
    """Return the exit code and the message of the Status object that ends an exec."""
    found = json.loads(status)
    if found.get("status") == "Success":
        return 0, ""
    message = str(found.get("message", "it failed"))
    for each in (found.get("details") or {}).get("causes") or ():
        if each.get("reason") == "ExitCode" and str(each.get("message", "")).isdecimal():
            return int(each["message"]), message
    return NOT_STARTED, message


def _refusal(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the message of what the API server answered in place of a websocket."""
    status, body = getattr(error, "status_code", NO_ANSWER), getattr(error, "resp_body", None)
    words = str(error) or type(error).__name__
    if body:
        try:
            words = str(json.loads(body)["message"])
        except (ValueError, LookupError, TypeError):
            words = bytes(body).decode(errors="replace") if isinstance(body, bytes | bytearray) else str(body)
    return (status if isinstance(status, int) else NO_ANSWER), words
