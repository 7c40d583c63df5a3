"""The disk tier on a healthy disk: order, limits, threads, and what it lets go of."""

import gc
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import structlog.testing

from umbel.cachestore.disk import tier as disk_tier
from umbel.cachestore.disk.files import HostTensor, Payload, write_file
from umbel.cachestore.disk.queue import WriteJob
from umbel.cachestore.disk.tier import DiskTier, Verified
from umbel.cachestore.errors import DiskTierError
from umbel.cachestore.record import Pin

from .disk_tools import (
    TIMEOUT,
    damaged,
    job,
    opened,
    own_names,
    payload,
    results,
    wait_until,
    write,
)
from .test_disk_files import DAMAGE

if TYPE_CHECKING:
    from umbel.cachestore.record import Record


@contextmanager
def stuck_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    gate = threading.Event()

    def wait(*arguments: object) -> tuple[int, bytes]:
        assert gate.wait(TIMEOUT)
        return write_file(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_tier, "write_file", wait)
    try:
        yield gate
    finally:
        gate.set()


def disk_threads() -> set[str]:
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name.startswith("umbel-disk")}


# -- writing -------------------------------------------------------------------------------


def test_results_come_in_order_with_their_tokens(tmp_path: Path) -> None:
    tokens = [object() for _ in range(20)]
    with opened(tmp_path) as tier:
        assert tier.completed() == []
        for place, token in enumerate(tokens):
            assert tier.write(job(place)._replace(token=token))
        done = results(tier)
        assert [written.token for written in done] == tokens
        records = [written.record for written in done]
        assert [record.start for record in records if record] == list(range(20))
        assert tier.completed() == []
        assert tier.statistics().writes == 20
        assert tier.statistics().queued_bytes == 0


def test_the_owner_is_woken(tmp_path: Path) -> None:
    woken: list[tuple[int, str]] = []

    def wake() -> None:
        woken.append((len(tier.completed()), threading.current_thread().name))

    with opened(tmp_path, wake=wake) as tier:
        assert tier.write(job())
        wait_until(lambda: bool(woken))
        assert woken == [(1, "umbel-disk-writer")]
        woken.clear()
        future = tier.verify([])
        wait_until(lambda: bool(woken))
        assert woken == [(0, "umbel-disk-verifier")]
        assert future.done()


def test_failing_wake_stops_no_thread(tmp_path: Path) -> None:
    def wake() -> None:
        raise RuntimeError("a fault of the owner")

    with structlog.testing.capture_logs() as logs, opened(tmp_path, wake=wake) as tier:
        first, second = write(tier, job(0), job(1))
        assert damaged(tier, first, second) == []
        assert damaged(tier, first) == []
        assert disk_threads() == {"umbel-disk-writer", "umbel-disk-verifier"}
    assert {entry["log_level"] for entry in logs} == {"error"}


