"""An index that is not what was written: no wrong state is served, whatever it says.

The state is tokens, so that what is restored shows whose it is.
"""

import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import structlog.testing

from umbel.cachestore.disk.files import INDEX, INDEX_FILES
from umbel.cachestore.errors import DiskTierError
from umbel.cachestore.node import as_tokens
from umbel.cachestore.paging.page_in import PageInStatus
from umbel.cachestore.record import Pin
from umbel.cachestore.tries import Namespace

from .disk_tools import TIMEOUT
from .fakes import EVERYTHING, KV, NAMESPACE, RECURRENT, Stack, TokenIds
from .pager_tools import ENOUGH, PagedWorld

FLIPS = 34  # of each stack in each run
MANY = 334  # of each stack among the slow tests: a thousand in all
STACKS = (KV, EVERYTHING, RECURRENT)
OTHER = Namespace("other")
NOVEL = 77_777  # a token that nothing goes on with


class Kept(NamedTuple):
    """A folder that a tier has left; `indices` are as files, when closed and after a kill."""

    stack: Stack
    folder: Path
    indices: list[dict[str, bytes]]
    served: list[tuple[TokenIds, Namespace]]
    pins: list[Pin]


def conversations(number: int) -> list[tuple[TokenIds, Namespace]]:
    """Make prompts that share beginnings, of few different tokens, of two tenants."""
    made = random.Random(number)  # noqa: S311
    words = [made.randrange(50_000) for _ in range(6)]
    paths: list[TokenIds] = [()]
    for _ in range(9):
        path = made.choice(paths)
        more = (made.choice(words) for _ in range(made.randrange(8, 40)))
        paths.append((*path[: made.randrange(len(path) + 1)], *more))
    return [(path, made.choice((NAMESPACE, OTHER))) for path in paths[1:]]


def index_of(folder: Path) -> dict[str, bytes]:
    names = (name for name in INDEX_FILES if (folder / name).exists())
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture(params=STACKS, ids=lambda stack: stack.name)
def kept(request: pytest.FixtureRequest, folder: Path) -> Kept:
    """Leave the state of some conversations behind."""
    stack: Stack = request.param
    served = conversations(5)
    with PagedWorld(stack, folder, interval=8, longest=30) as world:
        for prompt, namespace in served:
            world.serve(prompt, namespace=namespace)
            world.write_all()
        for prompt, namespace in served[:3]:
            world.cache.pins.pin(namespace.tenant, f"pin-{len(prompt)}", as_tokens(prompt))
        assert world.tier.flush(TIMEOUT)
        killed = index_of(folder)
    closed = index_of(folder)
    assert set(closed) < set(killed), "a kill leaves a log of what was written last"
    found = [Pin(f"pin-{len(p)}", n.tenant, as_tokens(p).tobytes()) for p, n in served[:3]]
    return Kept(stack, folder, [closed, killed], served, found)


@contextmanager
def copied(kept: Kept, index: dict[str, bytes]) -> Iterator[Path]:
    """Make a folder with the same files, and an index."""
    folder = kept.folder.with_name("copied")
    folder.mkdir()
    for path in kept.folder.glob("*.safetensors"):
        os.link(path, folder / path.name)  # they are not changed
    for name, content in index.items():
        (folder / name).write_bytes(content)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def flipped(index: dict[str, bytes], name: str, at: int, bit: int) -> dict[str, bytes]:
    content = bytearray(index[name])
    content[at] ^= 1 << bit
    return index | {name: bytes(content)}


def serve_all(world: PagedWorld, kept: Kept) -> int:
    """Ask for everything that was served; what is restored must be the prompt's own.

    Returns:
        How many tokens were restored.
    """
    restored = sum(serve(world, prompt, namespace) for prompt, namespace in kept.served)
    world.check()
    return restored


def serve(world: PagedWorld, prompt: Iterable[int], namespace: Namespace = NAMESPACE) -> int:
    asked = (*prompt, NOVEL)
    for _ in range(ENOUGH):
        if world.pager.page_in.request(namespace, as_tokens(asked)) is PageInStatus.NOTHING:
            break
        assert world.tier.flush(TIMEOUT)
        world.pager.step()
    sequence = world.begin(asked, namespace=namespace)  # compares what is restored
    sequence.fail()
    return sequence.cached


def outcome(kept: Kept, folder: Path) -> str:
    """Restart on a folder, ask for everything, go on; say how it was found."""
    try:
        world = PagedWorld(kept.stack, folder, longest=30)
    except DiskTierError as error:
        return "refused" if "a newer umbel wrote" in str(error) else "unusable"
    with world:
        is_empty = not world.tier.records
        assert set(world.tier.pins) <= set(kept.pins)
        restored = serve_all(world, kept)
        world.serve(range(90_000, 90_030))
        world.write_all()
        world.restart()
        assert world.tier.statistics().state == "on"
        assert serve(world, range(90_000, 90_030)) >= 29
        assert serve_all(world, kept) == restored
    return "started empty" if is_empty else "restored" if restored else "nothing restored"


