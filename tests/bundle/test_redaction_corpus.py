"""A corpus of what people put into names, reasons, arguments and logs: secrets go, and what a report is about stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mig_agent.bundle.redaction import LEFT_OUT, redact, redact_json

S = "s3cr3tVALUE"
"""Stands for a secret of no recognizable form."""
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PEM = "MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn"
AWS_ID, AWS_KEY = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"

SECRETS = [
    (f"Authorization: Basic {S}", S),
    (f"authorization: bearer {S}", S),
    (f"Authorization: Token {S}", S),
    (f"curl -H 'Authorization: Basic {S}=='", S),
    (f"Proxy-Authorization: Basic {S}", S),
    (f"X-Api-Key: {S}", S),
    (f"Cookie: session={S}; other={S}", S),
    (f"Set-Cookie: sid={S}; Path=/", S),
    ("password: 'a b c'", "b c"),
    ('password: "a b c"', "b c"),
    ('{"password": "a b c", "user": "bob"}', "b c"),
    (r'{"password": "a\"b c"}', "b c"),
    ("--password 'a b c' --user bob", "b c"),
    ('--db-password="a b c"', "b c"),
    (f"DB_PASSWORD={S}", S),
    (f"PGPASSWORD={S} psql", S),
    (f"MYSQL_PWD={S}", S),
    (f"passphrase = {S}", S),
    (f"psql postgresql://alice:{S}@db.example.org/x", S),
    (f"https://{S}@github.com/a/b.git", S),
    (f"redis://:{S}@cache:6379/0", S),
    (f"git clone https://alice:{S}%40x@host/repo", S),
    (f"PRIVATE_KEY={S}", S),
    (f"SSH_PRIVATE_KEY: {S}", S),
    (f"private-key = {S}", S),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{PEM}\n-----END RSA PRIVATE KEY-----", PEM),
    (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{PEM}", PEM),
    (f"KEY='-----BEGIN ENCRYPTED PRIVATE KEY-----\\n{PEM}\\n-----END ENCRYPTED PRIVATE KEY-----'", PEM),
    (f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n{PEM}\n-----END PGP PRIVATE KEY BLOCK-----", PEM),
    (f"aws {AWS_ID} is there", AWS_ID),
    (f"aws_secret_access_key = {AWS_KEY}", AWS_KEY),
    (f"AWS_SECRET_ACCESS_KEY={AWS_KEY}", AWS_KEY),
    (f"AWS_SESSION_TOKEN={S}", S),
    ("ASIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE"),
    (f"failed with {JWT} in it", JWT[-20:]),
    (f"https://host/path?a=1&token={S}&b=2", S),
    (f"https://host/path?access_token={S}", S),
    (f"https://host/path?X-Amz-Signature={S}&x=1", S),
    (f"https://blob/x?sig={S}&se=2", S),
    (f"https://host/?api_key={S}#frag", S),
    (f"python train.py --token {S} --gpu 0", S),
    (f"--hf-token={S}", S),
    (f"--api-key {S}", S),
    (f"--secret {S}", S),
    (f"wandb login --key {S}", S),
    (f"curl -u alice:{S} https://host", S),
    (f"curl --user alice:{S} https://host", S),
    (f"mysql -uroot -p{S} db", S),
    (f"sshpass -p {S} ssh host", S),
    ("hf_abcdefghijklmnopqrstuvwxyzABCDEF12", "hf_abcdefghijkl"),
    ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_abcdef"),
    ("github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz", "github_pat_11"),
    ("glpat-abcdefghij0123456789", "glpat-abc"),
    ("xoxb-123456789012-abcdefghijkl", "xoxb-123"),
    ("sk-proj-abcdefghijklmnopqrstuvwx", "sk-proj-abc"),
    ("AIzaSyA1234567890abcdefghijklmnopqrstuv", "AIzaSyA123"),
    (f"lease token {'0123456789abcdef' * 4}", "0123456789abcdef"),
    (f"WANDB_API_KEY={S} HF_TOKEN={S} python train.py", S),
    (f"export SECRET_KEY='{S} {S}'", S),
    (f"client_secret: {S}", S),
    (f"credential={S}", S),
    (f'"token":"{S}"', S),
    (f"{{'token': '{S}'}}", S),
    (f"token:\n  {S}", S),
    (f'{{"argv": "--password \\"{S} x\\""}}', S),
]
KEPT = [
    "MIG-5ecff54b-fe84-5168-9ef9-6990fda2626c on GPU-844511bf-e0c0-4933-9e05-a0204c8bc88f",
    "MIG-GPU-844511bf-e0c0-4933-9e05-a0204c8bc88f/1/0",
    "lease 81c9fd393c47ec7a of alice ended: nobody held it any more",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    '"sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"',
    "image registry.example.org/train@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "1g.10gb 1g.10gb+me 1c.3g.40gb 7g.80gb on GPU 0, slices 0-3",
    "cannot touch lease 81c9fd393c47ec7a: it takes its token, since you are not who asked for it",
    "the token is not the one of this lease",
    "give the token that came with the lease",
    "tls_key is /etc/mig-agent/tls/server.key (was off)",
    "cannot read the token's key /var/lib/mig-agent/token.key: permission denied",
    "held by python train.py (pid 4711, container 0123456789ab)",
    "settings of unix:///run/mig-agent/mig-agent.sock",
    "https://host.example.org:7400/path?gpu=0&since=7d#x",
    "boot 6d1c3c1e-9d7f-4c4e-8b43-0b0d3b4f7a11, revision 4711",
    "alice@example.org asked for 20G (train-lr-1e-20)",
    "ssh alice@gpu-17 -p 22",
    '2026-11-22T23:02:18+0000 gpu-17 mig-agent[4711]: {"level": "info", "event": "serving"}',
    "--key-file x.pem is there, --user alice --name train --gpu 0",
    "keyboard, monkey, tokenizer: bert, tokenizers=4",
    "a password is asked for at the login",
    "the secretary of the department",
    "slices 0-3 at 12:34:56.789 of 10.0.0.1:7400 and [::1]:7481",
    "pod default/train-0 (uid 0f6a8f7c-7c1b-4c5e-8b1f-9a44f1f2d9aa)",
    "max_tokens: 4096, num_tokens=2048",
    "git commit 8a19da9c0e7f44a1b5d2c3e4f5061728394a5b6c",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=[text[:30] for text, _ in SECRETS])
def test_secrets_are_left_out(text: str, secret: str) -> None:
    for written in (text, f"gpu-17: {text}\nnext line", json.loads(json.dumps(f"lease of {text}"))):
        assert secret not in redact(written), redact(written)
        assert LEFT_OUT in redact(written)
    told = redact_json({"holder": text})
    assert isinstance(told, dict)
    assert secret not in str(told["holder"])


@pytest.mark.parametrize("text", KEPT, ids=[text[:30] for text in KEPT])
def test_the_rest_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(("text", "secret"), SECRETS, ids=[text[:30] for text, _ in SECRETS])
def test_secrets_in_a_log_of_json_lines_are_left_out(text: str, secret: str) -> None:
    line = json.dumps({"event": f"refused {text}", "gpu": "0", "level": "info"})
    shown = redact(line)
    assert json.dumps(secret)[1:-1] not in shown, shown


@given(st.sampled_from(SECRETS), st.text(max_size=30), st.text(max_size=30))
def test_redacting_twice_changes_nothing(case: tuple[str, str], before: str, after: str) -> None:
    once = redact(f"{before} {case[0]} {after}")
    assert redact(once) == once


def test_long_lines_take_no_time() -> None:
    """No pattern may look at a text again and again."""
    for unit in ("a", "--", "password", "eyJ", "https://", "-----BEGIN ", "a:", "'", "key=", "0", "x@", "token "):
        redact(unit * (200_000 // len(unit)))


def test_keys_of_json_that_name_secrets() -> None:
    told = redact_json({"api_key": "x y", "password": "x y", "data": {"private_key": "x y"}, "key": "gpu", "token": ""})
    assert told == {
        "api_key": LEFT_OUT,
        "password": LEFT_OUT,
        "data": {"private_key": LEFT_OUT},
        "key": "gpu",
        "token": "",
    }
