"""Harmony, gpt-oss's form of answers: messages with headers.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…

The channel `analysis` holds thoughts; `final` and `commentary` hold content. A message to a
recipient (`to=functions.NAME`, before the channel or after it) is a call and holds its arguments as
JSON. The prompt ends with the first message's role.

mlx-lm has no markers and no parser for it; the markers in a template tell that a model writes it.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
"""Ends of a message; the last two end the answer."""

TOKENS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *ENDS)
"""All markers; each is one token."""

NEXT = f"{_START}assistant"
"""Begins each message but the first."""

ANALYSIS, COMMENTARY, FINAL = (
    f"{_CHANNEL}{channel}{_MESSAGE}" for channel in ("analysis", "commentary", "final")
)
"""Headers of messages that call nothing."""

RECIPIENT = "to=functions."

_LONGEST = 512  # characters of a header
_OPENINGS = (NEXT, _CHANNEL, "to=", _MESSAGE)
_WHOLE = tuple(next_ + header for next_ in ("", NEXT) for header in (ANALYSIS, COMMENTARY, FINAL))
_WORDS = re.compile(r"<\|\w+\|>|[^\s<]+|<")
_HEADER = re.compile(  # its words, each followed by one blank
    r"(?:<\|start\|> assistant )?(?:to=(?P<first>\S+) )?"
    r"(?:<\|channel\|> (?P<channel>analysis|commentary|final) )?(?:to=(?P<second>\S+) )?"
    r"(?:<\|constrain\|> )?(?:\w+ )?<\|message\|> "
)


class Header(NamedTuple):
    """Header of a message."""

    end: int  # index of its end; of its beginning if there is no header
    thinks: bool = False  # a thought follows
    called: str = ""  # the tool whose arguments follow; empty if text follows


def is_harmony(template: Any) -> bool:
    """True if a chat template writes harmony."""
    markers = (_START, _CHANNEL, _MESSAGE)
    return isinstance(template, str) and all(marker in template for marker in markers)


def read_header(text: str, at: int) -> Header | None:
    """Read the header of a message that begins at `text[at]`; None if more text is needed."""
    rest = text[at : at + _LONGEST]
    words = rest.lstrip()
    if words and not any(o.startswith(words[: len(o)]) for o in _OPENINGS):
        return Header(at)
    end = rest.find(_MESSAGE)
    if end < 0:
        return Header(at) if len(rest) == _LONGEST else None
    end += len(_MESSAGE)
    spaced = " ".join([*_WORDS.findall(rest[:end]), ""])
    match = _HEADER.fullmatch(spaced)
    if match is None:
        return Header(at)
    recipient = match["first"] or match["second"] or ""
    called = recipient.removeprefix("functions.")
    if recipient and not called:
        return Header(at)
    return Header(at + end, match["channel"] == "analysis" and not called, called)


def is_cut(text: str) -> bool:
    """True if a text is the beginning of a header that calls nothing."""
    words = text.strip()
    return bool(words) and any(whole.startswith(words) for whole in _WHOLE)


def parse_call(text: str, _: Sequence[Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Read a call from the text after `RECIPIENT`, as mlx-lm's parsers do.

    Raises:
        ValueError: it is no call.
    """
    whole = RECIPIENT + text
    header = read_header(whole, 0)
    if header is None or not header.called:
        raise ValueError("no header of a call")
    return {"name": header.called, "arguments": json.loads(whole[header.end :])}
