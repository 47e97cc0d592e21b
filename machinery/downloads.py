"""Files by URL or from the Hugging Face hub, under their name only when they are whole.

sources.py and tokenizer.py fetch with it.
"""

import base64
import os
import re
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from machinery.files import first_line, sha256_of

DOWNLOAD_TRIES = 6  # tries in a row without a new byte
DOWNLOAD_TIMEOUT = (10, 30)  # seconds to connect, and of silence


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
    match = re.fullmatch(r"hf://(datasets/)?([^/@]+/[^/@]+)@([^/]+)/(.+)", name)
    if not match:
        raise ValueError(f"{name}: expected hf://[datasets/]OWNER/REPOSITORY@REVISION/PATH")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    import huggingface_hub as hub
    kind, repository, revision, path = match.groups()
    where = {"repo_id": repository, "filename": path, "revision": revision,
             "repo_type": "dataset" if kind else "model"}
    try:
        cached = hub.try_to_load_from_cache(**where)
        if isinstance(cached, str):
            return cached
        if in_part and name.endswith(".parquet"):
            return hub.HfFileSystem().open(name, block_size=1 << 20)
        return hub.hf_hub_download(**where, local_dir=None if keep else downloads)
    except Exception as error:  # the hub's, httpx's and the system's: the network's or the user's
        raise ValueError(f"{name}: cannot be fetched: {first_line(error)}") from None


def download(url, path):
    """Fetch a URL to a path, which exists only when it is whole; return it as str.

    Goes on where an earlier try ended. Waits and tries again after 408, 429 and 5xx (as long as
    Retry-After says), a broken body, or 30 s of silence. Raises ValueError after DOWNLOAD_TRIES in
    a row without a new byte, or for another sha256 than the server gives.
    """
    import requests
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    validator = path.with_name(path.name + ".etag")
    if path.exists():
        path.replace(part)  # whole, or cut short by something else? The server will say
    session = open_session(url)
    tries, most, total, sha256, failure = 0, -1, None, None, None
    while size_of(part) != total:
        size = size_of(part)
        tries, most = (0, size) if size > most else (tries + 1, most)
        if tries == DOWNLOAD_TRIES:
            raise ValueError(f"{url}: cannot be fetched, {tries} tries in a row brought nothing: "
                             f"{failure}")
        time.sleep(min(2**tries - 1, 30))
        try:
            total, sha256 = request_rest(session, url, part, validator)
        except (requests.ConnectionError, requests.Timeout,
                requests.exceptions.ChunkedEncodingError) as error:
            failure = first_line(error)
            print(f"{url}: {failure}; trying again", file=sys.stderr)
        except requests.RequestException as error:
            raise ValueError(f"{url}: cannot be fetched: {first_line(error)}") from None
    if sha256 and sha256 != sha256_of(part):
        part.unlink()
        raise ValueError(f"{url}: what came has not the sha256 that the server gives ({sha256}); "
                         "run again")
    validator.unlink(missing_ok=True)
    return str(part.replace(path))


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def open_session(url):
    """Return a requests.Session that tries again where the server asks for patience."""
    import requests
    from urllib3.util import Retry
    retry = Retry(DOWNLOAD_TRIES, connect=0, read=0, backoff_factor=0.5, backoff_jitter=0.5,
                  status_forcelist=(408, 429, 500, 502, 503, 504))
    session = requests.Session()
    adapter = requests.adapters.HTTPAdapter(max_retries=retry)
    session.mount(f"{urlsplit(url).scheme}://", adapter)
    return session


def request_rest(session, url, part, validator):
    """Append to the file part what it lacks of a URL; return (size, sha256 or None) of the whole.

    The file validator keeps the server's name of this version. Where the server has another by now,
    or does not know parts, part becomes all that it sends. Raises requests' errors.
    """
    import requests
    size = size_of(part)
    headers = {"Accept-Encoding": "identity"}  # some servers drop Range where they compress
    if size:
        headers["Range"] = f"bytes={size}-"
    if size and validator.exists():
        headers["If-Range"] = validator.read_text()  # if it changed meanwhile, all of it comes
    with session.get(url, headers=headers, stream=True, timeout=DOWNLOAD_TIMEOUT) as answer:
        content_range = answer.headers.get("Content-Range", "")
        span = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", content_range)
        resumed = answer.status_code == 206 and span and span[1] == str(size)
        if answer.status_code == 416 and span and span[2] == str(size):  # it was whole
            head = session.head(url, timeout=DOWNLOAD_TIMEOUT, allow_redirects=True)
            return size, find_sha256(head.headers)
        if answer.status_code in (206, 416) and not resumed:
            part.unlink(missing_ok=True)
            raise requests.ConnectionError(
                f"answer {answer.status_code} does not fit what was asked for")
        answer.raise_for_status()
        if not resumed:
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified", "")
            validator.write_text(version)
        with open(part, "ab" if resumed else "wb") as file:
            for chunk in answer.iter_content(1 << 16):  # a chunk that breaks is lost
                file.write(chunk)
        total = span[2] if resumed else answer.headers.get("Content-Length")
        # Without a length the body ended as a body should, so this is all.
        return size_of(part) if total is None else int(total), find_sha256(answer.headers)


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
