"""Worker processes that encode documents, in order."""

import multiprocessing
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

from machinery.tokenizer import FAST


def start_fork_server():
    """Start the process that workers are forked from: it loads the libraries once for them all, while this one goes on.

    Forking this process itself could hang the workers, since its libraries have started threads. SIGINT is the parent's
    to handle, so the server and all workers ignore it from birth.
    """
    multiprocessing.set_forkserver_preload(["numpy", "pyarrow.parquet", FAST, "tokenizers", "tqdm"])
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def run_in_order(start_worker, settings, work, jobs, workers):
    """Yield (number, work(rows), end) for each (number, rows, end), in order; few are on their way at a time. Each
    process is made ready by start_worker(*settings)."""
    if workers == 1:
        start_worker(*settings)
        yield from ((number, work(rows), end) for number, rows, end in jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), start_worker, settings) as pool:
        pending = deque()
        for number, rows, end in jobs:
            pending.append((number, pool.submit(work, rows), end))
            if len(pending) > 2 * workers + 2:
                number, result, end = pending.popleft()
                yield number, result.result(), end
        for number, result, end in pending:
            yield number, result.result(), end
