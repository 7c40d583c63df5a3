"""A request's conversation: the one that the client names, else its agent's session."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from ...models.text.conversation import Conversation
from ..http.failures import APIError

if TYPE_CHECKING:
    from ..protocols.generation_request import GenerationBody, Prompt

PARALLEL = 32
"""Requests of one session, or of one beginning, that run at once."""

_HEADER = "X-Umbel-Conversation"
_LONGEST = 256
_BEGINNING = 256  # characters or tokens of a text that later texts of its conversation begin with
# The headers in which agents send a session, and what tells its subagents apart.
_SESSIONS = (
    ("X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id"),
    ("thread-id", ""),
    ("session-id", ""),
    ("x-session-id", ""),
    ("x-session-affinity", ""),
)


def named_conversation(headers: Mapping[str, str]) -> str | None:
    """Read the conversation's name, if a header has it.

    Raises:
        APIError: 400, it cannot be a name.
    """
    return check_name(headers.get(_HEADER) or None, _HEADER)


def check_name(name: str | None, place: str) -> str | None:
    """Refuse a name that is too long, or would be no word in logs and /status.

    Raises:
        APIError: 400, naming its place.
    """
    if name and len(name) > _LONGEST:
        message = f"{place} has over {_LONGEST} characters; send a shorter name"
        raise APIError(400, message, param=place)
    if name and not name.isprintable():
        message = f"{place} has characters that cannot be printed; send plain text"
        raise APIError(400, message, param=place)
    return name


def conversation_of_choice(name: str, choice: int) -> str:
    """Name the conversation of one of a request's answers, so that none waits for another.

    The first has the request's own. No client can send the others': the space is not printable.
    """
    return f"{name}\N{NO-BREAK SPACE}{choice}" if choice else name


def session(headers: Mapping[str, str]) -> str | None:
    """Read an agent's session; an unprintable or overlong name is none."""
    for name, helper in _SESSIONS:
        parts = [headers.get(part, "") for part in (name, helper) if part]
        if parts[0] and all(part.isprintable() and len(part) <= _LONGEST for part in parts):
            return ".".join(part for part in parts if part)
    return None


class OrderKey(NamedTuple):
    """Requests with a common key are queued in the order in which they came."""

    model: str  # requests for different models do not wait for each other
    kind: str  # of the name: a conversation, a response, or an agent's session
    name: str


def order_keys(
    model: str, conversation: str | None, session: str | None, body: "GenerationBody"
) -> list[OrderKey]:
    """Return a request's keys: its conversation's, else its previous response's and session's.

    The conversation and the session are those of the headers, and the body may have others.
    """
    if name := conversation or body.conversation_name:
        return [OrderKey(model, "conversation", name)]
    named = ("response", body.previous_response), ("session", session or body.session_name)
    return [OrderKey(model, kind, name) for kind, name in named if name]


class Place(NamedTuple):
    """A request's place in the order of its tenant's."""

    conversation: str | None  # its name, for logs and pins; None for one of its own
    # requests that start in order and are served together; None if that is the conversation, whose
    # requests run one at a time
    unit: str | None = None


def place_of(named: str | None, session: str | None, prompt: "Prompt") -> Place:
    """Find a request's place: by its conversation's name, its session, or its prompt's beginning.

    An agent sends several requests at once in one session: subagents, a title. They start in order
    and run beside each other. Each beginning (system prompts, and the first message after them)
    has a name of its own.
    """
    if named is not None:
        return Place(named)
    beginning = _digest(prompt)
    if session is not None:
        return Place(f"{session}/{beginning[:8]}", f"session\N{NO-BREAK SPACE}{session}")
    return Place(None, f"beginning\N{NO-BREAK SPACE}{beginning}")


def _digest(prompt: "Prompt") -> str:
    digest = xxhash.xxh3_64()
    if isinstance(prompt, Conversation):
        for message in prompt.messages:
            digest.update(f"{message.role}:{message.content}\0".encode(errors="replace"))
            if message.role != "system":
                break
    else:
        digest.update(str(prompt[:_BEGINNING]).encode(errors="replace"))
    return digest.hexdigest()
