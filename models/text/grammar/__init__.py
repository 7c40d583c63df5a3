"""Grammars that hold an answer to what its request asks for."""
