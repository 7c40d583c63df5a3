"""The disk tier: files of state, the index that describes them, and the threads that serve both.

It knows no tries: what it is given to keep is bytes, and what they are is the pager's to know.
"""
