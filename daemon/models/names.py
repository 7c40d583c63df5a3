"""What models are called, and which of them a request means."""

from collections.abc import Collection, Mapping, Sequence

from ..http.failures import APIError
from ..quoting import quote
from .aliases import DEFAULT_MODEL
from .slot import ModelSlot


def visible(
    slots: Sequence[ModelSlot], aliases: Mapping[str, str], allowed: Collection[str] | None
) -> tuple[Sequence[ModelSlot], Mapping[str, str]]:
    """Leave out models that a tenant may not use, and their aliases.

    The first one that is left is the tenant's default.

    Args:
        slots: the models, the default one first.
        aliases: further names; each stands for a model's, or for the default one.
        allowed: names or aliases of the models that stay; None for all.
    """
    if allowed is None:
        return slots, aliases
    found = {DEFAULT_MODEL: slots[0], **names(slots, aliases)}
    named = [found.get(name) for name in allowed]
    left = [slot for slot in slots if slot in named]
    stay = {
        alias: target
        for alias, target in aliases.items()
        if left and (target == DEFAULT_MODEL or found[alias] in left)
    }
    return left, stay


def names(slots: Sequence[ModelSlot], aliases: Mapping[str, str]) -> dict[str, ModelSlot]:
    """All names of all models, each with its model; a model's own name before its aliases.

    Args:
        slots: the models, the default one first.
        aliases: further names; each stands for a model's, or for the default one.
    """
    found = {name: slot for slot in slots for name in slot.names}
    for alias, target in aliases.items():
        found.setdefault(alias, found.get(target, slots[0]))
    return found


def find(slots: Sequence[ModelSlot], aliases: Mapping[str, str], name: str | None) -> ModelSlot:
    """Find the model of that name; without one, the default.

    Raises:
        APIError: 404, saying what there is, and how there can be more.
    """
    if not slots:
        message = f"there is no model {quote(name or DEFAULT_MODEL)}; this tenant may use none"
        raise APIError(404, message, code="model_not_found", param="model")
    if name in (None, "", DEFAULT_MODEL):
        return slots[0]
    found = names(slots, aliases)
    if name in found:
        return found[name]
    served = ", ".join(repr(slot.name) for slot in slots)
    one = "it" if len(slots) == 1 else "one of them"
    message = (
        f"there is no model {quote(name)}; this daemon serves {served}; to serve {one} by "
        "that name too, start it with --alias NAME or [models.aliases] in umbel.toml"
    )
    raise APIError(404, message, code="model_not_found", param="model")
