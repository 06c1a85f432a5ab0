"""Lossless speculation: how drafts grow, and what the target keeps of them."""
