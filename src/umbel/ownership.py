"""Folders and files that no other user can change: what lies there is this user's own."""

import grp
import os
import pwd
import stat
from functools import cache
from pathlib import Path

ADVICE = "take it from others (chown, chmod go-w)"
"""For a folder with a fault."""


class ForeignFolderError(OSError):
    """Another user owns a folder, or can write to it. The message says which one."""


def private_folder(folder: Path) -> Path:
    """Make a folder, mode 0700, from which this user can load code.

    Nothing that another user controls may lie on the way to it. A sticky folder may, as the
    system's temporary folder is: what another user owns in it is refused.

    Returns:
        The folder without links, so that none can be turned elsewhere later.

    Raises:
        ForeignFolderError: another user owns it or can write to it, or to a folder above it.
        OSError: it cannot be made.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    real = folder.resolve(strict=True)
    for above in reversed(real.parents):
        if (fault := folder_fault(above)) is not None:
            raise ForeignFolderError(f"{fault}; {ADVICE}")
    if (fault := folder_fault(real, may_be_sticky=False)) is not None:
        raise ForeignFolderError(f"{fault}; delete it, as what lies there may be theirs")
    return real


def folder_fault(folder: Path, *, may_be_sticky: bool = True) -> str | None:
    """Say in words how another user could change what lies in a folder; None if none could.

    Args:
        folder: to look at.
        may_be_sticky: other users may add files, as long as they cannot replace this user's.

    Raises:
        OSError: it cannot be looked at.
    """
    info = folder.stat()
    is_sticky = may_be_sticky and info.st_mode & stat.S_ISVTX
    return _fault(folder, info, may_be_written=bool(is_sticky))


def file_fault(path: Path, info: os.stat_result) -> str | None:
    """Say in words how another user could change a file; None if none could.

    Args:
        path: of the file.
        info: of the open file.
    """
    return _fault(path, info, may_be_written=False)


def _fault(path: Path, info: os.stat_result, *, may_be_written: bool) -> str | None:
    if not is_trusted(info):
        return f"{path} belongs to another user (uid {info.st_uid})"
    by_group = info.st_mode & stat.S_IWGRP and not _is_own_group(info.st_gid)
    if (by_group or info.st_mode & stat.S_IWOTH) and not may_be_written:
        return f"other users can write to {path} (mode {stat.S_IMODE(info.st_mode):04o})"
    return None


@cache
def _is_own_group(number: int) -> bool:
    """True if a group was made for this user alone, as systems with umask 002 do.

    It is the user's first group, has the user's name and no other member. Of a directory's group,
    such as `domain users`, the members are not listed.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    if user.pw_gid != number or group.gr_name != user.pw_name:
        return False
    first = {each.pw_name for each in pwd.getpwall() if each.pw_gid == number}
    return {*group.gr_mem, *first} <= {user.pw_name}


def readable_by_all(info: os.stat_result) -> bool:
    """True if every user of this machine can read a file."""
    return bool(info.st_mode & stat.S_IROTH)


def is_trusted(info: os.stat_result) -> bool:
    """True if a file belongs to this user or to root."""
    return info.st_uid in (os.geteuid(), 0)
