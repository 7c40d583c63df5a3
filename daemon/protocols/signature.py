"""Thoughts that a client keeps without reading them, and sends back as they are.

Where a client wants thinking left out, a message's signature carries it, and so does a response's
`encrypted_content`: the next turn's prompt then has what the model thought. It proves nothing: a
client may also send thinking of its own.
"""

from base64 import b64decode, b64encode

_MARK = "umbel."


def sign(hidden: str = "") -> str:
    """Make a signature that carries thoughts."""
    return _MARK + b64encode(hidden.encode()).decode()


def hidden_in(signature: str) -> str:
    """Read what a signature carries; nothing if it is not one of ours."""
    if not signature.startswith(_MARK):
        return ""
    try:
        return b64decode(signature.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
