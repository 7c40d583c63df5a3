"""The tables `[tenants.NAME]`: keys, defaults, and errors in words."""

from pathlib import Path

import pytest

from umbel.daemon.config import TenantSettings, load, tenant_settings
from umbel.daemon.errors import ConfigError


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "umbel.toml"


def read(toml: Path, text: str) -> dict[str, TenantSettings]:
    toml.write_text(text)
    return load({}, file=toml, environment={}).tenants


def test_every_key_of_a_table(toml: Path) -> None:
    tenants = read(
        toml,
        """
        [tenants.research]
        weight = 2
        running = 8
        waiting = 64
        tokens_per_minute = 200_000
        cache_floor = "2GiB"
        cache_ceiling = "8 GiB"
        disk_bytes = 1000
        priority = "batch"
        models = ["small"]
        uids = [1000, 1001]
        """,
    )
    found = tenants["research"]
    assert (found.weight, found.running, found.waiting) == (2.0, 8, 64)
    assert (found.tokens_per_minute, found.priority, found.models) == (200_000, "batch", ["small"])
    assert (found.floor, found.ceiling, found.disk_budget) == (2 << 30, 8 << 30, 1000)
    assert found.uids == [1000, 1001]


def test_tenant_without_a_table_has_that_of_default(toml: Path) -> None:
    """Without one, the defaults bound nothing."""
    tenants = read(toml, "[tenants.default]\nweight = 3\n[tenants.a]\nrunning = 1\n")
    assert tenant_settings(tenants, "a") == TenantSettings(running=1)
    assert tenant_settings(tenants, "uid:0").weight == 3.0
    assert tenant_settings({}, "uid:0") == TenantSettings()
    assert (TenantSettings().floor, TenantSettings().ceiling, TenantSettings().models) == (
        0,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants = 3", "tenants must be tables [tenants.NAME]"),
        ("[tenants]\na = 3", "tenants.a: it must be a table, and is a whole number"),
        (
            "[tenants.a]\nweigth = 1",
            "tenants.a: unknown key 'weigth'; did you mean weight? Its keys",
        ),
        ("[tenants.a]\nweight = 0", "tenants.a: weight must be a number over 0"),
        ("[tenants.a]\nweight = nan", "tenants.a: weight must be a number"),
        ("[tenants.a]\nweight = inf", "tenants.a: weight must be a number <= 1000000.0"),
        ("[tenants.a]\nrunning = 0", "tenants.a: running must be a whole number >= 1"),
        ("[tenants.a]\nwaiting = 0", "tenants.a: waiting must be a whole number >= 1"),
        (
            "[tenants.a]\ntokens_per_minute = 0",
            "tenants.a: tokens_per_minute must be a whole number >= 1",
        ),
        (
            "[tenants.a]\ndisk_bytes = 'much'",
            "disk_bytes must be a size: 8GiB, 500MB, or a whole number of bytes",
        ),
        ("[tenants.a]\ncache_floor = 2\ncache_ceiling = 1", "tenants.a: cache_floor is more than"),
        ("[tenants.a]\npriority = 'high'", "tenants.a: priority must be interactive or batch"),
        ("[tenants.a]\nmodels = 'm'", "tenants.a: models must be a list, and is a string"),
        ("[tenants.a]\nuids = [-1]", "tenants.a: uids[0] must be a whole number >= 0"),
        (
            "[tenants.a]\nuids = [7]\n[tenants.b]\nuids = [7]",
            "tenants.b: uid 7 is the tenant a already",
        ),
        ("[tenants.'a b']", "tenants: 'a b' is no name of a tenant; it has 1 to 64 printable"),
        ("[tenants.'']", "tenants: '' is no name of a tenant"),
        ('[tenants."a\\nb"]', "tenants: 'a\\nb' is no name of a tenant"),
        (f"[tenants.{'a' * 65}]", "is no name of a tenant"),
        (
            "[tenants.'(shared)']",
            "it has 1 to 64 printable characters, no spaces and no '(' in front",
        ),
    ],
)
def test_bad_table(toml: Path, text: str, words: str) -> None:
    """The message names the file, the table and the key."""
    with pytest.raises(ConfigError) as caught:
        read(toml, text)
    assert f"{toml}: " in str(caught.value)
    assert words in str(caught.value)
