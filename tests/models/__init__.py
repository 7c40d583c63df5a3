"""Tests of umbel.models."""
