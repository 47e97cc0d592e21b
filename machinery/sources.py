"""Where documents come from: what --source names, a reader for each kind of file, their sizes.

To add a kind of file: a reader, and its line in READERS. prepare.py reads with it.
"""

import codecs
import glob
import io
import itertools
import json
import os
import queue
import shutil
import sys
import sysconfig
import threading
import tokenize
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from machinery.downloads import check_hub_file, fetch
from machinery.errors import first_line, is_refusal
from machinery.files import changed_since, sha256_of
from machinery.shards import count_documents

BATCH_BYTES = 4 << 20  # of a batch of documents: memory must not grow with them
# The paper's corpus, pinned: ids are these bytes' ids.
FINEWEB_EDU = ("hf://datasets/HuggingFaceTB/smollm-corpus@3ba9d605774198c5868892d7a8deda78031a781f/"
               "fineweb-edu-dedup/train-{:05d}-of-00234.parquet")
FINEWEB_EDU_SHARDS = 234
FINEWEB_EDU_BYTES = 2_350_000_000  # of one of them, about
ENCODINGS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le",
             codecs.BOM_UTF32_BE: "utf-32-be", codecs.BOM_UTF16_LE: "utf-16-le",
             codecs.BOM_UTF16_BE: "utf-16-be"}  # in this order: some begin as others do
NOT_TEXT = False  # in place of a text, to be counted as such
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data",
               "__pycache__"}


def find_sources(source, shards=None):
    """Return the names of the source files that --source means, in order.

    Of them A to B - 1 for shards "A:B". A name is "stdlib VERSION", a path, an http(s):// URL, or
    hf://[datasets/]OWNER/REPOSITORY@REVISION/PATH. A .txt file is one document, so all those of a
    glob that ends in .txt together make one source. Raises FileNotFoundError if nothing matches,
    ValueError for a kind of file that no reader knows.
    """
    names = [source] if "://" in source else local_files(source)
    if source == "stdlib":
        names = [f"stdlib {sys.version.split()[0]}"]
    elif source == "fineweb-edu":
        names = [FINEWEB_EDU.format(number) for number in range(FINEWEB_EDU_SHARDS)]
    elif not names:
        raise FileNotFoundError(f"--source={source}: no such file; expected stdlib, fineweb-edu, "
                                "a path, a quoted glob or a URL")
    elif "://" not in source and source.endswith(".txt"):
        names = [source]
    for name in names:
        find_reader(name)
    first, last = map(int, shards.split(":")) if shards else (0, len(names))
    if not first < last <= len(names):
        raise ValueError(f"--shards={shards}: expected A:B with 0 <= A < B <= {len(names)}, the "
                         "number of source files")
    return names[first:last]


def local_files(source):
    """Return the sorted paths of the local files that a path or glob means."""
    if Path(source).is_file():
        return [source]
    return sorted(filter(os.path.isfile, glob.glob(source, recursive=True)))


