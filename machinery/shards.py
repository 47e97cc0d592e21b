"""The shard format: writer, reader, meta.json, checks, statistics."""

import hashlib
import json
import os
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from machinery.files import sha256_of, write_whole

FORMAT = 1

SPLITS = ("train", "val")

BLOCK_SIZES = (256, 512, 1024, 2048, 4096)  # of the summary

REPAIR = "run the same prepare.py command again to repair it"


def write_meta(out, meta):
    write_whole(Path(out) / "meta.json", json.dumps(meta, indent=1).encode())


def document_starts(lengths):
    """Return int64 [n + 1]: where each document starts, and the end. In 64 bits, whatever the lengths came in."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


class ShardWriter:
    """Writes one shard: data/NAME/SPLIT/00000.bin and .idx."""

    def __init__(self, out, split, number):
        self.path = Path(out) / split / f"{number:05d}.bin"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.aside = self.path.with_name(self.path.name + ".tmp")
        self.file, self.sha256 = open(self.aside, "wb"), hashlib.sha256()
        self.lengths, self.bytes = [], 0

    def add(self, ids, lengths, n_bytes):
        """Append documents: their ids (uint16 as bytes), their lengths in ids, the bytes of their texts."""
        self.file.write(ids)
        self.sha256.update(ids)
        self.lengths += lengths
        self.bytes += n_bytes

    def close(self):
        """Give the shard its final name; return its entry in meta.json. Without documents there is no file."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        index = document_starts(self.lengths).astype("<i8").tobytes()
        if self.lengths:
            write_whole(self.path.with_suffix(".idx"), index)
            self.aside.replace(self.path)
        else:
            for path in (self.aside, self.path, self.path.with_suffix(".idx")):  # also what a killed run may have left
                path.unlink(missing_ok=True)
        return {"documents": len(self.lengths), "tokens": sum(self.lengths), "bytes": self.bytes,
                "longest": max(self.lengths, default=0), "bin_sha256": self.sha256.hexdigest(),
                "idx_sha256": hashlib.sha256(index).hexdigest()}


def read_meta(data_dir):
    """Return the meta.json of a prepared directory. Raises FileNotFoundError or ValueError, saying what to type."""
    path = Path(data_dir) / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{data_dir}: no prepared data here; run python prepare.py --out={data_dir} "
                                "(or give --data=DIR)")
    try:
        meta = json.loads(path.read_text())
        found = meta["format"]
    except (ValueError, KeyError, TypeError):
        found = "unreadable"
    if found != FORMAT:
        raise ValueError(f"{path}: format {found}; expected {FORMAT}; delete {data_dir} and prepare it again")
    return meta


