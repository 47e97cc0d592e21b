"""What comes over the network: whole files or none, and no harm from any server.

The network is a server on the loopback that answers as a file server or as the Hugging Face hub
does. Only the main process fetches, never a worker or a training rank; the hub's own retries are
huggingface_hub's.
"""

import base64
import errno
import gzip
import hashlib
import http.server
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from preparing import (
    ROOT,
    assert_one_line,
    command,
    contents,
    decoded,
    documents,
    entries,
    final_names,
    parquet,
    run,
    texts_of,
)

import prepare
from machinery import downloads
from machinery.downloads import download
from machinery.errors import explain

REVISION = "a" * 40
FILE = "fineweb-edu-dedup/train-{:05d}-of-00234.parquet"


def etag_of(data):
    return f'"{hashlib.sha256(data).hexdigest()}"'


class Server(http.server.ThreadingHTTPServer):
    """Serves files {path: bytes}, and keeps a log of the requests.

    script {path: steps}: what to do at the first request of it, the second and so on. A step is a
    function (handler, data, start) that answers, or None for the ordinary answer.
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.script, self.log, self.revisions = {}, {}, [], set()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass

    def wanted(self):
        """Return the Range of each request for a body, in order."""
        return [wanted for method, _, wanted, _ in self.log if method == "GET"]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        hub = re.fullmatch(r"/(?:datasets/)?\w+/\w+/resolve/([\w%.]+)/(.+)", self.path)
        path, wanted = hub[2] if hub else self.path, self.headers.get("Range")
        if hub:
            self.server.revisions.add(hub[1])
        self.server.log.append((self.command, path, wanted, time.monotonic()))
        if path.startswith("/api/"):
            return self.answer_json(path)
        if path not in self.server.files:
            return self.send(404, b"no such file")
        data = self.server.files[path]
        script = self.server.script.get(path)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "bytes=0-").groups()
        step = script.pop(0) if script and self.command == "GET" else None
        if step:
            return step(self, data, int(first))
        return self.answer_file(data, wanted, int(first), last, hub and hub[1])

    do_HEAD = do_GET

    def answer_file(self, data, wanted, first, last, revision):
        etag = etag_of(data)
        headers = {"ETag": etag}
        if revision:
            headers["X-Repo-Commit"] = revision
        if not wanted or self.headers.get("If-Range", etag) != etag:
            return self.send(200, data, headers)
        if first >= len(data):
            unsatisfied = {"Content-Range": f"bytes */{len(data)}"}
            return self.send(416, b"range not satisfiable", unsatisfied)
        part = data[first:int(last) + 1 if last else None]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
        return self.send(206, part, headers)

    def answer_json(self, path):
        tree = []
        for name, data in self.server.files.items():
            lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
            tree.append({"type": "file", "path": name, "size": len(data), "oid": "0" * 40,
                         "lfs": lfs})
        info = {"id": "o/n", "sha": REVISION, "siblings": []}
        body = json.dumps(tree if "/tree/" in path else info).encode()
        self.send(200, body, {"Content-Type": "application/json"})

    def send(self, status, body, headers=None, cut=None):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def send_whole(handler, data, start):
    handler.send(200, data)


def send_until(cut, **headers):
    """Return the step that sends the first bytes and closes the connection."""
    return lambda handler, data, start: handler.send(200, data, headers, cut=cut)


def refuse(status, body=b"an error text", **headers):
    """Return the step that answers with an error."""
    headers = {key.replace("_", "-"): value for key, value in headers.items()}
    return lambda handler, data, start: handler.send(status, body, headers)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.05)))
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def fetch(server, tmp_path):
    """A function that downloads the server's /f.bin to tmp_path/f.bin and returns its bytes."""
    return lambda: Path(download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes()


def some_bytes(n, seed=0):
    return random.Random(seed).randbytes(n)


# By URL

def test_a_cut_file_at_the_final_name_is_completed(server, fetch, tmp_path):
    data = server.files["/f.bin"] = some_bytes(300_000)
    (tmp_path / "f.bin").write_bytes(data[:100_000])
    (tmp_path / "f.bin.etag").write_text(etag_of(data))
    assert fetch() == data
    assert server.wanted() == ["bytes=100000-"]


def test_a_file_that_is_whole_is_not_fetched_again(server, fetch, tmp_path):
    data = server.files["/f.bin"] = some_bytes(3000)
    assert fetch() == fetch() == data
    assert server.wanted() == [None, "bytes=3000-"]


@pytest.mark.parametrize("name", ["f.bin", "f.bin.part"])
def test_a_file_of_an_unknown_version_is_fetched_anew(name, server, fetch, tmp_path):
    """Such as an older version, or the page of a log-in: the rest of this one does not go to it."""
    new = server.files["/f.bin"] = some_bytes(300_000)
    server.script["/f.bin"] = [send_whole]  # without a sha256 or a version
    (tmp_path / name).write_bytes(b"older" * 1000)
    assert fetch() == new and server.wanted() == [None]


def test_a_server_that_minds_the_range_alone(server, fetch):
    """A part of another version, though If-Range asks for this one, is not appended."""
    old, new = some_bytes(300_000, seed=1), some_bytes(300_000, seed=2)
    server.files["/f.bin"] = new

    def send_rest_of_new(handler, data, start):
        content_range = f"bytes {start}-{len(new) - 1}/{len(new)}"
        handler.send(206, new[start:], {"Content-Range": content_range, "ETag": etag_of(new)})

    def send_old(handler, data, start):
        handler.send(200, old, {"ETag": etag_of(old)}, cut=200_000)

    server.script["/f.bin"] = [send_old, send_rest_of_new]
    assert fetch() == new


@pytest.mark.parametrize("name, data, good", [
    ("f.parquet", b"<!DOCTYPE html><p>Log in", b"PAR1 and so on PAR1"),
    ("f.parquet", b"PAR1 but cut off", b"PAR1 and so on PAR1"),
    ("f.jsonl.gz", b'{"text": "plain"}', gzip.compress(b'{"text": "a"}', mtime=0)),
    ("f.jsonl.zst", b"\x1f\x8b of gzip", b"\x28\xb5\x2f\xfd of zstd"),
    ("f.jsonl", b"\n <html>", b'\xef\xbb\xbf\n {"text": "a"}')])
def test_what_is_no_such_file_gets_no_name(name, data, good, server, tmp_path):
    server.files[f"/{name}"] = data
    with pytest.raises(ValueError, match=f"{name}: what came is no") as error:
        download(f"{server.url}/{name}", tmp_path / name)
    assert "\n" not in str(error.value) and not (tmp_path / name).exists()
    server.files[f"/{name}"] = good
    assert Path(download(f"{server.url}/{name}", tmp_path / name)).read_bytes() == good


def test_a_file_stored_as_gzip_is_taken_as_it_is(server, fetch):
    data = server.files["/f.bin"] = gzip.compress(some_bytes(3000), mtime=0)

    def send_encoded(handler, data, start):
        handler.send(200, data, {"Content-Encoding": "gzip", "ETag": etag_of(data)})

    server.script["/f.bin"] = [send_encoded] * 9
    assert fetch() == data and len(server.log) == 1


def test_a_server_that_ignores_range(server, fetch):
    data = server.files["/f.bin"] = some_bytes(300_000)
    server.script["/f.bin"] = [send_until(233_000), *[send_whole] * 5]
    assert fetch() == data and len(server.log) == 2


def test_a_206_that_starts_elsewhere_is_not_appended(server, fetch):
    def send_elsewhere(handler, data, start):
        handler.send(206, data[100:], {"Content-Range": "bytes 100-299999/300000"})

    data = server.files["/f.bin"] = some_bytes(300_000)
    server.script["/f.bin"] = [send_until(200_000), send_elsewhere]
    assert fetch() == data and len(server.log) == 3


def test_a_file_that_changes_between_two_tries_is_fetched_anew(server, fetch):
    old, new = some_bytes(300_000, seed=1), some_bytes(300_000, seed=2)
    server.files["/f.bin"] = old

    def cut(handler, data, start):
        handler.send(200, data, {"ETag": etag_of(old)}, cut=200_000)
        server.files["/f.bin"] = new

    server.script["/f.bin"] = [cut]
    assert fetch() == new


@pytest.mark.parametrize("header, form", [
    ("Repr-Digest", "sha-256=:{}:"), ("Digest", "sha-256={}"), ("ETag", None)])
def test_a_wrong_sha256_is_noticed(header, form, server, fetch, tmp_path):
    digest = hashlib.sha256(b"another file")
    encoded = base64.b64encode(digest.digest()).decode()
    value = form.format(encoded) if form else f'"{digest.hexdigest()}"'
    server.files["/f.bin"] = some_bytes(3000)
    server.script["/f.bin"] = [
        lambda handler, data, start: handler.send(200, data, {header: value})]
    with pytest.raises(ValueError, match=digest.hexdigest()):
        fetch()
    assert not (tmp_path / "f.bin").exists() and not (tmp_path / "f.bin.part").exists()


def test_a_complete_partial_and_416(server, fetch, tmp_path):
    data = server.files["/f.bin"] = some_bytes(300_000)
    (tmp_path / "f.bin.part").write_bytes(data)
    (tmp_path / "f.bin.etag").write_text(etag_of(data))
    assert fetch() == data
    assert server.wanted() == ["bytes=300000-"], "not fetched again"
    (tmp_path / "f.bin").replace(tmp_path / "f.bin.part")
    with open(tmp_path / "f.bin.part", "ab") as file:
        file.write(b"too long")
    assert fetch() == data


def test_retry_after_is_honoured(server, fetch, monkeypatch, capsys):
    monkeypatch.undo()  # real sleeping
    data = server.files["/f.bin"] = some_bytes(3000)
    server.script["/f.bin"] = [refuse(429, Retry_After="1")]
    assert fetch() == data
    times = [when for *_, when in server.log]
    assert len(times) == 2 and times[1] - times[0] >= 0.99
    assert "trying again in 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("after", ["86400", "Fri, 31 Dec 2100 23:59:59 GMT"])
def test_a_wait_of_a_day_is_told_not_slept(after, server, fetch):
    server.files["/f.bin"] = some_bytes(3000)
    server.script["/f.bin"] = [refuse(503, Retry_After=after)]
    with pytest.raises(ValueError, match=r"cannot be fetched: .* asks to wait [\d,]+ s"):
        fetch()


@pytest.mark.parametrize("status", [429, 503, 404, 403])
def test_a_refusal_for_ever_is_one_line(status, server, tmp_path):
    server.files["/f.parquet"] = b"PAR1 data PAR1"
    server.script["/f.parquet"] = [refuse(status)] * 99
    with pytest.raises(ValueError, match=f"/f.parquet: cannot be fetched.*{status}") as error:
        run(f"--source={server.url}/f.parquet", "--tokenizer=utf16", f"--out={tmp_path}/out")
    assert "\n" not in str(error.value)
    assert len(server.log) == (downloads.DOWNLOAD_TRIES if status in (429, 503) else 1)
    assert b"error text" not in b"".join(contents(tmp_path).values())


def test_reset_then_503_then_the_rest(server, fetch):
    data = server.files["/f.bin"] = some_bytes(3_000_000)
    server.script["/f.bin"] = [send_until(1_500_000, ETag='"v1"'), refuse(503)]
    assert fetch() == data
    first, second, third, *_ = server.wanted()
    assert first is None and third == second != "bytes=0-"


def test_a_stalled_transfer_is_taken_up_again(server, fetch, monkeypatch, capsys):
    monkeypatch.setattr(downloads, "DOWNLOAD_TIMEOUT", (1, 0.3))
    data = server.files["/f.bin"] = some_bytes(3000)
    release = threading.Event()

    def stall(handler, data, start):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:1000])
        handler.wfile.flush()
        release.wait(10)

    server.script["/f.bin"] = [stall]
    start = time.monotonic()
    assert fetch() == data
    release.set()
    assert time.monotonic() - start < 5 and "trying again" in capsys.readouterr().err


