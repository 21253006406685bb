"""The ways to enforce the memory limits of shares: one module for each."""