def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, what is being written included; a job too large for it is taken alone."""
    size = job().nbytes
    with stuck_disk(monkeypatch) as gate, opened(tmp_path, queue_bytes=4 * size - 1) as tier:
        assert [tier.write(job(token)) for token in range(5)] == [True] * 3 + [False] * 2
        assert tier.statistics().queued_bytes == 3 * size
        gate.set()
        assert len(results(tier)) == 3
        gate.clear()
        assert tier.write(job(5, items=10_000))
        assert not tier.write(job(6))
        gate.set()
        assert [written.token for written in results(tier)] == [5]
        assert len(write(tier, job(7), job(8))) == 2


def test_the_owner_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stuck_disk(monkeypatch) as gate, opened(tmp_path) as tier:
        asked: list[object] = []

        def ask() -> None:
            asked.extend(tier.write(job(token)) for token in range(3))
            tier.touch({1: 2})
            tier.delete([])
            tier.pin(Pin("name", "tenant", b""))
            tier.unpin("name", "tenant")
            asked.append(tier.completed())
            asked.append(tier.statistics().queued_bytes)
            asked.append(tier.verify([]))
            asked.append(tier.flush(0.01))

        owner = threading.Thread(target=ask, daemon=True)
        owner.start()
        owner.join(TIMEOUT)
        assert asked[:4] == [True, True, True, []]
        assert asked[4] == 3 * job().nbytes
        assert asked[6] is False
        gate.set()
        assert len(results(tier)) == 3


def test_payloads_are_let_go_of_before_it_is_told(tmp_path: Path) -> None:
    """Written or not, without a collection of garbage: the owner counts on the memory."""
    alive: list[weakref.ref[object]] = []

    def watched(length: int) -> WriteJob:
        values = np.zeros(100, np.float32)
        alive.append(weakref.ref(values))
        return job()._replace(payload=Payload({"x": HostTensor("F32", (length,), [values])}, {}))

    gc.disable()
    try:
        with structlog.testing.capture_logs(), opened(tmp_path) as tier:
            for folder, length in ((tmp_path, 100), (tmp_path, 99), (tmp_path / "gone", 100)):
                tier.folder, given = folder, watched(length)
                assert tier.write(given)
                (answer,) = results(tier)
                assert (answer.record is not None) == (folder == tmp_path and length == 100)
                assert given.payload.tensors == {}
                assert not any(reference() is not None for reference in alive)
            assert tier.statistics().queued_bytes == 0
    finally:
        gc.enable()
    released, waits = threading.Event(), job()
    with opened(tmp_path) as tier:
        tier.add(lambda: released.wait(TIMEOUT))
        assert tier.write(waits)
        tier.end(abandon=True)
        assert [written.record for written in tier.completed()] == [None]
        assert waits.payload.tensors == {}
        assert tier.statistics().queued_bytes == 0
        released.set()


def test_a_payload_of_no_use_is_the_owners_fault(tmp_path: Path) -> None:
    wrong = job()._replace(payload=Payload({"x": payload().tensors["x"]._replace(shape=(1,))}, {}))
    huge = job(start=1 << 70)
    with structlog.testing.capture_logs() as logs, opened(tmp_path) as tier:
        for bad in (wrong, huge):
            assert tier.write(bad)
            assert results(tier)[0].record is None
            assert tier.statistics().state == "on"
        assert [entry["log_level"] for entry in logs] == ["error", "error"]
        assert own_names(tmp_path) == set()
        write(tier, job())


# -- order ---------------------------------------------------------------------------------


def test_deleting_and_touching_anything(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        first, second = write(tier, job(0), job(1))
        tier.delete([])
        tier.delete([first])
        tier.delete([first])
        tier.touch({first.id: 7, 99: 7})
        tier.touch({})
        assert tier.flush(TIMEOUT)
        assert own_names(tmp_path) == {second.name}
        assert damaged(tier, first, second) == [first]
        assert tier.statistics().records == 1
        assert tier.statistics().failures == 0


def test_deletions_of_many_share_a_transaction(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        records = write(tier, *map(job, range(20)))
        commits: list[str] = []
        tier._index._database.set_trace_callback(
            lambda text: commits.append(text) if text == "COMMIT" else None
        )
        tier.delete(records[:10])
        assert tier.flush(TIMEOUT)
        assert len(commits) == 1
        tier.touch(dict.fromkeys((record.id for record in records[10:]), 7))
        assert tier.flush(TIMEOUT)
        assert len(commits) == 2
        tier._index._database.set_trace_callback(None)


def test_everything_at_once(tmp_path: Path) -> None:
    random_ = random.Random(7)  # noqa: S311
    expected: dict[int, Record] = {}
    used: dict[int, int] = {}
    with opened(tmp_path, queue_bytes=50_000) as tier:
        token = 0
        while token < 300:
            token += tier.write(job(token, items=random_.randrange(1, 2000)))
            for written in tier.completed():
                assert written.record is not None
                expected[written.record.id] = written.record
            if expected and random_.random() < 0.6:
                chosen = random_.choice(list(expected))
                tier.touch({chosen: token})
                used[chosen] = token
            if expected and random_.random() < 0.3:
                tier.delete([expected.pop(random_.choice(list(expected)))])
            if expected and random_.random() < 0.1:
                record = random_.choice(list(expected.values()))
                assert damaged(tier, record) == []
        expected |= {w.record.id: w.record for w in results(tier) if w.record}
        assert tier.statistics().records == len(expected)
        assert tier.statistics().nbytes == sum(r.nbytes for r in expected.values())
    with opened(tmp_path) as tier:
        assert {record.id for record in tier.records} == set(expected)
        for record in tier.records:
            assert record.used == used.get(record.id, record.start)
        assert own_names(tmp_path) == {record.name for record in expected.values()}
        assert damaged(tier, *tier.records) == []
        assert tier.collected == Counter()


# -- verifying -----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_records_are_named(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as tier:
        records = write(tier, *map(job, range(4)))
        for record in records[1:3]:
            (tmp_path / "elsewhere").unlink(missing_ok=True)
            DAMAGE[damage](tier.path(record))
        with structlog.testing.capture_logs() as logs:
            assert damaged(tier, *records) == records[1:3]
        assert len(logs) == 2
        assert tier.statistics().state == "on"
        tier.delete(records[1:3])
        assert tier.flush(TIMEOUT)
        assert tier.statistics().records == 2


def test_cancelled_verification_delays_no_other(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        (record,) = write(tier, job(items=500_000))
        futures = [tier.verify([record] * 5) for _ in range(5)]
        assert futures[-1].cancel()
        with pytest.raises(CancelledError):
            futures[-1].result(TIMEOUT)
        assert [future.result(TIMEOUT) for future in futures[:-1]] == [Verified([], [])] * 4
        assert damaged(tier, record) == []


def test_flush_waits_for_verifications(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        records = write(tier, *(job(token, items=300_000) for token in range(5)))
        future = tier.verify(records)
        assert tier.flush(TIMEOUT)
        assert future.done()


# -- closing -------------------------------------------------------------------------------


def test_nothing_is_left_after_closing(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with opened(folder) as tier:
        write(tier, job())
    assert disk_threads() == set()
    before = len(list(Path("/dev/fd").iterdir()))
    for token in range(3):
        with opened(folder) as tier:
            (record,) = write(tier, job(token))
            assert damaged(tier, record) == []
            os.truncate(tier.path(record), 10)
            assert damaged(tier, record) == [record]
            with pytest.raises(DiskTierError):
                DiskTier(folder, fingerprint="", queue_bytes=1)
    (tmp_path / "other" / "lock").mkdir(parents=True)
    (tmp_path / "another" / "index.sqlite").mkdir(parents=True)
    for name in ("other", "another"):
        with pytest.raises(DiskTierError):
            DiskTier(tmp_path / name, fingerprint="", queue_bytes=1)
    assert disk_threads() == set()
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_closing_finishes_the_queue(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        for token in range(50):
            assert tier.write(job(token))
        future = tier.verify([])
        tier.close(TIMEOUT)
        assert future.result(0) == Verified([], [])
        written = [done.record for done in tier.completed()]
        assert len(written) == 50
        assert None not in written
    with opened(tmp_path) as tier:
        assert tier.records == written


def test_a_closed_tier_takes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        (record,) = write(tier, job())
    tier.close(0)
    assert not tier.write(job(1))
    tier.delete([record])
    tier.touch({record.id: 99})
    tier.pin(Pin("name", "tenant", b""))
    assert tier.flush(TIMEOUT)
    assert tier.completed() == []
    with pytest.raises(DiskTierError, match="closed"):
        tier.verify([record]).result(TIMEOUT)
    assert tier.statistics().state == "off"
    assert tier.statistics().reason == "closed"
    with opened(tmp_path) as tier:
        assert tier.records == [record]
        assert tier.pins == []


def test_closing_gives_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, original = threading.Event(), os.write

    def slow(fd: int, data: bytes) -> int:
        reached.set()
        time.sleep(0.005)
        return original(fd, data[:64])

    with structlog.testing.capture_logs() as logs, opened(tmp_path) as tier:
        monkeypatch.setattr("umbel.cachestore.disk.files.BLOCK", 1 << 10)
        monkeypatch.setattr(os, "write", slow)
        for token in range(3):
            assert tier.write(job(token, items=1_000_000))
        assert reached.wait(TIMEOUT)
        tier.close(0)
        assert disk_threads() == set()
        assert [(done.token, done.record) for done in tier.completed()] == [
            (1, None),
            (2, None),
            (0, None),
        ]
        assert tier.statistics().queued_bytes == 0
        assert own_names(tmp_path) == set()
        assert tier.flush(0)
    assert logs == []


def test_closing_gives_up_verifying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The futures end with an error, those that wait and that which is being answered."""
    with opened(tmp_path) as tier:
        (record,) = write(tier, job(items=100_000))
        monkeypatch.setattr("umbel.cachestore.disk.files.BLOCK", 16)
        futures = [tier.verify([record] * 1000) for _ in range(3)]
        wait_until(futures[0].running)
        tier.close(0)
        assert disk_threads() == set()
        for future in futures:
            with pytest.raises(DiskTierError, match="closed"):
                future.result(0)


def test_a_disk_that_never_answers_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("umbel.cachestore.disk.tier._GRACE", 0.01)
    with stuck_disk(monkeypatch) as gate, opened(tmp_path) as tier:
        assert tier.write(job(0))
        assert tier.write(job(1))
        with structlog.testing.capture_logs() as logs:
            tier.close(0.01)
        assert len(logs) == 1
        assert not tier.flush(0.01)
        with pytest.raises(DiskTierError, match="in use"):
            DiskTier(tmp_path, fingerprint="", queue_bytes=1)
        gate.set()
        wait_until(lambda: not disk_threads())
        assert {done.record for done in tier.completed()} == {None}
    with opened(tmp_path) as tier:
        assert tier.records == []
        assert own_names(tmp_path) == set()
