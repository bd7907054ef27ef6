"""What goes over the wire. Requests are pydantic models, which check and document them; replies are msgspec structs,
which are quick to write. Types only: what they mean is the routes' business."""
