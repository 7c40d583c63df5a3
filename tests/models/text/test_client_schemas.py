"""Schemas that pydantic, OpenAI's SDK and zod write: answers are valid, and can be loaded."""

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import random
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NotRequired

import numpy as np
import pydantic
import pytest
from jsonschema import Draft202012Validator
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, Field, TypeAdapter, conlist, constr
from typing_extensions import TypedDict

from umbel.models.errors import GrammarError
from umbel.models.text.conversation import JSONSchema
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.grammar.matcher import Grammar

from .walks import allows

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel
    from umbel.models.text.codec import TextCodec

_WALKS = 8
_TOKENS = 250
_SHORT = 30  # tokens; from then on what closes is taken


class Color(enum.Enum):
    """Of texts."""

    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    """Of numbers."""

    S = 1
    M = 2


class Cat(BaseModel):
    """Its tag has a default."""

    kind: Literal["cat", "lion"] = "cat"
    lives: int = 9


class Dog(BaseModel):
    """Its tag has none."""

    kind: Literal["dog"]
    friend: "Pet | None" = None


class Fish(BaseModel):
    """Its tag is a default, too."""

    kind: Literal["fish"] = "fish"
    old: Annotated["One | Two", Field(discriminator="version")]


class One(BaseModel):
    """Told apart by a number."""

    version: Literal[1] = 1


class Two(BaseModel):
    """The other."""

    version: Literal[2] = 2


Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]


class Tree(BaseModel):
    """Recursive."""

    value: int
    below: list["Tree"] = []


class Closed(BaseModel):
    """Without additional names."""

    model_config = pydantic.ConfigDict(extra="forbid")
    a: int
    b: str | None = None
    pet: Pet | None = None
    colors: set[Color] = set()


class Opened(BaseModel):
    """With additional names."""

    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Computed(BaseModel):
    """With a name that is written only."""

    a: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def b(self) -> int:
        return self.a


class Named(TypedDict):
    """A dictionary with names."""

    a: int
    b: NotRequired[str]


class Pair(NamedTuple):
    """A tuple with names."""

    a: int
    b: str = ""


@dataclasses.dataclass
class Data:
    """A data class."""

    a: int
    b: list[int] = dataclasses.field(default_factory=list)


def with_pattern(pattern: str) -> Any:
    """A text with a pattern in its schema that pydantic's own engine cannot read."""
    return Annotated[str, Field(json_schema_extra={"pattern": pattern})]


def in_format(name: str) -> Any:
    return Annotated[str, Field(json_schema_extra={"format": name})]


TYPES: list[Any] = [
    str, int, float, bool, None, Any, Color, Size, Literal["a", 1, True] | None, int | None,
    int | str | None, pydantic.JsonValue, pydantic.StrictStr, pydantic.SecretStr,
    pydantic.SecretBytes, pydantic.FiniteFloat,
    dt.datetime, dt.date, dt.time, dt.timedelta, pydantic.AwareDatetime,
    uuid.UUID, pydantic.UUID1, pydantic.UUID3, pydantic.UUID4, pydantic.UUID5, pydantic.UUID6,
    pydantic.UUID7, pydantic.UUID8,
    pydantic.AnyUrl, in_format("email"), in_format("idn-email"), in_format("hostname"),
    ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network,
    ipaddress.IPv4Interface, ipaddress.IPv6Interface, pydantic.IPvAnyAddress,
    pydantic.IPvAnyNetwork, pydantic.IPvAnyInterface,
    fractions.Fraction, pathlib.Path, bytes, pydantic.Base64Bytes,
    pydantic.PositiveInt, pydantic.NonNegativeFloat, pydantic.conint(gt=1, lt=9, multiple_of=2),
    pydantic.confloat(gt=0.5, le=2.5), constr(min_length=1, max_length=5, pattern="^a"),
    conlist(int, min_length=1, max_length=3), list[int], tuple[int, str], tuple[int, ...],
    tuple[()], collections.deque[int], set[Color], set[bool], frozenset[Literal["a", "b", "c"]],
    Annotated[set[Literal[1, 2, 3]], Field(min_length=1, max_length=2)],
    dict[str, int], dict[str, Any], dict[Color, int], dict[Literal["a", "b"], int],
    dict[uuid.UUID, int], dict[dt.date, int],
    dict[Annotated[str, Field(min_length=2, max_length=4)], int],
    Annotated[dict[str, int], Field(min_length=1)], Annotated[dict[str, int], Field(max_length=3)],
    Pet, list[Pet], Cat | Dog, Closed, Opened, Computed, Tree, Named, Pair, Data,
    pydantic.RootModel[list[Pet]],
]  # fmt: skip

