"""The agent as a process: settings, locks, hardware, servers, signals and logs put together around the manager."""
