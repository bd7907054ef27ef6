"""LLM, LLMEngine, AsyncLLM and the command line."""
