"""Other engines, each in an environment of its own, beside ours on the same prompts."""
