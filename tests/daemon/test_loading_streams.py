"""Streams that wait for a model: what is sent before there is an answer, or an error."""

import asyncio
from typing import Any, cast

import pytest
from aiohttp.test_utils import TestClient, TestServer

from umbel.daemon.config import Settings
from umbel.daemon.http.app import application
from umbel.daemon.http.handlers.entry import Entry
from umbel.daemon.models.slot import ModelSlot
from umbel.models.errors import ModelLoadError

from ..fakes import PATIENCE
from .serving import serving

BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
BODIES = {
    "/v1/chat/completions": BODY,
    "/v1/completions": {"prompt": "hi", "stream": True},
    "/v1/messages": BODY | {"model": "tiny"},
    "/v1/responses": {"input": "hi", "stream": True},
}


class FailingLoader:
    """Takes its time, and then fails."""

    def __init__(self) -> None:
        self.may_fail = asyncio.Event()

    async def open(self, slot: ModelSlot, begin: Any, downloaded: Any) -> int:
        """Find nothing."""
        del slot, begin, downloaded
        await self.may_fail.wait()
        raise ModelLoadError("its files are cut off")

    async def drop(self, slot: ModelSlot) -> None:
        """Drop nothing."""


@pytest.mark.parametrize("route", BODIES)
async def test_a_model_that_fails_ends_the_stream(route: str) -> None:
    """With an error as the protocol has it, once the client has heard that there is a stream."""
    loader = FailingLoader()
    entry = Entry(Settings(keepalive=0.01))
    entry.models = serving()
    entry.models._loader = cast("Any", loader)
    entry.models.timeout = PATIENCE
    entry.responses = cast("Any", object())
    async with TestClient(TestServer(application(entry))) as client:
        answer = await client.post(route, json=BODIES[route])
        assert answer.status == 200
        assert await answer.content.readuntil(b"\n\n") == b": loading tiny\n\n"
        loader.may_fail.set()
        rest = (await answer.read()).decode()
    *comments, error, end = rest.split("\n\n")
    assert set(comments) <= {": loading tiny"}
    assert end == ""
    assert "tiny cannot be loaded; the daemon's log says why" in error
    named = route in ("/v1/messages", "/v1/responses")
    assert error.startswith("event: error\ndata: {" if named else 'data: {"error":{')
    assert entry.models._places.waiting == 0


@pytest.mark.parametrize("route", BODIES)
async def test_a_model_that_fails_at_once_is_a_status(route: str) -> None:
    """Nothing was sent yet."""
    loader = FailingLoader()
    loader.may_fail.set()
    entry = Entry(Settings())
    entry.models = serving()
    entry.models._loader = cast("Any", loader)
    entry.responses = cast("Any", object())
    async with TestClient(TestServer(application(entry))) as client:
        answer = await client.post(route, json=BODIES[route])
        assert answer.status in (503, 529)
        assert "tiny cannot be loaded; the daemon's log says why" in await answer.text()


async def test_a_client_that_leaves_waits_no_more() -> None:
    """The load goes on for others."""
    loader = FailingLoader()
    entry = Entry(Settings(keepalive=0.01))
    entry.models = serving()
    entry.models._loader = cast("Any", loader)
    entry.models.timeout = PATIENCE
    async with TestClient(TestServer(application(entry))) as client:
        answer = await client.post("/v1/chat/completions", json=BODY)
        assert await answer.content.readuntil(b"\n\n") == b": loading tiny\n\n"
        answer.close()
        async with asyncio.timeout(PATIENCE):
            while entry.models._places.waiting:  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0.01)
        assert entry.models.default.loading is not None
        loader.may_fail.set()
