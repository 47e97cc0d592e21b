"""Where documents come from: readers, downloads, the hub, disk space."""

import base64
import glob
import io
import itertools
import json
import os
import queue
import re
import shutil
import sys
import sysconfig
import threading
import time
import tokenize
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from machinery.files import first_line, sha256_of
from machinery.shards import SPLITS

BATCH_BYTES = 4 << 20          # ... or fewer, if they are long: memory must not grow with the documents

DOWNLOAD_TRIES = 6             # tries in a row without a new byte

DOWNLOAD_TIMEOUT = (10, 30)    # seconds to connect, and of silence

# The paper's corpus and the base model's tokenizer (not an instruct one's), pinned: ids are these bytes' ids.
FINEWEB_EDU = ("hf://datasets/HuggingFaceTB/smollm-corpus@3ba9d605774198c5868892d7a8deda78031a781f/"
               "fineweb-edu-dedup/train-{:05d}-of-00234.parquet")

FINEWEB_EDU_SHARDS, FINEWEB_EDU_BYTES = 234, 2_350_000_000  # files, and bytes of one of them (about)


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


def check_space(meta, args):
    """Raise ValueError if the disk cannot hold what is to come, by a low estimate: half the bytes of a local source; of
    the paper's corpus 0.8 bytes of ids a byte, and three shards (with --keep_downloads all) downloaded at a time."""
    local = sum(map(os.path.getsize, itertools.chain(*map(local_files, meta["sources"]))))
    remote = len(meta["sources"]) * (args.source == "fineweb-edu")
    need = local / 2 + FINEWEB_EDU_BYTES * (0.8 * remote + (remote if args.keep_downloads else min(remote, 3)))
    if need > (free := shutil.disk_usage(args.out).free):
        raise ValueError(f"{args.out}: {free / 1e9:.1f} GB free, at least {need / 1e9:.1f} GB needed; give another "
                         "--out, or take fewer files with --shards")
