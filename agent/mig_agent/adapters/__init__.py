"""Doors to everything outside: the driver, the ledger, the machine, sockets, the clock."""
