"""The scale benchmark: one scheduler over many agents."""
