"""`migctl bundle`: one file for a bug report, without secrets, from which the agent's plans can be made again."""
