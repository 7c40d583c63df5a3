"""A process that runs out of descriptors over a disk tier.

Run as a program, `starved FOLDER` prints what became of its state, as a line of JSON.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from umbel.cachestore.disk.tier import DiskTier
from umbel.cachestore.errors import DiskTierError
from umbel.cachestore.paging import page_in, page_out

from .disk_tools import FINGERPRINT, TIMEOUT
from .fakes import KV
from .pager_tools import PagedWorld

LIMIT = 64  # descriptors that the process may have
MOST = 8  # a start takes fewer


@contextmanager
def starved(free: int, tier: DiskTier | None = None) -> Iterator[None]:
    """Take all descriptors except a few, once the tier's threads have closed theirs."""
    assert tier is None or tier.flush(TIMEOUT)
    taken: list[int] = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for _ in range(free):
        os.close(taken.pop())
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


def starts(folder: Path) -> int:
    """Start with fewer descriptors than that takes; return how often it was refused."""
    refused = 0
    for free in range(MOST):
        with starved(free):
            try:
                DiskTier(folder, fingerprint=FINGERPRINT, queue_bytes=1 << 20).close(TIMEOUT)
            except DiskTierError:
                refused += 1
    return refused


def reads(world: PagedWorld) -> int:
    """Ask for what is on disk without a descriptor; return how often it was a miss."""
    missed = 0
    for hour in range(3):
        page_in._clock = lambda hour=hour: 3600.0 * hour  # type: ignore[misc]
        with starved(0, world.tier):
            world.fetch(range(91))
            missed += world.probe(range(91)) == (90, 0)
    return missed


def main(folder: Path) -> None:
    """Fill a folder, and use it without descriptors, then with them."""
    page_out._REST = 0.0
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    with PagedWorld(KV, folder, longest=30) as world:
        for end in (30, 60, 90):
            world.serve(range(end))
        world.page_out()
        before = sorted(world.tier.files())
        world.close_tier()
        refused = starts(folder)
        world.restart()
        missed = reads(world)
        with starved(0, world.tier):
            world.serve(range(200, 230))
            world.step()
            assert world.tier.flush(TIMEOUT)  # the writer has a thread of its own
        after = sorted(world.tier.files())
        world.write_all()
        world.restart()
        page_in._clock = lambda: 1e6
        world.fetch(range(91))
        world.fetch(range(200, 231))
        restored = world.probe(range(91))[1]
        written = world.probe(range(200, 231))[1]
    said = {"refused": refused, "missed": missed, "restored": restored, "written": written}
    print(json.dumps(said | {"before": before, "after": after}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
