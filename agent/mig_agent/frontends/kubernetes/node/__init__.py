"""The agent on its node object: the switch by label, pauses, the condition, Events, feature labels, a clean leaving."""
