"""Documents to memory-mapped token shards, and the reader of those shards.

A shard is the token ids of whole documents back to back, each closed by the end-of-text id, and an index of where each
document starts. Training windows never cross a document (the paper, "Data"), so the index is part of the data:

    data/NAME/meta.json          tokenizer, split rule, and for each source file what became of it
    data/NAME/tokenizer.json     the tokenizer that made the ids; later stages need no network
    data/NAME/train/00000.bin    uint16 little-endian token ids
    data/NAME/train/00000.idx    int64 little-endian document starts, n_documents + 1 of them
    data/NAME/val/...            the same for the held-out documents; a side with no document has no file

Usage:
    python prepare.py                                                 this Python's own library sources, no download
    python prepare.py --source=fineweb-edu --max_documents=10000      the paper's corpus, its first documents
    python prepare.py --source=fineweb-edu --shards=0:234 --workers=16
    python prepare.py --source='path/*.parquet' --tokenizer=path/tokenizer.json
    python prepare.py --check=data/stdlib --stats

One source file gives one train and one val shard, each under its final name only when it is whole, and the same bytes
whatever the number of workers: stop it or kill it at any moment, and the same command goes on. Text is ordinary text:
the spelling of a special token never becomes a special id. What is not Unicode (bytes that are not UTF-8, lone
surrogates) becomes U+FFFD.
"""

import argparse
import errno
import hashlib
import itertools
import multiprocessing
import os
import re
import shutil
import sys
import threading
import time
from collections import Counter
from concurrent.futures import BrokenExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from machinery.files import sha256_of, write_whole
from machinery.shards import (
    FORMAT,
    SPLITS,
    ShardWriter,
    check,
    find_damage,
    print_stats,
    read_meta,
    write_meta,
)
from machinery.sources import (
    BATCH_BYTES,
    check_space,
    count_rows,
    fetch_ahead,
    find_sources,
    read_rows,
    source_facts,
)
from machinery.tokenizer import (
    FAST,
    SMOLLM2,
    find_eot,
    find_tokenizer,
    find_twin,
    load_tokenizer,
    make_encoder,
    vocab_size,
)
from machinery.workers import run_in_order, start_fork_server

BATCH_DOCUMENTS = 256          # documents encoded at a time ...


# ----------------------------------------------------------------------------------------------------------------------
# Where documents come from: each reader yields (id or None, text as str or bytes, or None)


def clean_text(text):
    """Return (text as a valid Unicode str, None), or (None, the reason to skip it)."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not text or not isinstance(text, str):
        return None, "null" if text is None else "empty" if text == "" else "not text"
    if not text.isascii():
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text, None


def is_held_out(key, text, seed, fraction):
    """Return whether a document belongs to val: blake2b-8 of its id (its text where it has none) and the seed, below
    fraction (the paper, "Data"). Python's own hash() would change from run to run."""
    name = f"{seed}:{text if key is None else key}".encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") < fraction * 2**64


# ----------------------------------------------------------------------------------------------------------------------
# Fetching


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer


# ----------------------------------------------------------------------------------------------------------------------
# The same ids, faster: splintr, or else tiktoken, in place of tokenizers wherever that provably changes nothing


# ----------------------------------------------------------------------------------------------------------------------
# Worker processes: rows in, token ids out


def start_worker(tokenizer_path, twin, eot_id, split_seed, val_fraction):
    """Make this process ready for encode_batch."""
    global worker
    if parent := multiprocessing.parent_process():  # if that is killed, so is this:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    worker = SimpleNamespace(encode=make_encoder(load_tokenizer(tokenizer_path), twin),
                             end=np.array([eot_id], np.uint32),
                             split=(split_seed, val_fraction))


def encode_batch(rows):
    """Encode a list of rows (id, text); return (Counter of skipped rows by reason, and for train and val the ids,
    uint16 as bytes, the lengths in ids of the documents and the bytes of their texts)."""
    skipped, sides = Counter(), [([], [], []), ([], [], [])]
    for key, text in rows:
        text, reason = clean_text(text)
        if text and (ids := worker.encode(text)) is None:
            reason = "holds the end of text"
        if reason:
            skipped[reason] += 1
            continue
        arrays, lengths, sizes = sides[is_held_out(key, text, *worker.split)]
        arrays += (ids, worker.end)
        lengths.append(len(ids) + 1)
        sizes.append(len(text.encode()))
    return skipped, [(np.concatenate(arrays).astype("<u2").tobytes() if arrays else b"", lengths, sum(sizes))
                     for arrays, lengths, sizes in sides]


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def batches(rows):
    """Group rows into lists that are short in documents and in bytes."""
    batch, size = [], 0
    for row in rows:
        batch.append(row)
        size += len(row[1]) if isinstance(row[1], (bytes, str)) else 0
        if len(batch) == BATCH_DOCUMENTS or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def read_jobs(meta, args, keep):
    """Yield (number, a list of rows, None) of every source without a shard, and last of each (number, [], source_facts).

    An error is yielded in place of the facts: raised, it would cost the shards whose rows are still on their way. A
    download is deleted after its last row unless it is to be kept.
    """
    downloads, left = Path(args.out, "downloads").resolve(), args.max_documents or sys.maxsize
    files = fetch_ahead([name for name, shard in zip(meta["sources"], meta["shards"]) if not shard], args)
    for number, (name, shard) in enumerate(zip(meta["sources"], meta["shards"])):
        if shard:
            left -= sum(shard["skipped"].values()) + sum(shard[split]["documents"] for split in SPLITS)
        elif left:
            file, facts = next(files)
            try:
                if isinstance(file, Exception):
                    raise file
                for batch in batches(itertools.islice(read_rows(name, file, args.text_column, args.id_column), left)):
                    left -= len(batch)
                    yield number, batch, None
            except (ValueError, OSError) as error:
                yield number, [], error
                return
            yield number, [], facts
            if "://" in name and not keep and isinstance(file, str) and Path(file).resolve().is_relative_to(downloads):
                os.remove(file)


