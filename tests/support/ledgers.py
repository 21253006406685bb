"""A ledger changed behind the agent's back as though the agent had written it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from mig_agent.adapters.ledger.digest import PUT_HEAD, RunningDigest, read_head


@contextmanager
def rewritten(path: Path) -> Iterator[sqlite3.Connection]:
    """What is executed is one commit; no agent may have the ledger open."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        head = read_head(connection)
        digest = RunningDigest(connection, head.digest)
        connection.execute("BEGIN IMMEDIATE")
        yield connection
        connection.execute(PUT_HEAD, replace(head, number=head.number + 1, digest=digest.value).row())
        connection.execute("COMMIT")