def read_stdlib(file, text_column, id_column):
    """Yield the running Python's own library: one document a source file and a topic of its help.

    Tests and site-packages are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if NOT_LIBRARY & set(name.parts):
            continue
        try:
            with tokenize.open(path) as source:  # honours a source file's own encoding line
                yield f"lib/{name.as_posix()}", source.read()
        except (SyntaxError, UnicodeDecodeError):
            yield f"lib/{name.as_posix()}", None
    from pydoc_data.topics import topics
    for name, text in sorted(topics.items()):
        yield f"pydoc/{name}", text


def read_parquet(file, text_column, id_column):
    """Yield (id or None, text as bytes or None) of each row.

    Raises ValueError if there is no text column.
    """
    # Else the whole column of a row group, which may be all of a 2.3 GB file, would be in memory.
    file = pq.ParquetFile(open_local(file), buffer_size=1 << 20, pre_buffer=False)
    names = file.schema_arrow.names
    if text_column not in names:
        raise ValueError(f"no column {text_column!r}; --text_column can be {', '.join(names)}")
    for column in (text_column, id_column):
        if names.count(column) > 1:
            raise ValueError(f"{names.count(column)} columns are called {column!r}; expected one "
                             "(--text_column, --id_column)")
    has_id = id_column in names
    columns = [text_column, id_column] if has_id else [text_column]
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group)
        n = BATCH_BYTES * rows.num_rows // (rows.total_byte_size + 1)
        for batch in file.iter_batches(min(max(n, 1), 1024), [group], columns):
            # As bytes: a column of strings may hold bytes that are not UTF-8, and one bad row must
            # not cost the others.
            texts = batch.column(text_column).cast(pa.large_binary()).to_pylist()
            ids = batch.column(id_column).to_pylist() if has_id else itertools.repeat(None)
            yield from zip(ids, texts)


def read_jsonl(file, text_column, id_column):
    """Yield (id or None, text) of each line.

    Raises ValueError, naming the line, for one that is no object with a text.
    """
    codec = {".gz": "gzip", ".zst": "zstd"}.get(Path(str(file)).suffix)
    stream = pa.input_stream(open_local(file), compression=codec)
    with io.BufferedReader(stream, 1 << 20) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig", "replace"))
                yield row.get(id_column), row[text_column]
            except (ValueError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"line {number}: expected an object with {text_column!r} "
                                 f"({error!r})") from None


def open_local(file):
    """Return a path as an Arrow file, even if its name is not UTF-8; an open file as it is."""
    return pa.OSFile(os.fsencode(file)) if isinstance(file, str) else file


def read_txt(file, text_column, id_column):
    """Yield (name, text) of each file of a path or glob: a file is a document.

    It is UTF-8 unless it begins with the mark of another encoding, as Windows writes it. What has
    many zero bytes is UTF-16 without a mark, or no text at all: NOT_TEXT.
    """
    for path in local_files(file):
        text = Path(path).read_bytes()
        mark = next((mark for mark in ENCODINGS if text.startswith(mark)), None)
        if mark:
            text = text[len(mark):].decode(ENCODINGS[mark], "replace")
        elif text[:1024].count(0) > len(text[:1024]) // 8:
            text = NOT_TEXT
        yield Path(path).name, text


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".jsonl.gz": read_jsonl,
           ".jsonl.zst": read_jsonl, ".txt": read_txt}


def find_reader(name):
    """Return the reader of a source by the end of its name.

    Raises ValueError for a kind that none knows.
    """
    if name.startswith("stdlib "):
        return read_stdlib
    path = urlsplit(name).path if "://" in name else name
    for ending, reader in READERS.items():
        if path.endswith(ending):
            return reader
    raise ValueError(f"{name}: expected a name that ends in {', '.join(READERS)}")


def read_rows(name, file, text_column, id_column):
    """Yield the rows (id or None, text as str or bytes, or None) of a source, in order.

    The source called name (see find_sources) is at file, a path or an open file. Raises ValueError,
    with the name, if it is damaged or not as expected, and OSError or MemoryError if the system
    failed to read it.
    """
    try:
        yield from find_reader(name)(file, text_column, id_column)
    except MemoryError:
        raise MemoryError(f"to read {name}") from None
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError) as error:
        raise ValueError(f"{name}: cannot be read: {first_line(error)}; expected text in the "
                         f"column {text_column!r} (--text_column)") from None
    except (pa.ArrowException, OSError, ValueError) as error:
        if is_refusal(error):
            raise OSError(error.errno, os.strerror(error.errno), name) from None
        is_file = isinstance(file, str) and os.path.isfile(file)
        size = f"{os.path.getsize(file):,} bytes, " if is_file else ""
        raise ValueError(f"{name}: {size}cannot be read: {first_line(error)}; replace it and run "
                         "again") from None


def source_facts(file):
    """Return what meta.json keeps of a source: its size and sha256; None unless it is local."""
    paths = local_files(file) if isinstance(file, str) else []
    if not paths:
        return {"size": None, "sha256": None}
    return {"size": sum(map(os.path.getsize, paths)), "sha256": sha256_of(*paths)}


def is_same_source(entry, since):
    """Return whether a source is still the file of its entry in meta.json, as far as can be seen.

    By its size, and by its sha256 if it was changed since a time (in ns).
    """
    paths = local_files(entry["source"])
    if not paths or entry["sha256"] is None:
        return True
    if sum(map(os.path.getsize, paths)) != entry["size"]:
        return False
    return not changed_since(since, *paths) or sha256_of(*paths) == entry["sha256"]


def fetch_ahead(names, args):
    """Yield (file, source_facts(file)) for each source, while the next one is being fetched.

    Raises, in a source's turn, what fetching it raised.
    """
    ready = queue.Queue(1)  # the thread waits while the source before has not been taken

    def fetch_all():
        for name in names:
            fetched = Future()
            try:
                file = fetch(name, f"{args.out}/downloads", args.keep_downloads,
                             in_part=args.max_documents is not None)
                facts = source_facts(file)
                check_hub_file(name, file, facts["sha256"])
                fetched.set_result((file, facts))
            except Exception as error:
                fetched.set_exception(error)
            ready.put(fetched)

    # A daemon: an error elsewhere must not wait for a download.
    threading.Thread(target=fetch_all, daemon=True).start()
    for _ in names:
        yield ready.get().result()


def count_rows(meta, args):
    """Return how many rows are still to be read, for the progress bar.

    None where only reading them all would tell.
    """
    if args.max_documents:
        return args.max_documents - sum(map(count_documents, filter(None, meta["shards"])))
    names = [name for name, shard in zip(meta["sources"], meta["shards"]) if not shard]
    if not all(name.endswith(".parquet") and "://" not in name for name in names):
        return None
    try:
        return sum(pq.read_metadata(open_local(name)).num_rows for name in names)
    except (pa.ArrowException, OSError):
        return None  # read_rows will say which and why


def check_space(meta, args):
    """Raise ValueError if the disk cannot hold what is to come, by a low estimate.

    Half the bytes of a local source; of the paper's corpus 0.8 bytes of ids a byte, and three
    shards (with --keep_downloads all) downloaded at a time.
    """
    todo = [name for name, entry in zip(meta["sources"], meta["shards"]) if not entry]
    local = itertools.chain.from_iterable(map(local_files, todo))
    local_bytes = sum(map(os.path.getsize, local))
    remote = len(todo) if args.source == "fineweb-edu" else 0
    downloaded = remote if args.keep_downloads else min(remote, 3)
    need = local_bytes / 2 + FINEWEB_EDU_BYTES * (0.8 * remote + downloaded)
    free = shutil.disk_usage(args.out).free
    if need > free:
        raise ValueError(f"{args.out}: {free / 1e9:.1f} GB free, at least {need / 1e9:.1f} GB "
                         "needed; give another --out, or take fewer files with --shards")
