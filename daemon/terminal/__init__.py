"""Parts of umbel that draw on a terminal: start-up, requests, keys."""
