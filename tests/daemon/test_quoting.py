"""A client's text in answers and in the log."""

import io
import json
import logging

import pytest
import structlog

from umbel.daemon.config import LogFormat
from umbel.daemon.http.failures import APIError
from umbel.daemon.observability import logs
from umbel.daemon.quoting import printable, quote, shorten

from .raw import connected, read_to_end
from .running import RunningDaemon

NASTY = "\x1b[31mred\x07\r\n\x00\x9b\u202egnp.exe\u2028\ud800 é 世界"


def test_what_does_not_print_is_escaped() -> None:
    """Control codes of both kinds, line ends, text that turns direction, half surrogates."""
    text = printable(NASTY)
    assert text.isprintable()
    assert text == r"\x1b[31mred\x07\r\n\x00\x9b\u202egnp.exe\u2028\ud800 é 世界"


def test_what_prints_stays() -> None:
    """Letters of any script and the backslashes of a path are left alone."""
    assert printable(r"C:\new é 世界 👩") == r"C:\new é 世界 👩"


def test_a_long_text_is_cut_and_measured() -> None:
    """Two hundred characters are quoted; of the rest the number is told."""
    assert quote("x" * 200) == f"'{'x' * 200}'"
    assert quote("x" * 201) == f"'{'x' * 200}… (201 characters)'"
    assert len(shorten("\x1b" * 60_000_000)) < 1000


def test_no_error_carries_more_than_its_bound() -> None:
    """Whatever a library puts into its words, an answer stays short and printable."""
    error = APIError(400, NASTY * 1000)
    assert len(error.message) < 25_000
    assert error.message.isprintable()
    assert json.loads(error.body())["error"]["message"] == error.message


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_log_line_obeys_a_client(log_format: LogFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither fields nor the words of an exception reach a terminal as control codes."""
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    level = logging.getLogger("aiohttp.server").level
    try:
        logs.configure(log_format)
        log = structlog.get_logger()
        try:
            raise ValueError(NASTY)  # noqa: TRY301
        except ValueError as error:
            log.warning("refused", path=NASTY, exc_info=error)
    finally:
        structlog.reset_defaults()
        logging.getLogger("aiohttp.server").setLevel(level)
    (line,) = written.getvalue().splitlines()
    assert line.isprintable()
    assert line.count("gnp.exe") == 2


def test_a_path_with_control_codes_is_logged_as_text(tiny_daemon: RunningDaemon) -> None:
    """Raw bytes and percent escapes alike."""
    with connected(tiny_daemon.socket) as connection:
        connection.sendall(b"GET /\x1b[2J" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_to_end(connection)
    assert answer.splitlines()[0].endswith(b"400 Bad Request")
    assert b"this is not HTTP" in answer
    assert len(answer) < 1000
    reply = tiny_daemon.request("GET", "/a%1b%5b2J")
    assert reply.json()["error"]["message"].startswith(r"GET /a\x1b[2J: ")
    assert "\x1b" not in tiny_daemon.log()


def test_a_model_name_of_megabytes_is_not_repeated(tiny_daemon: RunningDaemon) -> None:
    """Neither the answer nor the log grows with what was sent."""
    size = len(tiny_daemon.log())
    messages = [{"role": "user", "content": "x"}]
    for fields in ({"model": "y" * 5_000_000}, {"messages": [{"role": "z" * 5_000_000}]}):
        reply = tiny_daemon.post({"messages": messages, **fields})
        assert reply.status in (400, 404)
        assert len(reply.body) < 1000
    assert len(tiny_daemon.log()) - size < 3000
