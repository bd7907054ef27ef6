"""The HTTP server: OpenAI's and Anthropic's interfaces over AsyncLLM. API process; the engine runs in its own.

routes/ speaks HTTP, schema/ says what bodies look like, the files here are what routes share: who may ask (auth), how a
request runs (runs), how it becomes a prompt and parameters (prompts, params), what is counted (metrics), how the
process starts and ends (life, launch).
"""
