"""The HTTP server: OpenAI's and Anthropic's interfaces over AsyncLLM. API process; the engine runs in its own.

routes/ has the HTTP routes with their bodies and writes replies; schema/ has the bodies that several share. A request
passes gate (id, key, size), its route, api_request (prompts, limits, accounting) and event_stream (a streamed reply).
app puts them together; launch and lifecycle run the process.
"""
