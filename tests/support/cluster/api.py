"""A small client of the API server, over the socket that leads into the node's network namespace.

Objects are the JSON that Kubernetes documents, as dicts.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]

_TIMEOUT_SECONDS = 30.0
_ERRORS_FROM = 400


class ApiError(Exception):
    """What the API server refused; `status` is HTTP's."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status}: {words}")
        self.status = status


class _Connection(http.client.HTTPSConnection):
    """To a Unix socket."""

    def __init__(self, path: Path, context: ssl.SSLContext, timeout: float) -> None:
        super().__init__("127.0.0.1", timeout=timeout, context=context)
        self._path = path
        self._tls = context

    def connect(self) -> None:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.settimeout(self.timeout)
        try:
            plain.connect(str(self._path))
            self.sock = self._tls.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


class Api:
    """Calls with one user's token; safe to use from several threads (each call has a connection of its own)."""

    def __init__(self, path: Path, authority: Path, token: str) -> None:
        self._path = path
        self._context = ssl.create_default_context(cafile=str(authority))
        self._token = token

    @classmethod
    def of(cls, path: Path, kubeconfig: Path) -> Api:
        """As the user of a kubeconfig that `credentials` wrote."""
        config = json.loads(kubeconfig.read_text())
        authority = Path(config["clusters"][0]["cluster"]["certificate-authority"])
        return cls(path, authority, config["users"][0]["user"]["token"])

    def using(self, token: str) -> Api:
        """The same with somebody else's token."""
        other = Api.__new__(Api)
        other._path, other._context, other._token = self._path, self._context, token
        return other

    def call(self, method: str, path: str, body: object = None, *, kind: str = "application/json", **query: str) -> Any:
        """The answer, decoded (text where it is not JSON). Raises ApiError, and OSError where nobody answers."""
        connection, response = self._send(method, path, body, kind, query, _TIMEOUT_SECONDS)
        try:
            data = response.read()
        finally:
            connection.close()
        if response.status >= _ERRORS_FROM:
            raise ApiError(response.status, _words(data))
        if response.getheader("Content-Type", "").startswith("application/json"):
            return json.loads(data)
        return data.decode()

    def get(self, path: str, **query: str) -> Json:
        answer: Json = self.call("GET", path, **query)
        return answer

    def items(self, path: str, **query: str) -> list[Json]:
        """Of a list."""
        found: list[Json] = self.get(path, **query)["items"]
        return found

    def find(self, path: str) -> Json | None:
        """None where there is no such object."""
        try:
            return self.get(path)
        except ApiError as error:
            if error.status == http.client.NOT_FOUND:
                return None
            raise

    def create(self, path: str, body: Json) -> Json:
        answer: Json = self.call("POST", path, body)
        return answer

    def merge(self, path: str, body: Json) -> Json:
        """A merge patch: what is None in it goes."""
        answer: Json = self.call("PATCH", path, body, kind="application/merge-patch+json")
        return answer

    def delete(self, path: str, **query: str) -> None:
        """Gone or going; silent where there is no such object."""
        try:
            self.call("DELETE", path, **query)
        except ApiError as error:
            if error.status != http.client.NOT_FOUND:
                raise

    def watch(self, path: str, *, seconds: float, **query: str) -> Iterator[tuple[str, Json]]:
        """Changes (type and object) as they come, from now on or from `resourceVersion`; ends after `seconds`."""
        query |= {"watch": "true", "timeoutSeconds": str(int(seconds))}
        connection, response = self._send("GET", path, None, "", query, seconds + _TIMEOUT_SECONDS)
        try:
            if response.status >= _ERRORS_FROM:
                raise ApiError(response.status, _words(response.read()))
            for line in response:
                change = json.loads(line)
                yield change["type"], change["object"]
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: object, kind: str, query: Mapping[str, str], timeout: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        if query:
            path = f"{path}?{urllib.parse.urlencode(query)}"
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = kind
        connection = _Connection(self._path, self._context, timeout)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


def _words(data: bytes) -> str:
    try:
        words: str = json.loads(data)["message"]
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")
    return words