WEAKER: list[Any] = [
    # Texts and names of which the schema says less than the type: they are valid, and may not load.
    pydantic.PastDate, pydantic.FutureDatetime, pydantic.NaiveDatetime, pydantic.HttpUrl,
    pydantic.FileUrl, pydantic.PostgresDsn, pydantic.RedisDsn, pydantic.WebsocketUrl,
    decimal.Decimal, pydantic.condecimal(max_digits=5, decimal_places=2), pydantic.FilePath,
    pydantic.Base64Str, pydantic.Base64UrlStr, pydantic.Json, pydantic.Json[list[int]],
    pydantic.ByteSize, pydantic.ImportString, complex, dict[int, str],
    dict[Annotated[str, Field(pattern="^[a-z]+$")], int],
    # Schemas of zod; pydantic does not hold texts to them here.
    in_format("jwt"),
    *(
        in_format(name)
        for name in (
            "cidrv4", "cidrv6", "cuid", "cuid2", "e164", "hex", "json-pointer", "ksuid",
            "lowercase", "mac", "nanoid", "sha256_hex", "ulid", "uppercase", "xid",
        )
    ),
]  # fmt: skip

REFUSED: list[tuple[Any, str]] = [
    (set[int], "uniqueItems"),
    (frozenset[str], "uniqueItems"),
    (Annotated[dict[str, int], Field(min_length=2)], "minProperties"),
    (dict[Annotated[str, Field(pattern="^[a-z]+$", max_length=4)], int], "propertyNames"),
    # zod's email and duration, and the decimal numbers of earlier versions of pydantic.
    (with_pattern(r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@x\.org$"), "pattern"),
    (with_pattern(r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?)$"), "pattern"),
    (with_pattern(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"), "pattern"),
]


@pytest.fixture(scope="module")
def compiler(tiny: "LoadedModel") -> GrammarCompiler:
    return GrammarCompiler(tiny.text)


@pytest.fixture(scope="module")
def closing(tiny: "LoadedModel") -> frozenset[int]:
    """Tokens that begin with what ends a text, an array or an object."""
    return frozenset(
        token
        for token in range(tiny.text.vocab_size)
        if tiny.text.detokenizer().push(token).startswith(('"', "]", "}"))
    )


def walk(codec: "TextCodec", grammar: Grammar, closing: frozenset[int], seed: int) -> str | None:
    """Take allowed tokens at random until the answer may stop; None where that takes too many."""
    dice, matcher = random.Random(seed), grammar.matcher()  # noqa: S311  (not a secret)
    detokenizer, text = codec.detokenizer(), ""
    (eos,) = codec.eos_ids
    for step in range(_TOKENS):
        if matcher.is_complete:
            return text
        mask = matcher.mask()
        if allows(mask, eos) and dice.random() < 0.5:
            return text
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        tokens = [token for token in np.flatnonzero(bits).tolist() if token != eos]
        if not tokens:
            return text
        if step > _SHORT:
            tokens = [token for token in tokens if token in closing] or tokens
        token = dice.choice(tokens)
        matcher.consume(token)
        text += detokenizer.push(token)
    return None


def answers(codec: "TextCodec", grammar: Grammar, closing: frozenset[int]) -> list[str]:
    walked = (walk(codec, grammar, closing, seed) for seed in range(_WALKS))
    return [answer for answer in walked if answer is not None]


def check(schema: Any, answer: str) -> None:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    assert [e.message for e in validator.iter_errors(json.loads(answer))] == [], answer


@pytest.mark.parametrize("kind", TYPES)
def test_answers_can_be_loaded(
    compiler: GrammarCompiler, tiny: "LoadedModel", closing: frozenset[int], kind: Any
) -> None:
    adapter = TypeAdapter(kind)
    read, written = (adapter.json_schema(mode=m) for m in ("validation", "serialization"))
    for schema in [read, written] if written != read else [read]:
        made = answers(tiny.text, compiler.compile(JSONSchema(schema)), closing)
        assert made
        for answer in made:
            check(schema, answer)
            adapter.validate_json(answer)


@pytest.mark.parametrize("kind", WEAKER)
def test_answers_are_valid(
    compiler: GrammarCompiler, tiny: "LoadedModel", closing: frozenset[int], kind: Any
) -> None:
    schema = TypeAdapter(kind).json_schema()
    for answer in answers(tiny.text, compiler.compile(JSONSchema(schema)), closing):
        check(schema, answer)


@pytest.mark.parametrize("kind", [Closed, Tree, Fish, Computed])
def test_strict_schemas_of_openais_sdk(
    compiler: GrammarCompiler, tiny: "LoadedModel", closing: frozenset[int], kind: type[BaseModel]
) -> None:
    schema = to_strict_json_schema(kind)
    made = answers(tiny.text, compiler.compile(JSONSchema(schema)), closing)
    assert made
    for answer in made:
        check(schema, answer)
        kind.model_validate_json(answer)


@pytest.mark.parametrize(("kind", "place"), REFUSED)
def test_documented_unsupported_schemas_are_refused(
    compiler: GrammarCompiler, kind: Any, place: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compiler.compile(JSONSchema(TypeAdapter(kind).json_schema()))
    assert caught.value.place == place
