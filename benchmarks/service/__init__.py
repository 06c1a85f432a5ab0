"""The service under load, its start and its overhead."""
