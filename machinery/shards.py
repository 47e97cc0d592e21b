"""The shard format (see prepare.py): its writer, its reader, and meta.json.

prepare.py writes with it; train.py and evaluate.py read.
"""

import hashlib
import json
from pathlib import Path

import numpy as np

from machinery.files import sha256, sha256_of, sync, write_whole

FORMAT = 1
SPLITS = ("train", "val")
NOTES = "shards.jsonl"  # beside meta.json while a preparation is under way
REPAIR = "run the same prepare.py command again to repair it"


def document_starts(lengths):
    """Return int64 [n + 1]: where each document starts, and the end.

    In 64 bits, whatever the lengths came in.
    """
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


class ShardWriter:
    """Writes one shard: data/NAME/SPLIT/00000.bin and .idx."""

    def __init__(self, out, split, number):
        self.path = Path(out) / split / f"{number:05d}.bin"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.aside = self.path.with_name(self.path.name + ".tmp")
        self.file = open(self.aside, "wb")
        self.sha256 = hashlib.sha256()
        self.lengths = []
        self.bytes = 0

    def add(self, ids, lengths, n_bytes):
        """Append documents: their ids (uint16 as bytes), lengths in ids, and bytes of text."""
        self.file.write(ids)
        self.sha256.update(ids)
        self.lengths += lengths
        self.bytes += n_bytes

    def close(self):
        """Give the shard its final name; return its entry in meta.json.

        Without documents there is no file, and what a killed run may have left goes.
        """
        sync(self.file)
        self.file.close()
        index = document_starts(self.lengths).astype("<i8").tobytes()
        index_path = self.path.with_suffix(".idx")
        if self.lengths:
            write_whole(index_path, index)
            self.aside.replace(self.path)
        else:
            for path in (self.aside, self.path, index_path):
                path.unlink(missing_ok=True)
        return {"documents": len(self.lengths), "tokens": sum(self.lengths), "bytes": self.bytes,
                "longest": max(self.lengths, default=0), "bin_sha256": self.sha256.hexdigest(),
                "idx_sha256": sha256(index)}


