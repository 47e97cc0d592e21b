"""Orderly stops: the signals that ask for one. Used by train.py and its sweeps; free of torch."""

import contextlib
import os
import signal
import threading
import time

STOPPED = 75  # exit code after a signal (EX_TEMPFAIL of sysexits.h: try again)
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
                if hasattr(signal, name)]


@contextlib.contextmanager
def catch_signals(react):
    """Give a list that receives the names of the signals that ask for a stop; react(number) is
    called for each.

    The handlers of before come back afterwards, and what nohup ignores stays ignored. Outside the
    main thread, which Python's signals need, none is caught.
    """
    received = []

    def handle(number, frame):
        received.append(signal.Signals(number).name)
        react(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handle)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_soon():
    """Return what train.py does at a signal: say so, and give up at a second Ctrl-C.

    Ctrl-C under torchrun reaches a process twice, from the terminal and from torchrun: one within a
    second of the first is not the user's second.
    """
    interrupted = []  # when

    def react(number):
        name, now = signal.Signals(number).name, time.monotonic()
        if number == signal.SIGINT and interrupted and now > interrupted[0] + 1:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            interrupted.append(now)
        if os.environ.get("RANK", "0") == "0":  # written past Python's buffer, which may be in use
            with contextlib.suppress(OSError):  # a terminal that is closed
                os.write(2, f"{name}: a checkpoint after this update, then the end; a second "
                            "Ctrl-C ends at once, without\n".encode())

    return react
