"""The placement benchmark: the agent's own planner beside the exact optimum and what others do."""
