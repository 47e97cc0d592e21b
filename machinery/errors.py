"""A user's mistake, or a machine's, as one line: for evaluate.py and its rooms."""

import contextlib
import errno
import sys

# Failures of the machine, not of what is read: which is told, with what to do about it.
OF_THE_MACHINE = {
    errno.EACCES: "give yourself the permission, or name a place that is yours",
    errno.EPERM: "give yourself the permission, or name a place that is yours",
    errno.EROFS: "name a place that can be written",
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EIO: "the disk or its network fails; try again, then look after it",
    errno.ESTALE: "the file system went away; try again",
    errno.ENOMEM: "close something else, or ask for less at a time"}


def machine_failure(error):
    """Return the OSError or MemoryError that an exception came of, None where it was no failure of
    the machine: permission, space, a disk, memory."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in OF_THE_MACHINE:
            return error
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def explained(what, advice, kind=ValueError, place=""):
    """Raise whatever a library raises in here as one line: what failed, why, what to type.

    Args:
        what: the flag or the file.
        advice: for a mistake in it; a failure of the machine has advice of its own.
        place: how to name another place for what the machine would not do here.
    """
    try:
        yield
    except Exception as error:  # libraries have kinds of their own, and raise bare ones
        cause = machine_failure(error)
        if isinstance(cause, MemoryError):
            raise OSError(f"{what}: out of memory; {OF_THE_MACHINE[errno.ENOMEM]}") from error
        if cause is not None:
            where = f" ({cause.filename})" if cause.filename else ""
            advice = place or OF_THE_MACHINE[cause.errno]
            raise OSError(f"{what}: {cause.strerror}{where}; {advice}") from error
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, KeyError) or not reason:  # its text is the key alone
            reason = f"{type(error).__name__} {reason}".strip()
        raise kind(f"{what}: {reason}; {advice}") from error


# Memory that does not suffice, in the words of CUDA and MPS, of Linux, and of Windows and macOS.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error):
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


@contextlib.contextmanager
def one_line(program):
    """End the program in one line where the user or the machine can mend what happened; our own
    mistakes keep their traceback. What a console cannot show is replaced; lines appear at once."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's stream has none
            stream.reconfigure(errors="replace", line_buffering=True)
    try:
        yield
    except KeyboardInterrupt:
        print(f"{program}: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {' '.join(str(error).split())}")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"{program}: out of memory; --dtype=bfloat16 needs half, a smaller --batch_tokens "
                 "less, and --device=cpu has another memory")
