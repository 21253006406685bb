"""The pure heart: what a node looks like, what a request means, what to do about it. No I/O, no clock, no log."""
