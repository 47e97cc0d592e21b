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
import base64
import errno
import glob
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import tokenize
from collections import Counter, deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm

try:
    import splintr
    FAST = "splintr"
except ImportError:  # tiktoken gives the same ids in three times the time
    FAST = "tiktoken"

FORMAT = 1
SPLITS = ("train", "val")
EOT = "<|endoftext|>"          # SmolLM2's end of text, id 0
MAX_VOCAB_SIZE = 65_536        # ids are stored as uint16
BATCH_DOCUMENTS = 256          # documents encoded at a time ...
BATCH_BYTES = 4 << 20          # ... or fewer, if they are long: memory must not grow with the documents
DOWNLOAD_TRIES = 6             # tries in a row without a new byte
DOWNLOAD_TIMEOUT = (10, 30)    # seconds to connect, and of silence
BLOCK_SIZES = (256, 512, 1024, 2048, 4096)  # of the summary
REPAIR = "run the same prepare.py command again to repair it"
# The paper's corpus and the base model's tokenizer (not an instruct one's), pinned: ids are these bytes' ids.
FINEWEB_EDU = ("hf://datasets/HuggingFaceTB/smollm-corpus@3ba9d605774198c5868892d7a8deda78031a781f/"
               "fineweb-edu-dedup/train-{:05d}-of-00234.parquet")
FINEWEB_EDU_SHARDS, FINEWEB_EDU_BYTES = 234, 2_350_000_000  # files, and bytes of one of them (about)
SMOLLM2 = "HuggingFaceTB/SmolLM2-1.7B@effd688a12921b4cc83e3312b6feb579f70f9c71"


# ----------------------------------------------------------------------------------------------------------------------
# Where documents come from: each reader yields (id or None, text as str or bytes, or None)

def find_sources(source, shards=None):
    """Return the names of the source files that --source means, in order; of them A to B - 1 for shards "A:B".

    A name is "stdlib VERSION", a path, an http(s):// URL, or hf://[datasets/]OWNER/REPOSITORY@REVISION/PATH. A .txt
    file is one document, so all those of a glob that ends in .txt together make one source.
    Raises FileNotFoundError if nothing matches, ValueError for a kind of file that no reader knows.
    """
    names = [source] if "://" in source else local_files(source)
    if source == "stdlib":
        names = [f"stdlib {sys.version.split()[0]}"]
    elif source == "fineweb-edu":
        names = [FINEWEB_EDU.format(number) for number in range(FINEWEB_EDU_SHARDS)]
    elif not names:
        raise FileNotFoundError(f"--source={source}: no such file; expected stdlib, fineweb-edu, a path, a quoted glob "
                                "or a URL")
    elif "://" not in source and source.endswith(".txt"):
        names = [source]
    for name in names:
        find_reader(name)
    first, last = map(int, shards.split(":")) if shards else (0, len(names))
    if not first < last <= len(names):
        raise ValueError(f"--shards={shards}: expected A:B with 0 <= A < B <= {len(names)}, the number of source files")
    return names[first:last]


def local_files(source):
    """Return the sorted paths of the local files that a path or glob means."""
    if Path(source).is_file():
        return [source]
    return sorted(filter(os.path.isfile, glob.glob(source, recursive=True)))


