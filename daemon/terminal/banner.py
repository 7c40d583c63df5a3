"""What a daemon that serves tells a person: what, where, and what to try."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from ... import __version__
from ..lifecycle.display import Served
from .sizes import amount

_BODY = """{"temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}"""

_WIDTH = 11  # of the column of names


def banner(served: Served) -> Iterator[Text]:
    """Write what is served, line by line."""
    yield Text()
    yield Text.assemble(("umbel", "bold"), f" {__version__} serves ", (served.model, "bold green"))
    yield Text()
    for name, value in _facts(served):
        yield Text.assemble((f"  {name:{_WIDTH}}", "dim"), value)
    yield Text()
    yield Text("Try it:", "dim")
    yield Text()
    yield from (Text(f"  {line}") for line in curl(served.socket))
    yield Text()
    where = "" if served.default_socket else f" --socket {shlex.quote(str(served.socket))}"
    commands = {f"umbel chat{where}": "talks to it", f"umbel top{where}": "shows it at work"}
    width = max(map(len, commands))
    for command, does in commands.items():
        yield Text.assemble((f"  {command:{width}}", "bold"), (f"  {does}", "dim"))
    yield Text()
    yield Text("Ctrl-C stops it.", "dim")
    yield Text()


def curl(socket: Path) -> list[str]:
    """Write a command for a shell that asks the daemon something, in lines that need no folding."""
    parts = (
        ["curl", "--unix-socket", str(socket)],
        ["http://localhost/v1/chat/completions"],
        ["-H", "Content-Type: application/json"],
        ["-d", _BODY],
    )
    return " \\\n  ".join(map(shlex.join, parts)).split("\n")


def _facts(served: Served) -> Iterator[tuple[str, Text]]:
    yield "context", Text(f"{served.context:,} tokens")
    yield (
        "memory",
        Text(f"{amount(served.budget)} for state, beside {amount(served.weights)} of weights"),
    )
    if served.one_by_one is None:
        yield "requests", Text(f"up to {served.most} run at once")
    else:
        yield "requests", Text(f"decode one by one: {served.one_by_one}", "yellow")
    yield "socket", Text(str(served.socket))
    key = ", with the key" if served.needs_key else ""
    for address in served.addresses:
        yield "OpenAI", Text(f"http://{address}/v1{key}")
        yield "Anthropic", Text(f"http://{address}{key}")
    yield "state", Text("in memory only" if served.state is None else f"on disk, {served.state}")