def test_a_broken_body_for_ever_ends(server, fetch):
    server.files["/f.bin"] = some_bytes(3000)
    server.script["/f.bin"] = [send_until(1000)] * 99
    with pytest.raises(ValueError, match="tries in a row brought nothing"):
        fetch()
    assert len(server.log) <= downloads.DOWNLOAD_TRIES + 1


def test_a_url_from_end_to_end_and_its_download_is_deleted(
        server, tokenizer_path, tmp_path, monkeypatch):
    texts = texts_of(30)
    data = server.files["/data/f.parquet"] = parquet(tmp_path / "f.parquet", texts).read_bytes()
    flags = (f"--source={server.url}/data/f.parquet", f"--tokenizer={tokenizer_path}",
             "--val_fraction=0")
    out, kept, used = tmp_path / "out", tmp_path / "kept", tmp_path / "used"
    run(*flags, f"--out={out}")
    assert decoded(out) == texts and not (out / "downloads").exists()
    assert entries(out)[0]["sha256"] == hashlib.sha256(data).hexdigest()
    run(*flags, f"--out={kept}", "--keep_downloads")
    assert (kept / "downloads/f.parquet").read_bytes() == data
    with monkeypatch.context() as patch:
        # the folder stays, but what was in it?
        patch.setattr(prepare.shutil, "rmtree", lambda *unused, **flags: None)
        run(*flags, f"--out={used}")
    assert not list((used / "downloads").iterdir()), "each file goes as soon as it is used"
    n = len(server.log)
    run(*flags, f"--out={out}")
    assert len(server.log) == n, "what is done asks the network nothing"