def read_stdlib(file, text_column, id_column):
    """Yield the running Python's own library: one document a source file (tests and site-packages left out), and one
    a topic of pydoc's help."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skip & set(name.parts):
            try:
                with tokenize.open(path) as source:  # honours a source file's own encoding line
                    yield f"lib/{name.as_posix()}", source.read()
            except (SyntaxError, UnicodeDecodeError):
                yield f"lib/{name.as_posix()}", None
    from pydoc_data.topics import topics
    for name, text in sorted(topics.items()):
        yield f"pydoc/{name}", text


def read_parquet(file, text_column, id_column):
    """Yield (id or None, text as bytes or None) of each row. Raises ValueError if there is no text column."""
    # Else the whole column of a row group, which may be all of a 2.3 GB file, would be in memory.
    file = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    if text_column not in file.schema_arrow.names:
        raise ValueError(f"no column {text_column!r}; --text_column can be {', '.join(file.schema_arrow.names)}")
    columns = [text_column] + [id_column] * (id_column in file.schema_arrow.names)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group)
        n = BATCH_BYTES * rows.num_rows // (rows.total_byte_size + 1)
        for batch in file.iter_batches(min(max(n, 1), 1024), [group], columns):
            # As bytes: a column of strings may hold bytes that are not UTF-8, and one bad row must not cost the others.
            texts = batch.column(text_column).cast(pa.large_binary()).to_pylist()
            yield from zip(batch.column(id_column).to_pylist() if len(columns) == 2 else itertools.repeat(None), texts)


def read_jsonl(file, text_column, id_column):
    """Yield (id or None, text) of each line. Raises ValueError, naming the line, for one that is no object with a text."""
    with io.BufferedReader(pa.input_stream(file), 1 << 20) as lines:  # Arrow decompresses .gz and .zst
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig", "replace"))
                    yield row.get(id_column), row[text_column]
                except (ValueError, KeyError, AttributeError, RecursionError) as error:
                    raise ValueError(f"line {number}: expected an object with {text_column!r} ({error!r})") from None


def read_txt(file, text_column, id_column):
    for path in local_files(file):
        yield Path(path).name, Path(path).read_bytes()


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".jsonl.gz": read_jsonl, ".jsonl.zst": read_jsonl,
           ".txt": read_txt}


def find_reader(name):
    """Return the reader of a source by the end of its name. Raises ValueError for a kind that none knows."""
    if name.startswith("stdlib "):
        return read_stdlib
    for ending, reader in READERS.items():
        if (urlsplit(name).path if "://" in name else name).endswith(ending):
            return reader
    raise ValueError(f"{name}: expected a name that ends in {', '.join(READERS)}")


def read_rows(name, file, text_column, id_column):
    """Yield the rows of the source called name (see find_sources), which is at file, a path or an open file, in order.

    Raises ValueError, with the name, if it cannot be read.
    """
    try:
        yield from find_reader(name)(file, text_column, id_column)
    except (pa.ArrowException, OSError, ValueError) as error:
        size = f"{os.path.getsize(file):,} bytes, " if isinstance(file, str) and os.path.isfile(file) else ""
        raise ValueError(f"{name}: {size}cannot be read: {first_line(error)}; replace it and run again") from None


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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

def fetch(name, downloads, keep, in_part=False):
    """Return a source as a local path, downloaded if need be; or as an open remote file, if a part of it will do.

    huggingface_hub does all that concerns the hub: its cache, mirror, token and offline variables, retries, resuming.
    A download goes to the directory downloads, or with keep to the hub's own cache.
    """
    if name.startswith(("http://", "https://")):
        return download(name, Path(downloads) / Path(urlsplit(name).path).name)
    if not name.startswith("hf://"):
        return name
    match = re.fullmatch(r"hf://(datasets/)?([^/@]+/[^/@]+)@([^/]+)/(.+)", name)
    if not match:
        raise ValueError(f"{name}: expected hf://[datasets/]OWNER/REPOSITORY@REVISION/PATH")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub as hub
    where = dict(repo_id=match[2], filename=match[4], revision=match[3], repo_type="dataset" if match[1] else "model")
    try:
        if isinstance(cached := hub.try_to_load_from_cache(**where), str):
            return cached
        if in_part and name.endswith(".parquet"):
            return hub.HfFileSystem().open(name, block_size=1 << 20)
        return hub.hf_hub_download(**where, local_dir=None if keep else downloads)
    except Exception as error:  # the hub's, httpx's and the system's own kinds, all the network's or the user's
        raise ValueError(f"{name}: cannot be fetched: {first_line(error)}") from None


def download(url, path):
    """Fetch a URL to a path, which exists only when it is whole; return it as str. Goes on where an earlier try ended.

    Waits and tries again after 408, 429 and 5xx (as long as Retry-After says), a broken body, or 30 s of silence.
    Raises ValueError after DOWNLOAD_TRIES in a row without a new byte, or for another sha256 than the server gives.
    """
    import requests
    from urllib3.util import Retry
    path.parent.mkdir(parents=True, exist_ok=True)
    part, validator = path.with_name(path.name + ".part"), path.with_name(path.name + ".etag")
    if path.exists():
        path.replace(part)  # whole, or cut short by something else? The server will say
    session, tries, most, total, sha256, failure = requests.Session(), 0, -1, None, None, None
    session.mount(f"{urlsplit(url).scheme}://", requests.adapters.HTTPAdapter(max_retries=Retry(
        DOWNLOAD_TRIES, connect=0, read=0, backoff_factor=0.5, backoff_jitter=0.5,
        status_forcelist=(408, 429, 500, 502, 503, 504))))
    while (size := part.stat().st_size if part.exists() else 0) != total:
        tries, most = (0, size) if size > most else (tries + 1, most)
        if tries == DOWNLOAD_TRIES:
            raise ValueError(f"{url}: cannot be fetched, {tries} tries in a row brought nothing: {failure}")
        time.sleep(min(2**tries - 1, 30))
        headers = {"Accept-Encoding": "identity"}  # some servers drop Range where they compress
        if size:
            headers["Range"] = f"bytes={size}-"
            if validator.exists():
                headers["If-Range"] = validator.read_text()  # if the file changed meanwhile, the answer is all of it
        try:
            with session.get(url, headers=headers, stream=True, timeout=DOWNLOAD_TIMEOUT) as answer:
                span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", answer.headers.get("Content-Range", ""))
                resumed = answer.status_code == 206 and span and span[1] == str(size)
                if answer.status_code == 416 and span and span[2] == str(size):
                    sha256 = find_sha256(session.head(url, timeout=DOWNLOAD_TIMEOUT, allow_redirects=True).headers)
                    break
                if answer.status_code in (206, 416) and not resumed:
                    part.unlink(missing_ok=True)
                    raise requests.ConnectionError(f"answer {answer.status_code} does not fit what was asked for")
                answer.raise_for_status()
                total = int(span[2]) if resumed else int(answer.headers.get("Content-Length", -1))
                sha256 = find_sha256(answer.headers)
                if not resumed:
                    validator.write_text(answer.headers.get("ETag") or answer.headers.get("Last-Modified", ""))
                with open(part, "ab" if resumed else "wb") as file:
                    for chunk in answer.iter_content(1 << 16):  # a chunk that breaks is lost
                        file.write(chunk)
                if total == -1:  # no length was given, and the body ended as a body should
                    break
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            failure = first_line(error)
            print(f"{url}: {failure}; trying again", file=sys.stderr)
        except requests.RequestException as error:
            raise ValueError(f"{url}: cannot be fetched: {first_line(error)}") from None
    if sha256 and sha256 != sha256_of(part):
        part.unlink()
        raise ValueError(f"{url}: what came has not the sha256 that the server gives ({sha256}); run again")
    validator.unlink(missing_ok=True)
    return str(part.replace(path))


def find_sha256(headers):
    """Return the sha256 (hexadecimal) of the whole file if an HTTP answer's headers give it, else None."""
    if match := re.search(r"sha-256=:?([A-Za-z0-9+/]{43}=)", headers.get("Repr-Digest", headers.get("Digest", ""))):
        return base64.b64decode(match[1]).hex()
    match = re.fullmatch(r'"([0-9a-f]{64})"', headers.get("ETag", ""))  # as the Hugging Face hub does for large files
    return match and match[1]


