"""The checks, one module for each part of the machine; each check is a function of a Subject that yields findings."""
