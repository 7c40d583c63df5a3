"""Admission: requests that can never be served are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.scheduler.errors import ContextLengthExceededError, InvalidRequestError
from umbel.scheduler.limits import Admission, MemoryBound


def test_an_empty_prompt_is_refused() -> None:
    """There are no logits to sample from without at least one token."""
    with pytest.raises(InvalidRequestError, match="empty") as refusal:
        Admission(8).answer_length(0, 1)
    assert not isinstance(refusal.value, ContextLengthExceededError)


@pytest.mark.parametrize("prompt_length", [8, 9, 1000])
def test_a_prompt_without_room_for_an_answer_is_refused(prompt_length: int) -> None:
    """A prompt that fills the context is refused, in the words clients look for."""
    with pytest.raises(ContextLengthExceededError) as refusal:
        Admission(8).answer_length(prompt_length, None)
    message = str(refusal.value)
    assert "maximum context length is 8 tokens" in message
    assert str(prompt_length) in message
    assert (refusal.value.tokens, refusal.value.most) == (prompt_length, 7)


def test_a_context_cut_for_memory_says_so_in_bytes() -> None:
    admission = Admission(8, MemoryBound(900, lambda tokens: 100 * tokens))
    for refuse in (lambda: admission.answer_length(20, 5), lambda: admission.check_text(80, 4)):
        with pytest.raises(ContextLengthExceededError) as refusal:
            refuse()
        assert "maximum context length is 8 tokens" in str(refusal.value)
        assert "take 2100 bytes, and 900 of cache_bytes may be used" in str(refusal.value)
        assert (refusal.value.tokens, refusal.value.most) == (20, 7)


def test_the_longest_prompt_leaves_one_token() -> None:
    """The bound is exact: one token less than the context is served."""
    assert Admission(8).answer_length(7, None) == 1


def test_an_answer_without_a_limit_gets_the_room_there_is() -> None:
    """No `max_tokens` means up to the end of the context."""
    assert Admission(100).answer_length(30, None) == 70


def test_a_limit_beyond_the_context_is_cut() -> None:
    """Agents that ask for a large fixed number are served, not refused."""
    assert Admission(100).answer_length(30, 32_000) == 70


@given(
    context=st.integers(1, 50),
    prompt=st.integers(1, 50),
    max_tokens=st.none() | st.integers(1, 60),
)
def test_an_admitted_request_always_fits(context: int, prompt: int, max_tokens: int | None) -> None:
    try:
        length = Admission(context).answer_length(prompt, max_tokens)
    except ContextLengthExceededError:
        assert prompt >= context
    else:
        assert 1 <= length <= context - prompt
        assert max_tokens is None or length <= max_tokens
