"""Mixed steps, held to the same tokens in calls of their own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import umbel.models  # noqa: F401  (before mlx.core)

import mlx.core as mx  # isort: skip
import pytest
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize

from umbel.models.attention.blocks import BLOCK
from umbel.models.errors import NotBatchableError
from umbel.models.kv.placement import Placement
from umbel.models.kv.sequence_cache import SequenceCache
from umbel.models.load import probe_mixed
from umbel.models.load.device import CPU, CUDA, GPU, device_policy
from umbel.models.load.trials import Trials
from umbel.models.mixed_call import MixedCall
from umbel.models.output_rows import OutputRows
from umbel.models.params import Row, SamplingParams
from umbel.models.prefill import begin
from umbel.models.prepare import prepare
from umbel.models.runtime import resident_bytes

from .batch_fixture import NAMES, TOLERANCE, Agent, BatchFixture, Branch

APART = {
    "deepseek_v3": "its layers are given no mask",
    "llama_kv8": "its keys are quantised",
    "longcat_flash": "its layers are given no mask",
}
"""Models whose prompts are computed together, but in calls of their own, and why."""

MIXING = ["llama", "qwen3"]
GREEDY = SamplingParams(seed=0, temperature=0)


def mixed(
    world: BatchFixture, agents: Sequence[Agent], prompts: Sequence[tuple[list[int], SequenceCache]]
) -> mx.array:
    """Give agents tokens beside prompts, and remember what comes of them; returns the prompts'."""
    caches, tokens = [agent.cache for agent in agents], world.words(len(agents))
    planned = [(cache, len(words)) for words, cache in prompts]
    plan = world.runner.plan(caches, planned, mixed=True)
    logits = world.runner.mix(plan, caches, tokens, prompts).logits
    assert logits is not None
    for agent, token, row in zip(agents, tokens, logits, strict=False):
        agent.logits[len(agent.tokens)] = row
        agent.tokens.append(token)
    return logits[len(agents) :]


def is_as_alone(
    world: BatchFixture, branch: Branch, cache: SequenceCache, words: list[int], begun: mx.array
) -> None:
    """Check a prompt's first logits, and what its state leads to."""
    other = world.come(branch).cache
    expected = world.model(mx.array([words]), cache=other.layers)[0, -1]
    other.advanced(len(words))
    assert mx.abs(begun - expected).max() < TOLERANCE
    assert (cache.offset, cache.suffix_length) == (other.offset, other.suffix_length)
    after = [world.model(mx.array([[3]]), cache=each.layers) for each in (cache, other)]
    assert mx.abs(after[0] - after[1]).max() < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_who_mixes(name: str) -> None:
    """A model mixes whose layers all keep keys and values of every token, and no other."""
    world = BatchFixture(name)
    plain = world.runner.prefills_together and not world.layout.has_checkpoints
    assert world.runner.mixes == (plain and name not in APART)


def test_a_cpu_alone_mixes() -> None:
    """On a GPU launches are what takes the time."""
    assert [device.mixes for device in (CPU, GPU, CUDA)] == [True, False, False]


@pytest.mark.parametrize("lengths", [(7, 1, 4), (5, 5), (9,), (BLOCK + 9, 3)])
@pytest.mark.parametrize("name", MIXING)
def test_all_have_what_they_have_apart(name: str, lengths: tuple[int, ...]) -> None:
    """Prompts that lease what rows do, something else or nothing; wide ones, and one alone."""
    world = BatchFixture(name)
    branch = world.branch(40)
    places = [branch, world.branch(11, branch), Branch()]
    agents = [world.come(place, 3) for place in places]
    world.decode(steps=2)
    for _ in range(2):
        prompts = [
            (world.words(length), world.come(place).cache)
            for place, length in zip(places, lengths, strict=False)
        ]
        del world.agents[len(agents) :]
        begun = mixed(world, agents, prompts)
        for place, (words, cache), logits in zip(places, prompts, begun, strict=False):
            is_as_alone(world, place, cache, words, logits)
        del world.agents[len(agents) :]
    world.check()


@pytest.mark.parametrize("name", MIXING)
def test_beside_one_alone(name: str) -> None:
    """It decodes in caches of its own, be its keys apart or in one piece."""
    world = BatchFixture(name)
    branch = world.branch(20)
    agent = world.come(branch, 4)
    for contiguous in (False, True):
        if contiguous:
            agent.cache.make_contiguous()
        words = world.words(6)
        cache = world.come(branch).cache
        (logits,) = mixed(world, [agent], [(words, cache)])
        is_as_alone(world, branch, cache, words, logits)
        world.check(agent)


