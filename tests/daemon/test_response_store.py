"""Stored responses: found by their tenant alone, within bytes and time, whatever the disk does."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.daemon.responses.database import FILE
from umbel.daemon.responses.store import (
    LIFETIME,
    MAX_CHAIN,
    MAX_PAST,
    NoSuchResponseError,
    PastTooLongError,
    ResponseStore,
    StoredItem,
    StoredResponse,
    UnfinishedResponseError,
)
from umbel.scheduler.errors import UnavailableError

ENOUGH = 1 << 30


class Clock:
    """A clock that tests set; it goes on a little each time."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def item(name: str, size: int = 10) -> StoredItem:
    return StoredItem(name, b'"' + name.encode().ljust(size, b".") + b'"')


def put(
    store: ResponseStore,
    name: str,
    *,
    previous: str | None = None,
    tenant: str = "a",
    status: str = "completed",
    size: int = 10,
) -> None:
    """Store a response with one item of input and one of output."""
    store.put(
        tenant,
        StoredResponse(name, status, b"{}", [item(f"{name}-out")]),
        previous=previous,
        conversation=f"talk-{name}",
        inputs=[item(f"{name}-in", size)],
    )


@contextmanager
def opened(
    folder: Path | None,
    budget: int = ENOUGH,
    clock: Clock | None = None,
    uptime: Clock | None = None,
) -> Iterator[ResponseStore]:
    clock = clock or Clock()
    store = ResponseStore(folder, budget, clock, uptime or clock)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ResponseStore]:
    with opened(None if request.param == "memory" else tmp_path) as found:
        yield found


def is_there(store: ResponseStore, name: str, tenant: str = "a") -> bool:
    try:
        return store.get(tenant, name).id == name
    except NoSuchResponseError:
        return False


def test_stored_response_is_found(store: ResponseStore) -> None:
    """With its input and its items."""
    put(store, "r")
    assert store.get("a", "r") == StoredResponse("r", "completed", b"{}", [item("r-out")])
    assert store.input_items("a", "r") == [item("r-in")]
    assert store.item("a", "r-in") == item("r-in").body
    assert store.item("a", "r-out") == item("r-out").body
    assert store.item("a", "nothing") is None


def test_deleted_response_is_gone(store: ResponseStore) -> None:
    """With its items; it can be deleted once."""
    put(store, "r")
    assert store.delete("a", "r") is True
    assert store.delete("a", "r") is False
    assert not is_there(store, "r")
    assert store.item("a", "r-in") is None
    assert store.total() == 0


def test_past_is_the_chain_in_order(store: ResponseStore) -> None:
    """Inputs and outputs, oldest first; the conversation is that of the last."""
    put(store, "1")
    put(store, "2", previous="1")
    put(store, "other", previous="1")
    put(store, "3", previous="2", status="incomplete")
    past = store.past("a", "3")
    names = ["1-in", "1-out", "2-in", "2-out", "3-in", "3-out"]
    assert past.items == [item(name).body for name in names]
    assert past.conversation == "talk-3"
    assert past.nbytes == sum(map(len, past.items))


def test_tenants_see_nothing_of_each_other(store: ResponseStore) -> None:
    put(store, "r", tenant="a")
    put(store, "own", tenant="b", previous="r")
    assert not is_there(store, "r", tenant="b")
    assert store.item("b", "r-in") is None
    assert store.delete("b", "r") is False
    for name in ("r", "own"):
        with pytest.raises(NoSuchResponseError):
            store.past("b", name)
    with pytest.raises(NoSuchResponseError):
        store.input_items("b", "r")
    assert is_there(store, "r")


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_unfinished_response_is_not_continued(store: ResponseStore, status: str) -> None:
    """The error has its status; the response itself can be read."""
    put(store, "r", status=status)
    with pytest.raises(UnfinishedResponseError, match=status):
        store.past("a", "r")
    assert store.get("a", "r").status == status


def test_chain_is_bounded(store: ResponseStore) -> None:
    """In responses, and in bytes."""
    for number in range(MAX_CHAIN + 1):
        put(store, f"r{number}", previous=f"r{number - 1}" if number else None)
    assert len(store.past("a", f"r{MAX_CHAIN - 1}").items) == 2 * MAX_CHAIN
    with pytest.raises(PastTooLongError):
        store.past("a", f"r{MAX_CHAIN}")
    put(store, "large", size=MAX_PAST)
    with pytest.raises(PastTooLongError):
        store.past("a", "large")


def test_chain_with_a_deleted_response_is_not_continued(store: ResponseStore) -> None:
    put(store, "1")
    put(store, "2", previous="1")
    store.delete("a", "1")
    with pytest.raises(NoSuchResponseError):
        store.past("a", "2")
    assert is_there(store, "2")


def test_old_response_is_gone(tmp_path: Path) -> None:
    """Before it is collected, and also after."""
    clock = Clock()
    with opened(tmp_path, clock=clock) as store:
        put(store, "r")
        clock.now += LIFETIME - 1
        assert is_there(store, "r")
        clock.now += 2
        assert not is_there(store, "r")
        assert store.item("a", "r-in") is None
        assert store.delete("a", "r") is False
        put(store, "first look")
        store.delete("a", "first look")
        clock.now += 3600
        put(store, "new")
        size = store.total()
    with opened(None, clock=clock) as other:
        put(other, "new")
        assert size == other.total()