def write_shards(meta, settings, args):
    """Encode every source without a shard into its train and val shard; meta.json tells of each once it is whole."""
    shards, writers, documents, tokens, start = meta["shards"], None, 0, 0, time.monotonic()
    todo = shards.count(None)
    with tqdm(total=len(shards), initial=len(shards) - todo, unit=" shards", disable=None) as shard_bar, \
            tqdm(total=count_rows(meta, args), unit=" documents", unit_scale=True, disable=None) as bar:
        jobs = read_jobs(meta, args, args.keep_downloads)
        for number, (left_out, sides), end in run_in_order(start_worker, settings, encode_batch, jobs, args.workers):
            if isinstance(end, Exception):
                raise end
            if writers is None:
                writers, skipped = [ShardWriter(args.out, split, number) for split in SPLITS], Counter()
            skipped += left_out
            for writer, (ids, lengths, n_bytes) in zip(writers, sides):
                writer.add(ids, lengths, n_bytes)
                documents += len(lengths)
                tokens += sum(lengths)
            bar.update(documents - bar.n)
            bar.set_postfix_str(f"{tokens / (time.monotonic() - start):,.0f} tokens/s")
            if end is None:
                continue
            shards[number] = {"source": meta["sources"][number], **end, "skipped": dict(sorted(skipped.items())),
                              **{split: writer.close() for split, writer in zip(SPLITS, writers)}}
            writers = None
            write_meta(args.out, meta)
            shard_bar.update()
            if bar.disable:  # not a terminal
                seconds = time.monotonic() - start
                part = documents / bar.total if bar.total else 1 - shards.count(None) / todo
                print(f"shard {number + 1}/{len(shards)}: {documents:,} documents, {tokens:,} tokens so far, "
                      f"{documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s, "
                      f"{seconds * (1 - part) / max(part, 1e-9):,.0f} s left", flush=True)
    if None in shards:  # --max_documents was reached before them
        del meta["sources"][shards.index(None):], shards[shards.index(None):]
        write_meta(args.out, meta)


# ----------------------------------------------------------------------------------------------------------------------
# Reading


# ----------------------------------------------------------------------------------------------------------------------

