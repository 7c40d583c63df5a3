"""Text to tokens and back."""

import errno
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from umbel.models.errors import ModelLoadError, TemplateError
from umbel.models.load.loader import LoadedModel, load
from umbel.models.text.codec import TextCodec
from umbel.models.text.conversation import Conversation, Message
from umbel.models.text.formats import ToolParser

from ...tiny import CHAT_TEMPLATE, tiny_model_dir
from .templates import THINKING, model_with

REPLACEMENT = "\ufffd"
CODECS = ("smollm2", "tiny", "byte fallback")

# Whole Unicode, and more of what tokenizers cut: joined emoji, flags, combining marks,
# CJK, scripts without spaces, the replacement character itself, control characters.
_HARD = (
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 e\u0301 ñ ß 世界 日本語 한국어 ไทย العربية עברית"
    " \ufffd\u200d\ufe0f\x00\t\n\r  's 123 ▁ <0x0A> <|im_end"
)
TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(_HARD.split(" ")),
        st.text(st.sampled_from(_HARD), max_size=8),
    ),
    max_size=8,
).map("".join)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def asked(text: str) -> Conversation:
    return Conversation(messages=[Message(role="user", content=text)])


@pytest.fixture(scope="module")
def codecs(smollm2: LoadedModel, tiny: LoadedModel) -> dict[str, TextCodec]:
    return dict(zip(CODECS, (smollm2.text, tiny.text, byte_fallback_codec()), strict=True))


class StubTokenizer:
    """The part of mlx-lm's wrapper that TextCodec needs, with a template of the test's."""

    has_thinking = has_tool_calling = False
    think_start: str | None = None
    think_end: str | None = None
    tool_call_start: str | None = None
    tool_call_end: str | None = None
    tool_parser: ToolParser | None = None
    structural_markers: Sequence[str] = ()
    response_transitions: Mapping[str, Sequence[tuple[str, str]]] = MappingProxyType({})
    response_initial_state: str | None = None
    chat_template: Any = None

    def __init__(self, backend: Tokenizer, *, template: Any = None) -> None:
        self.backend_tokenizer = backend
        self.eos_token_ids = {0}
        self.has_chat_template = template is not None
        self._template = template

    def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
        rendered: str = self._template(messages, **kwargs)
        return rendered


def byte_fallback_codec() -> TextCodec:
    """Make a tokenizer in the manner of Llama 2 and Gemma: words, else bytes as `<0xHH>`."""
    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdehlo", "é", "▁a", "he", "ll"]
    tokenizer = Tokenizer(
        BPE(
            {word: i for i, word in enumerate(words)},
            [("▁", "a"), ("h", "e"), ("l", "l")],
            unk_token="<unk>",  # noqa: S106
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in words[:3]])
    # No normaliser: the caller writes ▁ for spaces, see `encode_whole`.
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TextCodec(StubTokenizer(tokenizer))


def encode_whole(name: str, codec: TextCodec, text: str) -> list[int]:
    if name == "byte fallback":
        text = "▁" + text.replace(" ", "▁")
    return codec.encode(text, special_tokens=False)


def pieces_of(codec: TextCodec, tokens: list[int]) -> list[str]:
    detokenizer = codec.detokenizer()
    return [detokenizer.push(token) for token in tokens]


@cache
def bytes_of(codec: TextCodec) -> dict[bytes, int]:
    written = {}
    for token in range(codec.vocab_size):
        data = codec.read_token(token, first=False).data
        if data is not None and len(data) == 1:
            written[data] = token
    if codec._token_bytes._byte_fallback:
        return {k: codec._fast.token_to_id(f"<0x{k[0]:02X}>") for k in written}
    return written


def byte_tokens(codec: TextCodec, data: bytes) -> list[int]:
    return [bytes_of(codec)[bytes([byte])] for byte in data]


def writable(codec: TextCodec, text: str) -> str:
    """Drop characters the vocabulary cannot write: SmolLM2's has no token for some bytes.

    Those are control characters and the planes 4 to 15, which have no letters.
    """
    known = {data[0] for data in bytes_of(codec)}
    return "".join(letter for letter in text if known.issuperset(letter.encode()))