def test_clock_that_was_ahead_loses_nothing(tmp_path: Path) -> None:
    """For less than an hour: responses are not found meanwhile, and are there again."""
    clock, uptime = Clock(), Clock()
    with opened(tmp_path, clock=clock, uptime=uptime) as store:
        put(store, "r")
        clock.now += 2 * LIFETIME
        for number in range(3):
            put(store, f"{number}")
            assert not is_there(store, "r")
            uptime.now += 1100
        clock.now -= 2 * LIFETIME
        put(store, "back")
        uptime.now += 7200
        put(store, "later")
        assert is_there(store, "r")


def test_budget_evicts_the_least_recently_used() -> None:
    """Going on with a response counts as use, of its whole chain."""
    with opened(None, 11_000) as store:
        for name in ("1", "2", "3"):
            put(store, name, size=1500)
        put(store, "4", previous="1", size=1500)
        store.past("a", "4")
        put(store, "5", size=1500)
        assert [is_there(store, name) for name in "12345"] == [True, False, True, True, True]
        assert store.total() <= 11_000


def test_flood_costs_its_own_tenant() -> None:
    with opened(None, 20_000) as store:
        put(store, "small", tenant="b", size=500)
        for number in range(50):
            put(store, f"r{number}", size=2000)
        assert is_there(store, "small", tenant="b")
        assert is_there(store, "r49")
        assert not is_there(store, "r40")
        assert store.total() <= 20_000


def test_response_over_the_budget_is_not_kept(store: ResponseStore) -> None:
    """It removes nothing else; a budget of 0 keeps nothing."""
    with opened(None, 5000) as small:
        put(small, "before")
        put(small, "r", size=6000)
        assert not is_there(small, "r")
        assert is_there(small, "before")
    with opened(None, 0) as none:
        put(none, "r")
        assert not is_there(none, "r")
    assert store.total() == 0


def test_restart_finds_responses(tmp_path: Path) -> None:
    """With a smaller budget, those that fit."""
    with opened(tmp_path) as store:
        put(store, "1", size=3000)
        put(store, "2", previous="1", size=3000)
        before = store.past("a", "2")
    with opened(tmp_path) as store:
        assert store.past("a", "2") == before
    with opened(tmp_path, 5000) as store:
        assert store.total() <= 5000
        assert is_there(store, "2")
        assert not is_there(store, "1")


def test_file_is_private(tmp_path: Path) -> None:
    """Other users cannot read it, and a link is not followed."""
    with opened(tmp_path) as store:
        put(store, "r")
        assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    linked, target = tmp_path / "linked", tmp_path / "target"
    linked.mkdir()
    target.write_bytes(b"")
    (linked / FILE).symlink_to(target)
    with opened(linked) as store:
        put(store, "r")
        assert is_there(store, "r")
    assert target.read_bytes() == b""


@pytest.mark.parametrize(
    "damage", [b"no database at all" * 500, b"SQLite format 3\0" + b"x" * 9000]
)
def test_damaged_file_is_replaced(tmp_path: Path, damage: bytes) -> None:
    """The store goes on, on disk."""
    (tmp_path / FILE).write_bytes(damage)
    with opened(tmp_path) as store:
        put(store, "r")
        assert is_there(store, "r")
    with opened(tmp_path) as store:
        assert is_there(store, "r")


def test_file_of_another_format_is_replaced(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE)
    database.executescript("CREATE TABLE t (a); PRAGMA user_version = 99;")
    database.close()
    with opened(tmp_path) as store:
        put(store, "r")
        assert is_there(store, "r")


def test_file_damaged_while_it_is_open(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for number in range(50):
            put(store, f"r{number}", size=100_000)
        assert is_there(store, "r0")
    with opened(tmp_path) as store:
        file = tmp_path / FILE
        with file.open("r+b") as damaged:
            damaged.write(b"x" * file.stat().st_size)
        found = [is_there(store, f"r{number}") for number in range(50)]
        assert not all(found)
        put(store, "new")
        assert is_there(store, "new")


def test_unusable_folder_means_memory(tmp_path: Path) -> None:
    with opened(tmp_path / "nowhere") as store:
        put(store, "r")
        assert is_there(store, "r")


def test_failing_disk(tmp_path: Path) -> None:
    """Writes are not stored; reads are a 503, and work again later."""
    with opened(tmp_path) as store:
        put(store, "before")
        real = store._database._database
        store._database._database = Failing()  # type: ignore[assignment]
        put(store, "lost")
        with pytest.raises(UnavailableError, match="try again later"):
            store.get("a", "before")
        store._database._database = real
        assert is_there(store, "before")
        assert not is_there(store, "lost")


class Failing:
    """A connection whose disk is full, or gone."""

    def execute(self, _statement: str) -> None:
        raise sqlite3.OperationalError("disk I/O error")


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3000), st.booleans()), max_size=30),
    st.integers(0, 12_000),
)
def test_counted_bytes_are_those_stored(puts: list[tuple[str, int, bool]], budget: int) -> None:
    with opened(None, budget) as store:
        for number, (tenant, size, delete) in enumerate(puts):
            put(store, f"r{number}", tenant=tenant, size=size)
            if delete:
                store.delete(tenant, f"r{number}")
            assert store.total() <= budget
        rows = store._database.read(
            lambda d: d.execute(
                "SELECT count(*), coalesce(sum(bytes), 0) FROM responses"
            ).fetchone()
        )
        items = store._database.read(
            lambda d: d.execute("SELECT count(*) FROM items").fetchone()[0]
        )
        assert rows[1] == store.total()
        assert items == 2 * rows[0]
