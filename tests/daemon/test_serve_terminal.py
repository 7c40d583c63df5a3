"""`umbel serve` on a terminal: phases, banner, log lines, and what its end waits for."""

import io
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import msgspec
import pyte
import pytest
import structlog
from rich.console import Console

from umbel.daemon.observability import logs
from umbel.daemon.terminal.display import TerminalDisplay

from ..tiny import tiny_model_dir
from .running import STOP, UnixConnection
from .terminal import COLUMNS, CTRL_C, LINES, Terminal, in_terminal, terminal

COLOUR = re.compile(rb"\x1b\[(\d+;)*(3\d|9\d)(;\d+)*m")


def serve(folder: Path, model: str | Path, **env: str) -> AbstractContextManager[Terminal]:
    """Start `umbel serve` in a terminal."""
    words = ("serve", "--model", str(model), "--socket", str(folder / "u.sock"))
    variables = in_terminal(folder) | {"UMBEL_DISK_DIR": str(folder / "disk")}
    return terminal(*words, env=variables | env, folder=folder)


@contextmanager
def answering(folder: Path) -> Iterator[None]:
    """Keep a daemon at work on an answer for as long as a block lasts."""
    messages = [{"role": "user", "content": "x"}]
    # Greedy, it does not end by itself.
    body = {"messages": messages, "max_tokens": 8000, "temperature": 0, "stream": True}
    with closing(UnixConnection(folder / "u.sock")) as connection:
        connection.request("POST", "/v1/chat/completions", msgspec.json.encode(body))
        with closing(connection.getresponse()) as response:
            response.read(1)
            yield


def test_phases_banner_and_requests(short_path: Path) -> None:
    """Phases are ticked off, the banner says what is served, and its curl line works."""
    model = tiny_model_dir(short_path / "tiny", max_position_embeddings=256)
    with serve(short_path, model) as shown:
        shown.wait_for("Ctrl-C stops it")
        for phase in ("loading the model", "measuring the model", "recovering state from disk"):
            assert re.search(rf"✓ {phase}  \d+\.\d s", shown.text()), shown.text()
        assert re.search(r"umbel \S+ serves tiny", shown.text())
        assert "256 tokens" in shown.text()
        assert f"on disk, {short_path}/disk" in shown.text()
        assert f"umbel chat --socket {short_path}/u.sock" in shown.text()
        assert COLOUR.search(shown.output)
        command = re.search(r"curl .*?\}'$", shown.text(), re.DOTALL | re.MULTILINE)
        assert command is not None
        if shutil.which("curl"):
            shell = ["sh", "-c", command[0]]
            done = subprocess.run(shell, capture_output=True, check=True, timeout=STOP)
            tokens = msgspec.json.decode(done.stdout)["usage"]["completion_tokens"]
            assert tokens
            shown.wait_for("tokens in, 0 % cached")
            rate = r"  [\d.]+ tokens/s" if tokens > 1 else ""  # sampled: it may end with the first
            assert re.search(rf"{tokens} out  first after \d+\.\d\d s{rate}", shown.text())
        shown.type(CTRL_C)
        assert shown.wait() == 0
        assert shown.lines()[-1].endswith("stopped")


@pytest.mark.parametrize(
    "phase",
    ["loading the model", pytest.param("measuring the model", marks=pytest.mark.slow)],
)
def test_ctrl_c_while_it_starts(short_path: Path, phase: str) -> None:
    """Ctrl-C in a phase ends the daemon in order, and its spinner is gone."""
    with serve(short_path, "smollm2") as shown:
        shown.wait_for(phase)
        pressed_at = 0.0

        def ended() -> bool:
            # The phase begins as MLX calls libc's `system`, and what comes in the instant in which
            # that begins is lost (see `hear_interrupts_always`): a person presses it again.
            nonlocal pressed_at
            if time.monotonic() - pressed_at > 1:
                pressed_at = time.monotonic()
                shown.type(CTRL_C)
            return shown.process.poll() is not None

        shown.wait_for(ended)
        assert shown.wait() == 0
        said = [line for line in shown.lines() if line != "^C"]  # typed while it ended
        assert said[-1].endswith("stopped")
        if phase == "loading the model":  # nothing is compiled yet
            assert "serves" not in shown.text()


