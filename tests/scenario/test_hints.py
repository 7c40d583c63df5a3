"""A client's hints place checkpoints: from its body to what its next request is spared."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from umbel.cachestore.checkpoints import Reason
from umbel.daemon.http.bodies import decode
from umbel.daemon.protocols.chat import ChatRequest
from umbel.daemon.protocols.generation_request import GenerationBody
from umbel.daemon.protocols.messages import MessagesRequest
from umbel.daemon.requests.prompts import Author, PromptReader, Rendered
from umbel.models.load.loader import LoadedModel
from umbel.scheduler.limits import Admission

from .bench import Ask, Bench

STABLE = "You are one of the agents that read the report. " * 8
MARK = {"cache_control": {"type": "ephemeral"}}


class Agents:
    """Sends bodies to a tiny model that needs checkpoints, or to one that does not.

    Args:
        text: has the tokenizer and the template.
        name: of the model in the zoo.
    """

    def __init__(self, text: LoadedModel, name: str) -> None:
        self.bench = Bench(name)
        layout = SimpleNamespace(has_checkpoints=self.bench.exact)
        loaded = cast("LoadedModel", SimpleNamespace(text=text.text, layout=layout, sampling={}))
        self._reader = PromptReader(loaded, Admission(4096))
        self._text = text.text

    def read(self, body: dict[str, Any], kind: type[GenerationBody]) -> Rendered:
        """Read a body as the daemon does."""
        decoded = decode(msgspec.json.encode({**body, "max_tokens": 4}), kind)
        (rendered,) = self._reader.prepare(decoded, Author("t", "r"), lambda: None).prompts
        return rendered

    def ask(self, body: dict[str, Any], kind: type[GenerationBody] = MessagesRequest) -> str:
        """Serve a body; returns the text of what was cached of its prompt."""
        rendered = self.read(body, kind)
        outcome = self.bench.run(rendered.prompt, 4, rendered.boundaries)
        assert self.bench.difference(outcome) < 1e-3
        cached = rendered.prompt[: outcome.cached]
        return "".join(self._text.read_token(t, first=False).text for t in cached)


def messages(day: str, question: str, *, mark: bool) -> dict[str, Any]:
    """A body of Anthropic's: a stable block of the system prompt, and one that is not."""
    stable = {"type": "text", "text": STABLE, **(MARK if mark else {})}
    volatile = {"type": "text", "text": day, **(MARK if mark else {})}
    return {"system": [stable, volatile], "messages": [{"role": "user", "content": question}]}


def chat(day: str, question: str, *, mark: bool) -> dict[str, Any]:
    """The same as a chat completion's."""
    body = messages(day, question, mark=mark)
    return {"messages": [{"role": "system", "content": body["system"]}, *body["messages"]]}


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_next"])
@pytest.mark.parametrize(("write", "kind"), [(messages, MessagesRequest), (chat, ChatRequest)])
def test_the_second_conversation_resumes_at_the_hint(
    tiny: LoadedModel, name: str, write: Any, kind: type[GenerationBody]
) -> None:
    """Without the hint it shares as many tokens, and has to compute them."""
    talks = [("It is Monday.", "What is the plan?"), ("A new day: Friday.", "Who reads?")]
    for mark in (True, False):
        agents = Agents(tiny, name)
        first, second = (agents.ask(write(*talk, mark=mark), kind) for talk in talks)
        assert first == ""
        assert second == (f"<|im_start|>system\n{STABLE}".rstrip() if mark else "")


def test_agents_that_start_together_share_what_is_before_the_hint(tiny: LoadedModel) -> None:
    """The one that waits for the other's prefill resumes where that has left its checkpoint."""
    agents = Agents(tiny, "gemma3_text")
    asks = []
    for at, day in enumerate(("It is Monday.", "A new day: Friday.")):
        read = agents.read(messages(day, "What is the plan?", mark=True), MessagesRequest)
        asks.append(Ask(read.prompt, 40, at=at, boundaries=list(read.boundaries)))
    first, second = agents.bench.run_together(asks)
    assert first.cached == 0
    assert second.cached in [at for at, why in asks[0].boundaries if why is Reason.HINT]


def test_a_hint_in_the_midst_of_history(tiny: LoadedModel) -> None:
    """Another question about a document that an earlier message has."""
    talk = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": STABLE, **MARK},
                {"type": "text", "text": "What is the plan?"},
            ],
        },
        *({"role": role, "content": "The answer."} for role in ("assistant", "user") * 2),
    ]
    agents = Agents(tiny, "gemma3_text")
    assert agents.ask({"messages": talk}) == ""
    other = [{"role": "user", "content": f"{STABLE}\nAnd who reads it?"}]
    assert agents.ask({"messages": other}) == f"<|im_start|>user\n{STABLE}".rstrip()


def test_models_that_resume_anywhere_pay_nothing(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their prompts are rendered once; for others a hint takes one rendering more."""
    template, rendered = tiny.text.template, 0
    real = template.render

    def render(*args: Any, **kwargs: Any) -> str:
        nonlocal rendered
        rendered += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(template, "render", render)
    taken: dict[str, list[int]] = {"llama": [], "gemma3_text": []}
    for name, counts in taken.items():
        for mark in (False, True):
            rendered = 0
            body = messages("It is Monday.", "What is the plan?", mark=mark)
            found = Agents(tiny, name).read(body, MessagesRequest).boundaries
            hinted = [reason for _, reason in found].count(Reason.HINT)
            assert hinted == (mark and name == "gemma3_text")
            counts.append(rendered)
    assert taken["llama"] == [1, 1]
    plain, marked = taken["gemma3_text"]
    assert marked == plain + 1
