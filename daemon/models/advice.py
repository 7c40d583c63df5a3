"""`umbel models recommend`: models that fit, from a table that umbel brings along."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from ... import models
from ...models.estimate.config import ModelConfig
from ...models.estimate.facts import ModelFacts, Weights
from ..config import Settings
from .fit import Fit, Machine, agents, fit, machine_of
from .list import about
from .machine import Planned

SHARED = 4096
"""Tokens of the prompt that agents are taken to share."""

_GB = 10**9


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the table.

    Attributes:
        repo: on Hugging Face.
        quantisation: of its weights.
        weight_bytes: of its weights, as they are stored: the size of the download.
        numbers: that they are made of.
        good_for: in a few words.
        config: what of its `config.json` tells what it takes.
    """

    repo: str
    quantisation: str
    weight_bytes: int
    numbers: int
    good_for: str
    config: dict[str, Any]

    @property
    def facts(self) -> ModelFacts:
        """What memory depends on."""
        width = 2
        weights = Weights(self.weight_bytes, 4 * self.numbers, width)
        return ModelFacts(ModelConfig(self.config), weights)


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table.

    Attributes:
        checked: the day on which it was.
        models: from small to large.
    """

    checked: str
    models: list[Entry]


class Advice(msgspec.Struct, frozen=True):
    """What is said of one model.

    Attributes:
        agents: conversations that fit in memory at a time.
    """

    repo: str
    quantisation: str
    download_bytes: int
    good_for: str
    fits: bool
    fit: Fit
    agents: int


class Recommendation(msgspec.Struct, frozen=True):
    """What is said of all.

    Attributes:
        machine: that they would run on.
        checked: the day of the table.
        history: tokens of each conversation, after the prompt that all share.
        shared: tokens of that prompt.
        models: the best first: those that fit with an agent at least, from large to small, then
            the others.
    """

    machine: Machine
    checked: str
    history: int
    shared: int
    models: list[Advice]


@cache
def table() -> Table:
    """Read the table."""
    raw = files(models).joinpath("recommended.json").read_bytes()
    return msgspec.json.decode(raw, type=Table)


def advise(machine: Machine, settings: Settings, history: int) -> Recommendation:
    """Say of each model of the table how it fits.

    Args:
        machine: they would run on.
        settings: of the daemon.
        history: tokens of each agent's conversation.
    """
    said = [_advice(entry, machine, settings, history) for entry in table().models]
    said.sort(key=lambda each: (not each.fits, each.agents == 0, -each.download_bytes))
    return Recommendation(machine, table().checked, history, SHARED, said)


def _advice(entry: Entry, machine: Machine, settings: Settings, history: int) -> Advice:
    how = fit(entry.facts, machine, settings)
    return Advice(
        entry.repo,
        entry.quantisation,
        entry.weight_bytes,
        entry.good_for,
        how.fits,
        how,
        agents(entry.facts, machine, settings, shared=SHARED, own=history),
    )


def recommend(
    planned: Planned, settings: Settings, *, history: int, everything: bool, json: bool
) -> list[str]:
    """Say which models fit, in lines.

    Args:
        planned: the machine that they would run on.
        settings: of the daemon.
        history: tokens of each agent's conversation.
        everything: also those that do not fit, or with no agent.
        json: in JSON.
    """
    said = advise(machine_of(planned), settings, history)
    if json:
        return [msgspec.json.format(msgspec.json.encode(said), indent=2).decode()]
    return list(_lines(said, settings, everything=everything))


def _lines(said: Recommendation, settings: Settings, *, everything: bool) -> Iterator[str]:
    yield about(said.machine, settings)
    listed = [each for each in said.models if everything or (each.fits and each.agents)]
    if listed:
        width = max(len(each.repo) for each in listed)
        yield f"{'model':{width}}  {'download':>9}  {'context':>8}  {'agents':>6}  good for"
        for each in listed:
            size = f"{each.download_bytes / _GB:.1f} GB"
            fit = f"{each.fit.context:>8}  {each.agents:>6}" if each.fits else f"{'too large':>16}"
            yield f"{each.repo:{width}}  {size:>9}  {fit}  {each.good_for}"
        yield (
            f"agents: conversations of {said.history} tokens that fit in memory at a time, after "
            f"a shared prompt of {said.shared}; others wait on disk."
        )
    if left := len(said.models) - len(listed):
        yield f"{left} more do not fit, or not with such a conversation; --all lists them."
    yield f"Estimated; the table is of {said.checked}. Any other model that mlx-lm loads will do."
