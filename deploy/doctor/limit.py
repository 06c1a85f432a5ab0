"""Time limit of a call that may hang, such as a look at a network file system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

_Kind = TypeVar("_Kind")


class CallTimeout(Exception):
    """Error of a call that takes too long."""


def within(seconds: float, function: Callable[..., _Kind], *arguments: Any) -> _Kind:
    """Return the result of ``function`` or raise its error.

    Raises:
        CallTimeout: it takes longer than ``seconds``. It may continue in its thread, which ends with the process.
    """
    result: Future[_Kind] = Future()
    threading.Thread(target=_settle, args=(result, function, *arguments), name="limited-call", daemon=True).start()
    wait([result], seconds)
    if not result.done():
        raise CallTimeout(f"no answer within {seconds:.0f} seconds")
    return result.result()


def _settle(result: Future[Any], function: Callable[..., Any], *arguments: Any) -> None:
    try:
        result.set_result(function(*arguments))
    except BaseException as error:
        result.set_exception(error)
