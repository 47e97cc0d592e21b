"""Files that are whole or not there, and their sha256; every stage uses this room."""

import hashlib
import os
from pathlib import Path


def first_line(error):
    """Return the first line of an exception's message, or the name of its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
