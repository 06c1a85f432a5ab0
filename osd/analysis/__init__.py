"""What the answers of a model say about the service that gave them."""
