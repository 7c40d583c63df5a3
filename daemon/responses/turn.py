"""One response: from a body and the past that it continues to the response that is stored."""

from collections.abc import Callable
from typing import Any

import msgspec

from ..http.failures import APIError
from ..protocols.generation_request import GenerationBody, GenerationRequest
from ..protocols.response_answers import ResponseAnswers, ResponseObject, Status
from ..protocols.response_output import Output
from ..protocols.responses import ReadResponse, ResponsesRequest
from ..quoting import quote
from ..requests.arrivals import Arrival
from ..requests.generation import Generations
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
    """A body together with the past that it continues; see `GenerationBody`."""

    body: ResponsesRequest
    tenant: str
    past: Past | None
    store: ResponseStore  # finds the items that the input refers to
    begin: Callable[[ReadResponse], None] | None = None  # gets the content, on a worker's thread
    kept: int = 0  # bytes of the content that the answer and the store will need

    def sets(self, field: str) -> bool:
        """Return True if the body has a value in a field."""
        return self.body.sets(field)

    @property
    def conversation_name(self) -> str | None:
        """The name that the body gives, or the one under which the responses before it ran."""
        return self.body.conversation_name or (self.past and self.past.conversation)

    @property
    def session_name(self) -> str | None:
        """The body's name of its agent's session, if it has one."""
        return self.body.session_name

    def generation_request(self, check: Check) -> GenerationRequest:
        """Read the whole body."""
        past = self.past.items if self.past else []
        read = self.body.read(past, lambda name: self.store.item(self.tenant, name), check)
        if self.begin is not None:
            self.begin(read)
            items = 0 if self.body.store is False else sum(map(len, read.items))
            self.kept = items + sum(len(memoryview(tool)) for tool in read.tools.shown)
        return read.request

    @property
    def kept_bytes(self) -> int:
        """Bytes of the input and of its tools that stay until the answer has ended."""
        return self.kept

    def release(self) -> None:
        """Drop the body's input and its past."""
        self.body.release()
        self.past = None


class ResponseTurn:
    """Makes one response, and stores it if the body does not say otherwise."""

    def __init__(
        self,
        body: ResponsesRequest,
        arrival: Arrival,
        past: Past | None,
        model: str,
        desk: ResponseDesk,
    ) -> None:
        self.id = arrival.request_id.replace("req-", "resp_", 1)
        # the body for the service
        self.request = TurnBody(
            body=body, tenant=arrival.tenant, past=past, store=desk.store, begin=self._begin
        )
        self._body = body
        self._arrival = arrival
        self._model = model
        self._desk = desk
        self.items: list[StoredItem] = []  # of the input, if it is to be stored
        self._object: tuple[ResponseObject, Output] | None = None
        self._conversation = self.id
        self._answers: ResponseAnswers | None = None
        self._generations: Generations | None = None
        self.is_settled = False  # the store has the rest, or nothing is to be stored

    def answers(self, generations: Generations) -> ResponseAnswers:
        """Take the answer that is coming; it is stored before its end is reported."""
        object_, output = self._read_body()
        self._answers = ResponseAnswers(object_, generations, output)
        self._generations = generations
        generations.at_end.append(self._store_at_end)
        return self._answers

    @property
    def status(self) -> str:
        """The status of the response object."""
        last = self._answers.last if self._answers else None
        return "in_progress" if last is None else str(last["status"])

    def now(self, status: Status = "in_progress") -> dict[str, Any]:
        """Return the response object as it is now."""
        if self._answers is not None and self._answers.last is not None:
            return self._answers.last
        object_, output = self._read_body()
        usage = self._generations.usage if self._generations else None
        return object_.make(status, output.items, usage)

    def cancel(self) -> dict[str, Any]:
        """End the answer; return the object with the part that has come."""
        if self._generations is not None:
            self._generations.cancel()
        return self.now("cancelled")

    def leave(self) -> None:
        """Store the part of an answer that was cut off, if a client may know of it."""
        if not self.is_settled and self._answers is not None and self._answers.has_begun:
            self._desk.leave(self._put(self._answers.whole()), self._input_bytes)

    def discard(self) -> None:
        """Store nothing: the client got an error and no response, or deletes it."""
        self.is_settled = True

    def _begin(self, read: ReadResponse) -> None:
        """Note the body's content. Called on a worker's thread."""
        output = Output(
            read.tools.called,
            logprobs=self._body.told_logprobs is not None,
            summarized=self._body.summary is not None,
            encrypted=self._body.encrypts_reasoning,
        )
        self._object = ResponseObject(self.id, self._model, self._body, read.tools.shown), output
        named = self._arrival.conversation or self.request.conversation_name
        self._conversation = named or self.id
        if self._body.store is not False:
            self.items = [
                StoredItem(msgspec.json.decode(item, type=_WithId).id, item) for item in read.items
            ]

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
        """Return the work that stores a response as it ended, if it is to be stored."""
        self.is_settled = True
        previous = self._body.previous_response_id

        def put(store: ResponseStore) -> None:
            if self._body.store is False:
                return
            output = [StoredItem(item["id"], msgspec.json.encode(item)) for item in last["output"]]
            body = msgspec.json.encode({**last, "output": []})
            store.put(
                self._arrival.tenant,
                StoredResponse(self.id, last["status"], body, output),
                previous=previous,
                conversation=self._conversation,
                inputs=self.items,
            )

        return put


async def find_past(previous: str | None, arrival: Arrival, desk: ResponseDesk) -> Past | None:
    """Find the responses that a request continues; their bytes count with its body's.

    Raises:
        APIError: 404 for a response that is not there; 400 for one that is of no use.
        UnavailableError: there is no room for them, or the disk cannot be read.
    """
    if previous is None:
        return None
    try:
        past = await desk.look(lambda store: store.past(arrival.tenant, previous))
    except NoSuchResponseError as error:
        message = f"Previous response with id {quote(previous)} not found."
        code = "previous_response_not_found"
        raise APIError(404, message, code=code, param="previous_response_id") from error
    except UnfinishedResponseError as error:
        raise unfinished(previous, str(error)) from error
    except PastTooLongError as error:
        message = f"what came before {quote(previous)} is too long; start again, with less input"
        code = "context_length_exceeded"
        raise APIError(400, message, code=code, param="previous_response_id") from error
    arrival.share.resize(arrival.share.nbytes + past.nbytes)
    return past


def unfinished(previous: str, status: str) -> APIError:
    """Make the error of a request that continues a response without a whole answer."""
    message = f"the response {quote(previous)} is {status}; go on with one that is completed"
    return APIError(400, message, param="previous_response_id")


class _WithId(msgspec.Struct):
    id: str
