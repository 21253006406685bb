"""The kubectl plugin `kubectl mig`: what `migctl status` shows, of all nodes of a cluster."""
