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
    python prepare.py --source='path/*.parquet' --tokenizer=path/tokenizer.json
    python prepare.py --source=documents.jsonl --tokenizer=train:3072 --out=data/mine

Text is encoded as ordinary text: the spelling of a special token inside a document never becomes a special id. One source
file gives one train and one val shard, each under its final name only when it is whole; run again to finish what was
interrupted.
"""

import argparse
import glob
import hashlib
import json
import os
import sys
import sysconfig
import tokenize
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

FORMAT = 1
SPLITS = ("train", "val")
EOT = "<|endoftext|>"          # SmolLM2's end of text, id 0
MAX_VOCAB_SIZE = 65_536        # ids are stored as uint16
BATCH_DOCUMENTS = 256          # documents encoded at a time ...
BATCH_BYTES = 4 << 20          # ... or fewer, if they are long: memory must not grow with the documents
SUMMARY_BLOCK_SIZES = (256, 512, 1024, 2048, 4096)
# The base model's tokenizer (not an instruct one's), pinned: the paper's ids are these bytes' ids.
PINNED_REVISIONS = {"HuggingFaceTB/SmolLM2-1.7B": "effd688a12921b4cc83e3312b6feb579f70f9c71"}


# ----------------------------------------------------------------------------------------------------------------------
# Where documents come from: each reader yields (id or None, text or None)

def find_sources(source):
    """Return the source files that --source names, in order: ["stdlib"], or the sorted paths of a file name or glob.

    Raises FileNotFoundError if nothing matches, ValueError for a kind of file that no reader knows.
    """
    if source == "stdlib":
        return ["stdlib"]
    paths = sorted(glob.glob(source, recursive=True))
    if not paths:
        raise FileNotFoundError(f"--source={source}: no such file; expected stdlib, a path or a quoted glob")
    for path in paths:
        if Path(path).suffix not in READERS:
            raise ValueError(f"{path}: expected a name that ends in {', '.join(READERS)}")
    return paths


def read_stdlib():
    """Yield the running Python's own library as documents: one a source file (tests and site-packages left out), and one a
    topic of pydoc's help."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skip & set(name.parts):
            try:
                with tokenize.open(path) as file:  # honours a source file's own encoding line
                    yield f"lib/{name.as_posix()}", file.read()
            except (SyntaxError, UnicodeDecodeError):
                yield f"lib/{name.as_posix()}", None
    from pydoc_data.topics import topics
    for name, text in sorted(topics.items()):
        yield f"pydoc/{name}", text


def read_parquet(path, text_column, id_column):
    file = pq.ParquetFile(path)
    if text_column not in file.schema_arrow.names:
        raise ValueError(f"{path}: no column {text_column!r}; its columns are {', '.join(file.schema_arrow.names)}")
    columns = [text_column] + [id_column] * (id_column in file.schema_arrow.names)
    for batch in file.iter_batches(batch_size=1024, columns=columns):
        # As bytes, because a column of strings may hold bytes that are not UTF-8, and one bad row must not cost the others.
        texts = batch.column(0).cast(pa.large_binary()).to_pylist()
        ids = batch.column(1).to_pylist() if len(columns) == 2 else [None] * len(texts)
        yield from zip(ids, texts)


def read_jsonl(path, text_column, id_column):
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                    yield row.get(id_column), row[text_column]
                except (json.JSONDecodeError, KeyError, AttributeError) as error:
                    raise ValueError(f"{path}:{number}: expected a JSON object with {text_column!r} ({error})") from None


def read_txt(path, text_column, id_column):
    yield Path(path).name, Path(path).read_bytes()


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".txt": read_txt}


def read_documents(source, text_column="text", id_column="id", skipped=None):
    """Yield the documents of one source file as (id str or None, text str), in order.

    Bytes that are not UTF-8 and lone surrogates become U+FFFD. Null and empty texts are left out and counted by reason in
    the dict skipped.
    """
    skipped = {} if skipped is None else skipped
    rows = read_stdlib() if source == "stdlib" else READERS[Path(source).suffix](source, text_column, id_column)
    try:
        for key, text in rows:
            if not text:
                reason = "null" if text is None else "empty"
                skipped[reason] = skipped.get(reason, 0) + 1
                continue
            if isinstance(text, bytes):
                text = text.decode("utf-8", "replace")
            elif not text.isascii():
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            yield None if key is None else str(key), text
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read ({str(error).splitlines()[0]}); replace the file and run again") from None


