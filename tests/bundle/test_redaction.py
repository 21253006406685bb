"""Nothing that looks like a secret gets through, and what does not stays readable."""

from __future__ import annotations

import json

import pytest

from mig_agent.bundle.redaction import LEFT_OUT, redact, redact_json, settings_json
from mig_agent.config.load import load

TOKEN = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "text",
    [
        f"lease with {TOKEN} ended",
        f"migctl release 81c9 --token {TOKEN[:20]}",
        f"--token={TOKEN[:20]}",
        f'"token": "{TOKEN[:20]}"',
        f"OPENAI_API_KEY={TOKEN[:20]}",
        f"Authorization: Bearer {TOKEN[:20]}",
        f"-----BEGIN EC PRIVATE KEY-----\n{TOKEN[:20]}\n-----END EC PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{TOKEN[:20]}",
        f"DB_PASSWORD: {TOKEN[:20]}",
    ],
)
def test_secrets_are_left_out(text: str) -> None:
    assert TOKEN[:20] not in redact(text)
    assert LEFT_OUT in redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "cannot touch lease 81c9fd393c47ec7a: it takes its token, since you are not who asked for it",
        "held by python train.py (pid 4711, container 0123456789ab)",
        "MIG-5ecff54b-fe84-5168-9ef9-6990fda2626c on GPU-844511bf-e0c0-4933-9e05-a0204c8bc88f",
    ],
)
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


def test_the_id_of_a_request_is_left_out() -> None:
    told = redact_json({"queue": [{"request_id": "abc", "holder": "alice"}], "env": {}, "token": "x"})
    assert told == {"queue": [{"request_id": LEFT_OUT, "holder": "alice"}], "env": {}, "token": LEFT_OUT}


def test_settings_that_are_no_secrets() -> None:
    flags = {"reread": "5s", "simulate": "a100-40gb:1"}
    told = settings_json(load(None, flags, environment={}), flags.keys())
    assert told["reread"] == {"value": "5s", "given": True}
    assert told["simulate"] == {"value": "a100-40gb:1", "given": True}
    assert told["tls_key"] == {"value": "off", "given": False}
    json.dumps(told)
