"""The pure core: the state of a node, the meaning of a request, and how to serve it. No I/O, no clock, no log."""
