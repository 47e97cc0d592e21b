"""Worker processes of prepare.py: batches of documents in, encoded batches out, in order."""

import errno
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from machinery.errors import first_line
from machinery.twin import FAST

CONTAINER_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # "QUOTA PERIOD" in microseconds, or "max PERIOD"


def count_cores():
    """Return how many cores this process may use: a batch system or a container may give fewer."""
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        cores = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):  # Linux
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count()
    try:
        quota, period = CONTAINER_LIMIT.read_text(encoding="utf-8").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):  # no container, or one without a limit
        pass
    return cores or 1


def start_fork_server():
    """Start the process that workers are forked from: it loads the libraries once for them all.

    Forking this process itself could hang the workers, since its libraries have started threads.
    SIGINT is the parent's to handle, so the server and all workers ignore it from birth. Returns
    whether there can be workers; if not, it is said why.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return True  # run_in_order starts them one by one
    libraries = ["numpy", "pyarrow.parquet", FAST, "tokenizers", "tqdm"]
    multiprocessing.set_forkserver_preload(libraries)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        from multiprocessing import forkserver, synchronize  # noqa: F401 - both may be missing
        forkserver.ensure_running()
        multiprocessing.Lock()
    except (OSError, ImportError) as error:
        print(f"no worker processes here ({first_line(error)}; TMPDIR is where they meet): one "
              "process does it all", file=sys.stderr, flush=True)
        return False
    finally:
        signal.signal(signal.SIGINT, handler)
    return True


def die_with_parent():
    """Let this worker end when its parent is killed, and leave Ctrl-C to that."""
    parent = multiprocessing.parent_process()
    if parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_in_order(start_worker, settings, work, batches, workers):
    """Yield (batch, work(batch.rows)) for each batch, in order; few are on their way at a time.

    Each process is made ready by start_worker(*settings). An error of reading the batches comes
    after the results of those before it: raised at once, it would cost the shards whose rows are
    still on their way.
    """
    if workers == 1:
        start_worker(*settings)
        for batch in batches:
            yield batch, work(batch.rows)
        return
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    with ProcessPoolExecutor(workers, context, start_worker, settings) as pool:
        for batch, result in submit_ahead(pool, work, batches, 2 * workers + 2):
            yield batch, result.result()


def hand_in(pool, work, rows):
    """Return the Future of work(rows). Raises OSError where the system starts no process for it."""
    try:
        return pool.submit(work, rows)
    except EOFError:  # of the fork server, which ended for want of a process
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None


def submit_ahead(pool, work, batches, most):
    """Yield (batch, its Future) in order, most batches behind the one that is handed in."""
    pending = deque()
    try:
        for batch in batches:
            pending.append((batch, hand_in(pool, work, batch.rows)))
            if len(pending) > most:
                yield pending.popleft()
    except (ValueError, OSError, MemoryError):
        yield from pending
        raise
    yield from pending
