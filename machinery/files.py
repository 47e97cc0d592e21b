"""Files that are whole or not there, and their sha256."""

import hashlib
import os
from pathlib import Path


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def sha256_of(*paths):
    """Return the sha256 (hexadecimal) of the contents of files, one after another."""
    sha256 = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()


def write_whole(path, data):
    """Write bytes under a name only when they are whole and on the disk: aside, fsync, rename."""
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def sha256(data):
    return hashlib.sha256(data).hexdigest()