def sha256_of(*paths):
    """Return the sha256 (hexadecimal) of the contents of files, one after another."""
    sha256 = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    return sha256.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer

class Utf16:
    """The predecessor's character-level regime: ids are a text's UTF-16 code units, so V = 65,536 and nothing is lost.

    The end of text is U+FFFF, which Unicode keeps free of characters; a document that holds it is skipped and counted.
    In a data directory it is the tokenizer.json UTF16_JSON, so that later stages load it as they load any other.
    """
    eot_id = 0xFFFF

    def encode(self, text, add_special_tokens=False):
        return SimpleNamespace(ids=np.frombuffer(text.encode("utf-16-le"), "<u2").tolist())

    def encode_batch_fast(self, texts, add_special_tokens=False):
        return [self.encode(text) for text in texts]

    def decode(self, ids, skip_special_tokens=True):
        ids = [i for i in ids if not (skip_special_tokens and i == self.eot_id)]
        return np.array(ids, "<u2").tobytes().decode("utf-16-le", "replace")


UTF16_JSON = b'{"model": {"type": "utf16"}}'


def train_tokenizer(texts, vocab_size):
    """Return a byte-level BPE Tokenizer of up to vocab_size ids trained on texts: id 0 is the end of text, then 256
    bytes, then merges; single digits are split, as SmolLM2's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty()))
    return tokenizer


def load_tokenizer(path):
    """Return the Tokenizer (or Utf16) of a tokenizer.json, set to encode text as ordinary text, whole and unpadded.

    Raises FileNotFoundError, or ValueError if its ids do not fit in uint16 or it is not a byte-level BPE.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such tokenizer file")
    if Path(path).read_bytes() == UTF16_JSON:
        return Utf16()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a tokenizer.json ({first_line(error)})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if (size := vocab_size(tokenizer)) > MAX_VOCAB_SIZE:
        raise ValueError(f"{path}: {size:,} ids; expected at most {MAX_VOCAB_SIZE:,}, since ids are stored as uint16")
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise ValueError(f"{path}: expected a byte-level BPE (its decoder is {type(tokenizer.decoder).__name__})")
    return tokenizer


