"""One response on its way: from a body and what it goes on with to what is stored of it."""

from collections.abc import Callable
from typing import Any

import msgspec

from ..http.failures import APIError
from ..identity.caller import Caller
from ..protocols.generation_request import GenerationBody, GenerationRequest
from ..protocols.response_answers import ResponseAnswers, ResponseObject, Status
from ..protocols.response_output import Output
from ..protocols.responses import ReadResponse, ResponsesRequest
from ..quoting import quote
from ..requests.generations import Generations
from ..requests.workers import Check
from .desk import ResponseDesk
from .store import (
    NoSuchResponseError,
    Past,
    PastTooLongError,
    ResponseStore,
    StoredItem,
    StoredResponse,
    UnfinishedResponseError,
)


class TurnBody(GenerationBody, kw_only=True):
    """A body together with what it goes on with.

    Attributes:
        body: of the request.
        caller: whose it is.
        past: what `previous_response_id` stands for; None without one.
        store: of responses, where the input's references lead.
        begin: told on a worker's thread what the body says.
        kept: bytes of what was read that the answer and the store will need.
    """

    body: ResponsesRequest
    caller: Caller
    past: Past | None
    store: ResponseStore
    begin: Callable[[ReadResponse], None] | None = None
    kept: int = 0

    def sets(self, field: str) -> bool:
        """Whether the body says something in a field."""
        return self.body.sets(field)

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
            items = 0 if self.body.store is False else sum(map(len, read.items))
            self.kept = items + sum(len(memoryview(tool)) for tool in read.tools.shown)
        return read.request

    @property
    def kept_bytes(self) -> int:
        """How many bytes of the input and of its tools stay until the answer has ended."""
        return self.kept

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
        items: of its input, if it is to be stored.
        is_settled: the store has what stays of it, or is about to have it, or nothing shall stay.
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
        self.items: list[StoredItem] = []
        self._object: tuple[ResponseObject, Output] | None = None
        self._conversation = self.id
        self._answers: ResponseAnswers | None = None
        self._generations: Generations | None = None
        self.is_settled = False

    def answers(self, generations: Generations) -> ResponseAnswers:
        """Take the answer that is coming; it is stored before its end is told."""
        object_, output = self._read_body()
        self._answers = ResponseAnswers(object_, generations, output)
        self._generations = generations
        generations.at_end.append(self._store_at_end)
        return self._answers

    @property
    def status(self) -> str:
        """How far the response is."""
        last = self._answers.last if self._answers else None
        return "in_progress" if last is None else str(last["status"])

    def now(self, status: Status = "in_progress") -> dict[str, Any]:
        """The response object as it is now."""
        if self._answers is not None and self._answers.last is not None:
            return self._answers.last
        object_, output = self._read_body()
        usage = self._generations.usage if self._generations else None
        return object_.make(status, output.items, usage)

    def cancel(self) -> dict[str, Any]:
        """End the answer; return the object with what has come of it."""
        if self._generations is not None:
            self._generations.cancel()
        return self.now("cancelled")

    def leave(self) -> None:
        """Store what came of an answer that was cut off, if a client may know of it."""
        if not self.is_settled and self._answers is not None and self._answers.has_begun:
            self._desk.leave(self._put(self._answers.whole()), self._input_bytes)

    def discard(self) -> None:
        """Store nothing: the client hears of an error and not of a response, or deletes it."""
        self.is_settled = True

    def _begin(self, read: ReadResponse) -> None:
        """Note what the body says. Called on a worker's thread."""
        output = Output(
            read.tools.called,
            logprobs=self._body.told_logprobs is not None,
            summarized=self._body.summary is not None,
            encrypted=self._body.encrypts_reasoning,
        )
        self._object = ResponseObject(self.id, self._model, self._body, read.tools.shown), output
        self._conversation = self._caller.conversation or self.request.conversation_name or self.id
        if self._body.store is not False:
            self.items = [_stored(item) for item in read.items]

    def _read_body(self) -> tuple[ResponseObject, Output]:
        if self._object is None:
            raise RuntimeError("the body was not read")
        return self._object

    async def _store_at_end(self) -> None:
        if not self.is_settled and self._answers is not None:
            await self._desk.keep(self._put(self._answers.whole()), self._input_bytes)

    @property
    def _input_bytes(self) -> int:
        return sum(len(item.body) for item in self.items)

    def _put(self, last: dict[str, Any]) -> Callable[[ResponseStore], None]:
        """Return what stores a response as it stays, if it shall be."""
        self.is_settled = True
        previous = self._body.previous_response_id

        def put(store: ResponseStore) -> None:
            if self._body.store is False:
                return
            output = [StoredItem(item["id"], msgspec.json.encode(item)) for item in last["output"]]
            body = msgspec.json.encode({**last, "output": []})
            store.put(
                self._caller.tenant,
                StoredResponse(self.id, last["status"], body, output),
                previous=previous,
                conversation=self._conversation,
                inputs=self.items,
            )

        return put


async def find_past(previous: str | None, caller: Caller, desk: ResponseDesk) -> Past | None:
    """Look up what a response goes on with; its bytes count with the body's.

    Raises:
        APIError: 404 for a response that is not there; 400 for one that is of no use.
        UnavailableError: there is no room for it, or the disk cannot be read.
    """
    if previous is None:
        return None
    try:
        past = await desk.look(lambda store: store.past(caller.tenant, previous))
    except NoSuchResponseError as error:
        message = f"Previous response with id {quote(previous)} not found."
        code = "previous_response_not_found"
        raise APIError(404, message, code=code, param="previous_response_id") from error
    except UnfinishedResponseError as error:
        raise unfinished(previous, str(error)) from error
    except PastTooLongError as error:
        message = f"what came before {quote(previous)} is too long; begin anew, with less input"
        code = "context_length_exceeded"
        raise APIError(400, message, code=code, param="previous_response_id") from error
    caller.share.resize(caller.share.nbytes + past.nbytes)
    return past


def unfinished(previous: str, status: str) -> APIError:
    """Say that nothing can go on with a response, because of its status."""
    message = f"the response {quote(previous)} is {status}; go on with one that is completed"
    return APIError(400, message, param="previous_response_id")


def _stored(body: bytes) -> StoredItem:
    return StoredItem(msgspec.json.decode(body, type=_WithId).id, body)


class _WithId(msgspec.Struct):
    id: str
