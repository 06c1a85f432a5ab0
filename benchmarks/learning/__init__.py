"""What drafters learn from recorded streams."""
