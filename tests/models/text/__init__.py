"""Tests of umbel.models.text."""
