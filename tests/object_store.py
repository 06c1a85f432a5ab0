"""S3-compatible object store in this process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import boto3
from moto.server import ThreadedMotoServer

_NUMBERS = itertools.count()


class ObjectStore:
    """Object store; ``bucket`` creates a bucket for one test."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        self._client = boto3.client("s3", endpoint_url=self.url, region_name="us-east-1")

    def bucket(self) -> str:
        name = f"bucket-{next(_NUMBERS)}"
        self._client.create_bucket(Bucket=name)
        return name

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Run a store, and set the environment so that clients find it."""
    variables = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    with mock.patch.dict(os.environ, variables):
        store = ObjectStore()
        with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": store.url}):
            yield store
        store.stop()
