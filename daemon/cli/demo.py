"""`umbel demo`: agents with and without a system prompt in common, live, in two turns."""

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial
from statistics import mean

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..errors import ClientError
from ..terminal.console import without_echo
from ..terminal.display import StartView
from .client import Client
from .private import private_daemon

_SYSTEM = """You are one of several agents that work in one small shop for plants. All of you \
follow the same house rules. Answer in one or two short sentences. Use plain words. Name only \
what you know. Never promise a delivery date. Prices are in euros. The shop opens at nine in the \
morning and closes at six in the evening, Monday to Saturday. Water for plants should stand for \
a day before it is used. Herbs like sun; ferns like shade. If a question has nothing to do with \
plants, answer it briefly all the same and be kind about it.
Prices: basil 3, mint 3, thyme 4, rosemary 5, sage 4, parsley 2, ivy 8, fern 9, palm 25, cactus 6, \
orchid 18, lily 12, rose 15, tulip 2, lavender 7, olive tree 40, lemon tree 45, fig tree 38.
Light: basil, thyme, rosemary, sage, lavender, cactus, roses, olive, lemon and fig trees like full \
sun. Mint, parsley, tulips and lilies like half shade. Ferns, ivy, palms and orchids like shade.
Water: cactus once in two weeks; lavender, thyme, rosemary, sage and olive trees once a week; \
orchids, palms and ivy twice a week; basil, mint, parsley, ferns and roses each day in summer.
Pots are of clay in three sizes: 10, 20 and 30 centimetres wide, for 2, 5 and 9 euros. Earth comes \
in bags of 5, 20 and 40 litres, for 3, 8 and 14 euros. A plant that dies within two weeks is \
replaced if the customer still has the receipt. Gifts are wrapped without charge."""

_TASKS = (
    "What is the capital of France?",
    "When does the shop open?",
    "Where should I put a fern?",
    "Do herbs like sun or shade?",
    "What is the capital of Italy?",
    "What is the capital of Spain?",
    "When does the shop close?",
    "What is the capital of Japan?",
)
_REFRESH = 8  # times a second
_WARM_UP = 4  # tokens


