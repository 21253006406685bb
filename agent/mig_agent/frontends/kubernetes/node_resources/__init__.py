"""Extended resources as plain numbers in the node object's status, for nodes without a device plugin."""
