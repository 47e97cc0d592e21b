"""Documents to memory-mapped token shards.

A shard is the token ids of whole documents back to back, each closed by the end-of-text id, and an
index of where each document starts. Training windows never cross a document (the paper, "Data"), so
the index is part of the data. Two documents of the ids 5 7 and 9, with 0 for the end of text:

    data/NAME/train/00000.bin    5 7 0 9 0     uint16 little-endian
    data/NAME/train/00000.idx    0 3 5         int64 little-endian, n_documents + 1 of them
    data/NAME/val/...            the same for the held-out documents; without any there is no file
    data/NAME/tokenizer.json     the tokenizer that made the ids; later stages need no network
    data/NAME/meta.json          tokenizer, split rule, and of each source file what became of it

Usage:
    python prepare.py                              this Python's own library sources, no download
    python prepare.py --source=fineweb-edu --max_documents=10000    the paper's corpus, its first
    python prepare.py --source=fineweb-edu --shards=0:234 --workers=16
    python prepare.py --source='path/*.parquet' --tokenizer=path/tokenizer.json
    python prepare.py --check=data/stdlib --stats
    python prepare.py --join data/part-0 data/part-1 --out=data/fineweb-edu

One source file gives one train and one val shard, each under its final name only when it is whole,
and the same bytes whatever the number of workers: stop it or kill it at any moment, and the same
command goes on. Text is ordinary text: the spelling of a special token never becomes a special id.
What is not Unicode (bytes that are not UTF-8, lone surrogates) becomes U+FFFD.
"""

import hashlib
import itertools
import os
import shutil
import signal
import sys
from collections import Counter
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from machinery.arguments import parse_prepare_args
from machinery.checks import check, print_stats, resume
from machinery.downloads import discard
from machinery.errors import one_line
from machinery.files import only_process_in, sha256_of, write_whole
from machinery.joining import join
from machinery.progress import Progress
from machinery.shards import (
    FORMAT,
    NOTES,
    SPLITS,
    ShardWriter,
    count_documents,
    note_shard,
    write_meta,
)
from machinery.sources import (
    BATCH_BYTES,
    check_space,
    count_rows,
    fetch_ahead,
    find_sources,
    is_same_source,
    read_rows,
)
from machinery.tokenizer import find_eot, find_tokenizer, load_tokenizer, vocab_size
from machinery.twin import FAST, find_twin, make_encoder
from machinery.workers import die_with_parent, run_in_order, start_fork_server

BATCH_DOCUMENTS = 256  # encoded at a time; fewer, if they are longer than BATCH_BYTES together
# The rule of is_held_out, as meta.json tells it.
SPLIT_RULE = "blake2b-8 of 'seed:id' / 2^64 < fraction"
worker = None  # a process's own, set by start_worker: encode, end_of_text, split_seed, val_fraction


class Batch(NamedTuple):
    """Rows of one source file, which are encoded together."""
    number: int  # of the source file, and so of its shards
    rows: list  # (id or None, text as str or bytes, or None)
    facts: dict  # of the source file: its size and sha256
    is_last: bool  # of the source file


def batches_of(number, rows, facts):
    """Yield the rows of a source file in Batches, short in documents and in bytes."""
    batch, size = [], 0
    for row in rows:
        text = row[1]
        batch.append(row)
        size += len(text) if isinstance(text, (bytes, str)) else 0
        if len(batch) == BATCH_DOCUMENTS or size > BATCH_BYTES:
            yield Batch(number, batch, facts, is_last=False)
            batch, size = [], 0
    yield Batch(number, batch, facts, is_last=True)


