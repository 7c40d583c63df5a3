"""The official clients against a real daemon."""