# From the hub

@pytest.fixture
def hub(server, tokenizer_path, tmp_path):
    """A hub with three of the corpus's shards and a tokenizer.

    A function that runs prepare.py against it.
    """
    for number in range(3):
        texts = texts_of(3000, seed=number)
        path = parquet(tmp_path / "x.parquet", texts, ids=f"s{number}-", row_group_size=500)
        server.files[FILE.format(number)] = path.read_bytes()
    server.files["tokenizer.json"] = Path(tokenizer_path).read_bytes()
    (tmp_path / "run_hub.py").write_text(
        "import sys, prepare\n"
        "from machinery import sources\n"
        "if __name__ == '__main__':\n"
        f"    sources.FINEWEB_EDU = 'hf://datasets/o/n@' + sys.argv.pop(1) + '/{FILE}'\n"
        "    try:\n"
        "        prepare.main()\n"
        "    except (ValueError, OSError) as error:\n"
        "        sys.exit(f'prepare.py: {error}')\n")
    settings = os.environ | {
        "PYTHONPATH": str(ROOT), "HF_ENDPOINT": server.url, "HF_HOME": f"{tmp_path}/hf_home",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}

    def run_hub(*flags, revision=REVISION, **environment):
        return subprocess.run(
            [sys.executable, tmp_path / "run_hub.py", revision, "--source=fineweb-edu",
             "--val_fraction=0", "--workers=1", *flags],
            capture_output=True, text=True, timeout=100, env=settings | environment)

    run_hub.settings = settings
    return run_hub


