"""docs/internals/conformance.md lists the features of each protocol."""

from .. import conformance
from ..probes import CHAT, PROBES, TEXT, Probe
from .running import RunningDaemon


def test_page_is_what_the_daemon_answers(tiny_daemon: RunningDaemon) -> None:
    told = conformance.PAGE.read_text(encoding="utf-8").splitlines()
    found = conformance.render(tiny_daemon).splitlines()
    assert found == told, "run python -m tests.conformance --write"


def test_probes_tell_honoured_from_ignored(tiny_daemon: RunningDaemon) -> None:
    """An unknown field is served, and shows nothing."""
    asked = {CHAT: {"more_answers": 2}}
    shows = next(p.shows for p in PROBES if p.feature == "several answers (n)")
    probe = Probe("more answers", asked, shows)
    plain = conformance.plain_answer(tiny_daemon, CHAT)
    assert conformance.cell(tiny_daemon, CHAT, probe, plain) == "ignored"
    assert conformance.cell(tiny_daemon, TEXT, probe, plain) == "-"
