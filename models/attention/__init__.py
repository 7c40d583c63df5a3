"""Attention over state that lies in pieces, for one sequence and for the rows of a batch."""
