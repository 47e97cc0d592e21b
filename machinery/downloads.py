"""Files by URL or from the Hugging Face hub, under their name only when they are whole.

sources.py and tokenizer.py fetch with it.
"""

import base64
import hashlib
import os
import re
import sys
import time
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from machinery.errors import first_line
from machinery.files import NO_PLACE, sha256_of

DOWNLOAD_TRIES = 6  # tries in a row without a new byte
DOWNLOAD_TIMEOUT = (10, 30)  # seconds to connect, and of silence
MOST_WAIT = 600  # seconds that a server may ask for
REVISION = r"(refs/(?:convert|pr)/[^/@]+|[^/@]+)"
HUB_NAME = re.compile(rf"hf://(datasets/)?([^/@]+/[^/@]+)@{REVISION}/(.+)")
FIRST_BYTES = {".parquet": b"PAR1", ".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd",
               ".jsonl": b"{"}


def fetch(name, downloads, keep, in_part=False):
    """Return a source as a local path, downloaded if need be.

    Or as an open remote file, if a part of it will do. huggingface_hub does all that concerns the
    hub: its cache, mirror, token and offline variables, retries, resuming. A download goes to the
    directory downloads, or with keep to the hub's own cache.
    """
    if name.startswith(("http://", "https://")):
        return download(name, Path(downloads) / Path(urlsplit(name).path).name)
    if not name.startswith("hf://"):
        return name
    kind, repository, revision, path = parse_hub_name(name)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub as hub
    where = {"repo_id": repository, "filename": path, "revision": revision,
             "repo_type": kind}
    try:
        cached = hub.try_to_load_from_cache(**where)
        if isinstance(cached, str):
            return cached
        if in_part and name.endswith(".parquet"):
            folder = "datasets/" if kind == "dataset" else ""
            name_there = f"{folder}{repository}@{quote(revision, safe='')}/{path}"
            return hub.HfFileSystem().open(name_there, block_size=1 << 20)
        return hub.hf_hub_download(**where, local_dir=None if keep else downloads)
    except Exception as error:  # the hub's, httpx's and the system's: the network's or the user's
        if getattr(error, "errno", None) in NO_PLACE:  # in HF_HOME, the hub's cache
            raise
        raise ValueError(f"{name}: cannot be fetched: {first_line(error)}") from None


def parse_hub_name(name):
    """Return (kind of repository, OWNER/REPOSITORY, revision, path) of an hf:// name."""
    match = HUB_NAME.fullmatch(name)
    if not match:
        raise ValueError(f"{name}: expected hf://[datasets/]OWNER/REPOSITORY@REVISION/PATH")
    folder, repository, revision, path = match.groups()
    # As others spell it: with %2F for the slash, and ~parquet for the hub's own conversion.
    revision = re.sub("^~", "refs/convert/", unquote(revision))
    return "dataset" if folder else "model", repository, revision, path


def download(url, path):
    """Fetch a URL to a path, which exists only when it is whole; return it as str.

    Goes on where an earlier try ended, if the server still has that version (its name is kept in
    path.etag). Waits and tries again after 408, 429 and 5xx (as long as Retry-After says), a broken
    body, or 30 s of silence. Raises ValueError after DOWNLOAD_TRIES in a row without a new byte, if
    the server asks to wait longer than MOST_WAIT, for another sha256 than the server gives, or for
    what is no file of the kind that its name says.
    """
    import requests
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    validator = path.with_name(path.name + ".etag")
    if path.exists():
        path.replace(part)  # whole, or cut short by something else? The server will say
    session = requests.Session()
    tries, most, total, sha256 = 0, -1, None, None
    while size_of(part) != total:
        most = max(most, size_of(part))
        try:
            total, sha256 = request_rest(session, url, part, validator)
            continue
        except requests.RequestException as error:
            failure, wait = first_line(error), wait_after(error)
        if wait is None:
            raise ValueError(f"{url}: cannot be fetched: {failure}")
        if wait > MOST_WAIT:
            raise ValueError(f"{url}: cannot be fetched: {failure}; the server asks to wait "
                             f"{wait:,.0f} s; run again then")
        tries = 1 if size_of(part) > most else tries + 1
        if tries == DOWNLOAD_TRIES:
            raise ValueError(f"{url}: cannot be fetched, {tries} tries in a row brought nothing: "
                             f"{failure}")
        wait = max(wait, min(2**tries - 1, 30))
        print(f"{url}: {failure}; trying again in {wait:.0f} s", file=sys.stderr, flush=True)
        time.sleep(wait)
    if sha256 and sha256 != sha256_of(part):
        part.unlink()
        raise ValueError(f"{url}: what came has not the sha256 that the server gives ({sha256}); "
                         "run again")
    check_kind(url, part, path.name)
    return str(part.replace(path))


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def wait_after(error):
    """Return the seconds to wait at least before a request that failed so is tried again.

    None if it would fail again.
    """
    import requests
    from urllib3.exceptions import InvalidHeader
    from urllib3.util import Retry
    if isinstance(error, (requests.ConnectionError, requests.Timeout)):
        return 0
    answer = error.response
    if answer is None or answer.status_code not in (408, 429, 500, 502, 503, 504):
        return None
    try:
        return Retry().parse_retry_after(answer.headers.get("Retry-After", "0"))
    except InvalidHeader:
        return 0


