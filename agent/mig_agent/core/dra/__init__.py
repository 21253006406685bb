"""Dynamic Resource Allocation: what a node publishes as partitionable devices, as pure functions of its view."""
