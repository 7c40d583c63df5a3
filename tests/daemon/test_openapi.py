"""openapi.yaml says what the daemon does: its routes, its fields, and its answers."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbel.daemon.config import Settings
from umbel.daemon.http.app import application
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.observability.cache_admin import PinRequest
from umbel.daemon.observability.status import MemoryStatus, ModelStatus, SlotStatus, Status
from umbel.daemon.protocols.chat import ChatMessage, ChatRequest
from umbel.daemon.protocols.completions import CompletionRequest, DetokenizeRequest, TokenizeRequest
from umbel.daemon.protocols.messages import CountRequest, MessagesRequest
from umbel.daemon.protocols.openai_fields import StructuredOutputs
from umbel.daemon.protocols.response_items import InputItem
from umbel.daemon.protocols.responses import ResponsesRequest

from ..tiny import tiny_model_dir
from .running import RunningDaemon, running

PAGE = Path(__file__).parents[2] / "daemon" / "openapi.yaml"
BODIES: tuple[type[msgspec.Struct], ...] = (
    *(ChatRequest, ChatMessage, CompletionRequest, StructuredOutputs),
    *(ResponsesRequest, InputItem, MessagesRequest, CountRequest),
    *(TokenizeRequest, DetokenizeRequest, PinRequest, Status),
)
UNSENT = ("Tenant", "Timeout")
"""Parameters that are not tried: without a proxy's key the first is refused, and a time too short
for an answer is a 504."""
# Answers of random requests come to their end soon.
CONTEXT = 96
# For each operation; 40 send about 3,000 requests.
EXAMPLES = os.environ.get("UMBEL_EXAMPLES", "3")
SEED = 20261122


def described() -> dict[str, Any]:
    return msgspec.yaml.decode(PAGE.read_bytes(), type=dict[str, Any])


def properties(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """List a schema's properties, with those of the schemas that it is made of."""
    found = dict(schema.get("properties", {}))
    for part in schema.get("allOf", []):
        whole = schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        found |= properties(whole, schemas)
    return found


def test_every_route_is_described_and_no_other() -> None:
    served = {
        (route.method, re.sub(r":[^}]*", "", route.resource.canonical))
        for route in application(Entry(Settings())).router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    told = {
        (method.upper(), path)
        for path, item in described()["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert told == served


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_every_field_is_described_and_no_other(kind: type[msgspec.Struct]) -> None:
    schemas = described()["components"]["schemas"]
    told = properties(schemas[kind.__name__], schemas)
    assert sorted(told) == sorted(kind.__struct_encode_fields__)


def test_parts_of_the_status_are_described() -> None:
    parts = described()["components"]["schemas"]["Status"]["properties"]
    for name, kind in (("model", ModelStatus), ("memory", MemoryStatus)):
        assert sorted(parts[name]["properties"]) == sorted(kind.__struct_encode_fields__)
    slot = described()["components"]["schemas"]["SlotStatus"]["properties"]
    assert sorted(slot) == sorted(SlotStatus.__struct_encode_fields__)


def test_bounds_are_those_of_the_fields() -> None:
    schemas = described()["components"]["schemas"]
    keys = ("minimum", "maximum", "exclusiveMinimum", "maxLength", "maxItems", "maxProperties")
    compared = 0
    for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, PinRequest):
        own = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
        told = properties(schemas[kind.__name__], schemas)
        for name, schema in own.items():
            for part in schema.get("anyOf", [schema]):
                bounds = {key: part[key] for key in keys if key in part}
                if bounds and part["type"] in ("integer", "number", "object"):
                    compared += 1
                    assert bounds.items() <= told[name].items(), name
    assert compared > 10


def test_references_lead_somewhere() -> None:
    """Every component is used."""
    page = described()
    named = set(re.findall(r'\$ref: "#/components/(\w+/\w+)"', PAGE.read_text()))
    there = {
        f"{kind}/{name}"
        for kind, parts in page["components"].items()
        if kind != "securitySchemes"
        for name in parts
    }
    assert named == there


@pytest.fixture
def small_daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon whose answers are short, on TCP."""
    model = tiny_model_dir(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), model, "--port", "0") as daemon,
    ):
        yield daemon


def narrowed(page: dict[str, Any]) -> dict[str, Any]:
    """Leave one model, one way to ask for structure, and no fields that are always refused."""
    page["components"]["schemas"]["ChatMessage"]["properties"]["role"]["enum"].remove("tool")
    narrow(page["components"]["schemas"])
    for name in UNSENT:
        del page["components"]["parameters"][name]
    for path in page["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict) and "parameters" in operation:
                unsent = [{"$ref": f"#/components/parameters/{name}"} for name in UNSENT]
                operation["parameters"] = [p for p in operation["parameters"] if p not in unsent]
    return page


def narrow(part: Any) -> None:
    if isinstance(part, list):
        part = dict(enumerate(part))
    if not isinstance(part, dict):
        return
    fields = part.get("properties", {})
    for name, field in list(fields.items()):
        refused = "Refused" in field.get("description", "")
        if refused or name.startswith("guided_") or name == "previous_response_id":
            del fields[name]
    if fields.get("model", {}).get("type") == ["string", "null"]:
        fields["model"] = {"enum": [None, "default", "tiny", ""]}
    for value in part.values():
        narrow(value)


@pytest.mark.slow
def test_random_requests(small_daemon: RunningDaemon, tmp_path: Path) -> None:
    """No answer is a 5xx, and none contradicts the description."""
    page = tmp_path / "openapi.json"
    page.write_bytes(msgspec.json.encode(narrowed(described())))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_headers_conformance,response_schema_conformance,negative_data_rejection,"
        "unsupported_method,use_after_free"
    )
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", str(page)),
        *("--url", f"http://127.0.0.1:{small_daemon.tcp_port()}", "--checks", checks),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", EXAMPLES),
        *("--seed", str(SEED), "--request-timeout", "60"),
        *("--suppress-health-check", "all", "--warnings", "off", "--continue-on-failure"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert small_daemon.process.poll() is None