@pytest.mark.parametrize("name", CODECS)
@relaxed
@given(text=TEXTS)
@example(text=REPLACEMENT)
@example(text="ends in \ufffd\ufffd")
@example(text=" 👩")
def test_pieces_are_whole_characters_and_make_up_the_text(
    codecs: dict[str, TextCodec], name: str, text: str
) -> None:
    if name == "byte fallback":
        text = text.replace("▁", "")  # this vocabulary's own sign for a space
    codec = codecs[name]
    text = writable(codec, text)
    pieces = pieces_of(codec, encode_whole(name, codec, text))
    assert "".join(pieces) == text
    assert sum(piece.count(REPLACEMENT) for piece in pieces) == text.count(REPLACEMENT)


@pytest.mark.parametrize("name", CODECS)
@relaxed
@given(text=TEXTS, data=st.data())
def test_an_answer_cut_anywhere_is_a_beginning_of_the_text(
    codecs: dict[str, TextCodec], name: str, text: str, data: st.DataObject
) -> None:
    codec = codecs[name]
    raw = writable(codec, text).encode()
    cut = data.draw(st.integers(0, len(raw)))
    written = "".join(pieces_of(codec, byte_tokens(codec, raw[:cut])))
    assert written == raw[:cut].decode(errors="ignore")


@pytest.mark.parametrize("name", ["smollm2", "tiny"])
def test_text_before_half_a_character_in_the_same_token_is_kept(
    codecs: dict[str, TextCodec], name: str
) -> None:
    codec = codecs[name]
    mixed = [
        token
        for token in range(codec.vocab_size)
        if (data := codec.read_token(token, first=False).data)
        and data.startswith(b" ")
        and len(data) in (3, 4)
        and data[1:].decode(errors="ignore") == ""
    ]
    assert mixed
    assert {codec.detokenizer().push(token) for token in mixed} == {" "}


@pytest.mark.parametrize("name", CODECS)
@relaxed
@given(data=st.data())
def test_any_tokens_at_all_are_decoded(
    codecs: dict[str, TextCodec], name: str, data: st.DataObject
) -> None:
    codec = codecs[name]
    tokens = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), max_size=30))
    raw, first = b"", True
    for token in tokens:
        written_bytes = codec.read_token(token, first=first).data
        if written_bytes is not None:
            raw, first = raw + written_bytes, False
    written = "".join(pieces_of(codec, tokens))
    # All that is missing is an unfinished character at the very end: three bytes at most, which
    # may stand for two U+FFFD (<ED> and <A0> begin no character, but only a third byte shows it).
    ends = [raw[: len(raw) - missing] for missing in range(4)]
    assert written in [end.decode(errors="replace") for end in ends]


@relaxed
@given(tokens=st.lists(st.integers(0, 383), max_size=30))
def test_decoding_agrees_with_the_tokenizers_own(tiny: LoadedModel, tokens: list[int]) -> None:
    whole = tiny.text._fast.decode(tokens, skip_special_tokens=True)
    written = "".join(pieces_of(tiny.text, tokens))
    # An unfinished character at the very end, of three bytes at most, is not written.
    assert written in [whole.removesuffix(REPLACEMENT * missing) for missing in range(4)]


def test_bytes_that_are_no_utf8_do_not_end_a_byte_fallback_answer(
    codecs: dict[str, TextCodec],
) -> None:
    codec = codecs["byte fallback"]
    a = codec.encode("a", special_tokens=False)
    tokens = byte_tokens(codec, "世".encode() + b"\xe4") + a + a
    assert pieces_of(codec, tokens) == ["", "", "世", "", REPLACEMENT + "a", "a"]


