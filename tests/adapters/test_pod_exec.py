"""Ends of an exec in a pod, from what Kubernetes sends at its end. The real one is in tests/e2e."""

from __future__ import annotations

import json

import pytest

from mig_agent.adapters.kubeapi import pod_exec
from mig_agent.adapters.kubeapi.credentials import Credentials
from mig_agent.adapters.kubeapi.objects import KubeApiError
from support.webserver import json_of, web_server


@pytest.mark.parametrize(
    ("status", "ending"),
    [
        ({"status": "Success"}, (0, "")),
        (
            {
                "status": "Failure",
                "message": "command terminated with non-zero exit code",
                "details": {"causes": [{"reason": "ExitCode", "message": "4"}]},
            },
            (4, "command terminated with non-zero exit code"),
        ),
        ({"status": "Failure", "message": "executable not found"}, (pod_exec.NOT_STARTED, "executable not found")),
    ],
    ids=["done", "exit code", "not started"],
)
def test_endings(status: dict[str, object], ending: tuple[int, str]) -> None:
    assert pod_exec._ending(json.dumps(status).encode()) == ending


def test_a_refusal_has_the_words_of_the_api_server() -> None:
    from kubernetes.client import Configuration  # noqa: PLC0415 -- a quarter of a second

    with web_server(lambda _asked: json_of({"message": "pods/exec is forbidden"}, 403)) as web:
        credentials = Credentials(
            address=web.address,
            pool=None,
            headers=lambda: {"authorization": "Bearer a-token"},
            configuration=Configuration(),
        )
        with pytest.raises(KubeApiError, match="cannot exec in pod ns/p: pods/exec is forbidden") as caught:
            pod_exec.exec_in_pod(credentials, namespace="ns", pod="p", container="c", command=["a", "b c"], seconds=5)
        assert caught.value.status == 403
        (asked,) = web.asked
    assert asked.path.startswith("/api/v1/namespaces/ns/pods/p/exec?command=a&command=b+c&container=c&")
    assert asked.headers["authorization"] == "Bearer a-token"
