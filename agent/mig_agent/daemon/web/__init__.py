"""The web page: what is where, who waits and how long, and what was wasted. Read-only; for this machine alone."""
