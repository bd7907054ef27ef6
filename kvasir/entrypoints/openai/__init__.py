"""vLLM's module path, for scripts that start a server by module name."""
