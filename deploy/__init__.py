"""Assembly of serving and training: the whole loop on one machine, the demo, and clusters."""

import os

# Read at Ray's import: a call after ray.shutdown must not start another Ray.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