def test_hub_shards_and_tokenizer(hub, server, tokenizer_path, tmp_path):
    flags = "--shards=0:2", f"--tokenizer=o/t@{REVISION}"
    cached = tmp_path / "hf_home"
    out, kept, offline = tmp_path / "out", tmp_path / "kept", tmp_path / "offline"
    result = hub(*flags, f"--out={out}")
    assert result.returncode == 0, result.stderr
    assert decoded(out) == texts_of(3000, seed=0) + texts_of(3000, seed=1)
    assert not (out / "downloads").exists() and not list(cached.rglob("*.parquet"))
    assert (out / "tokenizer.json").read_bytes() == Path(tokenizer_path).read_bytes()

    # With --keep_downloads they stay in the hub's cache, where the next run needs no network.
    assert hub(*flags, f"--out={kept}", "--keep_downloads").returncode == 0
    assert len(list(cached.rglob("*.parquet"))) == 2
    n = len(server.log)
    result = hub(*flags, f"--out={offline}", HF_HUB_OFFLINE="1")
    assert result.returncode == 0 and len(server.log) == n, result.stderr
    assert contents(offline) == contents(out) == contents(kept)
    assert len(list(cached.rglob("*.parquet"))) == 2, "not ours to delete"
    missing = hub("--shards=2:3", flags[1], f"--out={tmp_path}/none", HF_HUB_OFFLINE="1")
    assert_one_line(missing, "train-00002-of-00234.parquet", "cannot be fetched")


@pytest.mark.parametrize("name, parsed", [
    ("hf://datasets/o/n@refs/convert/parquet/d/0.parquet", ("refs/convert/parquet", "d/0.parquet")),
    ("hf://datasets/o/n@refs%2Fconvert%2Fparquet/d/0.txt", ("refs/convert/parquet", "d/0.txt")),
    ("hf://datasets/o/n@~parquet/d/0.parquet", ("refs/convert/parquet", "d/0.parquet")),
    ("hf://datasets/o/n@refs/pr/7/a.jsonl", ("refs/pr/7", "a.jsonl")),
    ("hf://datasets/o/n@v1.0/refs/a.jsonl", ("v1.0", "refs/a.jsonl")),
    ("hf://datasets/o/n@refs/heads/main/a.jsonl", ("refs", "heads/main/a.jsonl"))])
def test_a_revision_may_be_a_path(name, parsed):
    assert downloads.parse_hub_name(name) == ("dataset", "o/n", *parsed)
    parsed_model = downloads.parse_hub_name(name.replace("datasets/", ""))
    assert parsed_model == ("model", "o/n", *parsed)


