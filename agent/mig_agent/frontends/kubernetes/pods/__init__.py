"""Pods that leases are for: whether they live, by the kubelet's list and by the API server."""
