"""API keys in their file: made once, kept as digests, revoked, and seen by a daemon at once."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from umbel import ownership
from umbel.daemon.cli import app
from umbel.daemon.config import load
from umbel.daemon.errors import ConfigError
from umbel.daemon.identity.keys import KeyRing, add_key, digest, read_keys, revoke_key

from .running import START, spawn


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where keys are, in a folder that is not there yet."""
    return tmp_path / "config" / "keys.json"


class TestTheFile:
    """The file's content, and its readers."""

    def test_a_key_has_all_its_entropy_and_stays_nowhere(self, path: Path) -> None:
        """It is 32 random bytes; the file has its digest only, and no other user may read it."""
        key, text = add_key(path, "research", proxy=True)
        assert re.fullmatch(r"umbel-[\w-]{43}", text)
        assert text != add_key(path, "research")[1]
        assert text.removeprefix("umbel-") not in path.read_text()
        assert (key.sha256, key.tenant, key.proxy) == (digest(text), "research", True)
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert read_keys(path)[0] == key
        assert [each.name for each in path.parent.iterdir()] == ["keys.json"]

    def test_a_revoked_key_leaves_the_others(self, path: Path) -> None:
        """One that is not there is named, and nothing is written."""
        first, second = (add_key(path, name)[0] for name in "ab")
        assert revoke_key(path, first.id) == first
        before = path.stat()
        with pytest.raises(ConfigError, match=f"there is no key '{first.id}' in .*keys.json"):
            revoke_key(path, first.id)
        assert read_keys(path) == [second]
        assert path.stat().st_mtime_ns == before.st_mtime_ns

    def test_changes_at_once_are_all_kept(self, path: Path) -> None:
        """Each change sees those before it."""
        barrier = threading.Barrier(8)

        def add(number: int) -> str:
            barrier.wait(60)
            return add_key(path, f"t{number}")[0].id

        with ThreadPoolExecutor(8) as pool:
            made = set(pool.map(add, range(8)))
        assert {key.id for key in read_keys(path)} == made
        assert len(made) == 8

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"{", "Input data was truncated"),
            (b"\xff", "cannot read the keys in"),
            (b'{"kees": []}', "Object contains unknown field `kees`"),
            (b'{"keys": [{"id": "a"}]}', "missing required field `tenant`"),
            (
                b'{"keys": [{"id": "a", "tenant": "a b", "created": "2026-01-01T00:00:00Z", '
                b'"sha256": "' + b"0" * 64 + b'"}]}',
                "key 'a': 'a b' is no name of a tenant",
            ),
        ],
    )
    def test_a_file_that_is_none_is_left_as_it_is(
        self, path: Path, content: bytes, words: str
    ) -> None:
        """The message has the place, and no key is added to it."""
        path.parent.mkdir()
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            add_key(path, "a")
        assert str(path) in str(caught.value)
        assert words in str(caught.value)
        assert path.read_bytes() == content

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path: Path) -> None:
        """It is one sentence, with the reason."""
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"cannot write the keys to .*: "):
            add_key(tmp_path / "file" / "keys.json", "a")

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_a_file_that_root_writes_is_the_daemons(self, path: Path) -> None:
        """The file belongs to the folder's owner, and later to the file's."""
        path.parent.mkdir()
        os.chown(path.parent, 12345, 12346)
        add_key(path, "a")
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)
        os.chown(path, 23456, 23456)
        add_key(path, "b")
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (23456, 0o600)

    def test_a_link_stays_a_link(self, path: Path, tmp_path: Path) -> None:
        """The link's target is replaced, not the link."""
        real = tmp_path / "real.json"
        path.parent.mkdir()
        path.symlink_to(real)
        key, _ = add_key(path, "a")
        assert path.is_symlink()
        assert read_keys(real) == [key]


@pytest.mark.parametrize(
    ("mode", "owner", "words"),
    [
        (0o620, None, r"other users can write to .*keys.json \(mode 0620\)"),
        (0o602, None, "other users can write to"),
        (0o600, 65534, r"keys.json belongs to another user \(uid 65534\)"),
    ],
)
def test_a_file_that_others_can_change_lets_no_client_in(
    path: Path, mode: int, owner: int | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could make keys: a daemon does not start, or keeps the keys that it has."""
    monkeypatch.setattr(ownership, "_is_own_group", lambda _: False)
    key, text = add_key(path, "a")
    ring = KeyRing(path)
    assert ring.find(text) == key
    if owner is not None:
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        os.chown(path, owner, -1)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        KeyRing(path).read()
    with capture_logs() as logs:
        assert ring.find(text) == key
    assert [line["event"] for line in logs] == ["keys not read"]
    assert read_keys(path) == [key], "who runs the commands may mend it"


def test_a_file_that_all_can_read_is_warned_of(path: Path) -> None:
    """Its digests are of no use to them, and the tenants' names are none of their business."""
    add_key(path, "a")
    with capture_logs() as logs:
        KeyRing(path).read()
        path.chmod(0o644)
        KeyRing(path).read()
    (warning,) = logs
    assert (warning["log_level"], warning["advice"]) == ("warning", "chmod 600")


def test_a_path_that_is_no_file_is_an_error(path: Path) -> None:
    """A FIFO keeps nothing waiting, and a link to nothing does not mean that there are no keys."""
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="the file of keys, is no regular file"):
        KeyRing(path).read()
    path.unlink()
    path.symlink_to(path.with_name("gone.json"))
    ring = KeyRing(path)
    with pytest.raises(ConfigError, match="the file of keys, is a link to nothing"):
        ring.read()
    assert ring.wanted()


