"""Tests of umbel; they mirror its four folders."""
