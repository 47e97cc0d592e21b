"""How far prepare.py is: two progress bars in a terminal, a line a shard elsewhere."""

import time

from tqdm import tqdm


class Progress:
    """Counts what has been written and shows it; a context manager, whose end ends the bars."""

    def __init__(self, n_shards, n_todo, n_documents):
        """Args: all shards, those still to be made, and documents to come (None: not known)."""
        self.n_shards = n_shards
        self.n_todo = n_todo
        self.n_done = 0
        self.documents = 0
        self.tokens = 0
        self.start = time.monotonic()
        self.shard_bar = tqdm(total=n_shards, initial=n_shards - n_todo, unit=" shards",
                              disable=None)
        self.bar = tqdm(total=n_documents, unit=" documents", unit_scale=True, disable=None)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.bar.close()
        self.shard_bar.close()

    def add(self, documents, tokens):
        """Count documents and tokens that have been written."""
        self.documents += documents
        self.tokens += tokens
        self.bar.update(documents)
        seconds = time.monotonic() - self.start
        self.bar.set_postfix_str(f"{self.tokens / seconds:,.0f} tokens/s")

    def shard_is_whole(self, number):
        """Count the shard of this number, and say so where there are no bars."""
        self.n_done += 1
        self.shard_bar.update()
        if not self.bar.disable:
            return
        seconds = time.monotonic() - self.start
        part = self.documents / self.bar.total if self.bar.total else self.n_done / self.n_todo
        left = seconds * (1 - part) / max(part, 1e-9)
        print(f"shard {number + 1}/{self.n_shards}: {self.documents:,} documents, "
              f"{self.tokens:,} tokens so far, {self.documents / seconds:,.0f} documents/s, "
              f"{self.tokens / seconds:,.0f} tokens/s, {left:,.0f} s left", flush=True)
