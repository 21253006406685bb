"""The ledger: leases, instances and events in SQLite."""
