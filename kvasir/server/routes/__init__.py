"""The endpoints. Each file has a `router`."""