class TestTheRing:
    """A running daemon's knowledge of the file."""

    def test_it_follows_the_file(self, path: Path) -> None:
        """A new key is found at once, and a revoked one no more."""
        ring = KeyRing(path)
        assert not ring.wanted()
        key, text = add_key(path, "a")
        assert ring.find(text) == key
        assert ring.wanted()
        assert ring.find(text + "x") is None
        assert ring.find("") is None
        revoke_key(path, key.id)
        assert ring.find(text) is None
        assert ring.wanted()

    def test_keys_are_asked_for_when_their_file_is_gone(self, path: Path) -> None:
        """No key is valid then; the log names the file, once. A file that is back counts."""
        _, text = add_key(path, "a")
        kept = path.read_bytes()
        ring = KeyRing(path)
        ring.read()
        path.unlink()
        with capture_logs() as logs:
            for _ in range(2):
                assert ring.wanted()
                assert ring.find(text) is None
        assert [line["log_level"] for line in logs] == ["warning"]
        assert logs[0]["event"] == "the file of keys is gone"
        assert logs[0]["path"] == str(path)
        assert KeyRing(path.with_name("other.json"), wanted=True).wanted(), "another is named"
        assert not KeyRing(path).wanted(), "after a restart"
        path.write_bytes(kept)
        assert ring.find(text) is not None

    def test_it_reads_a_file_once(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wrong keys do not make the daemon read."""
        add_key(path, "a")
        ring = KeyRing(path)
        ring.read()
        monkeypatch.setattr(
            "umbel.daemon.identity.keys.read_keys", lambda _: pytest.fail("it reads")
        )
        assert ring.find("umbel-wrong") is None
        assert ring.wanted()

    def test_a_fault_leaves_the_keys_of_before(self, path: Path) -> None:
        """The log says so once; the file's next state counts."""
        key, text = add_key(path, "a")
        ring = KeyRing(path)
        ring.read()
        good = path.read_bytes()
        path.write_bytes(b"{")
        with capture_logs() as logs:
            assert ring.find(text) == key
            assert ring.find(text) == key
        assert [line["event"] for line in logs] == ["keys not read"]
        path.write_bytes(good.replace(b'"a"', b'"b"'))
        found = ring.find(text)
        assert found is not None
        assert found.tenant == "b"


def keys(*words: str, folder: Path) -> Result:
    """Run `umbel keys` with its file in a folder."""
    env = {"XDG_CONFIG_HOME": str(folder), "UMBEL_CONFIG": None, "UMBEL_KEYS_FILE": None}
    return CliRunner().invoke(app, ["keys", *words], env=env)


class TestTheCommands:
    """`umbel keys add`, `list` and `revoke`."""

    def test_a_keys_life(self, tmp_path: Path) -> None:
        """Standard output has the key alone, for scripts; the list has ids, and never a key."""
        assert "umbel keys add makes one" in keys("list", folder=tmp_path).stderr
        made = keys("add", "research", folder=tmp_path)
        assert made.exit_code == 0, made.output
        (text,) = made.stdout.splitlines()
        assert text.startswith("umbel-")
        assert "asks every client on TCP" in made.stderr
        more = keys("add", "gateway", "--proxy", folder=tmp_path)
        assert "asks every client on TCP" not in more.stderr
        listed = keys("list", folder=tmp_path).stdout
        rows = [line.split() for line in listed.splitlines()]
        assert [row[1] for row in rows] == ["tenant", "research", "gateway"]
        assert [row[-1] for row in rows[1:]] == [rows[1][2], "yes"]
        assert text not in listed
        done = keys("revoke", rows[1][0], folder=tmp_path)
        assert done.stdout == f"key {rows[1][0]} of research is revoked\n"
        assert "research" not in keys("list", folder=tmp_path).stdout

    def test_faults(self, tmp_path: Path) -> None:
        """A name that is none is wrong use; an unknown key and a bad file are failures."""
        for name in ("two words", "(shared)"):
            refused = keys("add", name, folder=tmp_path)
            assert refused.exit_code == 2
            assert "no '(' in front" in " ".join(refused.output.split())
        unknown = keys("revoke", "0123", folder=tmp_path)
        assert (unknown.exit_code, "there is no key '0123'" in unknown.stderr) == (1, True)
        (tmp_path / "umbel" / "keys.json").write_text("{")
        for words in (("list",), ("add", "a"), ("revoke", "0123")):
            bad = keys(*words, folder=tmp_path)
            assert bad.exit_code == 1
            assert "cannot read the keys in" in bad.stderr

    def test_a_first_key_opens_a_port(self, tmp_path: Path) -> None:
        """A daemon that others can reach needs a key, and the command that makes it does not."""
        file = tmp_path / "umbel.toml"
        file.write_text('host = "0.0.0.0"\nport = 1\n')
        with pytest.raises(ConfigError, match="make a key with umbel keys add, or set UMBEL_API"):
            load({}, file=file, environment={})
        assert keys("add", "a", "--config", str(file), folder=tmp_path).exit_code == 0
        assert load({}, file=file, environment={}).keys_path == tmp_path / "keys.json"
        assert (tmp_path / "keys.json").exists()

    def test_help_is_quick(self) -> None:
        """The commands import neither mlx nor a web server."""
        code = (
            "import sys, umbel.daemon.cli.keys, umbel.daemon.identity.keys;"
            "sys.exit(bool({'mlx', 'aiohttp'} & sys.modules.keys()))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_daemon_does_not_start_on_a_damaged_file(short_path: Path) -> None:
    """Nor would it know whom to refuse."""
    bad = short_path / "k.json"
    bad.write_text("{")
    daemon = spawn(short_path, "smollm2", "--keys-file", str(bad))
    assert daemon.process.wait(START) == 1
    assert f"cannot read the keys in {bad}" in daemon.log()
    assert "Traceback" not in daemon.log()
