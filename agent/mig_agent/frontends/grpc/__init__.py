"""The gRPC API: its methods (`servicer`), what they have in common (`handlers`), and health and reflection."""
