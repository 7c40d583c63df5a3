"""A line of `umbel doctor`."""

from typing import Literal, NamedTuple

Grade = Literal["ok", "warning", "problem"]


class Finding(NamedTuple):
    """One line of the report.

    Attributes:
        advice: what to do; empty when nothing is to be done.
    """

    grade: Grade
    subject: str
    text: str
    advice: str = ""
