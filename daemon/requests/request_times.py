"""A request's times: when it came, and how long it was in each stage."""

import math

from ..observability.metrics import Metrics, Stage


class RequestTimes:
    """The one record of a request's times, on the engine's clock, in seconds.

    A request is in one stage at a time, and its end ends the stage that it has reached. A
    preemption changes no stage. The metrics get each time as soon as it is known.
    """

    def __init__(self, arrived_at: float, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrived_at = self._entered_at = arrived_at
        self._stage: Stage | None = Stage.QUEUE
        self._left_at: dict[Stage, float] = {}
        self._tokens = 0
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._sent_at: float | None = None

    def start(self, at: float) -> None:
        """Note that the request left the queue."""
        self._enter(Stage.PREFILL, at)

    def add_token(self, at: float) -> None:
        """Note a token of the answer."""
        if self._first_token_at is None:
            self._first_token_at = at
            self._metrics.time_to_first_token.observe(at - self._arrived_at)
            self._enter(Stage.DECODE, at)
        else:
            self._metrics.inter_token_latency.observe(at - self._last_token_at)
        self._tokens += 1
        self._last_token_at = at

    def end(self, computed_at: float, sent_at: float) -> None:
        """Note when the engine had finished, and when the answer was sent or given up."""
        self._enter(None, computed_at)
        self._sent_at = sent_at
        self._metrics.e2e_seconds.observe(sent_at - self._arrived_at)

    def log_latencies(self) -> dict[str, float | None]:
        """Return the log line's fields of the tokens, in milliseconds."""
        first, gaps = self._first_token_at, self._tokens - 1
        if first is None:
            return {"ttft_ms": None, "itl_ms": None}
        decoding = (self._last_token_at - first) * 1e3
        return {
            "ttft_ms": self._milliseconds(first),
            "itl_ms": round(decoding / gaps, 1) if gaps else None,
        }

    def log_stages(self) -> dict[str, float | None]:
        """Return the log line's fields of the stages, in seconds; None for one never reached.

        Moments are cut to milliseconds, and durations are not, so that the stages' sum never
        exceeds the total.
        """
        fields: dict[str, float | None] = {}
        before = 0
        for stage in Stage:
            left_at = self._left_at.get(stage)
            now = before if left_at is None else self._milliseconds(left_at)
            fields[f"{stage}_s"] = None if left_at is None else (now - before) / 1e3
            before = now
        sent_at = self._sent_at
        total = None if sent_at is None else self._milliseconds(sent_at) / 1e3
        return {**fields, "e2e_s": total}

    def _milliseconds(self, at: float) -> int:
        return math.floor((at - self._arrived_at) * 1e3)

    def _enter(self, stage: Stage | None, at: float) -> None:
        if self._stage is not None:
            self._left_at[self._stage] = at
            self._metrics.stage_seconds[self._stage].observe(at - self._entered_at)
        self._stage, self._entered_at = stage, at
