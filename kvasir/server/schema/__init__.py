"""Bodies of requests and replies. Requests are pydantic models, which validate and document them; replies are msgspec
structs, which are fast to encode. The routes decide what the fields mean."""
