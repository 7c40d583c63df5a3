"""Whole conversations through engine, cache and real model arithmetic."""
