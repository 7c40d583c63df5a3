"""Jobs for the disk tier, and a process that is killed while it writes.

Run as a program, `disk_tools.py FOLDER PLAN SEED` opens a tier and works until it is killed:
see `_PLANS`. It prints "+ID" when a record was acknowledged and "-ID" before it is deleted.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from umbel.cachestore.disk import files
from umbel.cachestore.disk import tier as disk_tier
from umbel.cachestore.disk.files import HostTensor, Payload
from umbel.cachestore.disk.queue import WriteJob, Written
from umbel.cachestore.disk.tier import DiskTier
from umbel.cachestore.record import Record, RecordKind

TIMEOUT = 30.0  # seconds until a test takes something for hung; nothing is measured with it
FINGERPRINT = "model"


def payload(items: int = 1000, seed: int = 0) -> Payload:
    values = np.random.default_rng(seed).random(items, np.float32)
    return Payload({"x": HostTensor("F32", values.shape, [values])}, {"seed": str(seed)})


def job(token: int = 0, *, items: int = 1000, **changes: object) -> WriteJob:
    """Make a span of four tokens at `token`, with `items` float32 in its payload."""
    record = Record(
        id=0,
        kind=RecordKind.SPAN,
        tenant="tenant",
        start=token,
        end=token + 4,
        prefix=token.to_bytes(16, "little"),
        digest=(token + 1).to_bytes(16, "big"),
        tokens=np.arange(token, token + 4, dtype="<i4").tobytes(),
        used=token,
    )
    changed = replace(record, **cast("dict[str, Any]", changes))
    return WriteJob(token, changed, payload(items, token))


@contextmanager
def opened(folder: Path, **options: object) -> Iterator[DiskTier]:
    """Open a tier, and close it however the test ends."""
    chosen: dict[str, Any] = {"fingerprint": FINGERPRINT, "queue_bytes": 1 << 24, **options}
    tier = DiskTier(folder, **chosen)
    try:
        yield tier
    finally:
        tier.close(TIMEOUT)


def results(tier: DiskTier) -> list[Written]:
    """Wait for all jobs, and take what came of them."""
    assert tier.flush(TIMEOUT)
    return tier.completed()


def write(tier: DiskTier, *jobs: WriteJob) -> list[Record]:
    taken = [tier.write(each) for each in jobs]
    assert all(taken)
    records = [done.record for done in results(tier) if done.record is not None]
    assert len(records) == len(jobs)
    return records


def damaged(tier: DiskTier, *records: Record) -> list[Record]:
    verified = tier.verify(records).result(TIMEOUT)
    assert verified.unreadable == []
    return verified.damaged


def own_names(folder: Path) -> set[str]:
    return {name for name, _ in files.own_files(folder)}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def fill(path: Path) -> None:
    """Write a file until the disk is full, to the last byte."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with suppress(OSError):
                while True:
                    file.write(bytes(size))


# -- a process that is killed --------------------------------------------------------------


def child(folder: Path, plan: str, seed: int = 0) -> "subprocess.Popen[str]":
    command = [sys.executable, str(Path(__file__)), str(folder), plan, str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _die(*_: object, **__: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def _nth(count: int, original: Callable[..., Any], last: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def counted(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        return (last if calls == count else original)(*arguments, **named)

    return counted


def _half(fd: int, data: memoryview) -> NoReturn:
    _WRITE(fd, data[: len(data) // 2])
    _die()


def _at_call(name: str, count: int, last: Callable[..., Any], _: DiskTier) -> None:
    setattr(os, name, _nth(count, getattr(os, name), last))


def _after_call(name: str, count: int, tier: DiskTier) -> None:
    original = getattr(os, name)

    def last(*arguments: object, **named: object) -> NoReturn:
        original(*arguments, **named)
        _die()

    _at_call(name, count, last, tier)


def _at_statement(start: str, count: int, tier: DiskTier) -> None:
    """Die when SQLite is about to run the statement with this number of those."""
    seen = _nth(count, lambda: None, _die)
    database = tier._index._database
    database.set_trace_callback(lambda text: seen() if text.startswith(start) else None)


def _in_verify(_: DiskTier) -> None:
    def verify(path: Path, nbytes: int, checksum: bytes, _: object) -> dict[str, str]:
        return files.verify_file(path, nbytes, checksum, _die)

    vars(disk_tier)["verify_file"] = verify


_WRITE = os.write
# Where the process dies; the first few jobs succeed. A file takes three writes (header and two
# blocks) and two fsyncs, and every fourth job is followed by a deletion.
_PLANS: dict[str, Callable[[DiskTier], None]] = {
    "busy": lambda _: None,
    "header": partial(_at_call, "write", 16, _half),
    "block": partial(_at_call, "write", 18, _half),
    "fsync": partial(_at_call, "fsync", 11, _die),
    "rename": partial(_at_call, "rename", 6, _die),
    "renamed": partial(_after_call, "rename", 6),
    "folder": partial(_after_call, "fsync", 12),
    "begin": partial(_at_statement, "BEGIN", 9),
    "insert": partial(_at_statement, "INSERT", 6),
    "commit": partial(_at_statement, "COMMIT", 7),
    "delete": partial(_at_statement, "DELETE", 2),
    "update": partial(_at_statement, "UPDATE", 5),
    "verify": _in_verify,
}
PLANS = tuple(_PLANS)


def _work(folder: Path, plan: str, seed: int) -> None:
    """Write, delete, touch and verify until killed."""
    random_ = random.Random(seed)  # noqa: S311
    tier = DiskTier(folder, fingerprint=FINGERPRINT, queue_bytes=1 << 24)
    _PLANS[plan](tier)
    kept = list(tier.records)
    print("open", flush=True)  # noqa: T201
    for token in range(1000, 1_000_000):
        small = random_.randrange(1, 60_000)
        tier.write(job(token, items=small if plan == "busy" else 1_100_000))
        if plan != "busy":
            tier.flush(TIMEOUT)
        for written in tier.completed():
            assert written.record is not None
            kept.append(written.record)
            print(f"+{written.record.id}", flush=True)  # noqa: T201
        if kept:
            tier.touch({random_.choice(kept).id: token})
            tier.verify(kept[-2:] if token % 4 == 2 else [])
        if token % 4 == 3 and len(kept) > 1:
            gone = kept.pop(random_.randrange(len(kept)))
            print(f"-{gone.id}", flush=True)  # noqa: T201
            tier.delete([gone])


if __name__ == "__main__":
    _work(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
