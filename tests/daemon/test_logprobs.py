"""Which tokens are told with which piece of an answer, whatever the tokens are."""

import asyncio
import gc
import math
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from umbel.daemon.http import exchange
from umbel.daemon.http.bodies import BodyBudget
from umbel.daemon.http.failures import APIError
from umbel.daemon.observability.metrics import Metrics
from umbel.daemon.protocols.generation_request import GenerationRequest
from umbel.daemon.protocols.openai_answers import ChatAnswers, CompletionAnswers
from umbel.daemon.requests.answer_reader import ENTRY_BYTES, AnswerReader, LogprobBuffer, Told
from umbel.daemon.requests.generation import Generation, Generations
from umbel.daemon.requests.service import _hold_logprobs
from umbel.models.load.loader import LoadedModel
from umbel.models.params import LogProbs, SamplingParams
from umbel.models.text.codec import TextCodec
from umbel.models.text.events import PlainParser, TextDelta
from umbel.scheduler.errors import UnavailableError
from umbel.scheduler.handoff import Handoff
from umbel.scheduler.queue import ConversationQueue
from umbel.scheduler.request import Finished, FinishReason, TokenEvent
from umbel.scheduler.statistics import EngineStatistics

from ..fakes import make_request
from ..models.text.test_codec import byte_fallback_codec

METRICS = Metrics(EngineStatistics, lambda: 0, None)
PLAIN = 60  # a token of the tiny vocabulary, whatever it writes
TEXTS = st.text(st.sampled_from("the a\n👩👨世é\ufffd"), max_size=12)
TOKENS = st.lists(st.integers(0, 383), max_size=12)
STOPS = st.lists(st.text("the a\n👩\ufffd", min_size=1, max_size=3), max_size=2)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


class Piece(NamedTuple):
    """Some of an answer's text, and the tokens that begin in it."""

    text: str
    tokens: list[Told] | None


def generation(codec: TextCodec, stops: list[str], top: int | None = 0) -> Generation:
    """Make a generation that asked for log-probabilities; for use inside a running loop."""
    handoff = Handoff(ConversationQueue(1), lambda: None, channel_limit=1000)
    sampling = SamplingParams(seed=0, top_logprobs=top)
    request = msgspec.structs.replace(make_request("req-1"), sampling=sampling)
    reader = AnswerReader(codec, PlainParser(), stops, logprobs=top is not None)
    return Generation(request, handoff, reader, METRICS, 0.0)


async def generate(
    codec: TextCodec, tokens: list[int], stops: list[str]
) -> tuple[list[Piece], bool]:
    """Give a generation its tokens; return the pieces, and whether a stop sequence cut it.

    The log-probability of a token is its number, below 0, so that it can be recognised.
    """
    pieces = []
    async with generation(codec, stops) as answer:
        assert answer._channel is not None
        for number, token in enumerate(tokens):
            answer._channel.deliver(TokenEvent(token, 0.0, LogProbs(-float(number), [])))
        answer._channel.deliver(Finished(FinishReason.LENGTH))
        while (deltas := await answer.next()) is not None:
            for event, told in deltas:
                assert isinstance(event, TextDelta)
                pieces.append(Piece(event.text, told))
    return pieces, answer.finish_reason is FinishReason.STOP


def read_all(codec: TextCodec, tokens: list[int]) -> list[bytes]:
    """Read what each token writes; this vocabulary has no spaces that only begin a text."""
    return [codec.read_token(token, first=False).data or b"" for token in tokens]


def places_of(written: list[bytes]) -> list[int]:
    """Find the character of each token's first byte: the last one of the text up to it."""
    raw = b"".join(written)
    starts = accumulate(map(len, written), initial=0)
    return [
        len(raw[: start + bool(data)].decode(errors="replace")) - bool(data)
        for start, data in zip(starts, written, strict=False)
    ]


@relaxed
@given(text=TEXTS, noise=TOKENS, stops=STOPS)
@example(text="", noise=[], stops=[])
@example(text="", noise=[172, 97], stops=[])  # ED A1, the beginning of a surrogate
def test_each_token_is_told_once_with_its_text(
    tiny: LoadedModel, text: str, noise: list[int], stops: list[str]
) -> None:
    """Tokens come in order, each with the piece that has the character it begins in."""
    tokens = [*tiny.text.encode(text), *noise, *tiny.text.encode(text)]
    pieces, stopped = asyncio.run(generate(tiny.text, tokens, stops))
    written = read_all(tiny.text, tokens)
    places = places_of(written)
    told = [one for piece in pieces for one in piece.tokens or []]
    length = sum(len(piece.text) for piece in pieces)
    kept = [place for place in places if place < length] if stopped else places
    assert [-one.token.logprob for one in told] == list(range(len(kept)))
    assert [bytes(one.token.bytes or []) for one in told] == written[: len(kept)]
    begin = 0
    for piece in pieces:
        end = math.inf if piece is pieces[-1] and not stopped else begin + len(piece.text)
        assert all(begin <= one.place < end for one in piece.tokens or [])
        begin += len(piece.text)
    with_bytes = [
        (one.place, place) for one, place in zip(told, kept, strict=True) if one.token.bytes
    ]
    assert all(told_place == place for told_place, place in with_bytes)