class Agent(msgspec.Struct):
    """One agent's figures in one turn; times in seconds."""

    name: str
    messages: list[dict[str, str]]
    state: str = "waits"
    answer: str = ""
    ttft: float | None = None
    decode: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    out: int = 0

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first."""
        return (self.out - 1) / self.decode if self.decode and self.out > 1 else None


async def demo(*, agents: int, max_tokens: int, model: str) -> bool:
    """Run the demonstration; True when every agent got its answers.

    Raises:
        ClientError: the private daemon did not start.
    """
    console = Console()
    console.print(f"Starting a private daemon with [bold]{model}[/bold] …")
    view = StartView(Console(stderr=True, soft_wrap=True))
    async with AsyncExitStack() as stack:
        stack.callback(view.close)
        client = await stack.enter_async_context(private_daemon(model, view.show))
        view.close()
        await _work(_first(0, "Say hello."), client, _WARM_UP, " warm-up")  # in no figure
        turn = partial(_turn, console, client, max_tokens)
        apart = [_first(i, f"Shop {i + 1}. {_SYSTEM}") for i in range(agents)]
        crew = [_first(i, _SYSTEM) for i in range(agents)]
        if not await turn("Without sharing: each prompt begins otherwise", apart, " apart"):
            return False
        if not await turn("Turn 1: the same questions, below one system prompt", crew):
            return False
        again = [_second(i, agent) for i, agent in enumerate(crew)]
        if not await turn("Turn 2: each agent asks once more", again):
            return False
    _compare(console, apart, crew)
    console.print("Next: umbel serve, and then umbel chat; umbel models recommend names models.")
    return True


def _first(index: int, system: str) -> Agent:
    messages = [{"role": "system", "content": system}, _question(index)]
    return Agent(f"agent {index + 1}", messages)


def _second(index: int, before: Agent) -> Agent:
    answer = {"role": "assistant", "content": before.answer}
    return Agent(before.name, [*before.messages, answer, _question(index + 1)])


def _question(index: int) -> dict[str, str]:
    return {"role": "user", "content": _TASKS[index % len(_TASKS)]}


async def _turn(
    console: Console, client: Client, max_tokens: int, title: str, crew: list[Agent], mark: str = ""
) -> bool:
    """Run all agents at once, and show them; False if one got no answer.

    Args:
        console: to print on.
        client: of the daemon.
        max_tokens: of an answer.
        title: printed above the table.
        crew: the agents.
        mark: tells their conversations from those of other turns.
    """
    console.print(f"\n[bold]{title}[/bold]\n")
    start = time.perf_counter()
    with (
        without_echo(),  # a ^C would push the table down, and it would be drawn twice
        Live(get_renderable=lambda: _table(crew), refresh_per_second=_REFRESH, console=console),
    ):
        await asyncio.gather(*(_work(agent, client, max_tokens, mark) for agent in crew))
    _summarise(console, crew, time.perf_counter() - start)
    return all(agent.state == "done" for agent in crew)


async def _work(agent: Agent, client: Client, max_tokens: int, mark: str) -> None:
    start = first = time.perf_counter()
    try:
        async for chunk in client.chat(
            agent.messages,
            conversation=agent.name + mark,
            max_tokens=max_tokens,
            temperature=0.0,
        ):
            now = time.perf_counter()
            if chunk.text and agent.ttft is None:
                first, agent.ttft, agent.state = now, now - start, "answers"
            if chunk.text:
                agent.answer += chunk.text
                agent.decode = now - first
            if chunk.usage is not None:
                agent.prompt_tokens = chunk.usage["prompt_tokens"]
                agent.cached_tokens = chunk.usage["prompt_tokens_details"]["cached_tokens"]
                agent.out = chunk.usage["completion_tokens"]
    except ClientError as error:
        agent.state, agent.answer = "failed", str(error)
    else:
        agent.state = "done"


def _table(crew: list[Agent]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="bold")
    for column in ("agent", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("TTFT", "prompt", "cached", "out", "tok/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("answer", overflow="ellipsis", no_wrap=True, ratio=1)
    for agent in crew:
        table.add_row(
            agent.name,
            agent.state,
            "" if agent.ttft is None else f"{agent.ttft:.2f} s",
            _count(agent.prompt_tokens),
            str(agent.cached_tokens) if agent.prompt_tokens else "",
            _count(agent.out),
            "" if agent.rate is None else f"{agent.rate:.1f}",
            " ".join(agent.answer.split()),
        )
    return table


def _count(number: int) -> str:
    return str(number) if number else ""


def _summarise(console: Console, crew: list[Agent], seconds: float) -> None:
    done = sum(agent.state == "done" for agent in crew)
    prompt = sum(agent.prompt_tokens for agent in crew)
    cached = sum(agent.cached_tokens for agent in crew)
    out = sum(agent.out for agent in crew)
    console.print(
        f"\n{done} of {len(crew)} agents answered in {seconds:.1f} s: {prompt} prompt tokens, "
        f"{cached / max(prompt, 1):.0%} of them from the cache; {out} tokens out, "
        f"{out / seconds:.1f} tokens/s in all."
    )


def _compare(console: Console, apart: list[Agent], crew: list[Agent]) -> None:
    """Print which agents computed the shared prompt, and the gain of sharing it."""
    computed = [agent.name for agent in crew if agent.cached_tokens * 2 < agent.prompt_tokens]
    if 0 < len(computed) < len(crew):
        console.print(
            f"\nIn turn 1 {', '.join(computed)} computed the shared prompt; "
            f"{len(crew) - len(computed)} of {len(crew)} agents took it from the cache."
        )
    without = [agent.ttft for agent in apart if agent.ttft is not None]
    shared = [agent.ttft for agent in crew if agent.ttft is not None]
    if without and shared:
        slow, quick = mean(without), mean(shared)
        console.print(
            f"Measured on this machine just now: answers began after {quick:.2f} s in turn 1, and "
            f"after {slow:.2f} s without sharing, which is {slow / quick:.1f} times as long."
        )