def read_batches(meta, args, keep):
    """Yield the Batches of every source file without a shard, while the next file is fetched.

    A download is deleted after its last row unless it is to be kept.
    """
    left = args.max_documents or sys.maxsize  # rows still to read
    todo = [name for name, entry in zip(meta["sources"], meta["shards"]) if not entry]
    fetched = fetch_ahead(todo, args)
    # entry: what meta.json tells of a source file whose shards are finished, else None.
    for number, (name, entry) in enumerate(zip(meta["sources"], meta["shards"])):
        if entry:
            left -= count_documents(entry) + sum(entry["skipped"].values())
            continue
        if not left:
            continue
        file, facts = next(fetched)
        rows = itertools.islice(read_rows(name, file, args.text_column, args.id_column), left)
        for batch in batches_of(number, rows, facts):
            left -= len(batch.rows)
            yield batch
        if not keep:
            discard(name, file, f"{args.out}/downloads")


def clean_text(text):
    """Return (text as a valid Unicode str, None), or (None, the reason to skip it)."""
    if text is None:
        return None, "null"
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    elif isinstance(text, str) and not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    elif not isinstance(text, str):
        return None, "not text"
    return (text, None) if text else (None, "empty")


def is_held_out(key, text, seed, fraction):
    """Return whether a document belongs to val (the paper, "Data"), by SPLIT_RULE.

    The id is key, or the text where there is none; the hash is a number in [0, 1). Python's own
    hash() would change from run to run.
    """
    name = f"{seed}:{text if key is None else key}".encode("utf-8", "replace")
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def train_texts(meta, args):
    """Yield the texts that are not held out: a tokenizer may learn from these alone."""
    for batch in read_batches(meta, args, keep=True):
        for key, text in batch.rows:
            text, _ = clean_text(text)
            if text and not is_held_out(key, text, args.split_seed, args.val_fraction):
                yield text


def start_worker(tokenizer_path, twin, eot_id, split_seed, val_fraction):
    """Make this process ready for encode_rows."""
    global worker
    die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker = SimpleNamespace(encode=make_encoder(load_tokenizer(tokenizer_path), twin),
                             end_of_text=np.array([eot_id], "<u2"),
                             split_seed=split_seed, val_fraction=val_fraction)


def encode_rows(rows):
    """Encode rows (id, text) to the ids of train and of val, each document closed by its end.

    Returns:
        Counter of skipped rows by reason.
        The number of documents with U+FFFD.
        For each of SPLITS: ids (uint16 as bytes), documents' lengths in ids, bytes of their texts.
    """
    skipped = Counter()
    replaced = 0
    arrays = {split: [] for split in SPLITS}
    lengths = {split: [] for split in SPLITS}
    n_bytes = Counter()
    for key, text in rows:
        text, reason = clean_text(text)
        ids = worker.encode(text) if text else None  # utf16 has none for U+FFFF
        if ids is None:
            skipped[reason or "holds the end of text"] += 1
            continue
        held_out = is_held_out(key, text, worker.split_seed, worker.val_fraction)
        split = "val" if held_out else "train"
        arrays[split] += (ids, worker.end_of_text)
        lengths[split].append(len(ids) + 1)
        n_bytes[split] += len(text.encode())
        replaced += "\ufffd" in text
    sides = [(b"".join(arrays[split]), lengths[split], n_bytes[split]) for split in SPLITS]
    return skipped, replaced, sides


def write_shards(meta, settings, workers, args):
    """Encode every source file without a shard into its train and its val shard.

    meta.json tells of each once it is whole. Args: settings, those of start_worker.
    """
    batches = read_batches(meta, args, args.keep_downloads)
    encoded = run_in_order(start_worker, settings, encode_rows, batches, workers)
    shards = meta["shards"]
    writers = None
    if (Path(args.out) / "meta.json").exists():
        write_meta(args.out, meta)  # without what is damaged, with what is new
    with Progress(n_shards=len(shards), n_todo=shards.count(None),
                  n_documents=count_rows(meta, args)) as progress:
        for batch, (skipped_in_batch, replaced_in_batch, sides) in encoded:
            if writers is None:
                writers = [ShardWriter(args.out, split, batch.number) for split in SPLITS]
                skipped = Counter()
                replaced = 0
            skipped += skipped_in_batch
            replaced += replaced_in_batch
            for writer, (ids, lengths, n_bytes) in zip(writers, sides):
                writer.add(ids, lengths, n_bytes)
                progress.add(len(lengths), sum(lengths))
            if batch.is_last:
                entry = {"source": meta["sources"][batch.number], **batch.facts,
                         "skipped": dict(sorted(skipped.items()))}
                if replaced:
                    entry["replaced"] = replaced
                for split, writer in zip(SPLITS, writers):
                    entry[split] = writer.close()
                shards[batch.number] = entry
                note_shard(args.out, meta, batch.number)
                progress.shard_is_whole(batch.number)
                writers = None
    if None in shards:  # --max_documents was reached before them
        n_used = shards.index(None)
        del meta["sources"][n_used:], shards[n_used:]
    write_meta(args.out, meta)


