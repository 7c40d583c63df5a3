"""The real daemon, in which a script and not the model prefers the tokens of answers.

A user's message says what is to be answered, as JSON between `<plan>` and `</plan>`: a list with
one step for each of the assistant's turns that follow. A step is text, or a tool call `{"name": …,
"arguments": {…}}`, or a thought `{"thought": …}`, or a list of these; `RESULT` in a text stands for
what the last tool returned. Prompts without a plan are answered with `UNPLANNED`.

Turns, calls and thoughts are written as the model's family does, which its tokens tell.

Everything else is real: the template that the plan came through, the model's forward pass,
sampling, masks (what a grammar forbids cannot be preferred), the cache, the parsers, HTTP.

Run as `python -m tests.clients.scripted TOKENIZER_JSON serve --model …`.
"""

import ctypes
import fcntl
import json
import os
import re
import socket
import struct
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

UNPLANNED = "This prompt has no plan."
RESULT = "(the result)"
_PLAN = re.compile(r"<plan>(.*?)</plan>", re.DOTALL)
_PREFERENCE = 1e4  # far above any logit, penalty or noise; far below infinity
_KEPT = 64  # answers that are remembered while they are written
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP


class Family(NamedTuple):
    """How a model's template and its answers are written.

    Attributes:
        marker: a token that no other family has.
        turn: begins a turn of the assistant's.
        end: ends an answer.
        result: what a tool returned; its first group.
        edge: stands around a tool's name where the prompt defines it.
        call: with its name and its arguments.
        thought: with its text.
        text: with itself.
        between: stands between parts of an answer.
    """

    marker: str
    turn: str
    end: str
    result: str = r"<tool_response>\s*(.*?)\s*</tool_response>"
    edge: str = '"'
    call: str = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    thought: str = "<think>\n{}\n</think>\n"
    text: str = "{}"
    between: str = "\n"


CHATML = Family("<|im_start|>", "<|im_start|>assistant", "<|im_end|>")
FAMILIES = (
    CHATML,
    Family("<|start_header_id|>", "<|start_header_id|>assistant", "<|eot_id|>"),
    Family("<start_of_turn>", "<start_of_turn>model", "<end_of_turn>"),
    Family("<\uff5cAssistant\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend▁of▁sentence\uff5c>"),
    Family(
        "<|channel|>",
        "<|start|>assistant",
        "<|return|>",
        r"<\|start\|>functions\.\S+ to=assistant<\|channel\|>\w+<\|message\|>(.*?)<\|end\|>",
        " ",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}",
        "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        "<|channel|>final<|message|>{}",
        "",
    ),
    Family("</s>", "[/INST]", "</s>"),
)

Step = str | dict[str, Any] | list[str | dict[str, Any]]


def plan(*steps: Step) -> str:
    """Write the steps of an answer as a user's message carries them."""
    return f"<plan>{json.dumps(list(steps), ensure_ascii=False)}</plan>"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """Make a step of a plan that calls a tool."""
    return {"name": name, "arguments": arguments}


def thought(text: str) -> dict[str, Any]:
    """Make a part of a step that is thought."""
    return {"thought": text}


def answer_to(prompt: str, family: Family = CHATML) -> str:
    """Choose the text of an answer by its prompt.

    A tool that the prompt does not define is not called: agents send the same message along with
    other requests, such as one for a title.
    """
    plans = list(_PLAN.finditer(prompt))
    if not plans:
        return family.text.format(UNPLANNED)
    found = plans[-1]
    steps: list[Step] = json.loads(found[1])
    turns = prompt.count(family.turn, found.end()) - 1  # the last one is the answer's own
    step = steps[min(turns, len(steps) - 1)]
    parts = step if isinstance(step, list) else [step]
    defined = prompt[: found.start()] + prompt[found.end() :]
    results = re.compile(family.result, re.DOTALL).findall(prompt, found.end())
    text = family.between.join(_written(part, defined, family) for part in parts)
    return text.replace(RESULT, results[-1]) if results else text


def _written(part: str | dict[str, Any], defined: str, family: Family) -> str:
    if isinstance(part, str):
        return family.text.format(part)
    if "thought" in part:
        return family.thought.format(part["thought"])
    # A tool of a namespace may be defined by a longer name.
    known = rf"((?:[\w.:/-]*\W|\w*__)?{re.escape(part['name'])})"
    name = re.search(f"{family.edge}{known}{family.edge}", defined)
    if name is None:
        return family.text.format(UNPLANNED)
    arguments = json.dumps(part["arguments"], ensure_ascii=False)
    return family.call.format(name=name[1], arguments=arguments)


class Script:
    """Prefers tokens of the chosen answers.

    Args:
        tokenizer: the model's `tokenizer.json`.
    """

    def __init__(self, tokenizer: Path) -> None:
        from umbel.models.text.token_bytes import without_blank  # noqa: PLC0415  (as below)

        text = tokenizer.read_text()
        self._tokenizer = Tokenizer.from_str(text)
        known = self._tokenizer.token_to_id
        self._family = next(f for f in FAMILIES if known(f.marker) is not None)
        self._end = known(self._family.end)
        # Encodes answers, without the blank that some write before each text.
        self._writer = Tokenizer.from_str(without_blank(text))
        self._answers: OrderedDict[int, tuple[Sequence[int], list[int]]] = OrderedDict()

    def prefer(self, logits: Any, rows: Mapping[int, Any]) -> Any:
        """Raise the logits of the next token of each row's answer.

        Args:
            logits: `[B, V]`.
            rows: requests by the number of their row; `prompt` and `output` are read.
        """
        for number, row in rows.items():
            answer = self._answer(row.prompt)
            at = len(row.output)
            token = answer[at] if at < len(answer) else self._end
            logits = logits.at[number, token].add(_PREFERENCE)
        return logits

    def _answer(self, prompt: Sequence[int]) -> list[int]:
        """Encode the answer, once for each request: its prompt is one object all the while."""
        if id(prompt) not in self._answers:
            text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
            answer = answer_to(text, self._family)
            tokens = self._writer.encode(answer, add_special_tokens=False).ids
            self._answers[id(prompt)] = prompt, tokens
            if len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        return self._answers[id(prompt)][1]


def install(script: Script) -> None:
    """Make every sampling step in this process follow the script."""
    from umbel.models import runner, sampling  # noqa: PLC0415  (seconds; `main` handles signals first)

    real = runner.ModelRunner.sample

    def sample(self: Any, output: Any, rows: Mapping[int, Any]) -> Any:
        if output.logits is not None:
            output = sampling.ForwardOutput(script.prefer(output.logits, rows), output.errors)
        return real(self, output, rows)

    runner.ModelRunner.sample = sample  # type: ignore[method-assign]


def leave_network() -> None:
    """Move this process to an empty network of its own; only root can.

    Without the rights it stays where it is: clients are then offline by their settings.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or os.geteuid() != 0 or libc.unshare(_NEW_NETWORK) != 0:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))


def main() -> None:
    """Run the `umbel` command with the script installed."""
    from umbel.__main__ import main as umbel  # noqa: PLC0415
    from umbel.daemon.lifecycle.signals import leave_at_once  # noqa: PLC0415

    leave_at_once(0)
    leave_network()
    script = Script(Path(sys.argv.pop(1)))
    install(script)
    umbel()


if __name__ == "__main__":
    main()
