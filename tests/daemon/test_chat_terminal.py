"""`umbel chat` on a terminal: editing, history, commands, and Ctrl-C wherever it comes."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from umbel.daemon.chat.answer import WordWrap, harmless
from umbel.daemon.chat.conversation import Command, command_of

from .loading_daemon import loading_daemon
from .running import RunningDaemon, eventually, running
from .terminal import CTRL_C, CTRL_D, Terminal, in_terminal, terminal

UP, LEFT, ENTER = "\x1b[A", "\x1b[D", "\r"
LONG = ("--max-tokens", "4000", "--temperature", "0")
"""Flags of answers that take a while to show, and fit what may wait for a slow reader.

A drawn answer of the tiny model may end at any token.
"""

# A step takes 5 ms at least: the answer is under way however late a busy machine shows it.
SLOW = """
import time
from umbel.__main__ import main
from mlx_lm.models import llama
compute = llama.Model.__call__
def computes(*words, **named):
    time.sleep(0.005)
    return compute(*words, **named)
llama.Model.__call__ = computes
main()
"""


@contextmanager
def chat(socket: Path, folder: Path, *words: str) -> Iterator[Terminal]:
    """Start `umbel chat` in a terminal."""
    command = ("chat", "--socket", str(socket), *words)
    with terminal(*command, env=in_terminal(folder), folder=folder) as shown:
        yield shown


@contextmanager
def at_prompt(daemon: RunningDaemon, folder: Path, *words: str) -> Iterator[Terminal]:
    """Start a chat, and wait for its prompt."""
    with chat(daemon.socket, folder, "--max-tokens", "8", *words) as shown:
        shown.wait_for("/help lists")
        shown.wait_for(lambda: prompts(shown))
        yield shown


def prompts(shown: Terminal) -> int:
    """How many lines of the screen begin with a prompt."""
    return sum(line.startswith(">") for line in shown.lines())


def says(shown: Terminal, text: str, count: int) -> bool:
    """True if a text stands on the screen so often."""
    return shown.text().count(text) >= count


def answered(shown: Terminal, count: int = 1) -> bool:
    """True if so many answers are complete, and the next prompt is there."""
    return shown.text().count("prompt tokens cached") >= count and shown.lines()[-1] == ">"


def test_an_answer_says_what_it_took(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """After each answer stand its tokens, its speed and the share that was cached."""
    with at_prompt(tiny_daemon, short_path) as shown:
        for count in (1, 2):
            shown.type(f"hello{ENTER}")
            shown.wait_for(partial(answered, shown, count))
        told = re.findall(
            r"8 tokens, [\d.]+ tokens/s, the first after [\d.]+ s, "
            r"(\d+) % of \d+ prompt tokens cached",
            shown.text(),
        )
        assert len(told) == 2
        assert int(told[1]) > 0
        shown.type(CTRL_D)
        assert shown.wait() == 0


def test_lines_are_edited_and_remembered(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """The cursor moves in a line; a later chat has it back, from a file of its owner's only."""
    with at_prompt(tiny_daemon, short_path) as shown:
        shown.type(f"/hlp{LEFT}{LEFT}e{ENTER}")
        shown.wait_for("Alt-Enter begins another line")
        shown.type(f"/quit{ENTER}")
        assert shown.wait() == 0
    (history,) = short_path.rglob("chat_history")
    assert history.stat().st_mode & 0o777 == 0o600
    with at_prompt(tiny_daemon, short_path) as shown:
        shown.type(UP + UP)
        shown.wait_for("> /help")
        shown.type(CTRL_C)
        shown.wait_for(lambda: shown.lines()[-1] == ">")


