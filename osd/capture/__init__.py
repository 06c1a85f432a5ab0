"""Capture: the trace of a request, its way through Redis, and the Redis server itself."""