def test_prompts_that_have_begun_go_on() -> None:
    """What a chunk before left in caches of their own is read there."""
    world = BatchFixture("llama")
    branch = world.branch(20)
    agents = [world.come(branch, 4) for _ in range(2)]
    caches = [world.come(branch).cache for _ in range(2)]
    first, second = [[world.words(n) for n in lengths] for lengths in ((5, 9), (70, 2))]
    mixed(world, agents, list(zip(first, caches, strict=True)))
    begun = mixed(world, agents, list(zip(second, caches, strict=True)))
    for one, two, cache, logits in zip(first, second, caches, begun, strict=True):
        is_as_alone(world, branch, cache, [*one, *two], logits)
    world.check(*agents)


def test_rows_that_nobody_has_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody left a row in the middle: the model has a row for each who decodes, and no more."""
    world, seen = BatchFixture("llama"), []
    agents = [world.come(prompt=5) for _ in range(5)]
    world.decode()
    world.leave(agents[1])
    left = [agents[0], *agents[2:]]
    call = type(world.model).__call__

    def called(model: Any, tokens: mx.array, **options: Any) -> mx.array:
        found: mx.array = call(model, tokens, **options)
        seen.append((tokens.shape, found.shape[:2]))
        return found

    monkeypatch.setattr(type(world.model), "__call__", called)
    words, cache = world.words(6), world.come().cache
    (logits,) = mixed(world, left, [(words, cache)])
    monkeypatch.undo()
    assert seen == [((4 + 6, 1), (4 + 1, 1))]
    is_as_alone(world, Branch(), cache, words, logits)
    world.check(*left)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("name", MIXING)
def test_no_mixed_step_takes_more_than_its_price(name: str, rows: int) -> None:
    """All of it is reserved: what both parts compute with, and the prompts' logits."""
    world = BatchFixture(name)
    branch = world.branch(60)
    agents = [world.come(branch, 5) for _ in range(rows)]
    for lengths, held in (((30, 30), 0), ((1,), 0), ((90,), 0), ((4, 4, 3, 4), 0), ((9, 30), 7)):
        caches = [agent.cache for agent in agents]
        prompts = [(world.words(n), world.come(branch, held).cache) for n in lengths]
        plan = world.runner.plan(
            caches, [(cache, len(words)) for words, cache in prompts], mixed=True
        )
        apart = world.runner.plan(caches, [(cache, len(words)) for words, cache in prompts])
        price = world.runner.cost(plan).nbytes
        assert (price > world.runner.cost(apart).nbytes) == bool(rows)
        mx.clear_cache()
        before = resident_bytes()
        mx.reset_peak_memory()
        output = world.runner.mix(plan, caches, world.words(rows), prompts)
        choosing = {place: Row(GREEDY, [], []) for place in range(rows + len(prompts))}
        world.runner.sample(output, choosing).read()
        assert mx.get_peak_memory() - before <= price


@pytest.mark.parametrize("logits", [1, 1 << 24])
def test_prompts_by_themselves_take_their_layers_or_their_logits(
    logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ones are gone when the others come: little memory keeps no answer from beginning."""
    world = BatchFixture("llama")
    monkeypatch.setattr(world.runner.profile, "_logits", logits)
    prompts = [(world.come().cache, 40) for _ in range(2)]
    apart, begun = (
        world.runner.cost(world.runner.plan([], prompts, mixed=mixed)).nbytes
        for mixed in (False, True)
    )
    suffixes = 2 * world.runner.profile.sizes.suffix(40)
    assert begun == apart if logits == 1 else 2 * logits + suffixes <= begun < apart + 2 * logits


@pytest.mark.parametrize(
    ("owner", "method"),
    [(MixedCall, "advanced"), (MixedCall, "__call__"), (Placement, "apply"), (mx, "eval")],
)
def test_a_failure_leaves_no_row_behind(
    owner: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, the states of all are lost; the next batch has nothing of them."""
    world = BatchFixture("llama")
    agents = [world.come(prompt=5) for _ in range(2)]
    world.decode()

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, fails)
        with pytest.raises(RuntimeError, match="no"):
            mixed(world, agents, [(world.words(4), world.come().cache)])
    assert all(agent.cache.is_lost and agent.cache.slot is None for agent in agents)
    assert world.placement.sequences == {}
    world.agents = []
    others = [world.come(prompt=5) for _ in range(2)]
    mixed(world, others, [(world.words(4), world.come().cache)])
    world.check(*others)


@pytest.mark.parametrize("lengths", [(9,), (7, 1, 4), (5, 5), (BLOCK + 9, 3)])
@pytest.mark.parametrize("name", MIXING)
def test_prompts_by_themselves_begin_answers(name: str, lengths: tuple[int, ...]) -> None:
    """Nobody decodes: each has the logits that a call of its own gives, and its state."""
    world = BatchFixture(name)
    branch = world.branch(40)
    places = [branch, world.branch(11, branch), Branch()]
    prompts = [
        (world.words(length), world.come(place).cache)
        for place, length in zip(places, lengths, strict=False)
    ]
    begun = mixed(world, [], prompts)
    assert len(begun) == len(lengths)
    for place, (words, cache), logits in zip(places, prompts, begun, strict=False):
        is_as_alone(world, place, cache, words, logits)


