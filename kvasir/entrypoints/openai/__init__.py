"""vLLM's module paths, for scripts that start a server by module name."""
