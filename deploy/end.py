"""End of the service on a Ray cluster: ``python -m deploy.end``, before ``ray stop`` on the head.

New requests get 503, and the replicas finish the requests that they decode.
"""

from __future__ import annotations

import logging
import sys
import time

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

_LOOK_SECONDS = 0.2


def end(seconds: float) -> bool:
    """Delete the applications of this node's cluster; return whether all replicas have ended within ``seconds``.

    A cluster without Serve has none. The Ray of this node must run.
    """
    deadline = time.monotonic() + seconds
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


if __name__ == "__main__":
    try:
        ended = end(float(sys.argv[1]))
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"no Ray runs on this node: {' '.join(str(error).split())[:200]}")
    sys.exit(0 if ended else "replicas still decode, and their requests are cut off")
