"""The command line of mig-agent."""