def test_ctrl_c_clears_the_line(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """Ctrl-C at the prompt gives the line up, as a signal from outside does; Ctrl-D leaves."""
    with at_prompt(tiny_daemon, short_path) as shown:
        shown.type("never sent")
        shown.wait_for("never sent")
        shown.type(CTRL_C)
        shown.wait_for(lambda: prompts(shown) == 2)
        shown.process.send_signal(signal.SIGINT)
        shown.wait_for(lambda: prompts(shown) == 3)
        shown.type(CTRL_D)
        assert shown.wait() == 0
        assert "prompt tokens" not in shown.text()


def test_ctrl_c_stops_an_answer(plain_daemon: RunningDaemon, short_path: Path) -> None:
    """The chat goes on, and what came of the answer is part of it.

    It shows tokens more slowly than they come: `tiny_daemon` would not wait for it.
    """
    with at_prompt(plain_daemon, short_path, *LONG) as shown:
        shown.type(f"hello{ENTER}")
        shown.wait_for(lambda: len(shown.lines()) > 3)
        shown.type(CTRL_C)
        shown.wait_for(lambda: "stopped" in shown.lines() and shown.lines()[-1] == ">")
        eventually(lambda: not plain_daemon.status()["engine"]["running"], 60)
        shown.type(f"/save kept.json{ENTER}")
        shown.wait_for("Saved 2 messages to kept.json")
        roles = [each["role"] for each in json.loads((short_path / "kept.json").read_text())]
        assert roles == ["user", "assistant"]


def test_ctrl_c_stops_the_one_answer(plain_daemon: RunningDaemon, short_path: Path) -> None:
    """The command ends with it, and the shell's prompt gets a line of its own."""
    with chat(plain_daemon.socket, short_path, *LONG, "hello") as shown:
        shown.wait_for(shown.lines)
        shown.type(CTRL_C)
        assert shown.wait() == 128 + signal.SIGINT
        assert shown.screen.cursor.x == 0


def test_an_answer_that_breaks_off_says_why_below_it(short_path: Path, long_tiny_dir: Path) -> None:
    """As where the daemon is stopped."""
    with (
        running(short_path, long_tiny_dir, "--stop-grace", "0", program=("-c", SLOW)) as daemon,
        at_prompt(daemon, short_path, *LONG) as shown,
    ):
        shown.type(f"hello{ENTER}")
        shown.wait_for(lambda: len(shown.lines()) > 3)
        assert daemon.terminate() == 0
        shown.wait_for("the daemon is stopping")
        shown.wait_for(lambda: shown.lines()[-1] == ">")
        assert "the daemon is stopping" in shown.lines()[-2]
        assert shown.lines()[-2].startswith("the daemon")


def test_what_is_pasted_may_have_lines(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """A paste of several lines is one message, sent by Enter."""
    with at_prompt(tiny_daemon, short_path) as shown:
        shown.type("\x1b[200~first\nsecond\x1b[201~")
        shown.wait_for("second")
        shown.type(ENTER)
        shown.wait_for(lambda: answered(shown))
        shown.type(f"/save kept.json{ENTER}")
        shown.wait_for("Saved 2 messages to kept.json")
        assert json.loads((short_path / "kept.json").read_text())[0]["content"] == "first\nsecond"


def test_what_is_typed_during_an_answer_waits(
    plain_daemon: RunningDaemon, short_path: Path
) -> None:
    """It is not shown in the answer, outlives Ctrl-C, and stands at the next prompt."""
    with at_prompt(plain_daemon, short_path, *LONG) as shown:
        shown.type(f"hello{ENTER}")
        shown.wait_for(lambda: len(shown.lines()) > 3)
        shown.type("TYPED AHEAD")
        seen = shown.output.count(b"\n")
        shown.wait_for(lambda: shown.output.count(b"\n") > seen + 1)
        assert b"TYPED" not in shown.output
        shown.type(CTRL_C)
        shown.wait_for(lambda: shown.lines()[-1] == "> TYPED AHEAD")


def test_commands(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """Each command does what /help says, and none reaches the model."""
    steps = {
        "/system Be brief.": "holds from the next message on",
        "/system": "Be brief.",
        "/model": "* tiny",
        "/model tiny": "tiny answers from the next message on",
        "/model gpt": "There is no model gpt; the daemon has: tiny.",
        "/save notes.md": "Saved 1 message to notes.md.",
        "/system Be kind.": "holds from the next message on",
        "/save": "Saved 1 message to notes.md.",
        "/save other.md": "other.md is there already, and is not of this chat",
        "/clear": "A new conversation",
        "/nonsense": "There is no command /nonsense; /help lists them.",
    }
    (short_path / "other.md").write_text("kept")
    with at_prompt(tiny_daemon, short_path) as shown:
        for line, said in steps.items():
            told = shown.text().count(said) + 1
            shown.type(line + ENTER)
            shown.wait_for(partial(says, shown, said, told))
            shown.wait_for(lambda: shown.lines()[-1] == ">")
        assert "prompt tokens" not in shown.text()
    assert (short_path / "notes.md").read_text() == "## system\n\nBe kind.\n"
    assert (short_path / "other.md").read_text() == "kept"


def test_it_waits_while_a_daemon_loads(short_path: Path) -> None:
    """A download is shown with its bar until the daemon is ready; then the prompt comes."""
    socket = short_path / "u.sock"
    with loading_daemon(socket) as loaded, chat(socket, short_path) as shown:
        shown.wait_for("downloading the model")
        shown.wait_for("3.0 MiB of 12.0 MiB")
        loaded.set()
        shown.wait_for(lambda: prompts(shown))
        assert "downloading" not in shown.text()
        shown.type(CTRL_D)
        assert shown.wait() == 0


def test_ctrl_c_while_a_daemon_loads(short_path: Path) -> None:
    """Ctrl-C ends the wait, and the chat with it."""
    socket = short_path / "u.sock"
    with loading_daemon(socket), chat(socket, short_path) as shown:
        shown.wait_for("downloading the model")
        shown.type(CTRL_C)
        assert shown.wait() == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/help", Command("help", "")),
        ("/save a b.md ", Command("save", "a b.md")),
        ("/system one\ntwo", Command("system", "one\ntwo")),
        (" /help", None),
        ("/usr/bin/env fails", None),
        ("what is /help?", None),
    ],
)
def test_what_is_a_command(line: str, command: Command | None) -> None:
    """A line is one if its first word is a slash and letters; a path is not."""
    assert command_of(line) == command


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("1234567890 x", ["1234567890", "x"]),
        ("  indented\nx  y", ["  indented", "x  y"]),
        ("abc defghij\n\nk", ["abc", "defghij", "", "k"]),
        ("123456789012345 x", ["123456789012345 x"]),
        ("日本語日本語", ["日本語日本", "語"]),
        ("a\tb c", ["a\tb", "c"]),
    ],
)
def test_words_are_wrapped(text: str, lines: list[str]) -> None:
    """No word is broken that a line has room for, however the text is cut into parts."""
    for size in (1, 3, len(text)):
        wrap = WordWrap(lambda: 10)
        parts = [text[i : i + size] for i in range(0, len(text), size)]
        assert ("".join(map(wrap.add, parts)) + wrap.end()).split("\n") == lines


def test_an_answer_cannot_control_the_terminal() -> None:
    """Control codes are escaped; line breaks, tabs and all other characters stay."""
    assert harmless("\x1b]0;owned\x07 a\nb\tc 👩‍🚀 é") == "\\x1b]0;owned\\x07 a\nb\tc 👩‍🚀 é"