def vocab_size(tokenizer):
    """Return the highest id + 1, added tokens included: the rows that a table or a head needs."""
    if isinstance(tokenizer, Utf16):
        return MAX_VOCAB_SIZE
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def token_bytes(tokenizer):
    """Return how many bytes of UTF-8 text each id stands for: int64 [V]; special tokens stand for none."""
    if isinstance(tokenizer, Utf16):  # a surrogate is half of a character of 4 bytes; U+FFFF is the end of text
        return np.repeat([1, 2, 3, 2, 3, 0], np.diff([0, 0x80, 0x800, 0xD800, 0xE000, 0xFFFF, 0x10000]))
    sizes = np.zeros(vocab_size(tokenizer), np.int64)
    for token, i in tokenizer.get_vocab(with_added_tokens=False).items():
        sizes[i] = len(token)  # the byte-level alphabet writes each byte as one character
    for i, added in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = 0 if added.special else len(added.content.encode())
    return sizes


def find_eot(tokenizer):
    """Return the id that ends each document. Raises ValueError if the tokenizer has none."""
    if isinstance(tokenizer, Utf16):
        return tokenizer.eot_id
    for token in (EOT, "<|end_of_text|>", "</s>", "<eos>"):
        if (i := tokenizer.token_to_id(token)) is not None:
            return i
    raise ValueError(f"the tokenizer has no end-of-text token (such as {EOT})")


def find_tokenizer(name, out, train_texts):
    """Return the path of the tokenizer.json that --tokenizer names.

    Args:
        name: train:N (trained on train_texts() and written to out), utf16 (written to out), a path, or a Hugging Face
            OWNER/REPOSITORY@REVISION.
    """
    if name.startswith("train:") or name == "utf16":
        path, size = Path(out) / "tokenizer.json", name.removeprefix("train:")
        if name != "utf16" and not (size.isdigit() and 257 < int(size) <= MAX_VOCAB_SIZE):
            raise ValueError(f"--tokenizer={name}: expected train:N with N from 258 to {MAX_VOCAB_SIZE}")
        if not (Path(out) / "meta.json").exists():  # else it is the one that made the shards there
            if name != "utf16":
                print(f"training a byte-level BPE tokenizer of {size} ids on the train documents", flush=True)
            write_whole(path, UTF16_JSON if name == "utf16" else
                        train_tokenizer(train_texts(), int(size)).to_str(pretty=True).encode())
        return path
    if name.endswith(".json") or Path(name).exists():
        return Path(name)
    if not re.fullmatch(r"[^/@]+/[^/@]+@[^/@]+", name):
        raise ValueError(f"--tokenizer={name}: no such file; expected train:N, utf16, a tokenizer.json, or "
                         f"OWNER/REPOSITORY@REVISION such as {SMOLLM2}")
    return Path(fetch(f"hf://{name}/tokenizer.json", out, keep=True))