def test_only_the_first_space_of_an_answer_is_the_tokenizers(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte fallback"]
    word = codec._fast.token_to_id("▁a")
    assert pieces_of(codec, [word, word, word]) == ["a", " a", " a"]
    start = codec._fast.token_to_id("<s>")
    assert pieces_of(codec, [start, word, word]) == ["", "a", " a"]
    space = codec._fast.token_to_id("▁")
    assert pieces_of(codec, [space, word]) == ["", " a"]


def test_a_single_token_can_be_read(codecs: dict[str, TextCodec]) -> None:
    codec = codecs["byte fallback"]
    word, half = codec._fast.token_to_id("▁a"), codec._fast.token_to_id("<0xE4>")
    assert codec.read_token(word, first=True) == ("a", b"a")
    assert codec.read_token(word, first=False) == (" a", b" a")
    assert codec.read_token(half, first=False) == (REPLACEMENT, b"\xe4")
    assert codec.read_token(codec._fast.token_to_id("<s>"), first=True) == ("<s>", None)
    assert codec.read_token(99999, first=False) == ("", None)


def test_special_tokens_have_no_text(smollm2: LoadedModel) -> None:
    tokens = smollm2.text.encode("a<|im_end|>b<|endoftext|>")
    assert pieces_of(smollm2.text, tokens) == ["a", "", "b", ""]


def test_special_tokens_write_their_names_where_they_are_visible(tiny: LoadedModel) -> None:
    """A parser of markup must see them; others still write nothing."""
    tokens = tiny.text.encode("a<|im_start|>b<|im_end|>", special_tokens=False)
    visible = frozenset({tokens[1]})
    detokenizer = tiny.text.detokenizer(visible)
    assert [detokenizer.push(token) for token in tokens] == ["a", "<|im_start|>", "b", ""]
    read = tiny.text.read_token(tokens[1], first=False, visible=visible)
    assert read == ("<|im_start|>", b"<|im_start|>")
    assert tiny.text.read_token(tokens[3], first=False, visible=visible).data is None


def test_special_tokens_of_a_models_markup_are_visible(tmp_path: Path) -> None:
    inside = ("<tool_call>", "</tool_call>", "<think>", "</think>", '"arguments"')
    codec = model_with(tmp_path, THINKING, (*inside, "<other>"), special=True).text
    assert codec.template.abilities.tools
    assert codec.markup_tokens == {codec._fast.token_to_id(token) for token in inside}


def test_special_tokens_of_the_generic_form_are_visible(tmp_path: Path) -> None:
    codec = model_with(tmp_path, CHAT_TEMPLATE, ("<tool_call>", "</tool_call>"), special=True).text
    assert not codec.template.abilities.tools
    assert codec.markup_tokens == {384, 385}


def test_special_tokens_in_text_are_single_tokens(smollm2: LoadedModel) -> None:
    tokens = smollm2.text.encode("<|im_start|>user\nhi<|im_end|>", special_tokens=False)
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert smollm2.text.eos_ids == {2}


def test_a_models_own_prefix_is_added_only_where_asked(tiny_dir: Path, tmp_path: Path) -> None:
    state = json.loads((tiny_dir / "tokenizer.json").read_text())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    directory = tiny_model_dir(tmp_path / "prefixed")
    (directory / "tokenizer.json").write_text(json.dumps(state))
    codec = load(str(directory)).text
    assert codec.encode("the") == [0, *codec.encode("the", special_tokens=False)]
    assert codec.encode_conversation(asked("the")).count(0) == 0


def test_a_training_scripts_limits_do_not_shorten_prompts(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "limited")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(directory / "tokenizer.json"))
    codec = load(str(directory)).text
    text = "one two three four five six"
    assert "".join(pieces_of(codec, codec.encode(text))) == text
    assert 4 < len(codec.encode(text)) < 64


def test_vocabulary_with_holes_keeps_its_last_token() -> None:
    codec = TextCodec(StubTokenizer(Tokenizer(BPE({"a": 0, "b": 5}, []))))
    assert codec.vocab_size == 6
    assert codec.detokenizer().push(3) == ""


