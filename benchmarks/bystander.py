"""A normal client of a daemon that others attack, and what can be seen of the daemon meanwhile.

For `hostile.py`. Threads and blocking sockets: what is measured must not wait for itself.
"""

import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

SYSTEM = "You are a careful assistant. Answer each question in a few plain words."
QUESTIONS = (
    ("What is a plan?", "And a test?", "Which comes first?"),
    ("Name a river.", "Where does it end?", "Is it long?"),
    ("What is two and two?", "And three more?", "Is that odd?"),
    ("Who wrote the report?", "When?", "Why so late?"),
)
_TOKENS = 8
_PAUSE = 0.1  # seconds between two turns
_ABSENCE = 0.5  # seconds between two conversations: an attacker may take the connection's place
_PROBE_EVERY = 0.25
_SAMPLE_EVERY = 0.5
NO_ANSWER = "no answer"


class UnixConnection(HTTPConnection):
    """The standard library's HTTP client over a Unix socket; its timeout is that of each read."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """Connect; where the backlog is full this waits, as a socket with a timeout would not."""
        self.sock = socket.socket(socket.AF_UNIX)
        bound = struct.pack("ll", int(self.timeout or 0), 0)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        self.sock.connect(str(self._path))
        self.sock.settimeout(self.timeout)


def get(path: Path, route: str, timeout: float = 10.0) -> Any:
    """Get a route's JSON; raises `OSError` or `HTTPException` where there is none."""
    with closing(UnixConnection(path, timeout)) as connection:
        connection.request("GET", route)
        return json.loads(connection.getresponse().read())