def flip_bits(kept: Kept, count: int, seed: int) -> Counter[str]:
    """Flip bits, each in an index of its own, and count what came of them."""
    chosen, outcomes = random.Random(seed), Counter[str]()  # noqa: S311
    for number in range(count):
        index = kept.indices[number % 2]
        name = chosen.choice([name for name in index if index[name] and name != f"{INDEX}-shm"])
        at, bit = chosen.randrange(len(index[name])), chosen.randrange(8)
        with copied(kept, flipped(index, name, at, bit)) as folder:
            try:
                outcomes[outcome(kept, folder)] += 1
            except BaseException as error:
                error.add_note(f"bit {bit} of byte {at} of {name}, of index {number % 2}")
                raise
    return outcomes


def test_any_bit_of_the_index(kept: Kept) -> None:
    outcomes = flip_bits(kept, FLIPS, seed=1)
    assert not outcomes["unusable"]
    assert outcomes["restored"] > FLIPS / 2


@pytest.mark.slow
def test_a_thousand_bits_of_the_index(kept: Kept) -> None:
    outcomes = flip_bits(kept, MANY, seed=2)
    assert outcomes.total() == MANY
    assert not outcomes["unusable"]
    assert outcomes["restored"] > outcomes["started empty"] > outcomes["refused"]


# -- rows that were exchanged --------------------------------------------------------------


def exchange(columns: str) -> tuple[str, ...]:
    """Say how two rows of different paths come to have each other's values."""
    names = columns.split()
    # Names are unique, also between two statements.
    return (
        "CREATE TEMP TABLE old AS SELECT * FROM records WHERE id IN (1, 2)",
        "UPDATE records SET name = name || '.old' WHERE id IN (1, 2)",
        *(
            f"UPDATE records SET {name} = old.{name} FROM old WHERE old.id + records.id = 3"  # noqa: S608
            for name in names
        ),
        "UPDATE records SET name = replace(name, '.old', '')",
    )


FILE = "name nbytes checksum"
PLANTED = {
    "tokens": exchange("tokens"),
    "digests": exchange("digest"),
    "tokens and digests": exchange("tokens digest"),
    "files": exchange(FILE),
    "files and digests": exchange(f"{FILE} digest"),
    "tenant": ("UPDATE records SET tenant = 'other' WHERE id IN (1, 2)",),
    "kind": ("UPDATE records SET kind = replace('spancheckpoint', kind, '') WHERE id IN (1, 2)",),
}


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("stack", [KV, RECURRENT], ids=lambda stack: stack.name)
def test_rows_that_were_exchanged(folder: Path, stack: Stack, planted: str) -> None:
    """Neither is taken for the other, though each file is whole and each row makes sense."""
    paths = [range(number, number + 30) for number in (0, 100, 200)]
    with PagedWorld(stack, folder, interval=30) as world:
        for path in paths:
            world.serve([*path, NOVEL])
            world.write_all()
        first = {world.tier.alive[number].tokens[:4] for number in (1, 2)}
        assert first == {path[:1].tobytes() for path in map(as_tokens, paths[:2])}
        world.close_tier()
        with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as database:
            for statement in PLANTED[planted]:
                database.execute(statement)
        world.restart()
        assert [serve(world, path) for path in paths] == [0, 0, 30]
        assert [serve(world, path, OTHER) for path in paths] == [0, 0, 0]
        world.check()


@pytest.mark.parametrize("column", ["tokens", "tenant", "name", "digest"])
def test_altered_pin_is_forgotten(kept: Kept, column: str) -> None:
    """It is forgotten with a warning, for good; the others stay, and it can be pinned again."""
    with copied(kept, kept.indices[0]) as folder:
        values = {"tokens": as_tokens(range(9)).tobytes(), "digest": bytes(16)}
        with closing(sqlite3.connect(folder / INDEX)) as database, database:
            database.execute(
                f"UPDATE pins SET {column} = ? WHERE name = ?",  # noqa: S608
                (values.get(column, "changed"), kept.pins[0].name),
            )
        for number in range(2):
            with structlog.testing.capture_logs() as logs:
                world = PagedWorld(kept.stack, folder, longest=30)
            with world:
                assert set(world.tier.pins) == set(kept.pins[1:])
                assert sum("pin" in entry for entry in logs) == (number == 0)
                if number:
                    world.tier.pin(kept.pins[0])
        with PagedWorld(kept.stack, folder, longest=30) as world:
            assert set(world.tier.pins) == set(kept.pins)
