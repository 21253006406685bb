"""One connection to the API server: requests and answers in JSON, made in whatever thread calls.

Nothing here waits for ever: each call has a deadline that a server which trickles cannot stretch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import tenacity

from mig_agent import __version__
from mig_agent.adapters.failpoints import FAILPOINTS
from mig_agent.adapters.kubeapi.credentials import Credentials, find_credentials
from mig_agent.adapters.kubeapi.objects import NO_ANSWER, Json, KubeApiError
from mig_agent.adapters.kubeapi.patches import MERGE_PATCH, STRATEGIC_MERGE_PATCH, Patch

CONNECT_SECONDS: Final = 3.0
READ_SECONDS: Final = 8.0
"""Read timeout between two pieces of an answer."""
CALL_SECONDS: Final = 12.0
"""Time limit of a whole call, its retries included."""
_TRIES: Final = 3
_PIECE_BYTES: Final = 1 << 16
_MOST_BYTES: Final = 8 << 20
"""Limit of an object's size; etcd stores none larger than 1.5 MiB."""
_MOST_WORDS: Final = 500
_ERROR: Final = 400
_JSON_BODY: Final = "application/json"
RESOURCE_SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"


class ApiServer:
    """Sends requests to the API server and decodes its JSON. Thread-safe. Every method raises KubeApiError."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._pool = credentials.pool

    @classmethod
    def connect(cls, kubeconfig: Path | None) -> ApiServer:
        """Return a connection by a kubeconfig, or as the agent's own pod; sends nothing. Raises ConfigError."""
        return cls(find_credentials(kubeconfig))

    @property
    def address(self) -> str:
        """URL of the API server: `https://10.96.0.1:443`."""
        return self._credentials.address

    def read(self, path: str, query: Mapping[str, str] | None = None, most_bytes: int | None = None) -> Json:
        """Return an object or a list. Retryable failures are retried within CALL_SECONDS."""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(_TRIES) | tenacity.stop_after_delay(CALL_SECONDS - READ_SECONDS),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
            retry=tenacity.retry_if_exception(lambda error: isinstance(error, KubeApiError) and error.retryable),
            reraise=True,
        )
        return retrying(self._read_once, path, query, most_bytes or _MOST_BYTES)

    def _read_once(self, path: str, query: Mapping[str, str] | None, most_bytes: int) -> Json:
        with self._explained(f"read {path}"):
            url = self._url(path, query)
            answer = self._pool.request("GET", url, headers=self._headers(), timeout=_timeout(), preload_content=False)
            return _json(f"read {path}", answer, most_bytes)

    @contextlib.contextmanager
    def open_watch(self, path: str, query: Mapping[str, str], silence: float) -> Iterator[Any]:
        """Open a watch and yield the response, to be read line by line; `silence` seconds without a byte end it."""
        with self._explained(f"watch {path}"):
            answer = self._pool.request(
                "GET",
                self._url(path, query),
                headers=self._headers(),
                timeout=_timeout(silence),
                preload_content=False,
            )
            try:
                if answer.status >= _ERROR:
                    _json(f"watch {path}", answer)
                yield answer
            finally:
                answer.close()  # the rest of the stream is of no use to another call

    def patch_status(self, node: str, patch: Patch, kind: str) -> None:
        """Patch the status of a node."""
        with FAILPOINTS.around("node-status"):
            self._send("PATCH", f"/api/v1/nodes/{node}/status", patch, kind)

    def patch_node(self, node: str, patch: Patch) -> None:
        """Patch labels and annotations of a node."""
        with FAILPOINTS.around("node-labels"):
            self._send("PATCH", f"/api/v1/nodes/{node}", patch, MERGE_PATCH)

    def create_event(self, namespace: str, event: Json) -> None:
        """Create an Event."""
        with FAILPOINTS.around("event"):
            self._send("POST", f"/api/v1/namespaces/{namespace}/events", dict(event), "application/json")

    def patch_event(self, namespace: str, name: str, patch: Patch) -> None:
        """Patch an Event."""
        with FAILPOINTS.around("event-again"):
            self._send("PATCH", f"/api/v1/namespaces/{namespace}/events/{name}", patch, STRATEGIC_MERGE_PATCH)

    def create_slice(self, body: Json) -> Json:
        """Create a ResourceSlice; return it as the API server stored it."""
        with FAILPOINTS.around("resource-slice"):
            return self._send("POST", RESOURCE_SLICES, dict(body), _JSON_BODY)

    def replace_slice(self, name: str, body: Json) -> Json:
        """Replace a ResourceSlice; return it as the API server stored it."""
        with FAILPOINTS.around("resource-slice-again"):
            return self._send("PUT", f"{RESOURCE_SLICES}/{name}", dict(body), _JSON_BODY)

    def delete_slice(self, name: str) -> None:
        """Delete a ResourceSlice."""
        with FAILPOINTS.around("resource-slice-removal"):
            self._send("DELETE", f"{RESOURCE_SLICES}/{name}", {}, _JSON_BODY)

    def delete_daemon_set(self, namespace: str, name: str) -> None:
        """Start deleting a DaemonSet; the object goes after its pods."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground"}
        with FAILPOINTS.around("daemon-set"):
            self._send("DELETE", f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}", body, "application/json")

    def _send(self, method: str, path: str, body: Patch, kind: str) -> Json:
        what = f"{_VERBS[method]} {path}"
        with self._explained(what):
            answer = self._pool.request(
                method,
                self._url(path, None),
                body=json.dumps(body),
                headers={**self._headers(), "Content-Type": kind},
                timeout=_timeout(),
                preload_content=False,
            )
            return _json(what, answer)

    def _url(self, path: str, query: Mapping[str, str] | None) -> str:
        return f"{self.address}{path}{'?' + urlencode(query) if query else ''}"

    def _headers(self) -> dict[str, str]:
        """Return the headers with the current token: a service account's token changes on disk."""
        own = {"Accept": "application/json", "User-Agent": f"mig-agent/{__version__}"}
        return {**own, **self._credentials.headers()}

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Turn any other error into a KubeApiError that names the failed call."""
        try:
            yield
        except KubeApiError:
            raise
        except Exception as error:  # urllib3's, ssl's, and those of readers of tokens
            words = str(error) or type(error).__name__
            raise KubeApiError(f"cannot {what} at {self.address}: {words[:_MOST_WORDS]}", NO_ANSWER) from error


_VERBS: Final = {"PATCH": "change", "PUT": "replace", "POST": "create in", "DELETE": "delete"}


def _timeout(silence: float = READ_SECONDS) -> Any:  # noqa: ANN401 -- urllib3 has a class for it
    from urllib3 import Timeout  # noqa: PLC0415 -- an agent without Kubernetes may not have it

    return Timeout(connect=CONNECT_SECONDS, read=silence)


def _json(what: str, answer: Any, most_bytes: int | None = None) -> Json:  # noqa: ANN401 -- urllib3's response
    """Return the body if the server did what was asked, and free the connection for the next call."""
    try:
        body = _body(what, answer, most_bytes or _MOST_BYTES)
    except BaseException:
        answer.close()
        raise
    answer.release_conn()
    try:
        found = json.loads(body) if body else {}
    except ValueError:
        found = {"message": body[:_MOST_WORDS].decode(errors="replace")}
        if answer.status < _ERROR:
            raise KubeApiError(f"cannot {what}: the answer is no JSON", NO_ANSWER) from None
    if answer.status >= _ERROR:
        message = str(found.get("message") or answer.reason) if isinstance(found, dict) else str(answer.reason)
        raise KubeApiError(f"cannot {what}: {message[:_MOST_WORDS]} ({answer.status})", answer.status)
    if not isinstance(found, dict):
        raise KubeApiError(f"cannot {what}: the answer is no object", NO_ANSWER)
    return found


def pieces_of(answer: Any) -> Iterator[bytes]:  # noqa: ANN401 -- urllib3's response
    """Yield the body as it arrives, so that a server that trickles can be told from one that answers at once."""
    while piece := answer.read1(_PIECE_BYTES):
        yield piece


def _body(what: str, answer: Any, most_bytes: int) -> bytes:  # noqa: ANN401 -- urllib3's response
    began, pieces, size = time.monotonic(), [], 0
    for piece in pieces_of(answer):
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes or time.monotonic() - began > CALL_SECONDS:
            raise KubeApiError(f"cannot {what}: the answer does not come to an end", NO_ANSWER)
    return b"".join(pieces)
