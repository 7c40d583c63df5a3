"""How fast requests without a body are answered."""

from types import SimpleNamespace
from typing import Any, cast

from umbel.daemon.http.app import _MOST_PEERS, RATE, Pace


class Clock:
    """A clock that tests set."""

    now = 100.0

    def __call__(self) -> float:
        """Tell the time."""
        return self.now


def request(
    method: str, *, operator: bool = False, peer: str = "10.0.0.1", body: bool = False
) -> Any:
    """Make a request, as far as its pace depends on it."""
    transport = SimpleNamespace(connection=SimpleNamespace(operator=operator, peer=peer))
    return cast("Any", SimpleNamespace(method=method, transport=transport, body_exists=body))


def test_a_flood_is_answered_at_a_rate() -> None:
    """Some come at once; then each waits its turn, a second at most, and other peers do not."""
    clock = Clock()
    pace = Pace(clock)
    assert [pace.delay("a") for _ in range(int(RATE))] == [0.0] * int(RATE)
    waits = [pace.delay("a") for _ in range(int(RATE) * 3)]
    assert waits[0] > 0
    assert waits == sorted(waits)
    assert abs(waits[99] - 100 / RATE) < 1e-6
    assert max(waits) == 1.0
    assert pace.delay("b") == 0.0
    clock.now += 0.5
    assert 0 < pace.delay("a") <= 0.51
    clock.now += 2
    assert pace.delay("a") == 0.0


def test_a_slow_peer_never_waits() -> None:
    """Whatever it asks for in the long run."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(int(RATE) * 5):
        clock.now += 1.1 / RATE
        assert pace.delay("a") == 0.0


def test_operators_and_requests_with_a_body_do_not_wait() -> None:
    """Nor is anything kept of them; of others, a bounded number is known."""
    pace = Pace(Clock())
    many = int(RATE) * 2
    assert not any(pace.delay_of(request("GET", operator=True)) for _ in range(many))
    assert not any(pace.delay_of(request("POST", body=True)) for _ in range(many))
    assert any(pace.delay_of(request("GET")) for _ in range(many))
    assert any(pace.delay_of(request("POST", peer="10.0.0.2")) for _ in range(many))
    assert pace.delay_of(cast("Any", SimpleNamespace(method="GET", transport=None))) == 0.0
    for number in range(_MOST_PEERS + 5):
        pace.delay(f"{number}")
    assert len(pace._due) == _MOST_PEERS
