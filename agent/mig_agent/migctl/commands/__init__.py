"""The verbs of `migctl`, a module for each or for a few that belong together. Each is imported when it is called."""
