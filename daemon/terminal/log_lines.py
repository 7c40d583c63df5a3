"""Log lines for a person: a time, what happened, and colours where the terminal has them."""

from collections.abc import Iterator

import structlog
from rich.console import Console
from rich.text import Text
from structlog.typing import EventDict, ProcessorReturnValue

from .sizes import share

_SHOWN = frozenset({"downloading", "loading", "ready"})  # as a phase, and as the banner
_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}
_FINISHES = {"cancelled": "yellow", "error": "red"}
_LONGEST_NAME = 32
_REQUEST_NAME = 12  # of a request without a conversation


class ConsoleLogger:
    """What structlog writes with: a console that keeps lines apart from what moves."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def msg(self, line: Text) -> None:
        """Write a line."""
        self._console.print(line)

    debug = info = warning = error = critical = exception = log = msg


def render(_logger: object, _method: str, event: EventDict) -> ProcessorReturnValue:
    """Make a line of an event, as structlog's last processor.

    Raises:
        structlog.DropEvent: the display shows it already.
    """
    name = str(event.pop("event"))
    if name in _SHOWN:
        raise structlog.DropEvent
    time, level = event.pop("timestamp", ""), event.pop("level", "info")
    exception = event.pop("exception", None)
    line = Text.assemble((f"{time}  ", "dim"))
    match name:
        case "request":
            line.append_text(Text("  ").join(_request(event)))
        case "refused":
            line.append_text(Text("  ").join(_refusal(event, _STYLES.get(level, "yellow"))))
        case _:
            line.append(name, _STYLES.get(level, ""))
            for key, value in event.items():
                line.append(f"  {key}=", "dim").append(_value(value))
    if exception is not None:
        line.append(f"\n{exception}")
    return (line,), {}


def _request(event: EventDict) -> Iterator[Text]:
    """Write what became of a request, its conversation first."""
    conversation, request = str(event["conversation"]), str(event["request"])
    unnamed = conversation == request
    yield Text(conversation[: _REQUEST_NAME if unnamed else _LONGEST_NAME], "bold")
    yield Text(f"{event['total']} tokens in, {share(event['cached'], event['total'])} cached")
    yield Text(f"{event['out']} out")
    if (first := event["ttft_ms"]) is not None:
        yield Text(f"first after {first / 1000:.2f} s")
    if gap := event["itl_ms"]:
        yield Text(f"{1000 / gap:.1f} tokens/s")
    finish = str(event["finish"])
    yield Text(finish, _FINISHES.get(finish, "green"))
    if "error" in event:
        yield Text(f"{event['error']} ({request})", "red")


def _refusal(event: EventDict, style: str) -> Iterator[Text]:
    yield Text(f"refused {event.get('status', '')}", style)
    yield Text(str(event.get("message", "")))


def _value(value: object) -> str:
    return "" if value is None else str(value)
