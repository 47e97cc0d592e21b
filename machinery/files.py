"""Files that are whole or not there, and what it means in a line if the system fails to read one.

Every stage uses this room.
"""

import contextlib
import errno
import hashlib
import os
import sys
import warnings
from pathlib import Path

AGAIN = "nothing is lost; run the same command again"
ADVICE = {
    errno.ENOSPC: "the disk is full; make room and run the same command again",
    errno.EDQUOT: "the disk quota is used up; make room and run the same command again",
    errno.EACCES: "ask for the permission, or name another place",
    errno.EPERM: "ask for the permission, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.EIO: f"the disk or the network failed; {AGAIN}",
    errno.ESTALE: f"the network file system failed; {AGAIN}",
    errno.ETIMEDOUT: f"the network file system failed; {AGAIN}",
    errno.ENOMEM: f"not enough memory; {AGAIN} with less at work",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def first_line(error):
    """Return the first line of an exception's message, or the name of its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_refusal(error):
    """Return whether an exception says that the system could not, and nothing of a file's contents.

    No permission, a disk that fails, no memory: the file may be as good as ever.
    """
    return isinstance(error, MemoryError) or getattr(error, "errno", None) is not None


def explain(error):
    """Return an exception as one line: what failed, where, and what to do about it."""
    if isinstance(error, MemoryError):
        return f"{ADVICE[errno.ENOMEM]}{f' ({first_line(error)})' if str(error) else ''}"
    number = getattr(error, "errno", None)
    if number is None:
        return first_line(error)
    where = f"{error.filename}: " if error.filename else ""
    advice = f"; {ADVICE[number]}" if number in ADVICE else ""
    return f"{where}{os.strerror(number)}{advice}"


def replace_in_console():
    """Let what a console cannot show, such as an accent in ASCII, be a question mark there."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


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

    Raises ValueError if one is at work there. Where the file system knows no locks it says so and
    goes on.
    """
    import filelock  # here, so that reading shards needs it not
    lock = filelock.FileLock(Path(folder) / ".lock", timeout=0)
    try:
        with warnings.catch_warnings():  # of a file as a lock, where there is no other
            warnings.simplefilter("ignore")
            lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"{folder}: another {stage} is at work here; choose another --out, or "
                         "wait") from None
    except (OSError, NotImplementedError) as error:
        print(f"{folder}: cannot be locked ({first_line(error)}); see to it that no other {stage} "
              "is at work here", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        lock.release()