def parse_args():
    """Return the command line's settings, with the defaults that depend on the source."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("documents")
    group.add_argument("--source", default="stdlib", help="stdlib, fineweb-edu, an http(s) or hf:// URL, or a path or "
                       "glob of .parquet, .jsonl, .jsonl.gz, .jsonl.zst or .txt files (default: %(default)s)")
    group.add_argument("--shards", help="A:B, take only the source files numbered A to B - 1 (default: all)")
    group.add_argument("--max_documents", type=int, help="take only the first so many documents (default: all)")
    group.add_argument("--text_column", default="text", help="name of the text column (default: %(default)s)")
    group.add_argument("--id_column", default="id", help="name of the id column; documents without one are split by "
                       "their text (default: %(default)s)")
    group = parser.add_argument_group("what becomes of them")
    group.add_argument("--tokenizer", help="train:N, utf16, a tokenizer.json, or a Hugging Face "
                       f"OWNER/REPOSITORY@REVISION (default: train:3072 for stdlib, else {SMOLLM2})")
    group.add_argument("--val_fraction", type=float, help="share held out (default: 0.05 for stdlib, else 0.001)")
    group.add_argument("--split_seed", type=int, default=0, help="seed of the split (default: %(default)s)")
    group.add_argument("--out", help="directory to write (default: data/ and the source's name)")
    group.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: the %(default)s cores)")
    group.add_argument("--keep_downloads", action="store_true", help="do not delete downloaded files after use")
    group = parser.add_argument_group("instead of preparing")
    group.add_argument("--check", metavar="DIR", help="verify every shard of a prepared directory")
    group.add_argument("--stats", action="store_true", help="with --check: print its size and its documents' lengths")
    args = parser.parse_args()
    embedded = args.source == "stdlib"
    args.tokenizer = args.tokenizer or ("train:3072" if embedded else SMOLLM2)
    args.out = args.out or f"data/{Path(args.source).name.split('.')[0].replace('*', '') or 'corpus'}"
    args.val_fraction = (0.05 if embedded else 0.001) if args.val_fraction is None else args.val_fraction
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction={args.val_fraction}: expected 0 or more and less than 1")
    if args.shards and not re.fullmatch(r"\d+:\d+", args.shards):
        parser.error(f"--shards={args.shards}: expected A:B, as in 0:2")
    if args.workers < 1 or args.max_documents is not None and args.max_documents < 1:
        parser.error("--workers and --max_documents: expected 1 or more")
    if args.stats and not args.check:
        parser.error("--stats goes with --check=DIR")
    return args


def resume(meta, done, args):
    """Return done, the meta.json there, without the shards that are damaged. Raises ValueError if meta, what is asked
    for now, is another preparation, or a source is no longer the file that it was."""
    def fields(meta):
        return {key: meta[key] for key in ("sources", "columns", "max_documents")} | {
            f"{group} {key}": value for group in ("tokenizer", "split") for key, value in meta[group].items()}

    if args.max_documents:
        meta["sources"] = meta["sources"][:len(done["sources"])]  # the others were not needed
    there, asked = fields(done), fields(meta)
    if differing := [f"{key}: {there[key]!s:.200} there, {asked[key]!s:.200} now" for key in asked
                     if there[key] != asked[key]]:
        raise ValueError(f"{args.out} was prepared differently; {'; '.join(differing)}; choose another --out")
    for shard in filter(None, done["shards"]):
        if source_facts(shard["source"])["sha256"] not in (None, shard["sha256"]):
            raise ValueError(f"{shard['source']}: not the file that {args.out} was prepared from; choose another --out")
    for number, error in find_damage(args.out, done, args.workers).items():
        print(f"shard {number:05d}: {error}: making it again", file=sys.stderr)
        done["shards"][number] = None
    return done


def prepare(args):
    """Prepare in the directory args.out what the command line asks for."""
    out, sources = Path(args.out), find_sources(args.source, args.shards)
    meta = {
        "format": FORMAT,
        "sources": sources,
        "columns": [args.text_column, args.id_column],
        "max_documents": args.max_documents,
        "split": {"rule": "blake2b-8 of 'seed:id' / 2^64 < fraction", "seed": args.split_seed,
                  "fraction": args.val_fraction},
        "shards": [None] * len(sources),
    }

    def train_texts():
        """Yield the texts that are not held out, as a tokenizer may learn from these alone."""
        for _, rows, end in read_jobs(meta, args, keep=True):
            if isinstance(end, Exception):
                raise end
            for key, text in rows:
                text, _ = clean_text(text)
                if text and not is_held_out(key, text, args.split_seed, args.val_fraction):
                    yield text

    path, kept = find_tokenizer(args.tokenizer, out, train_texts), out / "tokenizer.json"
    tokenizer = load_tokenizer(path)
    meta["tokenizer"] = {"name": args.tokenizer, "vocab_size": vocab_size(tokenizer), "eot_id": find_eot(tokenizer),
                         "sha256": sha256_of(path)}
    if (out / "meta.json").exists():
        meta = resume(meta, read_meta(out), args)
    elif not args.max_documents:
        check_space(meta, args)
    if not kept.is_file() or kept.read_bytes() != path.read_bytes():
        write_whole(kept, path.read_bytes())
    if None in meta["shards"]:
        if args.workers > 1:
            start_fork_server()
        twin, kind = None, "UTF-16 code units"
        if isinstance(tokenizer, Tokenizer):
            try:
                twin, kind = find_twin(tokenizer), f"{FAST}, proven to give the ids that tokenizers gives"
            except ValueError as error:
                kind = f"tokenizers, since this one has {error}"
        print(f"{len(sources)} source files to {out}: ids by {kind}; {args.workers} workers", flush=True)
        write_shards(meta, (str(kept), twin, meta["tokenizer"]["eot_id"], args.split_seed, args.val_fraction), args)
    if "://" in sources[0] and not args.keep_downloads:  # a local source may lie there
        shutil.rmtree(out / "downloads", ignore_errors=True)
    print_stats(out)


def main():
    args = parse_args()
    if args.check:
        return check(args.check, args.workers, args.stats)
    import fcntl  # here, so that reading shards works where there is no such module
    os.makedirs(args.out, exist_ok=True)
    handle = os.open(args.out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        prepare(args)
    except BlockingIOError:
        raise ValueError(f"{args.out}: another prepare.py is at work here; choose another --out, or wait") from None
    finally:
        os.close(handle)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenExecutor:
        sys.exit("prepare.py: a worker died, perhaps for want of memory; try fewer --workers")
    except (ValueError, OSError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC
        sys.exit(f"prepare.py: {'the disk is full; make room and run the same command again' if full else error}")
    except KeyboardInterrupt:
        sys.exit("prepare.py: interrupted; run the same command again to go on")
