"""The end of a service's log, in which several runs of the daemon follow each other."""

import re

LINES = 400
"""As many are looked at: a run's refusals, or a traceback, may stand behind what ended it."""

_BEGIN = re.compile(r"""\bevent(=|": ?")listening\b""")
_ERRORS = re.compile(
    r"""^umbel:\ | ^(\w+\.)*\w*(Error|Exception)\b | ^Fatal\ Python\ error | ^libc\+\+abi:\ |
    \blevel(=|":\ ?")(error|critical)\b""",
    re.VERBOSE,
)


def last_words(lines: list[str], pid: str = "") -> str:
    """Find what says why the daemon ended: its last run's last error, else that run's last line.

    Args:
        lines: of the log, in umbel's formats for services.
        pid: of the daemon that runs now, which has not ended; empty without one.
    """
    begins = [number for number, line in enumerate(lines) if _BEGIN.search(line)]
    if pid and begins and re.search(rf"""\bpid(=|": ?"?){pid}\b""", lines[begins[-1]]):
        del lines[begins.pop() :]
    run = lines[begins[-1] :] if begins else lines
    errors = [line for line in run if _ERRORS.search(line)]
    return next(reversed(errors or run), "")
