"""The placement benchmark: compares the agent's planner with the exact optimum and with other policies."""
