"""Features of each protocol: every probe is sent in each protocol's own shape.

`python -m tests.conformance` prints docs/internals/conformance.md as a running daemon answers;
`--write` puts it in its place. Columns are the protocols whose routes there are.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from umbel.daemon.config import Settings
from umbel.daemon.http.app import application
from umbel.daemon.http.handlers.entry import Entry

from .answers import Answer
from .daemon.fixtures import TINY_CONTEXT
from .daemon.running import Reply, RunningDaemon, running
from .probes import DIALECTS, PLAIN, PROBES, ROUTES, Probe

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "conformance.md"

_INTRODUCTION = """\
# Conformance

Written by `python -m tests.conformance --write` from the answers of a running daemon; do not edit
it by hand. A test sends every request again and compares. The
[HTTP reference](../http/README.md) explains the fields.

- **yes**: the request is served, and where an answer can show it, it shows that the feature was
  honoured.
- **ignored**: the request is served, and the answer shows that it was not honoured.
- a status and a message: the request is refused with these.
- **-**: the protocol has no such field.

"""


def enabled() -> list[str]:
    """List the protocols that the application speaks."""
    router = application(Entry(Settings())).router
    served = {r.resource.canonical for r in router.routes() if r.resource is not None}
    return [name for name in DIALECTS if ROUTES[name] in served]


def plain_answer(daemon: RunningDaemon, dialect: str) -> Reply:
    """Send what every probe of a protocol adds its field to."""
    return daemon.post(PLAIN[dialect], ROUTES[dialect])


def cell(daemon: RunningDaemon, dialect: str, probe: Probe, plain: Reply) -> str:
    """Send a probe in a protocol's shape, and say what came, beside the plain answer."""
    if dialect not in probe.asked:
        return "-"
    reply = daemon.post(PLAIN[dialect] | probe.asked[dialect], ROUTES[dialect])
    if reply.status != 200:
        message = reply.json()["error"]["message"].replace("|", "\\|")
        return f"{reply.status}: {message}"
    answer = Answer(reply, Answer(plain, None))
    return "yes" if probe.shows is None or probe.shows(answer) else "ignored"


def render(daemon: RunningDaemon) -> str:
    """Write the whole page."""
    dialects = enabled()
    plain = {name: plain_answer(daemon, name) for name in dialects}
    rows = [
        [probe.feature, *(cell(daemon, name, probe, plain[name]) for name in dialects)]
        for probe in PROBES
        if probe.asked.keys() & set(dialects)
    ]
    table = [["feature", *dialects], ["---"] * (1 + len(dialects)), *rows]
    return _INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in table)


def main() -> None:
    """Print the page, or write it."""
    from .tiny import tiny_model_dir  # noqa: PLC0415  (it imports mlx.core)

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/internals/conformance.md")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory(prefix="u") as folder:
        model = tiny_model_dir(Path(folder) / "tiny", max_position_embeddings=TINY_CONTEXT)
        with running(Path(folder), model) as daemon:
            page = render(daemon)
    if write:
        PAGE.write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
