"""End of the service before ``ray stop``: ``python -m deploy.end SECONDS``.

On the head new requests get 503, and the replicas finish the requests that they decode. Any other node leaves the
cluster as by ``deploy.leave``.
"""

from __future__ import annotations

import logging
import sys
import time

import psutil
import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from deploy.leave import leave

_LOOK_SECONDS = 0.2


def end(seconds: float) -> bool:
    """Delete the applications of this node's cluster; return whether all replicas have ended within ``seconds``.

    A cluster without Serve has none. The Ray of this node must run.
    """
    deadline = time.monotonic() + seconds
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    ray.init("auto", logging_level=logging.ERROR, log_to_driver=False)
    try:
        applications = list(serve.status().applications)
        for name in applications:
            serve.delete(name, _blocking=False)
        while applications and serve.status().applications:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
    except RayServeException:  # Serve does not run
        pass
    finally:
        ray.shutdown()
    return True


def is_head() -> bool:
    """Return whether the head of a cluster runs on this machine."""
    return any(process.info["name"] == "gcs_server" for process in psutil.process_iter(["name"]))


if __name__ == "__main__":
    seconds = int(sys.argv[1])
    try:
        ended = end(seconds) if is_head() else leave(seconds)
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"Ray does not answer on this node: {' '.join(str(error).split())[:200]}")
    sys.exit(0 if ended else "replicas still decode, and their requests are cut off")
