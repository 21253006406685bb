"""The agent's node object: label and pauses that switch it off, its condition, Events, feature labels, uninstall."""