@pytest.mark.parametrize("name", ["hf://o/n/a.txt", "hf://datasets/o/n@v1", "hf://o@v1/a.txt"])
def test_a_name_of_no_file_of_the_hub_is_refused(name):
    with pytest.raises(ValueError, match="expected hf://"):
        downloads.parse_hub_name(name)


def test_the_hub_is_asked_for_that_revision(hub, server, tmp_path):
    data = server.files["d/0.parquet"] = server.files[FILE.format(0)]
    flags = "--source=hf://datasets/o/n@~parquet/d/0.parquet", "--tokenizer=o/t@refs/convert/it"
    for out, more in (("all", "--max_documents=9"), ("few", "--keep_downloads")):
        result = hub(*flags, f"--out={tmp_path}/{out}", more)
        assert result.returncode == 0, result.stderr
    assert entries(tmp_path / "few")[0]["sha256"] == hashlib.sha256(data).hexdigest()
    assert server.revisions == {"refs%2Fconvert%2Fparquet", "refs%2Fconvert%2Fit"}


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_flipped_byte_in_the_cache_of_the_hub_is_noticed(hub, tmp_path):
    flags = "--shards=0:1", f"--tokenizer=o/t@{REVISION}", "--keep_downloads"
    assert hub(*flags, f"--out={tmp_path}/first").returncode == 0
    [link] = (tmp_path / "hf_home").rglob("*.parquet")
    flip_a_byte(link.resolve())
    result = hub(*flags, f"--out={tmp_path}/out")
    assert_one_line(result, "hash", FILE.format(0))
    assert not final_names(tmp_path / "out")
    [link] = (tmp_path / "hf_home").rglob("tokenizer.json")
    flip_a_byte(link.resolve())
    assert_one_line(hub(*flags, f"--out={tmp_path}/other"), "hash", "tokenizer.json")


def test_a_flipped_byte_in_a_folder_that_the_hub_filled_is_noticed(hub, tokenizer_path, tmp_path):
    code = ("import sys\n"
            "from machinery.downloads import fetch\n"
            "print(fetch(sys.argv[1], sys.argv[2], keep=False))\n")
    name = f"hf://datasets/o/n@{REVISION}/{FILE.format(0)}"
    done = subprocess.run([sys.executable, "-c", code, name, tmp_path / "out/downloads"],
                          cwd=ROOT, capture_output=True, text=True, env=hub.settings)
    flip_a_byte(Path(done.stdout.strip()))
    result = hub("--shards=0:1", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out")
    assert_one_line(result, "hash", FILE.format(0))
    assert not final_names(tmp_path / "out")


def test_another_revision_of_the_corpus_is_refused(hub, tokenizer_path, tmp_path):
    flags = "--shards=0:2", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out"
    assert hub(*flags).returncode == 0
    before = contents(tmp_path / "out")
    assert_one_line(hub(*flags, revision="b" * 40), "sources", "choose another --out")
    assert contents(tmp_path / "out") == before


def test_max_documents_reads_only_the_row_groups_it_needs(hub, server, tokenizer_path, tmp_path):
    big = parquet(tmp_path / "x.parquet", texts_of(2000, words=2000), row_group_size=100)
    server.files[FILE.format(0)] = big.read_bytes()
    size = len(server.files[FILE.format(0)])
    result = hub("--max_documents=150", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out")
    assert result.returncode == 0, result.stderr
    assert len(documents(tmp_path / "out")) == 150
    read = 0
    for _, path, wanted, _ in server.log:
        assert not wanted or path != FILE.format(1), "the next file is not read"
        if wanted and path == FILE.format(0):
            first, last = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups()
            read += min(int(last), size - 1) - int(first) + 1
    assert 0 < read < size / 2, f"{read:,} of {size:,} bytes"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_told_as_such(number, tmp_path, monkeypatch):
    import huggingface_hub

    def failing(**unused):
        raise OSError(number, os.strerror(number), "/home/nobody/.cache")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", failing)
    with pytest.raises(OSError) as error:
        downloads.fetch("hf://datasets/o/n@v1/a.txt", tmp_path, keep=True)
    assert f"/home/nobody/.cache: {os.strerror(number)}" in explain(error.value)


def test_a_hub_that_is_away_is_one_line(tmp_path):
    result = command("--source=fineweb-edu", "--shards=0:1", "--tokenizer=utf16",
                     f"--out={tmp_path}/out", HF_ENDPOINT="http://127.0.0.1:9",
                     HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
    assert_one_line(result, "train-00000-of-00234.parquet", "cannot be fetched")
