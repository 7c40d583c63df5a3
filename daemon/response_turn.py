"""One response on its way: from a body and what it goes on with to what is stored of it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from .failures import APIError
from .generations import Generations
from .protocols.generation_request import GenerationBody, GenerationRequest
from .protocols.response_answers import ResponseAnswers
from .protocols.response_object import ResponseObject
from .protocols.response_output import Output
from .protocols.responses import ReadResponse, ResponsesRequest
from .quoting import quote
from .response_desk import ResponseDesk
from .response_store import (
    NoSuchResponseError,
    Past,
    PastTooLongError,
    ResponseStore,
    StoredItem,
    UnfinishedResponseError,
)
from .service import Caller
from .workers import Check


class TurnBody(GenerationBody, kw_only=True):
    """A body together with what it goes on with.

    Attributes:
        body: of the request.
        caller: whose it is.
        past: what `previous_response_id` stands for; None without one.
        store: of responses, where the input's references lead.
        begin: told on a worker's thread what the body says.
    """

    body: ResponsesRequest
    caller: Caller
    past: Past | None
    store: ResponseStore
    begin: Callable[[ReadResponse], None] | None = None

    @property
    def conversation_name(self) -> str | None:
        """The name that the body gives, or the one under which the responses before it ran."""
        return self.body.conversation_name or (self.past and self.past.conversation)

    @property
    def session_name(self) -> str | None:
        """What the body calls its agent's session, if it does."""
        return self.body.session_name

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body; see `GenerationBody`."""
        past = self.past.items if self.past else []
        read = self.body.read(past, lambda name: self.store.item(self.caller.tenant, name), check)
        if self.begin is not None:
            self.begin(read)
        return read.request

    def release(self) -> None:
        """Let go of what is read."""
        self.body.release()
        self.past = None


class ResponseTurn:
    """Makes one response, and stores it if it shall be.

    Args:
        body: of the request.
        caller: whose it is.
        past: what it goes on with, if anything.
        model: the name the answer carries.
        desk: of stored responses.

    Attributes:
        id: of the response.
        request: what the service is asked for.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        caller: Caller,
        past: Past | None,
        model: str,
        desk: ResponseDesk,
    ) -> None:
        self.id = caller.request_id.replace("req-", "resp_", 1)
        self.request = TurnBody(
            body=body, caller=caller, past=past, store=desk.store, begin=self._begin
        )
        self._body = body
        self._caller = caller
        self._model = model
        self._desk = desk
        self._stores = body.store is not False
        self._object: ResponseObject | None = None
        self._output: Output | None = None
        self._answers: ResponseAnswers | None = None
        self._generations: Generations | None = None
        self._is_settled = False
        self._is_discarded = False

    def answers(self, generations: Generations) -> ResponseAnswers:
        """Take the answer that is coming; it is stored before its end is told."""
        if self._object is None or self._output is None:
            raise RuntimeError("the body was not read")
        self._generations = generations
        self._answers = ResponseAnswers(self._object, generations, self._output)
        generations.at_end = self._store_at_end
        return self._answers

    def cancel(self) -> dict[str, Any]:
        """End the answer, and say what has come of it."""
        if self._generations is None or self._object is None or self._output is None:
            raise RuntimeError("there is no answer yet")
        self._generations.cancel()
        return self._object.make("cancelled", self._output.items, self._generations.usage)

    def leave(self) -> None:
        """See to it that what came of the answer is stored, if a client may know of it."""
        if self._is_settled:
            return
        if self._answers is None or not self._body.stream:
            self.discard()
        else:
            self._store(self._answers.whole())

    def discard(self) -> None:
        """Forget it: the client hears of an error, or of nothing, and not of a response."""
        self._is_settled = self._is_discarded = True
        if self._stores:
            self._desk.submit(self._forget)

    def _forget(self, store: ResponseStore) -> None:
        store.delete(self._caller.tenant, self.id)

    def _begin(self, read: ReadResponse) -> None:
        """Note what the body says, and store its input. Called on a worker's thread."""
        self._object = ResponseObject(self.id, self._model, self._body, read.tools.shown)
        logprobs = self._body.told_logprobs is not None
        self._output = Output(read.tools.called, logprobs=logprobs)
        if self._stores:
            self._desk.store.begin(
                self._caller.tenant,
                self.id,
                previous=self._body.previous_response_id,
                conversation=self._caller.conversation or self.request.conversation_name or self.id,
                body=msgspec.json.encode(self._object.make("in_progress")),
                items=[_stored(item) for item in read.items],
            )
            if self._is_discarded:  # while it was written
                self._forget(self._desk.store)

    async def _store_at_end(self) -> None:
        if self._answers is not None and (storing := self._store(self._answers.whole())):
            await asyncio.wrap_future(storing)

    def _store(self, last: dict[str, Any]) -> Future[None] | None:
        """Store a response as it stays."""
        self._is_settled = True
        if not self._stores:
            return None
        tenant, response_id = self._caller.tenant, self.id

        def finish(store: ResponseStore) -> None:
            output = [StoredItem(item["id"], msgspec.json.encode(item)) for item in last["output"]]
            body = msgspec.json.encode({**last, "output": []})
            store.finish(tenant, response_id, last["status"], body, output)

        return self._desk.submit(finish)


async def find_past(body: ResponsesRequest, caller: Caller, desk: ResponseDesk) -> Past | None:
    """Look up what a body goes on with; its bytes count with the body's.

    Raises:
        APIError: 404 for a response that is not there; 400 for one that is of no use.
        UnavailableError: there is no room for it, or the disk cannot be read.
    """
    previous = body.previous_response_id
    if previous is None:
        return None
    try:
        past = await desk.look(lambda store: store.past(caller.tenant, previous))
    except NoSuchResponseError as error:
        message = f"Previous response with id {quote(previous)} not found."
        code = "previous_response_not_found"
        raise APIError(404, message, code=code, param="previous_response_id") from error
    except UnfinishedResponseError as error:
        message = f"the response {quote(previous)} is {error}; go on with one that is completed"
        raise APIError(400, message, param="previous_response_id") from error
    except PastTooLongError as error:
        message = f"what came before {quote(previous)} is too long; begin anew, with less input"
        code = "context_length_exceeded"
        raise APIError(400, message, code=code, param="previous_response_id") from error
    caller.share.resize(caller.share.nbytes + past.nbytes)
    return past


def _stored(body: bytes) -> StoredItem:
    return StoredItem(msgspec.json.decode(body, type=_WithId).id, body)


class _WithId(msgspec.Struct):
    id: str
