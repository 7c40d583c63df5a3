"""Tests of cachestore, against fakes whose state is the tokens themselves."""
