"""A model's markers of thoughts and calls, as mlx-lm knows them.

mlx-lm chooses markers and parsers by the model's template; `harmony` adds those of gpt-oss. Besides
its own form, each model may write calls in the generic form, which `tools` describes.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from . import harmony

NORMAL, REASONING, TOOL, HEADER = "normal", "reasoning", "tool", "header"
"""States of an answer, by mlx-lm's names; in other states, all text is markup."""

ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], Any]
"""mlx-lm's type: the text between two markers and the tools, to one call or several."""


class Edges:
    """Markers that end a state of an answer, and the states that follow.

    The marker that is complete first wins; of two that are complete at once, the longer one. So
    the result does not depend on how the text was cut.
    """

    def __init__(self, targets: Mapping[str, str]) -> None:
        self.targets = dict(targets)
        self.longest = max(map(len, targets), default=0)
        ordered = sorted(targets, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._openings = frozenset(m[:n] for m in targets for n in range(1, len(m)))

    def search(self, text: str, start: int, end: int) -> tuple[int, str] | None:
        """Find the first marker in `text[start:end]`: its index, and the marker."""
        if self._pattern is None or (match := self._pattern.search(text, start, end)) is None:
            return None
        begin, marker = match.start(), match.group()
        for other in self.targets:  # a marker inside it may be complete before it
            at = text.find(other, begin, begin + len(marker) - 1)
            if at >= 0 and at + len(other) < begin + len(marker):
                begin, marker = at, other
        return begin, marker

    def held(self, text: str, start: int) -> int:
        """Count the characters at the end of `text[start:]` that may begin a marker."""
        most = min(self.longest - 1, len(text) - start)
        return next((n for n in range(most, 0, -1) if text[-n:] in self._openings), 0)


class ReasoningFormat(NamedTuple):
    """Markers around a model's thoughts; `then` follows the end, and is no part of the answer."""

    start: str
    end: str
    then: str = ""


class ToolFormat(NamedTuple):
    """Markers around a call."""

    start: str  # never empty
    end: str  # empty if only the answer's end ends a call
    parse: ToolParser | None = None  # of the model's own form; None for the generic form
    called: str = ""  # the tool's name, if the start has it; the arguments follow

    @property
    def name(self) -> str:
        """The form's name in mlx-lm, or `generic`."""
        if self.parse is None:
            return "generic"
        return str(getattr(self.parse, "__module__", "")).rpartition(".")[2]

    @property
    def only_json(self) -> bool:
        """True if only JSON can be a call of this form."""
        return self.name in ("generic", "json_tools", "harmony")


GENERIC = ToolFormat("<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class OutputFormat:
    """All markers of a model. Immutable, so safe from any thread."""

    reasoning: ReasoningFormat | None = None  # None for a model that does not think
    tools: ToolFormat | None = None  # its own form of calls; None if mlx-lm knows none
    structural: Sequence[str] = ()  # markup without a meaning
    transitions: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    initial: str = NORMAL  # state in which an answer without thoughts begins
    headed: bool = False  # the state `HEADER` is harmony's

    @cached_property
    def _edges(self) -> dict[bool, dict[str, Edges]]:
        return {calls: self._compile(calls=calls) for calls in (False, True)}

    def edges(self, state: str, *, calls: bool) -> Edges:
        """Return the markers that end a state; without `calls`, calls are plain text."""
        return self._edges[calls].get(state, NO_EDGES)

    def tool_format(self, marker: str) -> ToolFormat:
        """Return the form of call that a marker begins."""
        return self.tools if self.tools is not None and marker == self.tools.start else GENERIC

    @property
    def call_starts(self) -> frozenset[str]:
        """Markers that begin a call, of the model's own form and the generic one."""
        own = () if self.tools is None or self.headed else (self.tools.start,)
        return frozenset((*own, GENERIC.start))

    @property
    def barred(self) -> frozenset[str]:
        """Texts that free text must not have if a grammar holds the calls."""
        return self.call_starts | frozenset(harmony.TOKENS if self.headed else ())

    @property
    def content_start(self) -> str:
        """Markup before content."""
        if self.headed:
            return harmony.FINAL
        if self.initial == NORMAL:
            return ""
        first = self.edges(self.initial, calls=False).targets.items()
        return next((marker for marker, target in first if target == NORMAL), "")

    @property
    def markers(self) -> frozenset[str]:
        """All texts that are markup and never content."""
        own = {marker for edges in self._edges[True].values() for marker in edges.targets}
        ends = {GENERIC.end} if self.tools is None else {GENERIC.end, self.tools.end}
        return frozenset((own | ends | self.barred) - {""})

    def _compile(self, *, calls: bool) -> dict[str, Edges]:
        table: dict[str, dict[str, str]] = {NORMAL: {}}
        if self.reasoning is not None:
            table[NORMAL][self.reasoning.start] = REASONING
            table[REASONING] = {self.reasoning.end: NORMAL}
        for marker in self.structural:
            table[NORMAL][marker] = NORMAL
        for state, edges in self.transitions.items():
            named = table.setdefault(state, {})
            # If calls are plain text they are content, not part of a header.
            named.update((marker, to if to != TOOL else NORMAL) for marker, to in edges)
        if calls:
            for named in table.values():
                named.update(dict.fromkeys(self.call_starts, TOOL))
        return {state: Edges(targets) for state, targets in table.items()}


NO_EDGES = Edges({})
_THINKS = re.compile(r"([<\[])((?:\w+:)?think(?:ing)?[>\]])", re.IGNORECASE)
_AFTER_MESSAGE = tuple((end, HEADER) for end in harmony.ENDS)

HARMONY = OutputFormat(
    ReasoningFormat(harmony.ANALYSIS, harmony.ENDS[0], harmony.NEXT),
    ToolFormat(harmony.RECIPIENT, "", harmony.parse_call),
    transitions={NORMAL: _AFTER_MESSAGE, REASONING: _AFTER_MESSAGE},
    initial=HEADER,
    headed=True,
)
"""The markers of models whose template writes harmony."""


def _paired_thoughts(names: Collection[str], source: str) -> ReasoningFormat | None:
    """Find markers of thoughts that mlx-lm does not list, as `[THINK]`."""
    for where in (" ".join(sorted(names)), source):
        for found in _THINKS.finditer(where):
            if (end := f"{found[1]}/{found[2]}") in where:
                return ReasoningFormat(found[0], end)
    return None


def read_format(wrapper: Any, names: Collection[str] = (), source: str = "") -> OutputFormat:
    """Read a model's markers.

    Args:
        wrapper: mlx-lm's `TokenizerWrapper` of the model's tokenizer.
        names: added tokens; a pair of them may surround thoughts.
        source: the chat template's text, likewise.
    """
    if not wrapper.has_tool_calling and harmony.is_harmony(wrapper.chat_template):
        return HARMONY
    reasoning = tools = None
    if wrapper.has_thinking and wrapper.think_start and wrapper.think_end:
        reasoning = ReasoningFormat(wrapper.think_start, wrapper.think_end)
    else:
        reasoning = _paired_thoughts(names, source)
    if wrapper.has_tool_calling and wrapper.tool_call_start and wrapper.tool_parser:
        start, end = wrapper.tool_call_start, wrapper.tool_call_end or ""
        tools = ToolFormat(start, end, wrapper.tool_parser)
    return OutputFormat(
        reasoning,
        tools,
        wrapper.structural_markers,
        wrapper.response_transitions or {},
        wrapper.response_initial_state or NORMAL,
    )
