"""Liveness of the pods that have leases, by the kubelet's list and by the API server."""
