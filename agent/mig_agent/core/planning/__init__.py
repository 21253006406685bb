"""The planner: which profile, which GPU, which slices, and which idle instances have to go. Pure."""
