"""Request bodies: within a budget, sized up before they are decoded, decoded part by part."""

import itertools
import json
import operator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.daemon.http import bodies
from umbel.daemon.http.bodies import (
    MAX_BODY,
    MAX_PART,
    TOKEN_BYTES,
    BodyBudget,
    check_values,
    decode,
)
from umbel.daemon.http.failures import APIError
from umbel.daemon.protocols.chat import ChatRequest
from umbel.daemon.protocols.completions import CompletionRequest
from umbel.scheduler.errors import UnavailableError

from .raw import chat_request, connected, read_reply
from .running import RunningDaemon, eventually, running

KIB, MIB = 1 << 10, 1 << 20
TEXT = "/v1/completions"
JSON = st.recursive(
    st.none() | st.integers(-9, 9) | st.text('\\"[]{},:é ab', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('\\"[],x', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


class TestTheBudget:
    """Bytes of all bodies together."""

    def test_released_bytes_can_be_taken_again(self) -> None:
        """A share ends with its block, however that ends."""
        budget = BodyBudget(4 * MIB)
        with budget.share() as share:
            share.resize(MIB)
            assert budget.used == MIB
            share.resize(10)
            assert budget.used == 10
        assert budget.used == 0
        with budget.share() as other:
            other.resize(2 * MIB)
            with pytest.raises(UnavailableError), budget.share() as share:
                share.resize(3 * MIB)
            assert budget.used == 2 * MIB
        assert budget.used == 0

    def test_beyond_it_a_body_is_refused(self) -> None:
        """The one that came too late hears when to come back; the others keep theirs."""
        budget = BodyBudget(4 * MIB)
        with budget.share() as first, budget.share() as second:
            first.resize(MIB)
            second.resize(2 * MIB)
            with pytest.raises(UnavailableError, match="too many request bodies") as refusal:
                first.resize(MIB + 1)
            assert refusal.value.retry_after > 0
            assert (budget.used, first.nbytes) == (3 * MIB, MIB)

    def test_large_ones_leave_a_part_to_small_ones(self) -> None:
        """Large bodies that are held back shut out no chat."""
        budget = BodyBudget(8 * MIB)
        with budget.share() as large, budget.share() as another, budget.share() as small:
            large.resize(6 * MIB)
            with pytest.raises(UnavailableError):
                another.resize(MIB + 1)
            small.resize(MIB)
        assert budget.largest == 6 * MIB
        assert BodyBudget(1 << 40).largest == MAX_BODY

    def test_a_tenant_leaves_room_to_others(self) -> None:
        """However much it asks for: each one has an eighth of what all others leave, and more."""
        budget = BodyBudget(64 * MIB)
        with ExitStack() as stack:
            for tenant, held in (("a", 56), ("b", 7), ("c", 0)):
                assert fill(budget, stack, tenant) == held
            share = stack.enter_context(budget.share())
            share.assign("b", operator=False)
            with pytest.raises(UnavailableError, match="bodies of tenant b are in flight"):
                share.resize(MIB)

    def test_large_bodies_of_one_tenant_leave_room_for_others(self) -> None:
        """A quarter of the budget, of which the other one has three quarters."""
        budget = BodyBudget(64 * MIB)
        with budget.share() as first, budget.share() as second, budget.share() as third:
            for share, tenant in ((first, "a"), (second, "a"), (third, "b")):
                share.assign(tenant, operator=False)
            first.resize(40 * MIB)
            with pytest.raises(UnavailableError):
                second.resize(8 * MIB + 1)
            second.resize(8 * MIB)
            with pytest.raises(UnavailableError):
                third.resize(12 * MIB + 1)
            third.resize(12 * MIB)

    def test_an_operator_is_let_in_beyond_it(self) -> None:
        """With a sixteenth of the limit at most: more is bounded as everybody's."""
        budget = BodyBudget(64 * MIB)
        with ExitStack() as stack:
            for number in range(12):
                fill(budget, stack, f"tenant {number}", KIB)
            assert budget.limit - budget.used <= KIB
            share = stack.enter_context(budget.share())
            share.assign("uid:0", operator=True)
            share.resize(4 * MIB)
            with pytest.raises(UnavailableError):
                share.resize(4 * MIB + 1)

    @pytest.mark.parametrize("limit", [MIB, MIB + MIB // 5, 2 * MIB, 8 * MIB])
    def test_a_body_that_never_fits_has_its_own_error(self, limit: int) -> None:
        """The most that one may take is taken where there is no other; a byte more never is."""
        budget = BodyBudget(limit)
        with budget.share() as share:
            share.resize(budget.most)
            with budget.share() as other, pytest.raises(UnavailableError):
                other.resize(budget.most)
            with pytest.raises(APIError, match="body_bytes") as refusal:
                share.resize(budget.most + 1)
            assert (refusal.value.status, refusal.value.retry_after) == (413, None)
            assert budget.used == share.nbytes == budget.most
        assert budget.longest_prompt * TOKEN_BYTES <= budget.most


def fill(budget: BodyBudget, stack: ExitStack, tenant: str, nbytes: int = MIB) -> int:
    """Hold as many bodies as a tenant may; return their number."""
    for number in itertools.count():
        share = stack.enter_context(budget.share())
        share.assign(tenant, operator=False)
        try:
            share.resize(nbytes)
        except UnavailableError:
            return number
    raise AssertionError


class TestCounting:
    """Values are counted without decoding them."""

    @given(value=JSON, block=st.integers(2, 9), indent=st.sampled_from([None, 1]))
    def test_counts_agree_with_a_parser(self, value: Any, block: int, indent: int | None) -> None:
        """Wherever blocks end: inside strings, before and after backslashes."""
        body = bytearray(json.dumps(value, indent=indent).encode())
        count = separators(value)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bodies, "_BLOCK", block)
            check_values(body, count)
            if count:
                with pytest.raises(APIError, match=f"over {count - 1} values"):
                    check_values(body, count - 1)

    @pytest.mark.parametrize("block", [2, 3, 64, 1 << 16])
    def test_bytes_that_are_no_json_end_too(
        self, block: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any bytes are counted in one pass, or refused."""
        monkeypatch.setattr(bodies, "_BLOCK", block)
        monkeypatch.setattr(bodies, "MAX_ESCAPES", 1000)
        monkeypatch.setattr(bodies, "MAX_BLANKS", 1000)
        check_values(bytearray(b"[" + b" " * 1000 + b'"' + b" " * 5000 + b'"]'), 1000)
        with pytest.raises(APIError, match="over 1000 blanks"):
            check_values(bytearray(b"[" + b" \n" * 501 + b"1]"), 1000)
        for length, letters in itertools.product((1, 2, 3), ('\\"', '\\",', '"')):
            for text in map("".join, itertools.product(letters, repeat=length)):
                check_values(bytearray(text.encode() * 7), 1000)
        with pytest.raises(APIError, match="over 1000 values"):
            check_values(bytearray(b'"' * 10_000), 1000)
        with pytest.raises(APIError, match="escapes"):
            check_values(bytearray(b'"' + b"\\n" * 1001), 1000)


def separators(value: Any) -> int:
    """How many commas and opening brackets a value's JSON has outside strings."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return 1 + max(0, len(value) - 1) + sum(map(separators, inner))
    return 0


class TestDecoding:
    """No call is given more than `MAX_PART`."""

    @pytest.mark.parametrize(
        ("kind", "body", "where"),
        [
            (ChatRequest, '{"messages": [1], "model": "%s"}', "model"),
            (ChatRequest, '{"messages": [1], "tool_choice": {"a": "%s"}}', "tool_choice"),
            (CompletionRequest, '{"prompt": "x", "stop": ["%s"]}', "stop"),
        ],
    )
    def test_a_field_that_is_too_large(self, kind: Any, body: str, where: str) -> None:
        """It is named, and was not decoded."""
        with pytest.raises(APIError, match=f"{where} has over 8 MiB") as refusal:
            decode((body % ("x" * MAX_PART)).encode(), kind)
        assert (refusal.value.status, refusal.value.param) == (413, where)

    def test_fields_that_are_too_large_together(self) -> None:
        """The largest one is named."""
        body = {"messages": [1], "model": "x" * (MAX_PART // 2), "user": "z" * MAX_PART}
        body["tool_choice"] = "y" * (MAX_PART // 2 + 1)
        with pytest.raises(APIError, match="tool_choice has over 8 MiB"):
            decode(json.dumps(body).encode(), ChatRequest)

    def test_messages_may_be_larger_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each is decoded on its own, and work ends between two of them."""
        monkeypatch.setattr(bodies, "MAX_PART", 1000)
        messages = [{"role": "user", "content": "x" * 900}] * 5
        body = decode(json.dumps({"messages": messages}).encode(), ChatRequest)
        seen: list[int] = []
        read = body.read_conversation(lambda: seen.append(1)).messages
        assert [(message.role, message.content) for message in read] == [("user", "x" * 900)] * 5
        assert len(seen) == 5
        with pytest.raises(ZeroDivisionError):
            body.read_conversation(lambda: operator.truediv(1, 0) and None)

    def test_a_message_at_fault_is_named(self) -> None:
        """By its number, as deep as the fault lies."""
        for message, param in (
            ({"role": "user", "content": 7}, "messages[1].content"),
            ({"role": "robot"}, "messages[1].role"),
            ({}, "messages[1]"),
            ("hello", "messages[1]"),
            ({"role": "user", "content": [{"type": "x"}]}, "messages[1].content"),
        ):
            body = decode(
                json.dumps({"messages": [{"role": "user"}, message]}).encode(), ChatRequest
            )
            with pytest.raises(APIError) as refusal:
                body.read_conversation(lambda: None)
            assert (refusal.value.status, refusal.value.param) == (400, param)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(ChatRequest, b'{"messages": [{"role": "user"}]}'), (CompletionRequest, b'{"prompt": "x"}')],
)
def test_a_bodys_bytes_are_let_go(kind: Any, text: bytes) -> None:
    """While an answer is computed nothing looks at what the budget no longer counts."""
    raw = bytearray(text)
    body = decode(raw, kind)
    with pytest.raises(BufferError):
        raw.append(0)
    body.release()
    raw.append(0)


def upload(size: int) -> bytes:
    """Begin a request with a body of so many bytes, and send half of them."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + b'{"user": "' + b"x" * (size // 2)


def test_bodies_in_flight_are_bounded(short_path: Path, tiny_dir: Path) -> None:
    """Half-sent large bodies: the next one gets a 503, a small one is served, and it passes."""
    with running(short_path, tiny_dir, env={"UMBEL_BODY_BYTES": "16MiB"}) as daemon:
        good = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        large = {**good, "user": "x" * (3 * MIB)}
        assert daemon.post(large).status == 200
        with ExitStack() as stack:
            for _ in range(3):
                connection = stack.enter_context(connected(daemon.socket))
                connection.sendall(upload(7 * MIB))
            reply = eventually(lambda: refused(daemon, large))
            assert int(reply.headers["Retry-After"]) > 0
            assert "too many request bodies are in flight" in reply.json()["error"]["message"]
            assert daemon.post(good).status == 200
        eventually(lambda: daemon.post(large).status == 200)
        assert daemon.post({**good, "user": "x" * (13 * MIB)}).status == 413


def test_a_body_that_never_fits_has_no_retry_after(short_path: Path, tmp_path: Path) -> None:
    """Alone or not, such a prompt or body gets a 413; one that fits alone waits for its turn."""
    from ..tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    model = tiny_model_dir(tmp_path / "tiny", max_position_embeddings=1 << 15)
    with running(short_path, model, env={"UMBEL_BODY_BYTES": "1MiB"}) as daemon:
        longest = MIB // TOKEN_BYTES
        assert f'no prompt as long as the context" tokens={longest}' in daemon.log()
        reply = daemon.post({"prompt": [5] * (longest + 1)}, TEXT)
        assert reply.status == 413
        assert "Retry-After" not in reply.headers
        assert f"{MIB} of the daemon's setting body_bytes" in reply.json()["error"]["message"]
        reply = daemon.post({"prompt": "x" * MIB}, TEXT)
        assert reply.status == 413
        assert "daemon's setting body_bytes" in reply.json()["error"]["message"]
        good = {"prompt": [5] * 1500, "max_tokens": 1}
        reply = eventually(lambda: refused_beside_an_upload(daemon, good))
        assert int(reply.headers["Retry-After"]) > 0
        eventually(lambda: daemon.post(good, TEXT).status == 200)


def refused_beside_an_upload(daemon: RunningDaemon, body: Any) -> Any:
    """The answer to a body if it is a 503; now and then it comes first, and the upload gets it."""
    with connected(daemon.socket) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {MIB}\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 1_000_000)
        return refused(daemon, body, TEXT)


def test_a_budget_that_holds_the_context_is_not_warned_of(tiny_daemon: RunningDaemon) -> None:
    """The default one holds all that most models read."""
    assert "as long as the context" not in tiny_daemon.log()


def refused(daemon: RunningDaemon, body: Any, route: str = "/v1/chat/completions") -> Any:
    """The answer to a body if it is a 503."""
    reply = daemon.post(body, route)
    return reply if reply.status == 503 else None


def test_a_refused_body_is_not_kept(tiny_daemon: RunningDaemon) -> None:
    """The connection ends with it, and what is still sent of it is no next request."""
    with connected(tiny_daemon.socket) as connection:
        request = chat_request(max_tokens=2).replace(b"Host:", b"Content-Encoding: br\r\nHost:")
        connection.sendall(request)
        assert read_reply(connection).status == 415
        connection.sendall(chat_request(max_tokens=2))
        assert read_reply(connection).status == 200
