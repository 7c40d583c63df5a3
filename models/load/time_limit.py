"""A limit of time for programs that come with a model: its chat template is one."""

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future


class _OutOfTimeError(BaseException):
    """Ends a thread; no `except Exception` on the way holds it up."""


def within(seconds: float, fn: Callable[[], object]) -> None:
    """Call a function on a thread of its own, and end it if it takes too long.

    Python ends it between two of its instructions. A single call of C code that does not return
    is left behind; it keeps no process from ending.

    Raises:
        TimeoutError: it took too long.
        Exception: whatever the function raises.
    """
    future: Future[None] = Future()

    def call() -> None:
        try:
            fn()
        except BaseException as error:  # noqa: BLE001  (it belongs to the caller)
            future.set_exception(error)
        else:
            future.set_result(None)

    thread = threading.Thread(target=call, name="umbel-limited", daemon=True)
    thread.start()
    try:
        future.result(seconds)
    except TimeoutError:
        if thread.ident is not None and not future.done():
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(_OutOfTimeError))
        raise
