"""An answer's text to events: content, reasoning and calls, as they arrive.

Markup depends on the model (`formats`); the rules do not:

- Text is passed on once it cannot be part of a marker. The events and their texts do not depend on
  how the text was cut.
- Spaces and line breaks directly around a marker belong to it, as templates write them.
- A call is read when it is whole. A call that cannot be read, or does not end, is passed on as
  text, with its markers. A call of an unknown tool is a call.
- A call inside the model's thoughts ends them, if it can be read.
- If only calls may follow a call, a repeated call ends the answer, and is left out: models that may
  write nothing else repeat themselves.
- Calls are plain text if there are no tools, or `tool_choice` forbids calls.
- Content that a grammar constrains is text to its end.
"""

from collections.abc import Sequence

from .calls import Call, MalformedCallError, read_calls
from .conversation import Tool, ToolChoice
from .events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from .formats import HEADER, NO_EDGES, NORMAL, REASONING, TOOL, Edges, OutputFormat
from .harmony import is_cut, read_header
from .open_call import OpenCall, StreamedArguments, WrittenCall
from .tools import openai_tools

_BLANK = " \t\r\n"
_HELD_BLANKS = 256  # at most these before a marker belong to it; others are content


class OutputParser:
    """Parses one answer. Not thread-safe.

    Args:
        form: the model's markers.
        tools: tools that the prompt describes.
        tool_choice: `none` leaves calls in the text; with `one_call` the first is the last.
        in_reasoning: the prompt ends inside the model's thoughts.
        guaranteed: a grammar guarantees that calls can be read: their arguments are streamed.
        constrained: a grammar constrains the content; calls and thoughts stand only before it.

    Attributes:
        done: the answer is complete; later text is dropped.
        calls: count of calls that have begun.
    """

    def __init__(
        self,
        form: OutputFormat,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        in_reasoning: bool = False,
        guaranteed: bool = False,
        constrained: bool = False,
    ) -> None:
        choice = tool_choice or ToolChoice()
        self.done = False
        self.calls = 0
        self._form = form
        self._tools = openai_tools(tools)
        self._finds_calls = bool(tools) and choice.mode != "none"
        self._one_call = choice.one_call
        self._only_calls = constrained or choice.mode == "required"
        self._made: list[WrittenCall] = []
        self._guaranteed = guaranteed
        self._constrained = constrained
        self._in_content = False  # once constrained content has begun
        self._state = REASONING if in_reasoning else form.initial
        self._call: OpenCall | None = None
        self._streamed: StreamedArguments | None = None
        self._written: WrittenCall | None = None
        self._events: list[OutputEvent] = []
        # Unused text is _text[_at:]; _text[0] is character _base of the answer.
        self._text, self._at, self._base = "", 0, 0
        self._quiet_until = 0  # calls before this character are plain text
        self._blanks, self._blanks_at = "", 0
        self._after_marker = in_reasoning

    @property
    def in_reasoning(self) -> bool:
        """True if the next text belongs to the model's thoughts, as far as is known."""
        return self._state == REASONING

    def push(self, text: str) -> list[OutputEvent]:
        """Take more text of the model; return the events that are now certain."""
        if not self.done:
            self._base, self._text = self._base + self._at, self._text[self._at :] + text
            self._at = 0
            while self._step():
                pass
        return self._take_events()

    def flush(self) -> list[OutputEvent]:
        """End the answer: return the events that were held back."""
        while (call := self._call) is not None and not self.done:
            if call.may_end or self._is_streamed:
                self._close(call)
            else:
                self._give_up(call)
            while self._step():
                pass
        if not self.done:
            if self._is_header and not is_cut(self._text[self._at :]):
                self._state = NORMAL
            self._plain(len(self._text))
            self._emit(self._blanks, self._blanks_at)
        self.done = True
        return self._take_events()

    def _take_events(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    # -- markers ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """Use text up to the next marker, or of an open call; False if more is needed."""
        if self.done or self._at == len(self._text):
            return False
        if self._call is not None:
            return self._continue_call(self._call)
        if self._constrained and not self._in_content and self._is_content():
            self._in_content, self._finds_calls = True, False
            self._emit(self._blanks, self._blanks_at)
            self._blanks = ""
        quiet = self._quiet_until - self._base
        loud = self._finds_calls and self._at >= quiet
        if self._is_header:
            return self._read_header(loud=loud)
        edges = self._edges(calls=loud)
        end = len(self._text)
        if self._finds_calls and not loud:
            end = min(end, quiet + edges.longest)
        found = edges.search(self._text, self._at, end)
        if found is not None and (loud or not self._finds_calls or found[0] < quiet):
            begin, marker = found
            self._plain(begin)
            self._at = begin + len(marker)
            self._cross(marker, edges.targets[marker], self._base + begin)
            return True
        safe = len(self._text) - edges.held(self._text, self._at)
        if self._finds_calls and not loud:
            safe = min(safe, quiet)
        self._plain(safe)
        return self._finds_calls and not loud and safe == quiet

    def _edges(self, *, calls: bool) -> Edges:
        if self._in_content:
            return NO_EDGES
        return self._form.edges(self._state, calls=calls)

    def _is_content(self) -> bool:
        """True if the next text is content, and certainly no marker."""
        if self._state != NORMAL:
            return False
        rest = self._text[self._at :].lstrip(_BLANK)
        markers = self._form.edges(NORMAL, calls=self._finds_calls).targets
        return bool(rest) and not any(m.startswith(rest) or rest.startswith(m) for m in markers)

    def _cross(self, marker: str, target: str, begin: int) -> None:
        if target == TOOL:
            self._call = OpenCall(self._form.tool_format(marker), begin)
            self._streamed = StreamedArguments() if self._guaranteed else None
            return
        is_text = marker in self._form.call_starts  # which a header has announced
        self._blanks, self._state, self._after_marker = "", target, not is_text
        if is_text:
            self._emit(marker, begin)

    # -- headers ---------------------------------------------------------------------------

    @property
    def _is_header(self) -> bool:
        return self._form.headed and self._state == HEADER

    def _read_header(self, *, loud: bool) -> bool:
        """Read a message's header; unless `loud`, a call's header is content."""
        header, form = read_header(self._text, self._at), self._form.tools
        if header is None:
            return False
        begin, end = self._at, header.end
        if header.called and loud and form is not None:
            form = form._replace(start=self._text[begin:end], called=header.called)
            self._at, self._call = end, OpenCall(form, self._base + begin)
            self._streamed = StreamedArguments(header.called) if self._guaranteed else None
        elif not header.called and end > begin:
            self._at, self._blanks, self._after_marker = end, "", True
        self._state = REASONING if header.thinks else NORMAL
        return True

    # -- text ------------------------------------------------------------------------------

    def _plain(self, end: int) -> None:
        """Pass text before `end` on, except blanks that may belong to a marker."""
        text, begin = self._text[self._at : end], self._base + self._at
        self._at = end
        if not text or self._state not in (NORMAL, REASONING):
            return
        if self._after_marker:
            whole = len(text)
            text = text.lstrip(_BLANK)
            begin += whole - len(text)
            if not text:
                return
            self._after_marker = False
        if not self._edges(calls=self._finds_calls).targets:
            self._emit(text, begin)
            return
        if self._blanks:
            text, begin = self._blanks + text, self._blanks_at
        kept = len(text.rstrip(_BLANK))
        kept = max(kept, len(text) - _HELD_BLANKS)
        self._emit(text[:kept], begin)
        self._blanks, self._blanks_at = text[kept:], begin + kept

    def _emit(self, text: str, begin: int) -> None:
        if text:
            delta = ReasoningDelta(text) if self.in_reasoning else TextDelta(text, begin)
            self._events.append(delta)

    # -- calls -----------------------------------------------------------------------------

    def _continue_call(self, call: OpenCall) -> bool:
        begin, self._at = self._at, call.feed(self._text, self._at)
        if self._streamed is not None:
            self._stream(self._streamed, self._text[begin : self._at])
        if call.ended or (call.refused and self._is_streamed):
            self._close(call)  # events stay; later text is content
        elif call.refused:
            self._give_up(call)
        return True

    @property
    def _is_streamed(self) -> bool:
        return self._streamed is not None and self._streamed.name is not None

    def _stream(self, streamed: StreamedArguments, text: str) -> None:
        done = streamed.done
        fragment = streamed.push(text)
        if not fragment or streamed.name is None:
            return
        call = self._written = self._written or self._compared(streamed.name)
        if new := call.push(fragment):
            if call not in self._made:
                self._begin_call(call, None)
            self._events.append(ToolCallDelta(self.calls - 1, new))
        if streamed.done and not done:
            self.done = call.is_held
            if not call.is_held:
                self._events.append(ToolCallEnd(self.calls - 1))

    def _close(self, call: OpenCall) -> None:
        if not self._is_streamed:
            found = [] if self._is_words(call) else self._read(call.body, call)
            if not found:
                self._give_up(call)
                return
            for one in found[:1] if self._one_call else found:
                self._add_call(one)
                if self.done:
                    break
        self._call = self._written = None
        self._blanks = ""
        self._state, self._after_marker = NORMAL, True
        self.done = self.done or self._one_call

    def _compared(self, name: str) -> WrittenCall:
        return WrittenCall(name, self._made if self._only_calls else ())

    def _add_call(self, one: Call) -> None:
        call = self._compared(one.name)
        call.push(one.arguments)
        if call.is_held:
            self.done = True
            return
        self._begin_call(call, one.id)
        self._events.append(ToolCallDelta(self.calls - 1, one.arguments))
        self._events.append(ToolCallEnd(self.calls - 1))

    def _read(self, body: str, call: OpenCall) -> Sequence[Call]:
        try:
            return read_calls(body, call.form, self._tools)
        except MalformedCallError:
            return []

    def _is_words(self, call: OpenCall) -> bool:
        """True if the marker was plain text, and a call or the thoughts' end came later."""
        reasoning, body = self._form.reasoning, call.body
        if call.is_json:
            return False
        if self.in_reasoning and reasoning is not None and reasoning.end in body:
            return True
        _, again, rest = body.rpartition(call.form.start)
        return bool(again and call.form.end and self._read(rest, call))

    def _begin_call(self, call: WrittenCall, call_id: str | None) -> None:
        self._events.append(ToolCallStart(self.calls, call.name, call_id))
        self._made.append(call)
        self.calls += 1

    def _give_up(self, call: OpenCall) -> None:
        """Go back to the beginning of the call and read it as text."""
        self._call = None
        self._quiet_until = call.begin + call.words
        if call.begin < self._base:
            self._text, self._at = call.text + self._text[self._at :], 0
            self._base = call.begin
        else:
            self._at = call.begin - self._base