# ----------------------------------------------------------------------------------------------------------------------
# The same ids, faster: splintr, or else tiktoken, in place of tokenizers wherever that provably changes nothing

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's byte-level alphabet: these are themselves,
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]    # and these are U+0100 and up
BYTES = {chr(byte): byte for byte in PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(OTHERS)}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
# Pre-tokenizers, and the one regular expression that cuts as they do. Words come first, since most cuts are words, and what
# needs no look-ahead is one group, which tiktoken's engine hands to its faster half.
PATTERNS = [
    ([BYTE_LEVEL], r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"),
    # Where Digits has cut, ByteLevel sees an end of text: so a digit ends a run of spaces as the end would.
    ([DIGITS, BYTE_LEVEL], r"(?: ?\p{L}+|'(?:[sdmt]|ll|ve|re)|\p{N}| ?[^\s\p{L}\p{N}]+)|\s+(?![^\s\p{N}])|\s+"),
]


def find_twin(tokenizer):
    """Return (pattern, ranks bytes -> id) with which tiktoken and splintr give exactly the ids of a Tokenizer.

    They join any two neighbours that together are a token, lowest id first; tokenizers joins the two that a merge
    names, first merge first. That is the same if (1) ids rise in the order of the merges, each of which makes a token
    of its own out of bytes and earlier tokens, and (2) every token, alone, is encoded as itself. For take the first
    join where they differ: neighbours x y make token t, whose merge is a b. Nothing has been joined across the ends of
    t, so within them all is as if t stood alone, and then by (2) what stands there is a b.

    Bytes without a token (SmolLM2 has 21) get ids over 65,535; make_encoder leaves texts that have such to tokenizers.
    Raises ValueError, saying what stands in the way.
    """
    spec = json.loads(tokenizer.to_str())
    model, step = spec["model"], spec["pre_tokenizer"] or {}
    steps = [{k: v for k, v in step.items() if k != "trim_offsets"} for step in step.get("pretokenizers", [step])]
    pattern = next((pattern for shape, pattern in PATTERNS if shape == steps), None)
    if pattern is None:
        raise ValueError("another pre-tokenizer than ByteLevel, or Digits and ByteLevel")
    if spec["normalizer"] or any(not token["special"] for token in spec["added_tokens"]):
        raise ValueError("a normalizer, or added tokens that are not special")
    if model["type"] != "BPE" or any(map(model.get, ("dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                                     "ignore_merges"))):
        raise ValueError("another model than plain BPE")
    ranks, last = {token: model["vocab"][token] for token in BYTES if token in model["vocab"]}, -1
    for a, b in model["merges"]:
        if a not in ranks or b not in ranks or model["vocab"][a + b] <= last:
            raise ValueError(f"a merge out of order, {a!r} and {b!r}")
        last = ranks[a + b] = model["vocab"][a + b]
    for token, i in ranks.items():
        if [part.id for part in tokenizer.model.tokenize(token)] != [i]:
            raise ValueError(f"a token not encoded as itself, {token!r}")
    twin = pattern, {bytes([byte]): MAX_VOCAB_SIZE + byte for byte in range(256)} | {
        bytes(BYTES[character] for character in token): i for token, i in ranks.items()}
    # What the proof takes for granted: that the libraries mean the same by a letter, a digit and a space.
    plain, fast = make_encoder(tokenizer), make_encoder(tokenizer, twin)
    for start in range(0, 0x3400, 64):
        block = "".join(map(chr, range(start, start + 64)))
        if not np.array_equal(plain(text := f"{block} a1 {block[::-1]}"), fast(text)):
            raise ValueError(f"other ids in {FAST} for characters from U+{start:04X}")
    return twin


def make_encoder(tokenizer, twin=None):
    """Return the function from a text to its ids, an integer array, or None for a text that has no ids (see Utf16)."""
    if isinstance(tokenizer, Utf16):
        return lambda text: np.frombuffer(text.encode("utf-16-le"), "<u2") if "\uffff" not in text else None

    def plain(text):  # encode_batch_fast, because encode also finds each token's place in the text
        return np.array(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.uint32)

    if twin is None:
        return plain
    pattern, ranks = twin
    if FAST == "splintr":
        lines = b"".join(b"%s %d\n" % (base64.b64encode(token), i) for token, i in ranks.items())
        engine = splintr.Tokenizer.from_bytes(lines, pattern, {})
        encode = lambda text: np.frombuffer(engine.encode_flat(text), np.uint32)
    else:
        encode = tiktoken.Encoding("twin", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}).encode_to_numpy

    def fast(text):
        """Return the ids by the fast engine, or by tokenizers where that cannot or has ids that it should not."""
        try:
            ids = encode(text)
        except ValueError:  # tiktoken's regular expressions give up on some hundred thousand spaces in a row
            return plain(text)
        return ids if ids.max(initial=0) < MAX_VOCAB_SIZE else plain(text)  # tokenizers drops a byte without a token
    return fast


# ----------------------------------------------------------------------------------------------------------------------
# Worker processes: rows in, token ids out

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


def encode_in_order(jobs, workers, settings):
    """Yield (number, encode_batch(rows), end) for each (number, rows, end), in order; few are on their way at a time."""
    if workers == 1:
        start_worker(*settings)
        yield from ((number, encode_batch(rows), end) for number, rows, end in jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("forkserver"), start_worker, settings) as pool:
        pending = deque()
        for number, rows, end in jobs:
            pending.append((number, pool.submit(encode_batch, rows), end))
            if len(pending) > 2 * workers + 2:
                number, result, end = pending.popleft()
                yield number, result.result(), end
        for number, result, end in pending:
            yield number, result.result(), end


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


def source_facts(file):
    """Return what meta.json keeps of a source: its size and sha256, or None for what is not a local file."""
    paths = local_files(file) if isinstance(file, str) else []
    return {"size": sum(map(os.path.getsize, paths)) if paths else None, "sha256": sha256_of(*paths) if paths else None}


def fetch_ahead(names, args):
    """Yield (file, source_facts(file)) or (the error, None) for each source, while the next one is being fetched."""
    ready = queue.Queue(1)

    def work():
        """Put every source into the queue, an error in its place; wait while the one before has not been taken."""
        for name in names:
            try:
                file = fetch(name, f"{args.out}/downloads", args.keep_downloads, args.max_documents is not None)
                ready.put((file, source_facts(file)))
            except Exception as error:
                ready.put((error, None))

    threading.Thread(target=work, daemon=True).start()  # a daemon: an error elsewhere must not wait for a download
    for _ in names:
        yield ready.get()


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
        for number, (left_out, sides), end in encode_in_order(jobs, args.workers, settings):
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


def count_rows(meta, args):
    """Return how many rows are still to be read, for the progress bar; None where only reading them all would tell."""
    names = [name for name, shard in zip(meta["sources"], meta["shards"]) if not shard]
    if args.max_documents:
        return args.max_documents - sum(shard[split]["documents"] for shard in meta["shards"] if shard for split in SPLITS)
    if not all(name.endswith(".parquet") and "://" not in name for name in names):
        return None
    try:
        return sum(pq.read_metadata(name).num_rows for name in names)
    except (pa.ArrowException, OSError):
        return None  # read_rows will say which and why


# ----------------------------------------------------------------------------------------------------------------------
# Reading

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


def check_space(meta, args):
    """Raise ValueError if the disk cannot hold what is to come, by a low estimate: half the bytes of a local source; of
    the paper's corpus 0.8 bytes of ids a byte, and three shards (with --keep_downloads all) downloaded at a time."""
    local = sum(map(os.path.getsize, itertools.chain(*map(local_files, meta["sources"]))))
    remote = len(meta["sources"]) * (args.source == "fineweb-edu")
    need = local / 2 + FINEWEB_EDU_BYTES * (0.8 * remote + (remote if args.keep_downloads else min(remote, 3)))
    if need > (free := shutil.disk_usage(args.out).free):
        raise ValueError(f"{args.out}: {free / 1e9:.1f} GB free, at least {need / 1e9:.1f} GB needed; give another "
                         "--out, or take fewer files with --shards")


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
