"""`umbel chat` in a pipe: what is asked, of whom, and how it ends."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from .command import TIMEOUT, environment, umbel
from .running import RunningDaemon

CAPITAL = "What is the capital of France?"
GREEDY = ("--temperature", "0")


def prompt_tokens(daemon: RunningDaemon) -> list[int]:
    """The lengths of the prompts that the daemon has answered."""
    requests = [line for line in daemon.log().splitlines() if "event=request" in line]
    return [int(line.split(" total=")[1].split()[0]) for line in requests]


def test_a_private_daemon(short_path: Path) -> None:
    """`--private` starts a daemon for the chat, with the model of the settings."""
    done = umbel("chat", "--private", *GREEDY, CAPITAL, folder=short_path, stdin="")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "Starting a private daemon with smollm2" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_private_daemon_whose_model_is_none(short_path: Path) -> None:
    """It says once whose words these are, and of no daemon that it did not look for."""
    words = ("chat", "hello", "--private", "--model", "no-such")
    done = umbel(*words, folder=short_path)
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "Starting a private daemon with no-such …"
    assert last.startswith("umbel: the private daemon did not start: no model 'no-such'")


@pytest.mark.parametrize("words", [(), ("--model", "coder")])
def test_a_private_daemon_of_a_table(
    short_path: Path, long_tiny_dir: Path, words: tuple[str, ...]
) -> None:
    """The configured model, and a model by its name, may be a table's, as for `umbel serve`."""
    config = short_path / "umbel.toml"
    first = "" if words else 'model = "coder"\n'
    config.write_text(f'{first}[models.coder]\nmodel = "{long_tiny_dir}"\n')
    words = ("chat", "hello", "--private", "--max-tokens", "1", "--config", str(config), *words)
    done = umbel(*words, folder=short_path, stdin="")
    assert done.returncode == 0, done.stderr
    assert f"Starting a private daemon with {long_tiny_dir}" in done.stderr


