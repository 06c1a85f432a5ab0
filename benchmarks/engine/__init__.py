"""Parts of a decoding step, and of decoding on one engine."""