def request_rest(session, url, part, validator):
    """Append to the file part what it lacks of a URL; return (size, sha256 or None) of the whole.

    The file validator keeps the server's name of the version that part is of. Where that is not
    known, or the server has another by now, or does not know parts, part becomes all that it sends.
    Raises requests' errors.
    """
    import requests
    from urllib3.exceptions import HTTPError
    headers = {"Accept-Encoding": "identity"}  # some servers drop Range where they compress
    size = size_of(part)
    version = validator.read_text(encoding="utf-8") if validator.exists() else ""
    if size and version:
        headers["Range"] = f"bytes={size}-"
        headers["If-Range"] = version  # if it changed meanwhile, all of it comes
    with session.get(url, headers=headers, stream=True, timeout=DOWNLOAD_TIMEOUT) as answer:
        content_range = answer.headers.get("Content-Range", "")
        span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", content_range)
        version_now = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
        resumed = (answer.status_code == 206 and span and span[1] == str(size)
                   and version_now in ("", version))
        if answer.status_code == 416 and span and span[2] == str(size):  # it was whole
            head = session.head(url, timeout=DOWNLOAD_TIMEOUT, allow_redirects=True)
            return size, find_sha256(head.headers)
        if answer.status_code in (206, 416) and not resumed:
            part.unlink(missing_ok=True)
            raise requests.ConnectionError(
                f"answer {answer.status_code} does not fit what was asked for")
        answer.raise_for_status()
        if not resumed:
            part.unlink(missing_ok=True)  # before its version gets the name of another
            validator.write_text(version_now, encoding="utf-8")
        try:
            with open(part, "ab") as file:
                # As stored: a server may say of a .gz file that its content is encoded so.
                for chunk in answer.raw.stream(1 << 16, decode_content=False):
                    file.write(chunk)
        except HTTPError as error:  # a chunk that breaks is lost
            raise requests.ConnectionError(first_line(error)) from None
        total = span[2] if resumed else answer.headers.get("Content-Length")
        # Without a length the body ended as a body should, so this is all.
        return size_of(part) if total is None else int(total), find_sha256(answer.headers)


def check_kind(url, path, name):
    """Delete what was downloaded and raise ValueError unless it is a file as its name says.

    A server may answer with a page, such as one to log in.
    """
    ending = next((ending for ending in FIRST_BYTES if name.endswith(ending)), "")
    with open(path, "rb") as file:
        first = file.read(1 << 16)
        file.seek(-min(4, size_of(path)), os.SEEK_END)
        last = file.read()
    if ending == ".jsonl":
        first = first.removeprefix(b"\xef\xbb\xbf").lstrip()
    expected = FIRST_BYTES.get(ending, b"")
    if not first.startswith(expected) or (ending == ".parquet" and last != expected):
        path.unlink()
        raise ValueError(f"{url}: what came is no {ending} file: it begins with {first[:20]!r}")


def find_sha256(headers):
    """Return the whole file's sha256 (hexadecimal) if an HTTP answer's headers give it, or None."""
    digest = headers.get("Repr-Digest", headers.get("Digest", ""))
    match = re.search(r"sha-256=:?([A-Za-z0-9+/]{43}=)", digest)
    if match:
        return base64.b64decode(match[1]).hex()
    match = re.fullmatch(r'"([0-9a-f]{64})"', headers.get("ETag", ""))  # the hub's large files
    return match and match[1]


def discard(name, file, downloads):
    """Delete the file that fetch brought for a source, unless it lies elsewhere than in downloads.

    Elsewhere are the user's own files and the hub's cache.
    """
    fetched = "://" in name and isinstance(file, str)
    if fetched and Path(file).resolve().is_relative_to(Path(downloads).resolve()):
        os.remove(file)
        Path(f"{file}.etag").unlink(missing_ok=True)


def check_hub_file(name, file, digest):
    """Raise ValueError if a file from the hub has not the hash that the hub gave for it.

    The hub's cache names a large file after it; beside a folder that it filled are notes. Of small
    files (tokenizer.json may be one) it gives git's hash.

    Args: digest, the file's own sha256.
    """
    if not name.startswith("hf://") or not isinstance(file, str):
        return
    expected = Path(file).resolve().name
    for folder in Path(file).parents:
        note = (folder / ".cache/huggingface/download" / Path(file).relative_to(folder))
        note = note.with_name(note.name + ".metadata")
        if note.is_file():
            expected = note.read_text(encoding="utf-8").splitlines()[1]
    if re.fullmatch("[0-9a-f]{40}", expected):
        data = Path(file).read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", expected) and digest != expected:
        raise ValueError(f"{name}: {file} has not the hash that the hub gives ({expected}); "
                         "delete it and run again")
