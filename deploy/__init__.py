"""Putting the rooms together: the whole loop on one machine, the demo, and what a cluster needs."""

import os

# Ray reads it when it is imported: what still asks a Ray that has been shut down is not to start another one.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
