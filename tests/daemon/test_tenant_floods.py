"""A tenant's share while another floods the cache with new prompts, or the queue."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from umbel.daemon.identity.keys import add_key

from .running import RunningDaemon, eventually, running

CACHE = 13 << 18
"""Bytes that the daemon keeps in memory: of a few of the flood's prompts."""

CHAT = "/v1/chat/completions"
FLOOD = 24
SMOLLM2_CACHE, SMOLLM2_FLOOD = 128 << 20, 12
"""The same of a model of which a token takes 45 KiB."""
STORY = "You are a helpful assistant of the other agents. " * 20


class Talk:
    """A conversation of the small tenant, whose every turn goes on from the one before.

    Args:
        key: of the tenant.
    """

    def __init__(self, key: str) -> None:
        self._headers = {"Authorization": f"Bearer {key}"}
        self._messages = [{"role": "system", "content": STORY}]
        self._before = 0

    def turn(self, daemon: RunningDaemon) -> tuple[int, int]:
        """Ask; returns how many tokens were cached, and how many had been computed before."""
        self._messages.append({"role": "user", "content": "What is next?"})
        body = {"messages": self._messages, "max_tokens": 8, "temperature": 0}
        reply = daemon.request("POST", CHAT, body, self._headers).json()
        self._messages.append(reply["choices"][0]["message"])
        known, usage = self._before, reply["usage"]
        self._before = usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"], known


def flood(daemon: RunningDaemon, key: str, first: int, prompts: int = FLOOD) -> None:
    """Send prompts that have nothing in common, many times what the cache holds."""
    headers = {"Authorization": f"Bearer {key}"}
    for number in range(first, first + prompts):
        text = f"{number} " + f"report {number} of agent {number * 7} " * 40
        body = {"prompt": text, "max_tokens": 1, "temperature": 0}
        assert daemon.request("POST", "/v1/completions", body, headers).status == 200


def flood_disk(daemon: RunningDaemon, key: str, first: int) -> None:
    """Send such prompts one by one, each when the one before is written.

    What memory gives up before the writer comes to it is forgotten, and fills no disk.
    """
    for number in range(first, first + FLOOD):
        before = daemon.status()["disk"]["writes"]
        flood(daemon, key, number, 1)
        eventually(lambda before=before: daemon.status()["disk"]["writes"] > before)
    eventually(lambda: on_disk(daemon))


def on_disk(daemon: RunningDaemon) -> bool:
    """Return True if all computed state is written."""
    disk = daemon.status()["disk"]
    return bool(disk["writes"]) and not disk["queued_bytes"]


def flags(
    folder: Path, floor: str, *more: str, cache: int = CACHE
) -> tuple[list[str], dict[str, str]]:
    """The command line of a daemon with both tenants, and their keys."""
    config = folder / "umbel.toml"
    config.write_text(f'[tenants.small]\ncache_floor = "{floor}"\n')
    keys_file = folder / "keys.json"
    keys_file.unlink(missing_ok=True)
    keys = {name: add_key(keys_file, name)[1] for name in ("small", "flooding")}
    words = ["--config", str(config), "--keys-file", str(keys_file)]
    return [*words, "--cache-bytes", str(cache), *more], keys


@pytest.mark.slow
def test_a_flood_leaves_the_floor_untouched(short_path: Path, long_tiny_dir: Path) -> None:
    """The next turn finds all that was computed, time and again."""
    words, keys = flags(short_path, "1MiB", "--no-disk")
    with running(short_path, long_tiny_dir, *words) as daemon:
        talk = Talk(keys["small"])
        talk.turn(daemon)
        for first in (0, FLOOD):
            flood(daemon, keys["flooding"], first)
            cached, known = talk.turn(daemon)
            assert cached >= known > 200


@pytest.mark.nightly
def test_a_real_model_keeps_the_floor(short_path: Path) -> None:
    """SmolLM2's next turn finds all that was computed, and so does that after a restart."""
    disk = ("--disk-bytes", str(SMOLLM2_CACHE))
    words, keys = flags(short_path, "24MiB", *disk, cache=SMOLLM2_CACHE)
    talk = Talk(keys["small"])
    for first in (0, SMOLLM2_FLOOD):
        with running(short_path, "smollm2", *words) as daemon:
            cached, known = talk.turn(daemon)
            assert cached >= known
            eventually(lambda: on_disk(daemon))
            flood(daemon, keys["flooding"], first, SMOLLM2_FLOOD)
            given_up = daemon.status()["engine"]["cache"]
            assert given_up["evictions"] + given_up["page_outs"] > 0, "the flood is too small"
            cached, known = talk.turn(daemon)
            assert cached >= known > 200
            eventually(lambda: on_disk(daemon))


@pytest.mark.slow
def test_without_a_floor_the_flood_takes_it(short_path: Path, long_tiny_dir: Path) -> None:
    """So the floods of these tests are large enough."""
    words, keys = flags(short_path, "0", "--no-disk")
    with running(short_path, long_tiny_dir, *words) as daemon:
        talk = Talk(keys["small"])
        talk.turn(daemon)
        flood(daemon, keys["flooding"], 0)
        assert talk.turn(daemon)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("floor", ["1MiB", "0"])
def test_a_flood_leaves_the_floor_on_disk(
    floor: str, short_path: Path, long_tiny_dir: Path
) -> None:
    """The next daemon finds it, though the flood filled the disk; without a floor it is gone."""
    words, keys = flags(short_path, floor, "--disk-bytes", str(CACHE))
    talk = Talk(keys["small"])
    with running(short_path, long_tiny_dir, *words) as first:
        talk.turn(first)
        eventually(lambda: on_disk(first))
        flood_disk(first, keys["flooding"], 0)
    with running(short_path, long_tiny_dir, *words) as second:
        flood_disk(second, keys["flooding"], FLOOD)
        cached, known = talk.turn(second)
        assert known > 200
        assert cached >= known if floor != "0" else cached == 0


@pytest.mark.slow
def test_a_flooding_tenant_leaves_places_to_others(short_path: Path, long_tiny_dir: Path) -> None:
    """Eight times those that are free are its part; another tenant is let in, and answered."""
    words, keys = flags(short_path, "0", "--max-waiting", "10", "--max-batch", "1")
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
    with running(short_path, long_tiny_dir, *words) as daemon, ExitStack() as held:

        def send(number: int) -> None:
            """Ask for a long answer, and see that one more waits."""
            asked = {**body, "max_tokens": 6000, "user": f"{number}"}
            headers = {"Authorization": f"Bearer {keys['flooding']}"}
            held.enter_context(closing(daemon.send(asked, headers)))
            eventually(lambda: daemon.status()["engine"]["running"])
            eventually(lambda: daemon.status()["waiting"] == number)

        for number in range(10):
            send(number)
        more = daemon.request("POST", CHAT, body, {"Authorization": f"Bearer {keys['flooding']}"})
        assert more.status == 429
        assert more.json()["error"]["message"].startswith(
            "9 requests of tenant flooding are waiting already, and the places that are left are"
        )
        asked = {**body, "max_tokens": 3}
        other = daemon.request("POST", CHAT, asked, {"Authorization": f"Bearer {keys['small']}"})
        assert other.status == 200