class Shard:
    """One shard, its sizes checked against meta.json at once and its contents when it is mapped.

    Attributes: documents, tokens (counts), longest (tokens of its longest document).
    """

    def __init__(self, data_dir, split, number, meta):
        self.entry = meta["shards"][number][split]
        self.tokenizer = meta["tokenizer"]
        self.path = Path(data_dir) / split / f"{number:05d}.bin"
        self.index_path = self.path.with_suffix(".idx")
        self.documents = self.entry["documents"]
        self.tokens = self.entry["tokens"]
        self.longest = self.entry["longest"]
        check_size(self.path, 2 * self.tokens)
        check_size(self.index_path, 8 * (self.documents + 1))

    def map(self):
        """Return (tokens uint16 [n_tokens], starts int64 [n_documents + 1]), mapped read-only.

        Raises ValueError if the index is not one of these tokens (a swapped or damaged file).
        """
        tokens = np.memmap(self.path, dtype="<u2", mode="r")
        starts = np.memmap(self.index_path, dtype="<i8", mode="r")
        # A document ends in the end of text; a thousand of them tell a swapped file without
        # reading it all.
        sample = starts[1:][:: max(1, self.documents // 1000)] - 1
        spans = starts[0] == 0 and starts[-1] == self.tokens and np.diff(starts).min() >= 1
        if not spans or (tokens[sample] != self.tokenizer["eot_id"]).any():
            raise ValueError(f"{self.path}: its index does not belong to it; {REPAIR}")
        return tokens, starts

    def verify(self):
        """Read it all; raise ValueError unless it is what was written.

        That is: the index, the sha256 of both files, ids below vocab_size.
        """
        tokens, _ = self.map()
        for path, key in ((self.path, "bin_sha256"), (self.index_path, "idx_sha256")):
            if sha256_of(path) != self.entry[key]:
                raise ValueError(f"{path}: its sha256 is not the one in meta.json; {REPAIR}")
        vocab_size = self.tokenizer["vocab_size"]
        if tokens.max() >= vocab_size:
            raise ValueError(f"{self.path}: id {tokens.max()}; expected ids below vocab_size "
                             f"{vocab_size}")


def check_size(path, expected):
    """Raise ValueError unless a file is there and has the expected bytes."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        found = None
    if found != expected:
        found = "missing" if found is None else f"{found:,} bytes"
        raise ValueError(f"{path}: {found}; expected {expected:,} bytes; {REPAIR}")


def write_meta(out, meta):
    """Write meta.json, whole; what note_shard kept aside is in it."""
    write_whole(Path(out) / "meta.json", json.dumps(meta, indent=1).encode())
    (Path(out) / NOTES).unlink(missing_ok=True)


def note_shard(out, meta, number):
    """Keep the entry of a source whose shards are whole, should the run be stopped.

    The first makes meta.json, the others a line each in a file beside it: to write all entries
    again for each of a thousand sources takes minutes.
    """
    if not (Path(out) / "meta.json").exists():
        write_meta(out, meta)
        return
    with open(Path(out) / NOTES, "a", encoding="utf-8") as file:
        file.write(json.dumps([number, meta["shards"][number]]) + "\n")
        sync(file)


def read_notes(data_dir):
    """Yield (number, entry) of what note_shard kept; a line that was cut off is none."""
    path = Path(data_dir) / NOTES
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            number, entry = json.loads(line)
        except ValueError:
            continue  # of a run that was killed: the shard will be made again
        yield number, entry


def how_to_make(data_dir):
    """Return the command that makes a directory of data, as far as its name tells."""
    folder = Path(data_dir)
    if folder == Path("data/stdlib"):
        return "python prepare.py"
    if folder.name == "fineweb-edu":
        where = "" if folder == Path("data/fineweb-edu") else f" --out={data_dir}"
        return f"python prepare.py --source=fineweb-edu --shards=0:10{where}"
    return f"python prepare.py --out={data_dir}, with --source=FILES unless stdlib is meant"


def read_meta(data_dir):
    """Return the meta.json of a prepared directory.

    Raises FileNotFoundError or ValueError, saying what to type.
    """
    path = Path(data_dir) / "meta.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{data_dir}: no prepared data here; run "
                                f"{how_to_make(data_dir)} (or give --data=DIR)") from None
    try:
        meta = json.loads(text)
        found = meta["format"]
        if found == FORMAT and not {"sources", "shards", "tokenizer"} <= set(meta):
            found = "unreadable"
    except (ValueError, KeyError, TypeError):
        found = "unreadable"
    if found != FORMAT:
        raise ValueError(f"{path}: format {found}; expected {FORMAT}; delete {data_dir} and "
                         "prepare it again")
    for number, entry in read_notes(data_dir):
        meta["shards"][number] = entry
    return meta


def meta_time(data_dir):
    """Return when a preparation last told of a shard, in ns."""
    paths = [Path(data_dir) / "meta.json", Path(data_dir) / NOTES]
    return max(path.stat().st_mtime_ns for path in paths if path.exists())


def count_documents(entry):
    """Return how many documents a source gave, by its entry in meta.json."""
    return sum(entry[split]["documents"] for split in SPLITS)


def open_shards(data_dir, split):
    """Return the Shards of a split that hold documents.

    Raises ValueError for missing, cut or unfinished data.
    """
    meta = read_meta(data_dir)
    undone = meta["shards"].count(None)
    if undone:
        raise ValueError(f"{data_dir}: {undone} of {len(meta['shards'])} source files are not done "
                         "yet; run the same prepare.py command again to finish")
    return [Shard(data_dir, split, number, meta) for number, shard in enumerate(meta["shards"])
            if shard[split]["documents"]]