def is_held_out(key, text, seed, fraction):
    """Return whether a document belongs to val: blake2b-8 of its id (its text where it has none) and the seed, below
    fraction (the paper, "Data"). Python's own hash() would change from run to run."""
    digest = hashlib.blake2b(f"{seed}:{text if key is None else key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer

def train_tokenizer(texts, vocab_size):
    """Return a byte-level BPE Tokenizer of up to vocab_size ids trained on texts: id 0 is the end of text, then 256 bytes,
    then merges; single digits are split, as SmolLM2's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty()))
    return tokenizer


def load_tokenizer(path):
    """Return the Tokenizer of a tokenizer.json, set to encode text as ordinary text, whole and unpadded.

    Raises FileNotFoundError, or ValueError if its ids do not fit in uint16 or it is not a byte-level BPE.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer file")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a tokenizer.json ({error})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (size := vocab_size(tokenizer)) > MAX_VOCAB_SIZE:
        raise ValueError(f"{path}: {size:,} ids; expected at most {MAX_VOCAB_SIZE:,}, since ids are stored as uint16")
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise ValueError(f"{path}: expected a byte-level BPE tokenizer (its decoder is {type(tokenizer.decoder).__name__})")
    return tokenizer


def vocab_size(tokenizer):
    """Return the highest id + 1, added tokens included: the rows that a table or a head needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(tokenizer):
    """Return how many bytes of text each id stands for: int64 [V]; special tokens stand for none."""
    sizes = np.zeros(vocab_size(tokenizer), np.int64)
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        sizes[i] = len(token)  # the byte-level alphabet writes each byte as one character
    for i, added in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = 0 if added.special else len(added.content.encode())
    return sizes


def find_tokenizer(name, out, train_texts):
    """Return (path, revision) of the tokenizer.json that --tokenizer names.

    Args:
        name: train:N (trained on train_texts() and written to out), a path, or a Hugging Face repository[@revision].
    """
    if name.startswith("train:"):
        if not (name[6:].isdigit() and 257 < int(name[6:]) <= MAX_VOCAB_SIZE):
            raise ValueError(f"--tokenizer={name}: expected train:N with N from 258 to {MAX_VOCAB_SIZE}")
        path = Path(out) / "tokenizer.json"
        if not path.exists():
            print(f"training a byte-level BPE tokenizer of {name[6:]} ids on the train documents")
            write_whole(path, train_tokenizer(train_texts(), int(name[6:])).to_str(pretty=True).encode())
        return path, None
    if name.endswith(".json") or Path(name).exists():
        return Path(name), None
    from huggingface_hub import hf_hub_download
    repository, _, revision = name.partition("@")
    revision = revision or PINNED_REVISIONS.get(repository)
    if revision is None:
        raise ValueError(f"--tokenizer={name}: expected a pinned revision, as in {name}@COMMIT (or a tokenizer.json path)")
    try:
        return Path(hf_hub_download(repository, "tokenizer.json", revision=revision)), revision
    except Exception as error:
        raise ValueError(f"--tokenizer={name}: cannot be fetched ({str(error).splitlines()[0]}); "
                         "give the path of a tokenizer.json instead") from None


def find_eot(tokenizer):
    """Return the id that ends each document. Raises ValueError if the tokenizer has none."""
    for token in (EOT, "<|end_of_text|>", "</s>", "<eos>"):
        if (i := tokenizer.token_to_id(token)) is not None:
            return i
    raise ValueError(f"the tokenizer has no end-of-text token (such as {EOT})")


# ----------------------------------------------------------------------------------------------------------------------
# Writing

def write_whole(path, data):
    """Write bytes under a name only when they are whole and on the disk: aside, fsync, rename."""
    path = Path(path)
    aside = path.with_name(path.name + ".tmp")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def document_starts(lengths):
    """Return int64 [n + 1]: where each document starts, and the end. In 64 bits, whatever the lengths came in."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


class ShardWriter:
    """Writes one shard: data/NAME/SPLIT/00000.bin and .idx."""

    def __init__(self, out, split, number):
        self.path = Path(out) / split / f"{number:05d}.bin"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.aside = self.path.with_name(self.path.name + ".tmp")
        self.file = open(self.aside, "wb")
        self.sha256 = hashlib.sha256()
        self.lengths, self.bytes = [], 0

    def add(self, ids, n_bytes):
        """Append one document: its ids with the end of text, and the bytes of its text."""
        data = np.asarray(ids, dtype="<u2").tobytes()
        self.file.write(data)
        self.sha256.update(data)
        self.lengths.append(len(ids))
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
            self.aside.unlink()
        return {"documents": len(self.lengths), "tokens": sum(self.lengths), "bytes": self.bytes,
                "longest": max(self.lengths, default=0), "bin_sha256": self.sha256.hexdigest(),
                "idx_sha256": hashlib.sha256(index).hexdigest()}


def batches(documents):
    """Group (id, text) pairs into lists that are short in documents and in bytes."""
    batch, size = [], 0
    for key, text in documents:
        batch.append((key, text))
        size += len(text)
        if len(batch) == BATCH_DOCUMENTS or size > BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_shards(out, number, source, tokenizer, eot_id, args):
    """Encode one source file into its train and val shard; return its entry in meta.json."""
    skipped = {}
    sha256 = hashlib.sha256()
    writers = {split: ShardWriter(out, split, number) for split in SPLITS}
    documents = read_documents(source, args.text_column, args.id_column, skipped)
    bar = tqdm(desc=f"shard {number:05d}", unit=" documents", unit_scale=True, disable=None)
    for batch in batches(documents):
        encodings = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        for (key, text), encoding in zip(batch, encodings):
            data = text.encode()
            sha256.update(data)
            split = SPLITS[is_held_out(key, text, args.split_seed, args.val_fraction)]
            writers[split].add(encoding.ids + [eot_id], len(data))
        bar.update(len(batch))
    bar.close()
    return {"source": source, "text_sha256": sha256.hexdigest(), "skipped": skipped,
            **{split: writer.close() for split, writer in writers.items()}}


# ----------------------------------------------------------------------------------------------------------------------
# Reading

def read_meta(data_dir):
    """Return the meta.json of a prepared directory. Raises FileNotFoundError or ValueError, saying what to type."""
    path = Path(data_dir) / "meta.json"
    if not path.is_file():
        raise FileNotFoundError(f"{data_dir}: no prepared data here; run python prepare.py --out={data_dir} (or give --data=DIR)")
    meta = json.loads(path.read_text())
    if meta["format"] != FORMAT:
        raise ValueError(f"{path}: format {meta['format']}; expected {FORMAT}; prepare the data again")
    return meta


class Shard:
    """One shard, its sizes checked against meta.json at once and its contents when it is mapped.

    Attributes: name, documents, tokens (counts), longest (tokens of its longest document).
    """

    def __init__(self, data_dir, split, number, meta):
        entry = meta["shards"][number][split]
        self.name = f"{split}/{number:05d}"
        self.path = Path(data_dir) / split / f"{number:05d}.bin"
        self.documents, self.tokens, self.longest = entry["documents"], entry["tokens"], entry["longest"]
        self.eot_id = meta["tokenizer"]["eot_id"]
        for path, size in ((self.path, 2 * self.tokens), (self.path.with_suffix(".idx"), 8 * (self.documents + 1))):
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise ValueError(f"{path}: {'missing' if found is None else f'{found:,} bytes'}; expected {size:,} bytes; "
                                 f"delete {data_dir} and prepare it again")

    def map(self):
        """Return (tokens uint16 [n_tokens], starts int64 [n_documents + 1]), memory-mapped read-only.

        Raises ValueError if the index is not one of these tokens (a swapped or damaged file).
        """
        tokens = np.memmap(self.path, dtype="<u2", mode="r")
        starts = np.memmap(self.path.with_suffix(".idx"), dtype="<i8", mode="r")
        lengths = np.diff(starts)
        # A document ends in the end of text; a thousand of them tell a swapped file without reading it all.
        ends = starts[1:][:: max(1, self.documents // 1000)] - 1
        if starts[0] != 0 or starts[-1] != self.tokens or lengths.min() < 1 or (tokens[ends] != self.eot_id).any():
            raise ValueError(f"{self.path}: its index does not belong to it; delete {self.path.parent.parent} and prepare it again")
        return tokens, starts


def open_shards(data_dir, split):
    """Return the Shards of a split that hold documents. Raises ValueError for a missing or cut file or unfinished data."""
    meta = read_meta(data_dir)
    if len(meta["shards"]) < len(meta["sources"]):
        raise ValueError(f"{data_dir}: {len(meta['shards'])} of {len(meta['sources'])} source files are done; "
                         "run the same prepare.py command again to finish")
    return [Shard(data_dir, split, number, meta) for number, entry in enumerate(meta["shards"]) if entry[split]["documents"]]


# ----------------------------------------------------------------------------------------------------------------------

def print_summary(data_dir):
    """Print what a prepared directory holds: documents, tokens, and how many documents are long enough to train on."""
    meta = read_meta(data_dir)
    skipped = {}
    for entry in meta["shards"]:
        for reason, n in entry["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + n
    print(f"{data_dir}: tokenizer {meta['tokenizer']['name']}, vocab_size {meta['tokenizer']['vocab_size']:,}; "
          f"rows skipped: {', '.join(f'{n:,} {reason}' for reason, n in skipped.items()) or 'none'}")
    print(f"{'':5} {'documents':>13} {'tokens':>16} {'bytes/token':>11}   documents of more than T tokens, T = "
          + " ".join(f"{size:>9}" for size in SUMMARY_BLOCK_SIZES))
    for split in SPLITS:
        entries = [entry[split] for entry in meta["shards"]]
        tokens = sum(entry["tokens"] for entry in entries)
        lengths = [np.diff(shard.map()[1]) for shard in open_shards(data_dir, split)]
        eligible = [sum(int((n > size).sum()) for n in lengths) for size in SUMMARY_BLOCK_SIZES]
        print(f"{split:5} {sum(e['documents'] for e in entries):13,} {tokens:16,} "
              f"{sum(e['bytes'] for e in entries) / max(tokens, 1):11.3f}   {'':37}"
              + " ".join(f"{n:9,}" for n in eligible))
        if not tokens:
            print(f"{split}: no document; train.py will " + ("have nothing to learn from" if split == "train"
                  else "not evaluate (a larger --val_fraction holds documents out)"))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="stdlib", help="stdlib, or .parquet, .jsonl, .txt paths or a glob (default: %(default)s)")
    parser.add_argument("--tokenizer", help="train:N, a tokenizer.json, or a Hugging Face repository[@revision] "
                        "(default: train:3072 for stdlib, else HuggingFaceTB/SmolLM2-1.7B)")
    parser.add_argument("--out", help="directory to write (default: data/stdlib, else data/ and the source's name)")
    parser.add_argument("--val_fraction", type=float, help="share of documents held out (default: 0.05 for stdlib, else 0.001)")
    parser.add_argument("--split_seed", type=int, default=0, help="seed of the split (default: %(default)s)")
    parser.add_argument("--text_column", default="text", help="name of the text column (default: %(default)s)")
    parser.add_argument("--id_column", default="id", help="name of the id column; documents without one are split by their "
                        "text (default: %(default)s)")
    args = parser.parse_args()
    embedded = args.source == "stdlib"
    args.tokenizer = args.tokenizer or ("train:3072" if embedded else "HuggingFaceTB/SmolLM2-1.7B")
    args.out = args.out or f"data/{Path(args.source).name.split('.')[0].replace('*', '') or 'corpus'}"
    args.val_fraction = (0.05 if embedded else 0.001) if args.val_fraction is None else args.val_fraction
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction={args.val_fraction}: expected 0 or more and less than 1")
    return args


def main():
    args = parse_args()
    sources = find_sources(args.source)
    Path(args.out).mkdir(parents=True, exist_ok=True)

    def train_texts():
        for source in sources:
            for key, text in read_documents(source, args.text_column, args.id_column):
                if not is_held_out(key, text, args.split_seed, args.val_fraction):
                    yield text

    path, revision = find_tokenizer(args.tokenizer, args.out, train_texts)
    tokenizer = load_tokenizer(path)
    eot_id = find_eot(tokenizer)
    meta = {
        "format": FORMAT,
        "sources": sources,
        "columns": [args.text_column, args.id_column],
        "tokenizer": {"name": args.tokenizer, "revision": revision, "vocab_size": vocab_size(tokenizer), "eot_id": eot_id,
                      "sha256": hashlib.sha256(path.read_bytes()).hexdigest()},
        "split": {"rule": "blake2b-8 of 'seed:id' / 2^64 < fraction", "seed": args.split_seed, "fraction": args.val_fraction},
        "shards": [],
    }
    if (Path(args.out) / "meta.json").exists():
        done = read_meta(args.out)
        if differing := [f"{key}: {done[key]} there, {meta[key]} asked for" for key in meta if key != "shards" and done[key] != meta[key]]:
            raise ValueError(f"{args.out} was prepared differently; {'; '.join(differing)}; choose another --out")
        meta = done
    write_whole(Path(args.out) / "tokenizer.json", path.read_bytes())
    for number, source in enumerate(sources):
        if number >= len(meta["shards"]):
            meta["shards"].append(write_shards(args.out, number, source, tokenizer, eot_id, args))
            write_whole(Path(args.out) / "meta.json", json.dumps(meta, indent=1).encode())
    print_summary(args.out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
