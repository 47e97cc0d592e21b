"""Files that are whole or not there, their sha256, and one process to a folder: for all stages."""

import contextlib
import errno
import hashlib
import os
import sys
import warnings
from pathlib import Path

from machinery.errors import first_line

NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)  # to write in
HELD = 69  # train.py's exit code where another is at the run (EX_UNAVAILABLE of sysexits.h)


class HeldError(ValueError):
    """Another process is at work in a folder."""


def sha256(data):
    """Return the sha256 (hexadecimal) of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of(*paths):
    """Return the sha256 (hexadecimal) of the contents of files, one after another."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def changed_since(time_ns, *paths):
    """Return whether a file was written, renamed or replaced at a time or later."""
    stats = [os.stat(path) for path in paths]
    return any(max(stat.st_mtime_ns, stat.st_ctime_ns) >= time_ns for stat in stats)


def write_whole(path, data):
    """Write bytes under a name only when they are whole and on the disk: aside, fsync, rename."""
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(data)
        sync(file)
    aside.replace(path)


def sync(file):
    """Wait until what was written to a file is on the disk, where the file system can tell."""
    file.flush()
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise


@contextlib.contextmanager
def only_process_in(folder, stage):
    """Keep other processes of a stage out of a folder; a context manager.

    Raises HeldError if one is at work there. Where the file system knows no locks it says so and
    goes on.
    """
    with warnings.catch_warnings(action="ignore"):  # of a file as a lock, where there is no other
        import filelock  # here, so that reading shards needs it not
    lock = filelock.FileLock(Path(folder) / ".lock", timeout=0)
    try:
        with warnings.catch_warnings(action="ignore"):
            lock.acquire()
    except filelock.Timeout:
        raise HeldError(f"{folder}: another {stage} is at work here; choose another --out, or "
                        "wait") from None
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", None) in NO_PLACE:
            raise
        print(f"{folder}: cannot be locked ({first_line(error)}); see to it that no other {stage} "
              "is at work here", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release()
