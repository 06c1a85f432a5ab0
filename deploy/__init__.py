"""Assembly of serving and training: the whole loop on one machine, the demo, and clusters."""

import os

# Both are read at Ray's import. A call after ray.shutdown must not start another Ray. A Ray that starts here takes the
# loopback address for its node, so that its servers do not listen on other interfaces; a cluster sets its own address.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
