"""Agents whose prompts have the number of tokens that is asked for, and who talk in turns."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from side_by_side import VOCABULARY, Turn, ask
from tokenizers import Tokenizer

_FILLERS = (" a", " the", " x", ".", "!", "x")


@dataclass(frozen=True)
class Workload:
    """Who talks about how much. All but the first two are in tokens of text.

    Attributes:
        agents: how many talk at once.
        turns: questions that each of them asks.
        shared: of the system prompt, which all have in common; 0 for none.
        private: that only this agent has, in its first message.
        message: of each question.
        answer: of each answer.
    """

    agents: int
    turns: int
    shared: int
    private: int
    message: int
    answer: int


@dataclass
class Answer:
    """One answer: when it was asked for and had ended, on one clock, and its times.

    Attributes:
        again: its tokens as the text that goes back into the history.
    """

    start: float
    end: float
    turn: Turn
    again: int


class Texts:
    """Makes up texts of known lengths, with the tokenizer of a model's folder."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def of(self, count: int, start: str, seed: int) -> str:
        """Make up a text of so many tokens, or of a few more where its start alone has more."""
        rng = random.Random(seed)  # noqa: S311  (not a secret)
        words = [start]
        while (missing := count - self.count(" ".join(words))) > 0:
            words += [rng.choice(VOCABULARY) for _ in range(missing // 4 + 1)]
        while len(words) > 1 and self.count(" ".join(words)) > count:
            words.pop()
        text = " ".join(words)
        for _ in range(count - self.count(text)):
            text += self._filler(text)
        return text

    def _filler(self, text: str) -> str:
        """Find what makes a text one token longer."""
        wanted = self.count(text) + 1
        return next((f for f in _FILLERS if self.count(text + f) == wanted), "")


@dataclass
class Agent:
    """One agent, its history, and the answers it was given."""

    session: Any
    messages: list[dict[str, str]]
    questions: list[str]
    texts: Texts
    answers: list[Answer] = field(default_factory=list)

    async def talk(self, question: str, tokens: int) -> None:
        """Ask and wait for the whole answer, which goes into the history.

        Raises:
            RuntimeError: the answer broke off.
        """
        self.messages.append({"role": "user", "content": question})
        start = time.perf_counter()
        text, turn = await ask(self.session, self.messages, tokens)
        if not turn.tokens:
            raise RuntimeError("an answer broke off")
        end = time.perf_counter()
        self.messages.append({"role": "assistant", "content": text})
        self.answers.append(Answer(start, end, turn, self.texts.count(text)))


def crowd(session: Any, workload: Workload, texts: Texts) -> list[Agent]:
    """Make the agents of a workload, and one more question for each than it has turns."""
    system = texts.of(workload.shared, "You are one of several agents.", 0)
    history = [{"role": "system", "content": system}] if workload.shared else []
    return [
        Agent(session, [*history], _questions(number, workload, texts), texts)
        for number in range(workload.agents)
    ]


def _questions(number: int, workload: Workload, texts: Texts) -> list[str]:
    own = workload.private + workload.message
    return [
        texts.of(workload.message if turn else own, f"{number} {turn}:", 1000 * number + turn)
        for turn in range(workload.turns + 1)
    ]


async def drive(agents: list[Agent], workload: Workload, *, lockstep: bool) -> float:
    """Let all agents talk at once; returns the seconds it took.

    Args:
        agents: as `crowd` made them.
        workload: they were made for.
        lockstep: a turn begins for all of them when it ended for the last of them.
    """
    barrier = asyncio.Barrier(len(agents))

    async def talk(agent: Agent) -> None:
        for question in agent.questions[: workload.turns]:
            if lockstep:
                await barrier.wait()
            await agent.talk(question, workload.answer)

    start = time.perf_counter()
    await asyncio.gather(*map(talk, agents))
    return time.perf_counter() - start
