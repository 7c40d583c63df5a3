"""What a line that begins with a slash does in a chat."""

import json
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from ..errors import ClientError
from .conversation import Conversation
from .reach import model_names

_WORD = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_ENDS = ("exit", "quit")
_REGENERATES = "regenerate"


class Command(NamedTuple):
    """What is asked of the chat itself.

    Attributes:
        name: without the slash.
        rest: what stands behind it.
    """

    name: str
    rest: str


def command_of(line: str) -> Command | None:
    """Read a line as a command; None if it is for the model: a path, or begun with a blank."""
    found = _WORD.fullmatch(line.rstrip())
    return None if found is None else Command(found[1], (found[2] or "").strip())


def ends(command: Command) -> bool:
    """Whether the chat is over."""
    return command.name in _ENDS


def question_of(line: str, command: Command | None, conversation: Conversation) -> str:
    """Say what a line asks the model: itself, or the question that `/regenerate` takes back."""
    if command is None:
        return line.strip()
    return (command.name == _REGENERATES and conversation.take_back()) or ""


async def obey(command: Command, conversation: Conversation, console: Console) -> None:
    """Do what a command says, and print what came of it."""
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
        asked = conversation.model or names[0]
        return "\n".join(f"{'*' if each == asked else ' '} {each}" for each in names)
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
    path = Path(name).expanduser() if name else conversation.saved or _new_file()
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


def _new_file() -> Path:
    return Path(time.strftime("umbel-chat-%Y%m%d-%H%M%S.md"))


_ACTS: dict[str, Callable[[Conversation, str], Awaitable[str]]] = {
    "help": _help,
    "clear": _clear,
    "new": _clear,
    "system": _system,
    "model": _model,
    _REGENERATES: _regenerate,
    "save": _save,
}
NAMES = (*_ACTS, *_ENDS)
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

Ctrl-C clears the line, and stops an answer. Alt-Enter begins another line; what you paste may
have several. Up and Down go through what you wrote before. A line that begins with a blank goes
to the model as it is, also if a slash follows."""
