"""Load tests of the service, its start-up time and its overhead."""
