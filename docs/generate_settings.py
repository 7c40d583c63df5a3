#!/usr/bin/env python3
"""Writes docs/settings.md from `umbel.daemon.config.SETTINGS`.

`python docs/generate_settings.py` prints the page; `--write` puts it in its place.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from umbel.daemon.config import SETTINGS, Setting

PAGE = Path(__file__).with_name("settings.md")

_INTRODUCTION = """\
# Settings

Written by `docs/generate_settings.py`; do not edit it by hand.

A setting is a key of the configuration file, an environment variable and, for most, a flag of
`umbel serve`. Flags win over variables, and variables over the file. An unknown key, an unknown
variable that begins with `UMBEL_`, or a value out of bounds prevents the start; the message names
its place and suggests a correction.

The file is TOML: the one in `--config` or `UMBEL_CONFIG`, which must exist, else `umbel.toml` in
the user's configuration folder (`~/.config/umbel/` on Linux,
`~/Library/Application Support/umbel/` on macOS). [umbel.toml](umbel.toml) is an example.

```toml
model = "smollm2"
port = 8080
stop_grace = 60

[models.aliases]
gpt-4o = "default"
```

A [reload](operate/running.md#reload) applies new values of settings with a "yes" in the column
"reload"; others need a restart.

| key | variable | flag | value | default | reload | what it does |
|---|---|---|---|---|---|---|
"""

_NOTES = """

`socket` unset means `umbel.sock` in the user's runtime folder, or in `~/.local/state/umbel/` in a
Linux session without `XDG_RUNTIME_DIR`. `umbel serve` logs the path. `~` is expanded.

`models.aliases` maps names to a served model: to its name, or to `default`. Many tools ask for a
model of their own choice; an alias answers to that name, and
[the list of models](http/models.md) has it. In a variable, aliases are separated by commas; each
`--alias` has one: `NAME`, or `NAME=MODEL`. An alias has 1 to 255 printable characters. A stronger
source replaces the list of a weaker one.

Tables `[models.NAME]` are [further models](several-models.md), which share `memory_bytes`. Tables
`[tenants.NAME]` are [settings of a tenant](operate/tenants.md#settings-of-a-tenant).

`cors_origins` names the origins of web pages that may use the daemon, as browsers write them:
`https://app.example`, `http://localhost:3000`. In a variable they are separated by commas; each
`--cors-origin` has one. `*` is refused, because any page that the user opens could then use the
model. With keys, such a page must send one too ([web pages](http/access.md#web-pages)).

`host` needs `port`. A `host` that can be reached from outside needs `api_key`, or a key that
`umbel keys` made.

A size is a whole number of bytes, or a string with a unit: `KiB`, `MiB`, `GiB` and `TiB` are powers
of 1024, `KB`, `MB`, `GB` and `TB` powers of 1000. [Memory](memory.md#the-budget) explains
`cache_bytes`, [state on disk](operate/disk.md) `disk_dir` and `disk_bytes`,
[warm-up](operate/running.md#warm-up) `warmup`. With `no_cache`, or a `disk_bytes` of 0, no state is
on disk either.
"""


def render() -> str:
    """Write the whole page."""
    return _INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in _rows()) + _NOTES


def _rows() -> Iterator[tuple[str, ...]]:
    for setting in SETTINGS.values():
        yield (
            f"`{setting.key}`",
            f"`{setting.variable}`",
            f"`{setting.flag}`" if setting.flag else "none",
            setting.values,
            _default(setting),
            "yes" if setting.about.reload else "",
            setting.about.does,
        )


def _default(setting: Setting) -> str:
    if setting.about.unset:
        return f"unset: {setting.about.unset}"
    if isinstance(setting.default, bool):
        return f"`{str(setting.default).lower()}`"
    return f"`{setting.default}`"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/settings.md")
    if parser.parse_args().write:
        PAGE.write_text(render(), encoding="utf-8")
    else:
        sys.stdout.write(render())


if __name__ == "__main__":
    main()
