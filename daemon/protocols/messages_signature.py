"""What signs a thinking block: the client sends it back as it is and cannot read it.

Where a client wants thinking left out, the signature carries it, so that the next turn's prompt
has what the model thought. It proves nothing: a client may also send thinking of its own.
"""

from base64 import b64decode, b64encode

_MARK = "umbel."


def sign(hidden: str = "") -> str:
    """Make a signature that carries what the block does not show."""
    return _MARK + b64encode(hidden.encode()).decode()


def hidden_in(signature: str) -> str:
    """Read what a signature carries; nothing if it is not one of ours."""
    if not signature.startswith(_MARK):
        return ""
    try:
        return b64decode(signature.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
