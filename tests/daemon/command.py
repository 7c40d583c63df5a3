"""The `umbel` command, run to its end."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .fork_server import fork_server

TIMEOUT = 300.0
"""Seconds. Beside eight busy threads three answers of 8 tokens take 40 s, and 1.4 s otherwise."""


def environment(folder: Path, columns: int = 120) -> dict[str, str]:
    """Build an environment with a home in `folder`, without settings or colours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("UMBEL_", "XDG_"))}
    if cache := os.environ.get("XDG_CACHE_HOME"):  # it has the models' measurements
        kept["XDG_CACHE_HOME"] = cache
    return kept | {"HOME": str(folder), "COLUMNS": str(columns), "TERM": "dumb"}


def umbel(
    *words: str,
    folder: Path,
    stdin: str | bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    columns: int = 120,
) -> subprocess.CompletedProcess[str]:
    """Run the command in a home of its own, forked where that makes no difference to it.

    Args:
        words: of the command line.
        folder: the home.
        stdin: all of its standard input, which is no terminal.
        env: more variables of its environment.
        cwd: where it runs.
        columns: of the terminal that it believes to write to.
    """
    variables = environment(folder, columns) | dict(env or {})
    given = stdin.encode() if isinstance(stdin, str) else stdin
    server = fork_server()
    if server is None or not server.can_fork(variables):
        command = [sys.executable, "-m", "umbel", *words]
        done = subprocess.run(
            command,
            input=given,
            capture_output=True,
            env=variables,
            cwd=cwd,
            check=False,
            timeout=TIMEOUT,
        )
        return _completed(words, done.returncode, done.stdout, done.stderr)
    with (
        tempfile.TemporaryFile() as reads,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
    ):
        reads.write(given)
        reads.seek(0)
        process = server.fork(words, variables, (reads, out, errors), cwd)
        try:
            status = process.wait(TIMEOUT)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        errors.seek(0)
        return _completed(words, status, out.read(), errors.read())


def _completed(
    words: tuple[str, ...], status: int, out: bytes, errors: bytes
) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(words, status, out.decode(), errors.decode())
