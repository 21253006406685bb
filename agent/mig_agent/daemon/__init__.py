"""The agent as a process: settings, locks, hardware, servers, signals and logs around the manager."""
