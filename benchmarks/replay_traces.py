"""Traces of agents, as prompts of token ids in the order of time.

Two kinds name a prompt's blocks and not its text: tokens are then made from the blocks' names.
Of text four characters count as one token. Answers are left out, because only some traces have
them: what of an answer comes back is in the next prompt.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbel.cachestore.node import Tokens

CHARACTERS = 4  # of text, that count as one token
LONGEST = 131_072  # tokens; a longer prompt would be refused
AGENTS = "claude_code"
ROOTED = "claude_code, root"
ROOT = 12_000  # tokens of tools and system prompt, about what the agents' traces have
CHAT = "mooncake_synthetic"
TEXTS = ("magagent", "miniswe", "taubench")
CROWDS = {12: 1800.0, 40: 3600.0, 100: 7200.0}
"""How many sessions start within how many seconds."""


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt of a trace.

    Attributes:
        time: seconds, when it begins.
        until: seconds, when its answer is complete; `time` where the trace does not say.
        blocks: names of the prompt's blocks, in order.
        size: tokens in each of them.
        length: tokens of the prompt; the last block may be cut short.
        final: its answer ends the agent's turn: what comes next is a person's doing.
    """

    time: float
    until: float
    blocks: NDArray[np.int32]
    size: int
    length: int
    final: bool = False

    @property
    def tokens(self) -> Tokens:
        """Make the prompt. It is not kept: all prompts of a trace together take gigabytes."""
        inside = np.arange(self.size, dtype=np.int32)
        return (self.blocks[:, None] * np.int32(self.size) + inside).ravel()[: self.length]


Session = list[Request]


def agents(folder: Path, *, part: str = "all") -> list[Session]:
    """The coding agents' sessions, one a file; a file without a prompt that fits is left out.

    Args:
        folder: where the files are.
        part: "even" or "odd" takes every other file only.
    """
    files = _part(sorted(folder.glob("*.json")), part)
    return [session for file in files if (session := agent(json.loads(file.read_text())))]


def _part(files: list[Path], part: str) -> list[Path]:
    return {"all": files, "even": files[::2], "odd": files[1::2]}[part]


def agent(trace: dict[str, Any]) -> Session:
    """One coding agent's session, sub-agents included, without prompts that are too long."""
    block = int(trace["block_size"])
    return [
        _agent_request(entry, at, block)
        for entry, at in _flat(trace["requests"], 0.0)
        if len(entry["hash_ids"]) and entry["in"] <= LONGEST
    ]


def _flat(
    entries: Iterable[dict[str, Any]], start: float
) -> Iterator[tuple[dict[str, Any], float]]:
    for entry in entries:
        at = float(entry["t"])
        at += start if at < start else 0.0  # a sub-agent's times may count from its own start
        if "requests" in entry:
            yield from _flat(entry["requests"], at)
        else:
            yield entry, at


def _agent_request(entry: dict[str, Any], at: float, block: int) -> Request:
    names = np.array(entry["hash_ids"], np.int32)
    until = at + float(entry.get("api_time") or 0.0)
    final = entry.get("stop") == "end_turn"
    return Request(at, until, names, block, block * len(names), final)


def crowd(kept: list[Session], count: int, window: float, *, seed: int) -> Session:
    """Start `count` sessions within `window` seconds, with no block in common.

    Where there are fewer of them than that, they come again, with names of their own.
    """
    chance = random.Random(seed)  # noqa: S311
    turns = [index % len(kept) for index in range(count)]
    chance.shuffle(turns)
    placed: Session = []
    base = 0
    for turn in turns:
        start = chance.uniform(0, window)
        placed += (_moved(one, start, base) for one in kept[turn])
        base += 1 + max(int(one.blocks.max()) for one in kept[turn])
    return in_order(placed)


def rooted(requests: Session) -> Session:
    """Let all prompts have their first tokens in common, as agents of one kind do.

    The traces' names are their session's own, so that they do not show it.
    """
    return [replace(request, blocks=_on_root(request.blocks, request.size)) for request in requests]


def _on_root(blocks: NDArray[np.int32], size: int) -> NDArray[np.int32]:
    shared = np.arange(ROOT // size, dtype=np.int32)
    own = blocks[len(shared) :] + np.int32(len(shared))
    return np.concatenate([shared[: len(blocks)], own])


def _moved(request: Request, later: float, base: int) -> Request:
    time, until = request.time + later, request.until + later
    return replace(request, time=time, until=until, blocks=request.blocks + np.int32(base))


def in_order(requests: Iterable[Request]) -> Session:
    """Sort by time; of equals the first stays the first."""
    return sorted(requests, key=lambda request: request.time)


def chat(file: Path) -> Session:
    """Requests that name chained blocks of 512 tokens. How long one takes is not known."""
    requests = []
    for line in file.read_text().splitlines():
        entry = json.loads(line)
        names = np.array(entry["hash_ids"], np.int32)
        time = entry["timestamp"] / 1e3
        length = min(entry["input_length"], 512 * len(names))
        requests.append(Request(time, time, names, 512, length))
    return in_order(requests)


def texts(folder: Path, *, seed: int, part: str = "all") -> Session:
    """Agents whose prompts are text. They start within the span of the longest session."""
    names: dict[str, int] = {}
    read = partial(_text_session, names)
    files = _part(sorted(folder.glob("*.jsonl")), part)
    sessions = [session for file in files if (session := read(file))]
    window = max(session[-1].time for session in sessions)
    chance = random.Random(seed)  # noqa: S311
    starts = [chance.uniform(0, window) for _ in sessions]
    return in_order(
        _moved(one, start, 0)
        for session, start in zip(sessions, starts, strict=True)
        for one in session
    )


def _text_session(names: dict[str, int], file: Path) -> Session:
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    first = min((entry["timestamp"] for entry in entries), default=0)
    return in_order(
        text_request(names, (entry["timestamp"] - first) / 1e6, entry["input"])
        for entry in entries
        if entry["input"]
    )


def text_request(names: dict[str, int], time: float, text: str) -> Request:
    """Make tokens of text. `names` remembers which token stands for which characters."""
    pieces = (text[at : at + CHARACTERS] for at in range(0, len(text), CHARACTERS))
    tokens = np.array([names.setdefault(piece, len(names)) for piece in pieces], np.int32)
    return Request(time, time, tokens, 1, len(tokens))
