"""Protocols: OpenAI's chat and text completions and responses, and Anthropic's messages.

A body becomes a `GenerationRequest`; an encoder writes the answer's events. A body that cannot be
read or served raises an `APIError`: status 400 where a docstring names no other, and `param` names
the field at fault.
"""
