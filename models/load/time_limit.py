"""A time limit for programs that come with a model, such as its chat template."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

TEMPLATE_LIMIT = 60.0
"""Seconds for a rendering, and for all that is tried out of a chat template at the load."""


class _OutOfTimeError(BaseException):
    """Ends a thread; `except Exception` does not catch it."""


class _LimitedThread(threading.Thread):
    """A thread of `within`."""


def within(seconds: float, fn: Callable[[], T]) -> T:
    """Call a function on a thread of its own; raise TimeoutError if it takes too long.

    A call inside another one has the outer limit. Python ends the function between two
    instructions; a call of C code that does not return is left behind, and does not keep the
    process from ending.
    """
    if isinstance(threading.current_thread(), _LimitedThread):
        return fn()
    future: Future[T] = Future()
    thread = _LimitedThread(target=_fulfil, args=(future, fn), name="umbel-limited", daemon=True)
    thread.start()
    if not wait([future], seconds).done:
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_OutOfTimeError))
        raise TimeoutError
    try:
        return future.result()
    finally:
        del future, fn  # the function's error holds this frame, which must not hold the error


def _fulfil(future: Future[T], fn: Callable[[], T]) -> None:
    try:
        result = fn()
    except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
        future.set_exception(error)
    else:
        future.set_result(result)
    del future, fn  # as in `within`