class Shard:
    """One shard, its sizes checked against meta.json at once and its contents when it is mapped.

    Attributes: documents, tokens (counts), longest (tokens of its longest document).
    """

    def __init__(self, data_dir, split, number, meta):
        self.entry, self.tokenizer = meta["shards"][number][split], meta["tokenizer"]
        self.path = Path(data_dir) / split / f"{number:05d}.bin"
        self.documents, self.tokens, self.longest = (self.entry[key] for key in ("documents", "tokens", "longest"))
        for path, size in ((self.path, 2 * self.tokens), (self.path.with_suffix(".idx"), 8 * (self.documents + 1))):
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                found = "missing" if found is None else f"{found:,} bytes"
                raise ValueError(f"{path}: {found}; expected {size:,} bytes; {REPAIR}")

    def map(self):
        """Return (tokens uint16 [n_tokens], starts int64 [n_documents + 1]), memory-mapped read-only.

        Raises ValueError if the index is not one of these tokens (a swapped or damaged file).
        """
        tokens = np.memmap(self.path, dtype="<u2", mode="r")
        starts = np.memmap(self.path.with_suffix(".idx"), dtype="<i8", mode="r")
        # A document ends in the end of text; a thousand of them tell a swapped file without reading it all.
        sample = starts[1:][:: max(1, self.documents // 1000)] - 1
        if (starts[0] != 0 or starts[-1] != self.tokens or np.diff(starts).min() < 1
                or (tokens[sample] != self.tokenizer["eot_id"]).any()):
            raise ValueError(f"{self.path}: its index does not belong to it; {REPAIR}")
        return tokens, starts

    def verify(self):
        """Read it all; raise ValueError unless it is what was written: index, sha256 of both files, ids below V."""
        tokens, _ = self.map()
        for path, key in ((self.path, "bin_sha256"), (self.path.with_suffix(".idx"), "idx_sha256")):
            if sha256_of(path) != self.entry[key]:
                raise ValueError(f"{path}: its sha256 is not the one in meta.json; {REPAIR}")
        if (V := self.tokenizer["vocab_size"]) <= tokens.max():
            raise ValueError(f"{self.path}: id {tokens.max()}; expected ids below vocab_size {V}")


def open_shards(data_dir, split):
    """Return the Shards of a split that hold documents. Raises ValueError for missing, cut or unfinished data."""
    meta = read_meta(data_dir)
    if undone := meta["shards"].count(None):
        raise ValueError(f"{data_dir}: {undone} of {len(meta['shards'])} source files are not done yet; "
                         "run the same prepare.py command again to finish")
    return [Shard(data_dir, split, number, meta) for number, shard in enumerate(meta["shards"])
            if shard[split]["documents"]]


def find_damage(data_dir, meta, workers):
    """Return {number: what is wrong} of the shards that are not, byte for byte, what meta.json says."""
    def examine(number):
        """Return what is wrong with a source's shards, or None."""
        try:
            for split in SPLITS:
                if meta["shards"][number] and meta["shards"][number][split]["documents"]:
                    Shard(data_dir, split, number, meta).verify()
        except (ValueError, OSError, IndexError) as error:
            return str(error)

    numbers = range(len(meta["shards"]))
    with ThreadPoolExecutor(workers) as pool:  # threads, because hashing and numpy let others run
        found = list(tqdm(pool.map(examine, numbers), total=len(numbers), desc="verifying", disable=None))
    return {number: error for number, error in zip(numbers, found) if error}


def print_stats(data_dir, histogram=False):
    """Print what a prepared directory holds: documents, tokens, and how many of them are long enough to train on."""
    meta, limits, powers = read_meta(data_dir), (0, *BLOCK_SIZES), np.zeros(32, np.int64)
    skipped = sum((Counter(shard["skipped"]) for shard in meta["shards"]), Counter())
    print(f"{data_dir}: {len(meta['shards'])} source files, tokenizer {meta['tokenizer']['name']}, "
          f"vocab_size {meta['tokenizer']['vocab_size']:,}; rows skipped: "
          + (", ".join(f"{n:,} {reason}" for reason, n in sorted(skipped.items())) or "none"))
    table = np.zeros((2, len(limits), 2), np.int64)  # split, limit, documents and tokens
    for side, split in enumerate(SPLITS):
        for shard in open_shards(data_dir, split):
            lengths = np.diff(shard.map()[1])
            table[side] += [((lengths > limit).sum(), lengths[lengths > limit].sum()) for limit in limits]
            powers += np.bincount(np.frexp(lengths)[1] - 1, minlength=32)  # by floor(log2)
    print(f"{'':26}{'train documents':>16}{'tokens':>18}{'val documents':>16}{'tokens':>18}")
    for row, limit in enumerate(limits):
        print(f"{f'of more than {limit:,} tokens' if limit else 'all':26}"
              + "".join(f"{documents:16,}{tokens:18,}" for documents, tokens in table[:, row].tolist()))
    n_bytes = [sum(shard[split]["bytes"] for shard in meta["shards"]) for split in SPLITS]
    print(f"{'bytes per token':26}" + "".join(f"{n / max(n_tokens, 1):34.3f}"
                                              for n, n_tokens in zip(n_bytes, table[:, 0, 1])))
    if not table[0, 0, 0]:
        print("train: no document; train.py will have nothing to learn from")
    if not table[1, 0, 0]:
        print("val: no document; train.py will not evaluate (a larger --val_fraction holds documents out)")
    if histogram:
        print("\ntokens in a document          documents, train and val")
        for power in np.flatnonzero(powers).tolist():
            n = int(powers[power])
            print(f"{1 << power:9,} to {(2 << power) - 1:9,}{n:17,}  {'#' * (50 * n // int(powers.max()))}")


def check(data_dir, workers, stats):
    """Verify a prepared directory; exit with 1 and the list of what is wrong with it."""
    meta = read_meta(data_dir)
    damage = find_damage(data_dir, meta, workers)
    damage |= {n: f"no shard of {meta['sources'][n]} yet" for n, shard in enumerate(meta["shards"]) if not shard}
    lines = [f"shard {number:05d}: {error}" for number, error in sorted(damage.items())]
    if sha256_of(Path(data_dir) / "tokenizer.json") != meta["tokenizer"]["sha256"]:
        lines.append(f"{data_dir}/tokenizer.json: its sha256 is not the one in meta.json")
    if lines:
        sys.exit("\n".join(f"prepare.py: {line}" for line in lines))
    print(f"{data_dir}: {len(meta['shards'])} shards are what meta.json says")
    if stats:
        print_stats(data_dir, histogram=True)
