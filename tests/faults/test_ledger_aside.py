"""A damaged ledger that is being set aside when the process dies."""

from __future__ import annotations

import shutil
from pathlib import Path

from mig_agent.adapters.ledger import LEDGER_FILE
from support.engine import engine, killed, start


async def test_the_log_of_a_ledger_that_was_set_aside_is_kept_with_it(tmp_path: Path) -> None:
    """SQLite throws a log away that it finds beside an empty file."""
    node = await start(tmp_path, "a100-40gb")
    await node.acquire("1g.5gb")
    log = tmp_path / f"{LEDGER_FILE}-wal"
    shutil.copy(log, tmp_path / "log")
    await killed(node)
    (tmp_path / LEDGER_FILE).rename(tmp_path / f"{LEDGER_FILE}.damaged-1")
    shutil.copy(tmp_path / "log", log)
    async with engine(tmp_path) as after:
        assert not after.leases
        assert after.layout() == "6:1g.5gb=foreign"
    assert (tmp_path / f"{LEDGER_FILE}.damaged-1-wal").read_bytes() == (tmp_path / "log").read_bytes()