def test_a_prompt_by_itself_whose_head_is_not_known_fails() -> None:
    """Logits of all of its tokens were not reserved."""
    world = BatchFixture("llama")
    outputs = OutputRows()
    for lengths in ((5,), (5, 2)):
        prompts = [(world.words(length), world.come().cache) for length in lengths]
        with pytest.raises(NotBatchableError, match="logits"):
            begin(world.model, prompts, CPU, outputs)


def test_a_call_that_begins_answers_teaches_nothing_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How much of its peak were logits is not known; one that begins none teaches its own."""
    world, seen = BatchFixture("llama"), []
    branch = world.branch(40)
    monkeypatch.setattr(world.runner.profile, "observe", lambda *call: seen.append(call[:2]))
    mixed(world, [], [(world.words(6), world.come(branch).cache)])
    world.runner.prefill([(world.words(7), world.come(branch).cache)])
    assert seen == [(7, 40)]


def test_only_a_plan_of_one_call_is_mixed() -> None:
    """Not where sequences decode one by one."""
    world = BatchFixture("llama")
    world.runner.use(replace(world.runner.rules, batches=False))
    assert not world.runner.mixes
    cache, *decoding = [world.come(prompt=3).cache for _ in range(3)]
    plan = world.runner.plan(decoding, [(cache, 2)], mixed=True)
    with pytest.raises(ValueError, match="one call"):
        world.runner.mix(plan, decoding, [1, 1], [([1, 2], cache)])


class Model:
    """Computes logits as mlx-lm's models do, by a layer of either kind."""

    def __init__(self, *, tied: bool, bits: int | None) -> None:
        self.layers: Any = Module()  # type: ignore[no-untyped-call]
        self.layers.embed_tokens = Embedding(64, 64)
        self.layers.lm_head = Linear(64, 64, bias=False)
        if bits:
            quantize(self.layers, bits=bits)
        self.tied = tied

    def __call__(self, hidden: mx.array) -> mx.array:
        """Compute them."""
        if self.tied:
            tied: mx.array = self.layers.embed_tokens.as_linear(hidden)
            return tied
        logits: mx.array = self.layers.lm_head(hidden)
        return logits


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_some_rows_only(bits: int | None, *, tied: bool) -> None:
    """A head of its own or the embedding, plain or quantised, asked once or for a second time."""
    model = Model(tied=tied, bits=bits)
    hidden = mx.random.normal((5, 1, 64))
    whole = model(hidden)
    for outputs in [prepare(model.layers, device_policy()) for _ in range(2)]:
        with outputs.only([3, 1]):
            some = model(hidden)
        assert mx.allclose(some, whole[mx.array([3, 1])], atol=1e-5)
        assert mx.array_equal(model(hidden), whole)
    assert model.layers.embed_tokens(mx.array([2])).shape == (1, 64)


def test_a_model_that_computes_all_logits_is_not_mixed() -> None:
    """Its head has another name: nothing is reserved for logits of each token of a prompt."""
    world = BatchFixture("llama")
    outputs = OutputRows()
    agent, cache = world.come(prompt=4), world.come().cache
    call = MixedCall(world.model, [0], [(world.words(5), cache)], device_policy(), outputs)
    with pytest.raises(NotBatchableError, match="logits"):
        call(mx.array([[7]]), cache=agent.cache.layers)
    assert not probe_mixed.mixes(Trials(world.model, world.layout), CPU, outputs)


@pytest.mark.parametrize("error", [NotBatchableError, TypeError, RuntimeError])
def test_a_model_that_cannot_is_not_mixed(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trial raises is why; the model is served without."""

    def fails(*_: Any, **__: Any) -> None:
        raise error("no")

    world = BatchFixture("llama")
    outputs = prepare(world.model, device_policy())
    assert probe_mixed.mixes(Trials(world.model, world.layout), CPU, outputs)
    monkeypatch.setattr(MixedCall, "__call__", fails)
    assert not probe_mixed.mixes(Trials(world.model, world.layout), CPU, outputs)


def test_a_model_that_computes_otherwise_is_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it gives is compared, and not only whether it gives something."""
    world = BatchFixture("llama")
    outputs = prepare(world.model, device_policy())
    call = MixedCall.__call__

    def wrong(mixed_call: MixedCall, tokens: mx.array, **options: Any) -> mx.array:
        logits = call(mixed_call, tokens, **options)
        mixed_call.logits = -mixed_call.logits
        return logits

    monkeypatch.setattr(MixedCall, "__call__", wrong)
    assert not probe_mixed.mixes(Trials(world.model, world.layout), CPU, outputs)