@relaxed
@given(tokens=TOKENS)
def test_the_bytes_told_are_the_text(tiny: LoadedModel, tokens: list[int]) -> None:
    """An uncut answer's bytes are its text, and what there is of a character it ends in."""
    pieces, _ = asyncio.run(generate(tiny.text, tokens, []))
    text = "".join(piece.text for piece in pieces)
    raw = b"".join(bytes(one.token.bytes or []) for p in pieces for one in p.tokens or [])
    decoded = raw.decode(errors="replace")
    assert decoded.startswith(text)
    assert decoded[len(text) :] in ("", "\ufffd", 2 * "\ufffd", 3 * "\ufffd")  # one a lost byte


@pytest.mark.parametrize(
    ("stop", "text", "told"),
    [
        (" ca", "the", ["the"]),  # cut between tokens
        ("tal", "the capi", ["the", " capital"]),  # cut inside one
        ("the", "", []),
        ("l of x", "the capital of", ["the", " capital", " of"]),  # a false alarm
    ],
)
def test_tokens_behind_a_stop_sequence_are_not_sent(
    smollm2: LoadedModel, stop: str, text: str, told: list[str]
) -> None:
    """A token whose first byte comes before the cut is told whole; later ones are not."""
    tokens = smollm2.text.encode("the capital of")
    pieces, _ = asyncio.run(generate(smollm2.text, tokens, [stop]))
    assert "".join(piece.text for piece in pieces) == text
    assert [one.token.token for piece in pieces for one in piece.tokens or []] == told


def test_nothing_is_told_unasked(tiny: LoadedModel) -> None:
    """Without log-probabilities nothing is kept, and pieces have none."""

    async def whole() -> AnswerReader:
        async with generation(tiny.text, [], top=None) as answer:
            assert answer.reader._logprobs is None
            assert answer._channel is not None
            answer._channel.deliver(TokenEvent(PLAIN, 0.0))
            answer._channel.deliver(Finished(FinishReason.LENGTH))
            while (deltas := await answer.next()) is not None:
                assert all(delta.tokens is None for delta in deltas)
            return answer.reader

    collected = asyncio.run(whole()).collected()
    assert collected.text
    assert collected.tokens is None


def written_answer(
    tiny: LoadedModel, kind: type[ChatAnswers | CompletionAnswers], told: list[Told]
) -> Any:
    """Write tokens in an endpoint's shape, through JSON and back."""

    async def write() -> Any:
        answered = generation(tiny.text, [])
        answered.reader._tokens = told
        answer = kind("req-1", Generations([answered]), "tiny", "fingerprint", usage=False)
        return msgspec.json.decode(msgspec.json.encode(answer.whole()))

    return asyncio.run(write())["choices"][0]["logprobs"]


def tell(tiny: LoadedModel, token: int, logprobs: LogProbs) -> list[Told]:
    """Put one token through a ledger."""
    ledger = LogprobBuffer(tiny.text)
    ledger.push(token, logprobs)
    return ledger.rest()


def test_infinity_is_a_number(tiny: LoadedModel) -> None:
    """JSON has neither infinity nor NaN: both are OpenAI's -9999."""
    told = tell(tiny, PLAIN, LogProbs(-math.inf, [(5, -0.5), (6, -math.inf), (7, math.nan)]))
    (chat,) = written_answer(tiny, ChatAnswers, told)["content"]
    assert chat["logprob"] == -9999.0
    assert [likely["logprob"] for likely in chat["top_logprobs"]] == [-0.5, -9999.0, -9999.0]
    assert written_answer(tiny, CompletionAnswers, told)["token_logprobs"] == [-9999.0]


def test_only_the_first_token_begins_the_text() -> None:
    """A space that the tokenizer puts before a text is in no token's bytes; others are."""
    codec = byte_fallback_codec()
    start, word = codec._fast.token_to_id("<s>"), codec._fast.token_to_id("▁a")
    ledger = LogprobBuffer(codec)
    for token in (start, word, word):
        ledger.push(token, LogProbs(-1.0, [(word, -1.0)]))
    told = ledger.rest()
    assert [one.token.token for one in told] == ["<s>", "a", " a"]
    assert [one.token.top_logprobs[0].token for one in told] == ["a", "a", " a"]
    assert [one.place for one in told] == [0, 0, 1]


