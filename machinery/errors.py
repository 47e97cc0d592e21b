"""What a failure says, in one line: the user's mistake, or the machine's. For all stages."""

import contextlib
import errno
import os
import sys

CACHE_PLACE = "set HF_HOME=DIR to a place that you can write to"  # of the hub's cache
INSTALL = "run pip install -r requirements.txt"
AGAIN = "nothing is lost; run the same command again"
ADVICE = {  # for failures of the machine, not of what is read
    errno.ENOSPC: "the disk is full; make room and run the same command again",
    errno.EDQUOT: "the disk quota is used up; make room and run the same command again",
    errno.EACCES: "ask for the permission, or name another place",
    errno.EPERM: "ask for the permission, or name another place",
    errno.ENOTDIR: "name another place",
    errno.EROFS: "name a place that can be written",
    errno.EIO: f"the disk or the network failed; {AGAIN}",
    errno.ESTALE: f"the network file system failed; {AGAIN}",
    errno.ETIMEDOUT: f"the network file system failed; {AGAIN}",
    errno.ENOMEM: f"not enough memory; {AGAIN} with less at work",
    errno.EAGAIN: f"no more processes or memory may be had now; {AGAIN} with less at work",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENAMETOOLONG: "choose a shorter name",
}
# Memory that does not suffice, in the words of CUDA and MPS, of Linux, of Windows and macOS; and
# room for a thread, in Python's.
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory",
                 "can't start new thread")
# What torch's own exceptions of a lost process say, for which it has no kind.
LOST_PROCESS = ("Connection closed by peer", "Connection reset by peer", "Timed out waiting",
                "Connection refused", "failed to connect")


class ElsewhereError(Exception):
    """Another process has failed, and says why."""


def first_line(error):
    """Return the first line of an exception's message, or the name of its kind if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_refusal(error):
    """Return whether an exception says that the system could not, and nothing of a file's contents.

    No permission, a disk that fails, no memory: the file may be as good as ever.
    """
    return isinstance(error, MemoryError) or getattr(error, "errno", None) is not None


def is_out_of_memory(error):
    return isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def is_lost_process(error):
    """Return whether an exception of torch's says that another process is gone or stuck."""
    return (type(error).__name__.startswith("Dist")  # DistBackendError and its like
            or any(words in str(error) for words in LOST_PROCESS))


def explain(error):
    """Return an exception as one line: what failed, where, and what to do about it."""
    if isinstance(error, MemoryError):
        return f"{ADVICE[errno.ENOMEM]}{f' ({first_line(error)})' if str(error) else ''}"
    number = getattr(error, "errno", None)
    where = f"{error.filename}: " if number and error.filename else ""
    advice = f"; {ADVICE[number]}" if number in ADVICE else ""
    told = f"{where}{os.strerror(number)}{advice}" if number else str(error)
    return " ".join(told.split())  # a file's name may have two lines


def machine_failure(error):
    """Return the OSError or MemoryError that an exception came of, None where it was no failure of
    the machine: permission, space, a disk, memory."""
    while error is not None:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in ADVICE:
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
        if cause is None and is_out_of_memory(error):
            raise  # what was built of it is too large here
        if cause is not None:
            told = f"{what}: {explain(cause)}"
            raise OSError(f"{told}; {place}" if place else told) from error
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, KeyError) or not reason:  # its text is the key alone
            reason = f"{type(error).__name__} {reason}".strip()
        raise kind(f"{what}: {reason}; {advice}") from error


def replace_in_console():
    """Let what a console cannot show, such as an accent in ASCII, be a question mark there, and
    lines appear at once."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's stream has none
            stream.reconfigure(errors="replace", line_buffering=True)


def say_at_once(text, stream=None):
    """Print a line, also where standard output is a file. A terminal that is closed, or a reader
    that is gone, takes no run with it."""
    stream = stream or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # for good
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def warn(text):
    """Print a line on standard error."""
    say_at_once(text, sys.stderr)


@contextlib.contextmanager
def one_line(program, less_memory):
    """End the program in one line where the user or the machine can mend what happened; our own
    mistakes keep their traceback.

    Args:
        less_memory: what to type where memory does not suffice.
    """
    replace_in_console()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # as of head: whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"{program}: interrupted; run the same command again to go on", file=sys.stderr)
        sys.exit(130)  # as a shell says it: 128 + SIGINT
    except ImportError as error:
        sys.exit(f"{program}: {first_line(error)}; {INSTALL}")
    except ElsewhereError:
        sys.exit(1)
    except (ValueError, OSError) as error:
        sys.exit(f"{program}: {explain(error)}")
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            sys.exit(f"{program}: not enough memory ({first_line(error)}); {less_memory}")
        if not is_lost_process(error):
            raise
        sys.exit(f"{program}: another process is lost or stuck ({first_line(error)}); {AGAIN}")
