"""Lines from a terminal, with editing and a history that outlives the chat."""

import os
import signal
from pathlib import Path

import platformdirs
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from .commands import NAMES

_PROMPT, _GOES_ON = "> ", "… "


class EditedLines:
    """Lines from the terminal. What is pasted may have several; Alt-Enter begins another.

    Args:
        history: the file in which lines are remembered; it is its owner's only.
    """

    def __init__(self, history: Path) -> None:
        self._session: PromptSession[str] = PromptSession(
            history=_history(history),
            key_bindings=_keys(),
            completer=WordCompleter([f"/{name}" for name in NAMES], sentence=True),
            complete_while_typing=False,
            prompt_continuation=_GOES_ON,
            enable_history_search=True,
        )

    async def next(self) -> str | None:
        """Wait for a line; an empty one after Ctrl-C, None at the end of input."""
        # The library handles a signal of its own through asyncio, which takes this away.
        previous = signal.set_wakeup_fd(-1)
        try:
            return await self._session.prompt_async(_PROMPT, handle_sigint=False)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None
        finally:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)

    def interrupt(self) -> None:
        """Give the line up that is being written: a SIGINT that comes from outside."""
        if self._session.app.is_running:
            self._session.app.exit(exception=KeyboardInterrupt())


def history_file() -> Path:
    """Where the lines of earlier chats are."""
    return platformdirs.user_state_path("umbel") / "chat_history"


def _history(path: Path) -> History:
    """Open the history, for its owner only; one of this chat where no file can be written."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(opened, 0o600)
        finally:
            os.close(opened)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
