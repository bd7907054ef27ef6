"""The HTTP server: OpenAI's and Anthropic's interfaces over AsyncLLM. API process; the engine runs in its own.

routes/ has the HTTP routes and writes replies, schema/ has the bodies. A request passes gate (id, key, size), its
route, api_request (prompts, limits, accounting) and event_stream (a streamed reply). app puts them together; launch,
lifecycle and supervisor run the process.
"""
