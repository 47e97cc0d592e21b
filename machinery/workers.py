"""Worker processes of prepare.py: batches of documents in, encoded batches out, in order."""

import multiprocessing
import signal
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver

from machinery.twin import FAST


def start_fork_server():
    """Start the process that workers are forked from: it loads the libraries once for them all.

    Forking this process itself could hang the workers, since its libraries have started threads.
    SIGINT is the parent's to handle, so the server and all workers ignore it from birth.
    """
    libraries = ["numpy", "pyarrow.parquet", FAST, "tokenizers", "tqdm"]
    multiprocessing.set_forkserver_preload(libraries)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


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
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, context, start_worker, settings) as pool:
        for batch, result in submit_ahead(pool, work, batches, 2 * workers + 2):
            yield batch, result.result()


def submit_ahead(pool, work, batches, most):
    """Yield (batch, its Future) in order, most batches behind the one that is handed in."""
    pending = deque()
    try:
        for batch in batches:
            pending.append((batch, pool.submit(work, batch.rows)))
            if len(pending) > most:
                yield pending.popleft()
    except (ValueError, OSError):
        yield from pending
        raise
    yield from pending
