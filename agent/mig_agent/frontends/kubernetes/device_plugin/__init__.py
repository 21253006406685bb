"""The kubelet's device plugin: MIG instances as extended resources of this node.

The kubelet counts abstract ids and knows nothing of slices. So an id represents one device of a kind, the planner
chooses the slot when a container is about to start, and the number of ids follows what can still be created.
"""
