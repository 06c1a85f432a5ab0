"""Capture of request traces: the trace record, its transport through Redis Streams, and the Redis server."""