def test_ctrl_c_with_a_request(short_path: Path, long_tiny_dir: Path) -> None:
    """The end says what it waits for and how to force it; a second Ctrl-C does."""
    with serve(short_path, long_tiny_dir) as shown:
        shown.wait_for("Ctrl-C stops it")
        with answering(short_path):
            shown.type(CTRL_C)
            shown.wait_for("waiting for 1 request, Ctrl-C again to force")
            shown.type(CTRL_C)
            assert shown.wait() == 0
        assert "waiting for" not in shown.text()
        assert "^C" not in shown.text()
        assert "error  the daemon is" in shown.text()


def test_no_color_is_heeded(short_path: Path, long_tiny_dir: Path) -> None:
    """With NO_COLOR nothing is coloured."""
    with serve(short_path, long_tiny_dir, NO_COLOR="1") as shown:
        shown.wait_for("Ctrl-C stops it")
    assert "serves tiny" in shown.text()
    assert not COLOUR.search(shown.output)


def test_a_dumb_terminal_gets_lines(short_path: Path, long_tiny_dir: Path) -> None:
    """With TERM=dumb nothing moves: no escape code is written, and phases are lines."""
    with serve(short_path, long_tiny_dir, TERM="dumb") as shown:
        shown.wait_for("Ctrl-C stops it")
        with answering(short_path):
            shown.type(CTRL_C)
            shown.wait_for("waiting for 1 request, Ctrl-C again to force")
        assert shown.wait() == 0
    assert "loading the model …" in shown.text()
    assert b"\x1b" not in shown.output


def test_json_is_json_on_a_terminal_too(short_path: Path, long_tiny_dir: Path) -> None:
    with serve(short_path, long_tiny_dir, UMBEL_LOG_FORMAT="json") as shown:
        shown.wait_for('"event": "ready"')
        shown.type(CTRL_C)
        assert shown.wait() == 0
    lines = shown.output.replace(b"^C", b"").splitlines()
    assert [msgspec.json.decode(line)["event"] for line in lines][-1] == "stopped"


def test_log_lines_and_spinner_do_not_tear_each_other() -> None:
    """Lines that several threads log while a bar moves are whole on the screen, each once."""
    written = io.StringIO()
    console = Console(
        file=written, force_terminal=True, width=COLUMNS, soft_wrap=True, markup=False
    )
    display = TerminalDisplay(console)
    configured = structlog.get_config()
    logs.configure_terminal(console)
    log = structlog.get_logger()

    def write(thread: int) -> None:
        for number in range(10):
            log.info("line", thread=thread, number=number)
            display.advance(number, 10)

    try:
        display.begin("downloading")
        threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        display.begin("loading")
        display.close()
    finally:
        structlog.configure(**configured)
    screen = pyte.Screen(COLUMNS, LINES)
    pyte.Stream(screen).feed(written.getvalue().replace("\n", "\r\n"))
    shown = [line.rstrip()[10:] for line in screen.display if line.strip()]
    expected = {f"line  thread={t}  number={n}" for t in range(3) for n in range(10)}
    assert set(shown[:-1]) == expected
    assert len(shown) == len(expected) + 1  # the phase that has ended
    assert not screen.cursor.hidden


def test_log_lines_for_people() -> None:
    """A refusal says why, a warning its keys, a fault what broke; control codes are escaped."""
    written = io.StringIO()
    console = Console(file=written, width=COLUMNS, soft_wrap=True, markup=False, highlight=False)
    configured = structlog.get_config()
    logs.configure_terminal(console)
    log = structlog.get_logger()
    try:
        log.info("ready", model="is in the banner")
        log.info("refused", request="r", status=400, code="", message="no [bold]\x1b[31m field")
        log.warning("memory pressure", before="normal", share=0.5)
        log.error("handler failed", path="/x", exc_info=ValueError("it broke"))
    finally:
        structlog.configure(**configured)
    refusal, warning, fault, *traceback = [line[10:] for line in written.getvalue().splitlines()]
    assert refusal == r"refused 400  no [bold]\x1b[31m field"
    assert warning == "memory pressure  before=normal  share=0.5"
    assert fault == "handler failed  path=/x"
    assert "ValueError: it broke"[10:] == traceback[-1]
