"""The list of models, and the names under which the model is served."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from .fixtures import TINY_CONTEXT
from .running import RunningDaemon, running

ALIASES = ("gpt-4o", "org/claude-x")
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 1,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def aliased_daemon(long_tiny_dir: Path) -> Iterator[RunningDaemon]:
    """A daemon with two aliases."""
    flags = ("--alias", "gpt-4o", "--alias", "org/claude-x=default")
    with (
        tempfile.TemporaryDirectory(prefix="u") as folder,
        running(Path(folder), long_tiny_dir, *flags) as daemon,
    ):
        yield daemon


def test_an_alias_is_served(aliased_daemon: RunningDaemon) -> None:
    """A request may name the model as it likes; the answer says which model it was."""
    for name in (*ALIASES, "tiny", "default", "", None):
        reply = aliased_daemon.post(ASK | {"model": name})
        assert (reply.status, reply.json()["model"]) == (200, "tiny")


def test_an_unknown_name_is_told_how_it_could_be_served(aliased_daemon: RunningDaemon) -> None:
    """The 404 names the flag and the table; so does that of a model's own route."""
    for reply in (
        aliased_daemon.post(ASK | {"model": "gpt-5"}),
        aliased_daemon.request("GET", "/v1/models/gpt-5"),
    ):
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (404, "model_not_found")
        assert error["message"] == (
            "there is no model 'gpt-5'; this daemon serves 'tiny'; to serve it by that name too, "
            "start it with --alias NAME or [models.aliases] in umbel.toml"
        )


def test_the_list_has_the_aliases(aliased_daemon: RunningDaemon) -> None:
    """The model comes first, and each alias is an entry like it."""
    answer = aliased_daemon.request("GET", "/v1/models").json()
    entries = answer.pop("data")
    names = ["tiny", *ALIASES]
    assert [entry["id"] for entry in entries] == names
    assert answer == {
        "object": "list",
        "has_more": False,
        "first_id": "tiny",
        "last_id": "org/claude-x",
    }
    for entry in entries:
        assert entry["display_name"] == "tiny"
        assert entry["max_input_tokens"] == entry["max_model_len"] == TINY_CONTEXT
        assert aliased_daemon.request("GET", f"/v1/models/{entry['id']}").json() == entry
    assert aliased_daemon.request("GET", "/v1/models/default").json() == entries[0]


@pytest.mark.parametrize(
    ("query", "names", "more"),
    [
        ("limit=1", ["tiny"], True),
        ("limit=3", ["tiny", *ALIASES], False),
        ("limit=1&after_id=tiny", ["gpt-4o"], True),
        ("after_id=gpt-4o", ["org/claude-x"], False),
        ("after_id=org/claude-x", [], False),
        ("limit=1&before_id=org/claude-x", ["gpt-4o"], True),
        ("before_id=gpt-4o", ["tiny"], False),
    ],
)
def test_pages(aliased_daemon: RunningDaemon, query: str, names: list[str], *, more: bool) -> None:
    """A page begins behind a name, or ends before one."""
    answer = aliased_daemon.request("GET", f"/v1/models?{query}").json()
    assert [entry["id"] for entry in answer["data"]] == names
    assert answer["has_more"] is more
    assert answer["first_id"] == (names[0] if names else None)
    assert answer["last_id"] == (names[-1] if names else None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=-1", "limit"),
        ("limit=many", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("after_id=unknown", "after_id"),
        ("before_id=unknown", "before_id"),
    ],
)
def test_pages_that_are_none(aliased_daemon: RunningDaemon, query: str, param: str) -> None:
    """A query that is of no use is refused, naming the part."""
    reply = aliased_daemon.request("GET", f"/v1/models?{query}")
    assert (reply.status, reply.json()["error"]["param"]) == (400, param)


def test_both_sdks_read_the_list(aliased_daemon: RunningDaemon) -> None:
    """OpenAI's SDK and Anthropic's, page by page, find the same names."""
    transport = httpx2.HTTPTransport(uds=str(aliased_daemon.socket))
    with openai.OpenAI(
        base_url="http://localhost/v1",
        api_key="unused",
        http_client=openai.DefaultHttpxClient(transport=transport),
    ) as of_openai:
        assert [model.id for model in of_openai.models.list()] == ["tiny", *ALIASES]
        assert of_openai.models.retrieve("gpt-4o").owned_by == "umbel"
    transport = httpx2.HTTPTransport(uds=str(aliased_daemon.socket))
    with anthropic.Anthropic(
        base_url="http://localhost",
        api_key="unused",
        http_client=anthropic.DefaultHttpxClient(transport=transport),
    ) as of_anthropic:
        found = list(of_anthropic.models.list(limit=1))
        assert [model.id for model in found] == ["tiny", *ALIASES]
        assert found[1].max_input_tokens == TINY_CONTEXT
