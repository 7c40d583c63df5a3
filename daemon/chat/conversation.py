"""A conversation: its messages, and its commands, which are lines that begin with a slash."""

import asyncio
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..cli.client import Client, StreamEvent
from ..errors import ClientError

Message = dict[str, str]

_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_ENDS = ("exit", "quit")
_REGENERATE = "regenerate"


class Options(NamedTuple):
    """Options of all answers.

    Attributes:
        max_tokens: of an answer.
        temperature: of sampling; None for the model's own.
    """

    max_tokens: int
    temperature: float | None


class Conversation:
    """The messages so far, and their name for the daemon.

    Attributes:
        client: of the daemon.
        system: the system prompt, if there is one. It may change.
        options: of all answers.
        model: its name; None for the daemon's default. It may change.
        saved: the file of the last `/save`.
    """

    def __init__(
        self, client: Client, system: str | None, options: Options, model: str | None = None
    ) -> None:
        self.client = client
        self.system = system
        self.options = options
        self.model = model
        self.saved: Path | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all messages except the system prompt."""
        self._name = f"chat-{secrets.token_hex(6)}"
        self._messages: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """The messages of a request, with the system prompt."""
        system = [{"role": "system", "content": _readable(self.system)}] if self.system else []
        return [*system, *self._messages]

    def take_back(self) -> str | None:
        """Forget the last question and its answer; return the question, or None without one."""
        if not self._messages:
            return None
        *self._messages, question, _ = self._messages
        return question["content"]

    async def say(self, text: str) -> AsyncIterator[StreamEvent]:
        """Send a message and stream the answer; both are kept, also a cancelled answer.

        Raises:
            ClientError: the daemon refused or failed; the message is forgotten.
        """
        self._messages.append({"role": "user", "content": _readable(text)})
        answer: list[str] = []
        try:
            async for event in self.client.chat(
                self.messages,
                conversation=self._name,
                model=self.model,
                max_tokens=self.options.max_tokens,
                temperature=self.options.temperature,
            ):
                answer.append(event.text)
                yield event
        except ClientError:
            self._messages.pop()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self._messages.append({"role": "assistant", "content": "".join(answer)})
            raise
        self._messages.append({"role": "assistant", "content": "".join(answer)})


def _readable(text: str) -> str:
    """Read as UTF-8 what the locale, such as C, could not read of the command line."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def model_names(client: Client) -> list[str]:
    """List the models of a daemon, the default one first.

    Raises:
        ClientError: the daemon does not answer.
    """
    return [str(model["id"]) for model in (await client.get("/v1/models"))["data"]]


class Command(NamedTuple):
    """A command of the chat: its name without the slash, and the rest of the line."""

    name: str
    rest: str

    @property
    def ends(self) -> bool:
        """True if it ends the chat."""
        return self.name in _ENDS


def command_of(line: str) -> Command | None:
    """Read a line as a command; None if it is for the model: a path, or begun with a blank."""
    found = _COMMAND.fullmatch(line.rstrip())
    return None if found is None else Command(found[1], (found[2] or "").strip())


def question_of(line: str, command: Command | None, conversation: Conversation) -> str:
    """Return a line's question: itself, or the one that `/regenerate` takes back."""
    if command is None:
        return line.strip()
    return (command.name == _REGENERATE and conversation.take_back()) or ""


async def obey(command: Command, conversation: Conversation, console: Console) -> None:
    """Run a command, and print its result."""
    act = _ACTS.get(command.name)
    if act is None:
        console.print(f"There is no command /{command.name}; /help lists them.", style="yellow")
        return
    try:
        console.print(await act(conversation, command.rest), style="dim")
    except ClientError as error:
        console.print(str(error), style="red")
    except OSError as error:
        console.print(f"cannot write {error.filename}: {error.strerror}", style="red")


async def _help(_: Conversation, __: str) -> str:
    return _HELP


async def _clear(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return "A new conversation; the system prompt stays."


async def _system(conversation: Conversation, text: str) -> str:
    if text:
        conversation.system = text
        return "The system prompt holds from the next message on."
    return conversation.system or "There is no system prompt; /system TEXT sets one."


async def _model(conversation: Conversation, name: str) -> str:
    names = await model_names(conversation.client)
    if not name:
        chosen = conversation.model or names[0]
        return "\n".join(f"{'*' if each == chosen else ' '} {each}" for each in names)
    if name not in names:
        return f"There is no model {name}; the daemon has: {', '.join(names)}."
    conversation.model = name
    return f"{name} answers from the next message on."


async def _regenerate(_: Conversation, __: str) -> str:
    return "There is no question yet."


async def _save(conversation: Conversation, name: str) -> str:
    messages = conversation.messages
    if not messages:
        return "There is nothing to save yet."
    new = Path(time.strftime("umbel-chat-%Y%m%d-%H%M%S.md"))
    path = Path(name).expanduser() if name else conversation.saved or new
    if path.suffix == ".json":
        text = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
    else:
        text = "\n".join(f"## {each['role']}\n\n{each['content']}\n" for each in messages)
    own = path == conversation.saved
    try:
        with path.open("w" if own else "x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        return f"{path} is there already, and is not of this chat; /save FILE takes another name."
    conversation.saved = path
    return f"Saved {len(messages)} message{'s'[: len(messages) != 1]} to {path}."


_ACTS: dict[str, Callable[[Conversation, str], Awaitable[str]]] = {
    "help": _help,
    "clear": _clear,
    "new": _clear,
    "system": _system,
    "model": _model,
    _REGENERATE: _regenerate,
    "save": _save,
}
COMMANDS = (*_ACTS, *_ENDS)
"""All commands, without the slash."""

_HELP = """\
/clear           begin a new conversation (also /new)
/system [TEXT]   show the system prompt, or set another
/model [NAME]    show the models that the daemon has, or choose one
/regenerate      answer the last question again
/save [FILE]     write the conversation to a file: Markdown, or JSON if its name ends in .json;
                 without a name, to the same one again
/help            this
/exit            leave (also /quit, or Ctrl-D)

Ctrl-C clears the line, and stops an answer. Alt-Enter begins another line; pasted text may have
several. Up and Down go through earlier lines. A line that begins with a blank goes to the model as
it is, also if a slash follows."""
