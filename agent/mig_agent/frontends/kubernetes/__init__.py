"""Kubernetes: the device plugin, the node object, node resources and pods, side by side."""
