"""The engine: the single writer of hardware and ledger. `manager` is its public API."""