def test_only_the_answer_is_on_standard_output(
    smollm2_daemon: RunningDaemon, short_path: Path
) -> None:
    """With a daemon, `umbel chat` uses it, without a word beside the answer."""
    words = ("chat", CAPITAL, "--socket", str(smollm2_daemon.socket), *GREEDY)
    done = umbel(*words, folder=short_path, stdin="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "The capital of France is Paris.\n"


def test_a_pipe_is_part_of_the_prompt(smollm2_daemon: RunningDaemon, short_path: Path) -> None:
    """A pipe alone is one prompt; with an argument it stands below that, after an empty line."""
    to_it = ("--socket", str(smollm2_daemon.socket), "--max-tokens", "1")
    asked = "Name a plant.\n\nOne word.\nNo more."
    argument, pipe = asked.split("\n\n")
    before = len(prompt_tokens(smollm2_daemon))
    for words, stdin in (((argument,), pipe + "\n"), ((), asked), ((asked,), "")):
        done = umbel("chat", *to_it, *words, folder=short_path, stdin=stdin)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "cut off after 1 tokens; --max-tokens allows more\n"
    first, *others = prompt_tokens(smollm2_daemon)[before:]
    assert others == [first, first]


def test_lines_are_a_conversation(smollm2_daemon: RunningDaemon, short_path: Path) -> None:
    """With --lines, the turns of one conversation grow on each other until /new."""
    lines = f"{CAPITAL}\nAnd what did I ask?\n/new\nHello\n/exit\nnever sent\n"
    words = ("--lines", "--socket", str(smollm2_daemon.socket), "--max-tokens", "8", *GREEDY)
    before = smollm2_daemon.log().count("event=request")
    done = umbel("chat", *words, folder=short_path, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.\n")
    assert "Ctrl-C" not in done.stderr
    requests = [x for x in smollm2_daemon.log().splitlines() if "event=request" in x][before:]
    totals = prompt_tokens(smollm2_daemon)[before:]
    names = [line.split(" conversation=")[1].split()[0] for line in requests]
    assert len(totals) == 3
    assert totals[1] > totals[0] > totals[2]
    assert names[0] == names[1] != names[2]


def test_regenerate_asks_the_last_question_again(
    tiny_daemon: RunningDaemon, short_path: Path
) -> None:
    """The same prompt is sent, without the answer that it had; before a question there is none."""
    lines = f"/regenerate\nHello\n{CAPITAL}\n/regenerate\n/regenerate\n"
    words = ("--lines", "--socket", str(tiny_daemon.socket), "--max-tokens", "8", *GREEDY)
    before = len(prompt_tokens(tiny_daemon))
    done = umbel("chat", *words, folder=short_path, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "There is no question yet." in done.stderr
    first, second, *again = prompt_tokens(tiny_daemon)[before:]
    assert first < second
    assert again == [second, second]


def test_a_refusal_ends_no_conversation(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """A refused message is told in words, the conversation goes on, and the status tells."""
    lines = "x" * 30_000 + "\nhello\n"
    words = ("--lines", "--socket", str(tiny_daemon.socket), "--max-tokens", "2")
    done = umbel("chat", *words, folder=short_path, stdin=lines)
    assert done.returncode == 1
    assert "maximum context length is 8192 tokens" in done.stderr
    assert "1 question was not answered" in done.stderr
    assert len(done.stdout.strip()) > 0


@pytest.mark.parametrize(
    ("words", "settings", "variables"),
    [
        (("--socket", "gone.sock"), "", {}),
        ((), "", {}),
        (("--model", "coder"), "", {}),
        ((), 'model = "org/name"', {}),
        ((), '[models."org/name"]\npinned = true', {}),
        ((), "", {"UMBEL_MODEL": "org/name"}),
        ((), "", {"UMBEL_SOCKET": "gone.sock"}),
    ],
)
def test_no_other_daemon_stands_in(
    short_path: Path, words: tuple[str, ...], settings: str, variables: dict[str, str]
) -> None:
    """Without the daemon that is meant, and in any pipe, it ends with status 1."""
    (short_path / "umbel.toml").write_text(settings)
    words = ("chat", "hello", "--config", str(short_path / "umbel.toml"), *words)
    done = umbel(*words, folder=short_path, cwd=short_path, env=variables)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no daemon answers on" in done.stderr
    assert "umbel chat --private starts one for this chat" in done.stderr
    assert "Starting" not in done.stderr


def test_a_model_that_the_daemon_does_not_have(
    tiny_daemon: RunningDaemon, short_path: Path
) -> None:
    """It is refused with the names of those that there are; the daemon's own is taken."""
    words = ("chat", "hi", "--socket", str(tiny_daemon.socket), "--max-tokens", "1", "--model")
    refused = umbel(*words, "coder", folder=short_path, stdin="")
    assert refused.returncode == 1
    assert "has no model coder; it has: tiny" in refused.stderr
    assert umbel(*words, "tiny", folder=short_path, stdin="").returncode == 0


def test_a_locale_with_few_characters(smollm2_daemon: RunningDaemon, short_path: Path) -> None:
    """Questions get there, and answers come out, with what the locale lacks replaced."""
    words = ("chat", "Repeat after me: café ☕", "--socket", str(smollm2_daemon.socket), *GREEDY)
    done = subprocess.run(
        [sys.executable, "-m", "umbel", *words, "--max-tokens", "12"],
        input=b"\xff caf\xc3\xa9",
        capture_output=True,
        env=environment(short_path) | {"LC_ALL": "C", "PYTHONUTF8": "0"},
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout.isascii()


def test_nothing_is_asked(tiny_daemon: RunningDaemon, short_path: Path) -> None:
    """An empty pipe without a prompt is an error."""
    done = umbel("chat", "--socket", str(tiny_daemon.socket), folder=short_path, stdin="\n")
    assert done.returncode == 1
    assert "there is nothing to ask" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_socket_in_a_closed_folder(short_path: Path) -> None:
    """It is another's, which is said in a sentence."""
    closed = short_path / "closed"
    closed.mkdir(mode=0)
    try:
        done = umbel("chat", "hi", "--socket", str(closed / "u.sock"), folder=short_path, stdin="")
    finally:
        closed.chmod(0o700)
    assert done.returncode == 1
    assert "it is another user's" in done.stderr
    assert "Traceback" not in done.stderr


CLOSED = """
import os, runpy, socket, sys

path, look, connect = sys.argv[-1], os.stat, socket.socket.connect

def stat(asked, *args, **kwargs):
    if not isinstance(asked, int) and os.fspath(asked) == path:
        raise PermissionError(13, "Permission denied", path)
    return look(asked, *args, **kwargs)

def refuse(self, address):
    if address == path:
        raise PermissionError(13, "Permission denied")
    return connect(self, address)

os.stat, socket.socket.connect = stat, refuse
runpy.run_module("umbel", run_name="__main__", alter_sys=True)
"""
"""Runs umbel where the system refuses the last argument, a path, as it does in a closed folder."""


def test_a_socket_that_the_system_refuses(short_path: Path) -> None:
    """The sentence of a closed folder, also where the tests run as root."""
    done = subprocess.run(
        [sys.executable, "-c", CLOSED, "chat", "hi", "--socket", str(short_path / "u.sock")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=environment(short_path),
        check=False,
        timeout=TIMEOUT,
    )
    assert done.returncode == 1
    assert "it is another user's" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_daemon_that_dies_in_its_answer(short_path: Path) -> None:
    path = short_path / "u.sock"
    event = b'data: {"choices": [{"delta": {"content": "Par"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    ready = b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"status": "ready"}'

    def serve(listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            with connection:
                while asked := connection.recv(65536):
                    if asked.startswith(b"POST"):
                        connection.sendall(head + b"%x\r\n%s\r\n" % (len(event), event))
                        return
                    connection.sendall(ready)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        done = umbel("chat", "hi", "--socket", str(path), folder=short_path, stdin="")
        thread.join(TIMEOUT)
    assert (done.returncode, done.stdout) == (1, "Par\n")
    said = f"umbel: the daemon on {path} went away before its answer was complete\n"
    assert done.stderr == said
