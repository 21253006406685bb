"""Dynamic Resource Allocation: publishes the slots of the node, and serves the claims that the scheduler allocated."""
