"""Telemetry of requests: a log line and an OpenTelemetry trace for each request."""
