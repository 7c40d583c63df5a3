"""What can be wrong with the cache."""


class CacheError(Exception):
    """The cache is, or would come to be, in a state it must not be in."""


class LeaseClosedError(CacheError):
    """A lease was used after it was closed."""
