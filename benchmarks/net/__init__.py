"""The service with and without training, everything charged."""
