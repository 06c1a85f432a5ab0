"""Errors of the start of a service or trainer, as exit codes of commands."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from deploy.assembly import START_ERRORS, PartError, RayDied
from osd.cli.common import broken, fail
from osd.cli.exit_codes import FAILURE


@contextmanager
def start_errors(*more: type[Exception]) -> Generator[None]:
    """Exit with one line of error if a start fails, Ray dies, or one of ``more`` is raised."""
    try:
        yield
    except PartError as error:
        fail(error, FAILURE)
    except (*START_ERRORS, *more) as error:
        fail(error)
    except RayDied as error:
        broken(error)
