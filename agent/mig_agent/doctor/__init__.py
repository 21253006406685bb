"""`migctl doctor`: checks a machine, its driver and the agent, without changing anything."""
