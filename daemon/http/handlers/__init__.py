"""Handlers of HTTP requests, over one entry that reads and answers them."""
