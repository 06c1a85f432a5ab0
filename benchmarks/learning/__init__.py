"""Training of drafters on recorded streams."""