def prepare(args):
    """Prepare in the directory args.out what the command line asks for."""
    out = Path(args.out)
    sources = find_sources(args.source, args.shards)
    meta = {
        "format": FORMAT,
        "sources": sources,
        "columns": [args.text_column, args.id_column],
        "max_documents": args.max_documents,
        "split": {"rule": SPLIT_RULE, "seed": args.split_seed, "fraction": args.val_fraction},
        "shards": [None] * len(sources),
    }
    path = find_tokenizer(args.tokenizer, out, lambda: train_texts(meta, args))
    tokenizer = load_tokenizer(path)
    meta["tokenizer"] = {"name": args.tokenizer, "vocab_size": vocab_size(tokenizer),
                         "eot_id": find_eot(tokenizer), "sha256": sha256_of(path)}
    if (out / "meta.json").exists():
        meta = resume(out, meta, is_same_source, args.workers)
    if not args.max_documents:
        check_space(meta, args)
    kept = out / "tokenizer.json"
    if not kept.is_file() or kept.read_bytes() != path.read_bytes():
        write_whole(kept, path.read_bytes())
    if None in meta["shards"]:
        workers = args.workers if args.workers > 1 and start_fork_server() else 1
        twin, engine = choose_engine(tokenizer)
        print(f"{len(sources)} source files to {out}: ids by {engine}; {workers} workers",
              flush=True)
        eot_id = meta["tokenizer"]["eot_id"]
        settings = (str(kept), twin, eot_id, args.split_seed, args.val_fraction)
        write_shards(meta, settings, workers, args)
    elif (out / NOTES).exists():  # of a run that was killed when all was done but its last word
        write_meta(out, meta)
    if "://" in sources[0] and not args.keep_downloads:  # a local source may lie there
        shutil.rmtree(out / "downloads", ignore_errors=True)
    print_stats(out)


def choose_engine(tokenizer):
    """Return (twin or None, in words what makes the ids).

    A twin is the same tokenizer, written for a faster program, where that gives equal ids.
    """
    if not isinstance(tokenizer, Tokenizer):
        return None, "UTF-16 code units"
    try:
        return find_twin(tokenizer), f"{FAST}, the same that tokenizers gives"
    except ValueError as error:
        return None, f"tokenizers, since this one has {error}"


def main():
    args = parse_prepare_args(__doc__)
    if args.check:
        return check(args.check, args.workers, args.stats)
    if args.join:
        return join(args.join, args.out, args.workers)
    os.makedirs(args.out, exist_ok=True)
    with only_process_in(args.out, "prepare.py"):
        prepare(args)


def interrupt(number, frame):
    """Raise KeyboardInterrupt, but once: a second one would end the wait for the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def command():
    """Run main; end what is no mistake of ours in one line and exit code 1."""
    signal.signal(signal.SIGINT, interrupt)
    with one_line("prepare.py", "try fewer --workers"):
        try:
            main()
        except BrokenExecutor:
            raise OSError("a worker died, perhaps for want of memory; try fewer "
                          "--workers") from None


if __name__ == "__main__":
    command()