def test_special_tokens_have_a_name_and_no_bytes(tiny: LoadedModel) -> None:
    """The end token among the likeliest can be recognised, but writes nothing."""
    told = tell(tiny, 1, LogProbs(-1.0, [(2, -0.5)]))
    (chat,) = written_answer(tiny, ChatAnswers, told)["content"]
    assert (chat["token"], chat["bytes"]) == ("<|im_start|>", None)
    assert (chat["top_logprobs"][0]["token"], chat["top_logprobs"][0]["bytes"]) == (
        "<|im_end|>",
        None,
    )


def test_of_two_that_look_alike_the_likelier_is_told(tiny: LoadedModel) -> None:
    """Text completions know tokens by their text, and halves of characters look alike."""
    halves = [
        token for token in range(384) if tiny.text.read_token(token, first=False).text == "\ufffd"
    ]
    likely = [(halves[0], -0.5), (halves[1], -1.5), (PLAIN, -2.5)]
    told = tell(tiny, halves[2], LogProbs(-9.0, likely))
    plain = tiny.text.read_token(PLAIN, first=False).text
    assert written_answer(tiny, CompletionAnswers, told) == {
        "tokens": ["\ufffd"],
        "token_logprobs": [-9.0],
        "top_logprobs": [{"\ufffd": -0.5, plain: -2.5}],
        "text_offset": [0],
    }


def test_they_are_nothing_to_the_garbage_collector(tiny: LoadedModel) -> None:
    """However many are kept, a collection looks at a few objects of an answer."""
    ledger = LogprobBuffer(tiny.text)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1000):
        likely = [(token, -1.0 * number) for token in range(60, 80)]
        ledger.push(PLAIN + number % 20, LogProbs(-0.5, likely))
    gc.collect()
    assert len(gc.get_objects()) - before < 500
    assert len(ledger.rest()) == 1000


def test_they_are_counted_and_have_an_end(tiny: LoadedModel) -> None:
    """Each token counts its own log-probability and the likeliest; beyond the room it fails."""
    held: list[int] = []

    def hold(number: int) -> None:
        if len(held) == 3:
            raise UnavailableError("no room", retry_after=1)
        held.append(number)

    async def read(made: Generation) -> None:
        made._hold_logprobs = hold
        async with made:
            assert made._channel is not None
            for number in range(5):
                likely = [(PLAIN, -1.0), (PLAIN + 1, -2.0)]
                made._channel.deliver(TokenEvent(PLAIN + number, 0.0, LogProbs(-1.0, likely)))
            while await made.next() is not None:
                pass

    async def check() -> None:
        made = generation(tiny.text, [], 2)
        with pytest.raises(UnavailableError, match="no room"):
            await read(made)
        assert made.finish_reason is FinishReason.ERROR

    asyncio.run(check())
    assert held == [3, 3, 3]


def test_too_many_logprobs_fail_in_words() -> None:
    """The message names the setting, and not the bodies in flight."""
    budget = BodyBudget(1 << 20)
    with budget.share() as share:
        share.resize(1000)
        _hold_logprobs(share, 5)
        assert share.nbytes == 1000 + 5 * ENTRY_BYTES
        with pytest.raises(UnavailableError, match="more memory than body_bytes has room for"):
            _hold_logprobs(share, 1 << 20)


@given(
    value=st.recursive(
        st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.floats(-9, 9),
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=40,
    )
)
def test_in_pieces_it_is_the_same(value: Any) -> None:
    """Wherever the pieces end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_ITEMS", 3)
        assert b"".join(exchange._pieces(value)) == msgspec.json.encode(value)


def test_a_large_answer_lets_the_loop_run() -> None:
    """Something else runs while it is written."""
    data = {"choices": [{"logprobs": {"content": ["x" * 1000] * 5000}}], "usage": {}}

    async def write() -> int:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        response = await exchange.json_in_pieces(data)
        counting.cancel()
        assert response.body == msgspec.json.encode(data)
        return turns

    assert asyncio.run(write()) >= 5000 * 1000 // (512 << 10)


def test_answers_times_likeliest_are_bounded() -> None:
    """Together: each of the three alone is within its own bound."""
    likeliest = SamplingParams(seed=0, top_logprobs=5)
    prompts: list[Any] = ["x"] * 16
    GenerationRequest(prompts=prompts, n=4, sampling=likeliest)
    with pytest.raises(APIError, match="number of log-probabilities is over 320") as refusal:
        GenerationRequest(prompts=prompts, n=5, sampling=likeliest)
    assert (refusal.value.status, refusal.value.param) == (400, "logprobs")
