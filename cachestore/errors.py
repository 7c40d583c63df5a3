"""Errors of the cache."""


class CacheError(Exception):
    """An operation would break an invariant of the cache, or one is broken."""


class LeaseClosedError(CacheError):
    """A lease was used after it was closed."""


class PinError(CacheError):
    """A path cannot be pinned. The message says why."""


class DiskTierError(CacheError):
    """The disk tier cannot use its folder, or was closed. The message says what to do."""


class FolderInUseError(DiskTierError):
    """Another tier, of this process or another one, holds the folder."""


class DamagedFileError(CacheError):
    """A file is missing, or is not what was written: it will never be of use."""


class UnreadableFileError(CacheError):
    """A file cannot be read at present. It may be whole, and is to be left alone."""
