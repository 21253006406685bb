"""What the node can give as numbers in the node object's status, where no device plugin serves it."""