def test_smollm2_chat_is_the_known_rendering(smollm2: LoadedModel) -> None:
    messages = [{"role": "user", "content": "hi"}]
    rendered = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.text.render_chat(messages) == rendered
    tokens = smollm2.text.encode_conversation(asked("hi"))
    assert tokens == smollm2.text.encode(rendered, special_tokens=False)
    # Spelled out once, so that a change of the tokenizer cannot hide.
    assert tokens[:9] == [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173]
    assert tokens[-8:] == [4093, 198, 6004, 2, 198, 1, 520, 9531, 198][-8:]


def test_generation_prompt_can_be_left_out(tiny: LoadedModel) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = "<|im_start|>user\nhi<|im_end|>\n"
    assert tiny.text.render_chat(messages, generation_prompt=False) == plain
    assert tiny.text.render_chat(messages) == plain + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", id="raise_exception"),
        pytest.param("{{ messages[0]['content'] + 1 }}", id="TypeError"),
        pytest.param("{{ 1 / 0 }}", id="ZeroDivisionError"),
        pytest.param("{% for i in range(10 ** 9) %}{% endfor %}", id="OverflowError"),
        pytest.param("{% if %}", id="syntax error"),
        pytest.param("{{ ''.__class__.__mro__ }}", id="sandbox"),
        pytest.param("{{ messages[0].content.tool.name }}", id="undefined"),
    ],
)
def test_any_error_of_a_template_is_a_template_error(tmp_path: Path, template: str) -> None:
    directory = tiny_model_dir(tmp_path / "picky")
    settings_file = directory / "tokenizer_config.json"
    config = json.loads(settings_file.read_text()) | {"chat_template": template}
    settings_file.write_text(json.dumps(config))
    codec = load(str(directory)).text
    with pytest.raises(TemplateError, match="chat template refuses these messages"):
        codec.render_chat([{"role": "user", "content": "hi"}])


def test_a_model_without_template_says_which_route_to_use(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path / "base")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    codec = load(str(directory)).text
    assert not codec.has_chat_template
    with pytest.raises(TemplateError, match="/v1/completions"):
        codec.render_chat([{"role": "user", "content": "hi"}])


def test_messages_are_not_changed_by_a_template() -> None:
    def template(messages: list[dict[str, str]], **_: object) -> str:
        messages[0]["content"] = "changed"
        return ""

    codec = TextCodec(StubTokenizer(Tokenizer(BPE({"a": 0}, [])), template=template))
    message = {"role": "user", "content": "hi"}
    codec.render_chat([message])
    assert message["content"] == "hi"


def test_a_tokenizer_without_fast_form_cannot_be_served() -> None:
    class Slow:
        eos_token_ids: frozenset[int] = frozenset()

    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        TextCodec(Slow())


def test_encoding_from_eight_threads_is_right(smollm2: LoadedModel) -> None:
    texts = [f"Agent {i} counts to {i * i} " * (1 + i % 7) for i in range(200)]
    expected = [smollm2.text.encode(text) for text in texts]
    with ThreadPoolExecutor(max_workers=8) as pool:
        assert list(pool.map(smollm2.text.encode, texts)) == expected
        conversations = [asked(text) for text in texts]
        chats = list(pool.map(smollm2.text.encode_conversation, conversations))
    assert chats == [smollm2.text.encode_conversation(c) for c in conversations]


def test_other_threads_run_while_a_long_text_is_encoded(tiny: LoadedModel) -> None:
    """The event loop is one of them: the tokenizer does not hold Python's lock meanwhile."""
    text, seen = "the agent reads the plan " * 40_000, 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tiny.text.encode, text)
        while not encoding.done():
            time.sleep(0.001)
            seen += 1
    assert len(encoding.result()) > 40_000
    assert seen > 10  # two, before and after, if the lock is held


def test_a_lack_of_descriptors_is_no_fault_of_the_messages(tiny: LoadedModel) -> None:
    def exhausted(*_: Any, **__: Any) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    codec = TextCodec(StubTokenizer(tiny.text._fast, template=exhausted))
    with pytest.raises(OSError, match="Too many open files"):
        codec.render_chat([{"role": "user", "content": "x"}])