def wait_until_ready(path: Path, process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a daemon serves.

    Raises:
        RuntimeError: it has ended, or takes longer; its log shows why.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if get(path, "/ready")["status"] == "ready":
                return
        except (OSError, HTTPException):
            pass
        time.sleep(0.1)
    raise RuntimeError("the daemon did not start; its log shows why")


def peer(path: Path) -> int:
    """The process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        level, option = (0, 2) if sys.platform == "darwin" else (socket.SOL_SOCKET, 17)
        return int(struct.unpack("i", connection.getsockopt(level, option, 12)[:4])[0])


@dataclass
class Phase:
    """Figures of a phase. Times are in seconds.

    Attributes:
        waits: until a turn's first token, or until it was given up.
        errors: turns without a whole answer, by the reason.
        wrong: turns with another text than in the first phase.
        health: answers of `/health`; one that is late counts for each probe that was due meanwhile.
        failed_probes: of `/health`.
        rss_mib: the most memory the process had.
        descriptors: the most it had open.
        threads: the most it had.
    """

    waits: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    health: list[float] = field(default_factory=list)
    failed_probes: int = 0
    rss_mib: float = 0.0
    descriptors: int | None = None
    threads: int | None = None


class Client:
    """Talks with the daemon, one conversation after another, always the same few.

    Attributes:
        expected: the answer to each turn, as it was the first time.
    """

    def __init__(self, path: Path, patience: float) -> None:
        self.expected: dict[tuple[int, int], str] = {}
        self._path = path
        self._patience = patience

    def talk(self, phase: Phase, seconds: float) -> None:
        """Talk for a while, and on until each conversation was had once, ever."""
        end, known = time.monotonic() + seconds, bool(self.expected)
        for count in itertools.count():
            if time.monotonic() > end and (known or count >= len(QUESTIONS)):
                return
            self._converse(phase, count % len(QUESTIONS))
            time.sleep(_ABSENCE)

    def _converse(self, phase: Phase, number: int) -> None:
        name = f"normal-{time.monotonic_ns()}"
        messages = [{"role": "system", "content": SYSTEM}]
        with closing(UnixConnection(self._path, self._patience)) as connection:
            for turn, question in enumerate(QUESTIONS[number]):
                messages.append({"role": "user", "content": question})
                text = self._turn(connection, phase, messages, name)
                if text is None:
                    connection.close()  # the next turn opens a new connection
                    if (number, turn) not in self.expected:
                        return
                else:
                    phase.wrong += text != self.expected.setdefault((number, turn), text)
                messages.append({"role": "assistant", "content": self.expected[number, turn]})
                time.sleep(_PAUSE)

    def _turn(
        self, connection: UnixConnection, phase: Phase, messages: list[dict[str, str]], name: str
    ) -> str | None:
        """Ask; returns the whole answer, or None where there was an error."""
        start = time.monotonic()
        first: list[float] = []
        try:
            body = {"messages": messages, "max_tokens": _TOKENS, "temperature": 0, "stream": True}
            headers = {"X-Umbel-Conversation": name, "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            text = ""
            for piece in _pieces(connection, start + self._patience):
                first.append(time.monotonic() - start)
                text += piece
        except (OSError, HTTPException) as error:
            waited = time.monotonic() - start
            late = isinstance(error, TimeoutError | BlockingIOError) or waited >= self._patience
            reason = NO_ANSWER if late else str(error) or type(error).__name__
            phase.errors[reason] = phase.errors.get(reason, 0) + 1
            if late:
                phase.waits.append((first or [waited])[0])
            return None
        phase.waits.append((first or [time.monotonic() - start])[0])
        return text


def _pieces(connection: UnixConnection, deadline: float) -> Iterator[str]:
    """Read a stream's text as it comes.

    Raises:
        HTTPException: it was refused, broke off, or ended with an error.
        OSError: it broke off, or did not end by the deadline.
    """
    response = connection.getresponse()
    if response.status != 200:  # noqa: PLR2004
        response.read()
        raise HTTPException(str(response.status))
    for line in response:
        if time.monotonic() > deadline:
            raise TimeoutError
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise HTTPException(event["error"]["message"])
            if piece := event["choices"][0]["delta"].get("content"):
                yield piece
        elif line.startswith(b"data: [DONE]"):
            response.read()
            return
    raise HTTPException("broke off")


class Watch:
    """Looks at a process, and asks it for its health, in threads of its own."""

    def __init__(self, path: Path, pid: int, patience: float) -> None:
        self._path = path
        self._pid = pid
        self._patience = patience
        self._over = threading.Event()

    @contextmanager
    def over(self, phase: Phase) -> Iterator[None]:
        """Look until the block ends."""
        with suppress(OSError):  # resets VmHWM
            Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        self._over.clear()
        threads = [threading.Thread(target=f, args=(phase,)) for f in (self._probe, self._sample)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _probe(self, phase: Phase) -> None:
        connection = UnixConnection(self._path, self._patience)
        due = time.monotonic()
        while not self._over.wait(max(0, due - time.monotonic())):
            counts = True
            try:
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, HTTPException) as error:
                counts = isinstance(error, TimeoutError)  # a refusal is no quick answer
                phase.failed_probes += 1
                connection.close()
            now = time.monotonic()
            while due <= now:
                phase.health += [now - due] if counts else []
                due += _PROBE_EVERY
        connection.close()

    def _sample(self, phase: Phase) -> None:
        while True:
            rss, threads = memory_and_threads(self._pid)
            phase.rss_mib = max(phase.rss_mib, rss)
            phase.threads = _most(phase.threads, threads)
            phase.descriptors = _most(phase.descriptors, descriptors(self._pid))
            if self._over.wait(_SAMPLE_EVERY):
                return


def memory_and_threads(pid: int) -> tuple[float, int | None]:
    """The most memory of a process in MiB, and its threads; elsewhere than on Linux, memory now."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        if sys.platform == "linux":
            return 0.0, None  # it is gone
        command = ["ps", "-o", "rss=", "-p", str(pid)]
        shown = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return int(shown or 0) / 1024, None
    values = dict(line.split(":", 1) for line in lines)
    if "VmHWM" not in values:
        return 0.0, None  # it is ending
    return int(values["VmHWM"].split()[0]) / 1024, int(values["Threads"])


def descriptors(pid: int) -> int | None:
    """How many file descriptors a process has open; None where that cannot be seen."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  (thousands, twice a second)
    except OSError:
        return None


def _most(one: int | None, other: int | None) -> int | None:
    return other if one is None or (other is not None and other > one) else one
