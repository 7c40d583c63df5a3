"""Agents that hold conversations, with prompts of known lengths."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from side_by_side import VOCABULARY, Turn, ask
from tokenizers import Tokenizer

_FILLERS = (" a", " the", " x", ".", "!", "x")


_SHAPE = 1.1  # of the Pareto distribution of messages: the tail is heavier the smaller it is


@dataclass(frozen=True)
class Workload:
    """Number of agents, and lengths of their texts in tokens.

    Attributes:
        agents: in parallel conversations.
        turns: questions of each agent.
        shared: tokens of the system prompt that all agents have in common; 0 for none.
        private: tokens of each agent's own text in its first message.
        message: tokens of each question.
        answer: tokens of each answer.
        message_max: if not 0, lengths of questions follow a Pareto distribution that starts at
            `message` and is cut off here.
        answer_max: if not 0, lengths of answers are uniform between `answer` and this.
        arrivals: seconds over which the agents start, at equal distances; 0 to start all at once.
        pause: upper bound of the seconds between an answer and the agent's next question.
    """

    agents: int
    turns: int
    shared: int
    private: int
    message: int
    answer: int
    message_max: int = 0
    answer_max: int = 0
    arrivals: float = 0.0
    pause: float = 0.0


@dataclass(frozen=True)
class Question:
    """One message of an agent.

    Attributes:
        text: of the message.
        answer: tokens of the answer.
        pause: seconds until it is asked, from the answer before it or from the start.
    """

    text: str
    answer: int
    pause: float


@dataclass
class Answer:
    """One answer: the times of its request and of its end on one clock, and its tokens' times.

    Attributes:
        again: tokens of its text when the history is tokenized.
    """

    start: float
    end: float
    turn: Turn
    again: int


class Texts:
    """Generates texts of known lengths, with the tokenizer of a model's folder."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def count(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def of(self, count: int, start: str, seed: int) -> str:
        """Generate a text of `count` tokens, or of more if `start` alone has more."""
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
        """Find a suffix that makes a text one token longer."""
        wanted = self.count(text) + 1
        return next((f for f in _FILLERS if self.count(text + f) == wanted), "")


@dataclass
class Agent:
    """One agent, its history, its questions and its answers."""

    session: Any
    messages: list[dict[str, str]]
    questions: list[Question]
    texts: Texts
    answers: list[Answer] = field(default_factory=list)

    async def talk(self, question: Question) -> None:
        """Ask a question after its pause, and wait for the end of the answer.

        Raises:
            RuntimeError: the answer broke off.
        """
        await asyncio.sleep(question.pause)
        self.messages.append({"role": "user", "content": question.text})
        start = time.perf_counter()
        text, turn = await ask(self.session, self.messages, question.answer)
        if not turn.tokens:
            raise RuntimeError("an answer broke off")
        end = time.perf_counter()
        self.messages.append({"role": "assistant", "content": text})
        self.answers.append(Answer(start, end, turn, self.texts.count(text)))


def crowd(session: Any, workload: Workload, texts: Texts) -> list[Agent]:
    """Make the agents of a workload, each with one question more than it has turns."""
    system = texts.of(workload.shared, "You are one of several agents.", 0)
    history = [{"role": "system", "content": system}] if workload.shared else []
    return [
        Agent(session, [*history], _questions(number, workload, texts), texts)
        for number in range(workload.agents)
    ]


def _questions(number: int, workload: Workload, texts: Texts) -> list[Question]:
    rng = random.Random(number)  # noqa: S311  (not a secret)
    questions = []
    for turn in range(workload.turns + 1):
        length, answer = _message(workload, rng), _answer(workload, rng)
        if turn:
            pause = rng.uniform(0.0, workload.pause)
        else:
            length += workload.private
            pause = workload.arrivals * number / workload.agents
        text = texts.of(length, f"{number} {turn}:", 1000 * number + turn)
        questions.append(Question(text, answer, pause))
    return questions


def _message(workload: Workload, rng: random.Random) -> int:
    if not workload.message_max:
        return workload.message
    return min(int(workload.message * rng.paretovariate(_SHAPE)), workload.message_max)


def _answer(workload: Workload, rng: random.Random) -> int:
    return rng.randint(workload.answer, max(workload.answer, workload.answer_max))


async def drive(agents: list[Agent], workload: Workload, *, lockstep: bool) -> None:
    """Run all conversations to their end.

    Args:
        agents: as `crowd` made them.
        workload: they were made for.
        lockstep: a turn starts for all agents when it has ended for the last of them.
    """
    barrier = asyncio.Barrier(len(agents))

    async def talk(agent: Agent) -> None:
        for question in agent.questions[: workload.turns]:
            if lockstep:
                await barrier.wait()
            await agent.talk(question)

    await asyncio.gather(*map(talk, agents))
