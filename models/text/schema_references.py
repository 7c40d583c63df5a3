"""What references of a JSON schema lead to."""

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

from ..errors import GrammarError
from .schema_form import MOST_NODES, check, measure, within
from .schema_keywords import EFFECTIVE
from .schema_slips import mended

_REF_STANDS_ALONE = ("draft-03/", "draft-04/", "draft-06/", "draft-07/")
_MOST_CHECKED = 10 * MOST_NODES
_INDEX = re.compile("[0-9]{1,9}")

LOOKED_THROUGH = 16
"""References one behind the other."""


class Target(NamedTuple):
    """A schema, and where it stands."""

    schema: Any
    place: str


class References:
    """Finds what references of a schema refer to.

    Attributes:
        root: the schema.
        stand_alone: in its dialect a reference's other keywords mean nothing.
        other_base: references mean something else at present than in the root.

    Args:
        schema: the root.
        place: of it.
    """

    def __init__(self, schema: Any, place: str) -> None:
        self.root = Target(schema, place)
        dialect = schema.get("$schema", "") if isinstance(schema, dict) else ""
        self.stand_alone = any(draft in dialect for draft in _REF_STANDS_ALONE)
        self.other_base = False
        self._targets: dict[str, Target] = {}
        self._checked: dict[str, Target] = {}
        self._left_to_check = _MOST_CHECKED

    def is_reference(self, schema: Any) -> bool:
        """Whether a schema is a reference and says nothing besides."""
        if not isinstance(schema, dict) or "$ref" not in schema:
            return False
        return self.stand_alone or schema.keys() & EFFECTIVE == {"$ref"}

    def followed(self, schema: Any, place: str) -> Target:
        """Follow references that say nothing besides, some of them one behind the other.

        Raises:
            GrammarError: one leads to no schema.
        """
        target = Target(schema, place)
        for _ in range(LOOKED_THROUGH):
            if not self.is_reference(target.schema):
                break
            target = self.target(target.schema["$ref"], within(target.place, "$ref"))
        return target

    def resolved(self, schema: Any, place: str) -> Any:
        """Follow references to a schema; what stands below another `$id` is not looked into."""
        schema = self.followed(schema, place).schema
        return True if self.has_other_base(schema) else schema

    def has_other_base(self, schema: Any) -> bool:
        """Whether references in a schema mean something else than in the root."""
        return schema is not self.root.schema and _is_resource(schema)

    def target(self, reference: str, place: str) -> Target:
        """Find what a reference refers to.

        Raises:
            GrammarError: that is no schema, or is not supported.
        """
        if self.other_base:
            raise GrammarError("is not supported below another $id", place)
        if reference not in self._targets:
            self._targets[reference] = self._check(self._find(reference, place), place)
        return self._targets[reference]

    def _check(self, target: Target, place: str) -> Target:
        """See that a target is a schema, and mend it, once: it may be named in many ways."""
        if target.place not in self._checked:
            self._left_to_check -= measure(target.schema, target.place)
            if self._left_to_check < 0:
                raise GrammarError("leads to too many schemas by way of references", place)
            if target.schema is not self.root.schema:
                target = Target(mended(target.schema), target.place)
            check(*target)
            self._checked[target.place] = target
        return self._checked[target.place]

    def _find(self, reference: str, place: str) -> Target:
        base, _, fragment = reference.partition("#")
        root = self.root.schema
        if base and base not in {str(root.get(key)).rstrip("#") for key in ("$id", "id")}:
            words = f"leads to {reference!r}: only references within the schema are supported"
            raise GrammarError(words, place)
        if fragment and not fragment.startswith("/"):
            raise GrammarError(f"leads to {reference!r}: anchors are not supported", place)
        found, at = root, self.root.place
        for part in unquote(fragment).split("/")[1:]:
            step = part.replace("~1", "/").replace("~0", "~")
            found, at = _step(found, step), within(at, step)
            if found is None:
                raise GrammarError(f"leads to {reference!r}, where no schema is", place)
            if _is_resource(found):
                raise GrammarError(f"leads to {reference!r}, below another $id", place)
        return Target(found, at)


def _is_resource(schema: Any) -> bool:
    name = schema.get("$id") if isinstance(schema, dict) else None
    return isinstance(name, str) and not name.startswith("#")


def _step(found: Any, step: str) -> Any:
    if isinstance(found, dict):
        return found.get(step)
    if isinstance(found, list) and _INDEX.fullmatch(step) and int(step) < len(found):
        return found[int(step)]
    return None
