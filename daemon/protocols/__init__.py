"""Protocols: one module a dialect, over one internal request and one stream of events."""
