"""prepare.py: exact ids, whole shards, nothing lost.

The network is a server on the loopback that answers as a file server or as the Hugging Face hub does. Not here, because
the design makes the fault impossible: one source file gives one shard, however short (a corpus is not cut into shards
of a fixed size, so there is no remainder to lose); only the main process fetches, never a worker or a training rank;
the split is a threshold on a hash, so no count can round to nothing. The hub's own retries are huggingface_hub's.
"""

import base64
import gzip
import hashlib
import http.server
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import prepare
from machinery import shards as shard_format
from machinery import sources
from machinery import tokenizer as tokenizing

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
SMOLLM2 = SHARED / "smollm2" / "tokenizer.json"
needs_shared = pytest.mark.skipif(not SMOLLM2.exists(), reason="the real tokenizer and corpus are not in ../shared")
REVISION = "a" * 40
WORDS = "the of and a to in is you that it he was for on are as with his they I at be".split()


# ----------------------------------------------------------------------------------------------------------------------
# Helpers

@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text = (ROOT / "prepare.py").read_text()
    path.write_text(tokenizing.train_tokenizer([text, "0 1 2 the end\r\n\t "], 600).to_str())
    return str(path)


def texts_of(n, seed=0, words=40):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, words))) for _ in range(n)]


def parquet(path, texts, ids="d", text_type=None, id_column="id", row_group_size=None):
    columns = {"text": pa.array(texts, text_type)}
    if ids:
        columns[id_column] = [f"{ids}{i}" for i in range(len(texts))]
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return str(path)


def run(monkeypatch, *flags):
    """Run prepare.py in this process with one worker unless the flags say more."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--workers=1", *map(str, flags)])
    prepare.main()


def command(*flags, **environment):
    """Run prepare.py as a person does; return the finished process."""
    return subprocess.run([sys.executable, ROOT / "prepare.py", *map(str, flags)], capture_output=True, text=True,
                          timeout=120,
                          env=os.environ | {"PYTHONPATH": str(ROOT)} | environment)


def one_line(process, *parts):
    """The process ended as a user's mistake must: exit 1, one line, holding these parts."""
    assert process.returncode == 1 and process.stderr.count("\n") == 1, process.stderr
    assert process.stderr.startswith("prepare.py: ") and "Traceback" not in process.stderr
    for part in parts:
        assert part in process.stderr, process.stderr
    return True


def contents(out):
    """Every file of a directory and its bytes."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(Path(out).rglob("*")) if path.is_file()}


def documents(out, split="train"):
    """The documents of a prepared directory as lists of ids, without the end of text."""
    eot_id, found = shard_format.read_meta(out)["tokenizer"]["eot_id"], []
    for shard in shard_format.open_shards(out, split):
        tokens, starts = shard.map()
        for start, end in zip(starts[:-1], starts[1:]):
            assert tokens[end - 1] == eot_id
            found.append(tokens[start:end - 1].tolist())
    return found


def decoded(out, split="train"):
    tokenizer = tokenizing.load_tokenizer(Path(out) / "tokenizer.json")
    return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(out, split)]


@pytest.fixture
def prepared_from(tokenizer_path, tmp_path, monkeypatch):
    """A function that prepares texts, one parquet file, nothing held out; it returns the directory."""
    def prepare_texts(texts, *flags, tokenizer=tokenizer_path):
        run(monkeypatch, f"--source={parquet(tmp_path / 'a.parquet', texts)}", f"--tokenizer={tokenizer}",
            f"--out={tmp_path}/out",
            "--val_fraction=0", *flags)
        return tmp_path / "out"
    return prepare_texts


class Server(http.server.ThreadingHTTPServer):
    """Serves files {path: bytes}; script {path: [what to do at the first request, the second, ...]}; log of requests.

    A step is a function (handler, data, start) that answers, or None for the ordinary answer (ranges, ETag).
    """
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.script, self.log = {}, {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        hub = re.fullmatch(r"/(?:datasets/)?\w+/\w+/resolve/(\w+)/(.+)", self.path)
        path, wanted = hub[2] if hub else self.path, self.headers.get("Range")
        self.server.log.append((self.command, path, wanted, time.monotonic()))
        if path.startswith("/api/"):
            return self.answer_json(path)
        if path not in self.server.files:
            return self.send(404, b"no such file")
        data, script = self.server.files[path], self.server.script.get(path)
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", wanted or "bytes=0-").groups()
        if script and self.command == "GET" and (step := script.pop(0)):
            return step(self, data, int(first))
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        if self.headers.get("If-Range", etag) != etag:
            wanted = None
        headers = {"ETag": etag} | ({"X-Repo-Commit": hub[1]} if hub else {})
        if int(first) >= len(data) and wanted:
            return self.send(416, b"range not satisfiable", {"Content-Range": f"bytes */{len(data)}"})
        part = data[int(first):int(last) + 1 if last else None] if wanted else data
        if wanted:
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self.send(206 if wanted else 200, part, headers)

    do_HEAD = do_GET

    def answer_json(self, path):
        sizes = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40,
                  "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}}
                 for name, data in self.server.files.items() if not name.startswith("/")]
        self.send(200, json.dumps(sizes if "/tree/" in path else {"id": "o/n", "sha": REVISION,
                                                                  "siblings": []}).encode(),
                  {"Content-Type": "application/json"})

    def send(self, status, body, headers={}, cut=None):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def server(monkeypatch):
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setattr(prepare.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.05)))
    yield server
    server.shutdown()
    server.server_close()


# ----------------------------------------------------------------------------------------------------------------------
# Exact ids

HARD = [
    "", " ", "  ", "a", "hello !", "  two", "a\r\nb", "tab\tend ", "0012345678901", "e\u0301", "\ufeffstart",
        "don't I'LL 'tis we've",
    "The marker <|endoftext|> ends a page.", "<|im_start|>user\n<|endoftext|><|endoftext|>", "  1", " 1", "   1 2",
        "\n\n1", "x  \n 1\t",
    "\u00a0\u00a0nbsp \u00a0x", "\x00NUL\x00\x01\x02", "".join(map(chr, range(32))) * 3, "''\x06's", "\x04",
        "a\x14b\x1d\x1dc", "\x7f\x80\x9f",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9\U0001f1ea",
        "漢字かな交じり文、全角　空白。", "한국어 조선말",
    "العربية עברית हिन्दी ไทย",
    "Z\u0351\u036b\u0343\u036a\u0302a\u0363\u0349\u0348l\u0348\u034eg\u0347o",
        "\u2160\u2167\u216f \u00bd\u00b2\u2460 \u0660\u0661\u0966",
    " " * 999, "x" + "\n" * 300 + " " * 300 + "1", "\r\n" * 200, "1" * 500, "a" * 3000, "^" * 3000, "ab " * 900,
        "\u2028\u2029\u0085\u180e\u200b\u3000",
    "\U00040000\U000bffff \U000f0000\U0010ffff", "\ufffd\ufffe\uffff\ufdd0",
        "    def f(x):\n        return x  # it's\n",
]


def random_texts(n, seed):
    """Joins of what is hard: spaces, digits, letters, marks, symbols, controls, and characters of every plane."""
    draw = random.Random(seed)
    pieces = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "'s", "'ll", "'", "1", "42", "a", "The", "é", "e\u0301", "漢",
              "🙂", "\u200d", "\x06", "\x00",
              "<|endoftext|>", "_", "...", "²", "Ⅷ", "٣", "\u3000", "\u0085"]
    any_character = lambda: chr(draw.choice([draw.randrange(0x250), draw.randrange(0xd800),
                                             draw.randrange(0xe000, 0x110000)]))
    return ["".join(draw.choice(pieces) if draw.random() < 0.7 else any_character() for _ in range(draw.randint(1, 30)))
            for _ in range(n)]


def fast_encoders(tokenizer):
    """Yield the encoders by the fast engines: splintr where it is installed, and tiktoken."""
    if tokenizing.FAST == "splintr":
        yield tokenizing.make_encoder(tokenizer, tokenizing.find_twin(tokenizer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "FAST", "tiktoken")
        yield tokenizing.make_encoder(tokenizer, tokenizing.find_twin(tokenizer))


def assert_same_ids(path, texts):
    """Assert that there is a fast path and that it gives what tokenizers gives; return how many ids there were."""
    tokenizer = tokenizing.load_tokenizer(path)
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    for fast in fast_encoders(tokenizer):
        for text, encoding in zip(texts, encodings):
            assert fast(text).tolist() == encoding.ids, ascii(text[:200])
    return sum(len(encoding.ids) for encoding in encodings)


@needs_shared
def test_ids_equal_tokenizers_on_hard_text():
    assert assert_same_ids(SMOLLM2, HARD + random_texts(6000, seed=1)) > 100_000


@needs_shared
def test_ids_equal_tokenizers_on_every_code_point():
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    # Alone it would not show how it is cut off from what stands beside it.
    assert_same_ids(SMOLLM2, [f"a{c} {c}1{c}{c}  {c}\n {c}" for c in characters[:0x3400]])
    assert_same_ids(SMOLLM2, ["".join(f"a{c} {c}1 {c}" for c in characters[i:i + 64]) for i in range(0, len(characters), 64)])


@needs_shared
def test_ids_equal_tokenizers_on_joins_of_vocabulary_words():
    tokenizer, draw = tokenizing.load_tokenizer(SMOLLM2), random.Random(2)
    words = [tokenizer.decode([i]) for i in range(17, 49_152)]
    assert_same_ids(SMOLLM2, ["".join(draw.choices(words, k=2)) for _ in range(20_000)])


def test_ids_equal_tokenizers_for_a_trained_tokenizer(tokenizer_path):
    assert_same_ids(tokenizer_path, HARD + random_texts(2000, seed=3))


def test_ids_equal_tokenizers_for_the_gpt2_pre_tokenizer(tokenizer_path, tmp_path):
    spec = json.loads(Path(tokenizer_path).read_text())
    spec["pre_tokenizer"] = spec["pre_tokenizer"]["pretokenizers"][1]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(spec))
    assert_same_ids(path, HARD + random_texts(2000, seed=4))


@pytest.mark.parametrize("change, reason", [
    (lambda t: setattr(t, "normalizer", __import__("tokenizers").normalizers.NFC()), "normalizer"),
    (lambda t: t.add_tokens([AddedToken("zebra")]), "added tokens"),
    (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "pre-tokenizer"),
    (lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Whitespace(),
                                                                    pre_tokenizers.ByteLevel(False)])),
     "pre-tokenizer"),
])
def test_what_the_fast_engines_cannot_do_is_left_to_tokenizers(change, reason, tokenizer_path, tmp_path, prepared_from):
    tokenizer = Tokenizer.from_file(tokenizer_path)
    change(tokenizer)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    with pytest.raises(ValueError, match=reason):
        tokenizing.find_twin(tokenizing.load_tokenizer(path))
    texts = ["e\u0301 a zebra's day", "plain  text"]
    prepared_from(texts, tokenizer=path)
    assert documents(tmp_path / "out") == [tokenizer.encode(text).ids for text in texts]


def bpe(merges, extra=()):
    """A byte-level BPE over a small alphabet, its ids in the order: end of text, letters, extra tokens, merges."""
    vocab = {token: i for i, token in enumerate([tokenizing.EOT, *"abcd", *extra])}
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizing.EOT])
    return tokenizer


@pytest.mark.parametrize("tokenizer, text, reason", [
    (bpe([("a", "b"), ("b", "c"), ("a", "bc"), ("ab", "c")]), "abc", "merge out of order"),  # two merges, one token
    (bpe([("a", "b"), ("b", "c"), ("a", "bc")]), "abc", "token not encoded as itself"),  # it is always ab c
    (bpe([("b", "c"), ("a", "b")], extra=["ab"]), "abc", "merge out of order"),  # ids not in the merges' order
])
def test_vocabularies_on_which_the_fast_engines_would_differ_are_refused(tokenizer, text, reason):
    with pytest.raises(ValueError, match=reason):
        tokenizing.find_twin(tokenizer)


def test_bytes_without_a_token_are_dropped_as_tokenizers_drops_them():
    tokenizer = bpe([("a", "b"), ("c", "d"), ("ab", "cd")])
    for encode in fast_encoders(tokenizer):
        for text in ("axb", "abxcd", "x", "xabcd", "ab cd"):
            assert encode(text).tolist() == tokenizer.encode(text).ids
        assert encode("abxcd").tolist() == [7], "the neighbours of the hole join, as in tokenizers"


LONG = ["a" * 1_000_000, "^" * 1_000_000, " " * 1_000_000, "\n" * 1_000_000, "1" * 300_000,
        "".join(random.Random(5).choices("abcdefghijklmnopqrstuvwxyz", k=100_000))]


@needs_shared
def test_ids_equal_tokenizers_on_long_runs():
    assert_same_ids(SMOLLM2, LONG)


@needs_shared
def test_long_runs_take_bounded_time(tmp_path):
    """A million equal characters end a regular expression's stack and are quadratic for a careless BPE."""
    start = time.monotonic()
    result = command(f"--source={parquet(tmp_path / 'a.parquet', LONG + texts_of(100))}", f"--tokenizer={SMOLLM2}",
                     f"--out={tmp_path}/out", "--val_fraction=0", "--workers=2")
    assert result.returncode == 0, result.stderr
    assert len(documents(tmp_path / "out")) == 106 and time.monotonic() - start < 60


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

def test_special_spellings_are_ordinary_text(tmp_path, prepared_from):
    text = "The marker <|endoftext|> ends a page."
    prepared_from([text] * 3)
    assert decoded(tmp_path / "out") == [text] * 3
    tokens = np.concatenate([shard.map()[0] for shard in shard_format.open_shards(tmp_path / "out", "train")])
    assert (tokens == 0).sum() == 3, "as many ends of text as documents"


def test_decoding_gives_the_text_back(tokenizer_path, tmp_path, prepared_from):
    texts = [text for text in HARD if text]
    prepared_from(texts)
    assert decoded(tmp_path / "out") == texts
    sizes = tokenizing.token_bytes(tokenizing.load_tokenizer(tokenizer_path))
    assert [int(sizes[ids].sum()) for ids in documents(tmp_path / "out")] == [len(text.encode()) for text in texts]


def test_a_vocabulary_over_uint16_is_refused_before_writing(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({tokenizing.EOT: 0} | {f"w{i}": i for i in range(1, 70_000)},
                                           unk_token=tokenizing.EOT))
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    assert one_line(command(f"--source={parquet(tmp_path / 'a.parquet', ['w66000'])}", f"--tokenizer={path}",
                            f"--out={tmp_path}/out"),
                    "70,000 ids", "65,536")
    assert not contents(tmp_path / "out")


def test_vocab_size_counts_added_tokens(tokenizer_path, tmp_path, prepared_from):
    tokenizer = Tokenizer.from_file(tokenizer_path)
    tokenizer.add_tokens(["zebra", "yak", "xerus"])
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    prepared_from(['a xerus'], tokenizer=path)
    vocab_size = shard_format.read_meta(tmp_path / "out")["tokenizer"]["vocab_size"]
    assert vocab_size == Tokenizer.from_file(tokenizer_path).get_vocab_size() + 3
    assert documents(tmp_path / "out")[0][-1] == vocab_size - 1
    sizes = tokenizing.token_bytes(tokenizing.load_tokenizer(path))
    assert len(sizes) == vocab_size and sizes[-1] == len("xerus") and sizes[0] == 0


def test_truncation_and_padding_of_a_tokenizer_file_are_switched_off(tokenizer_path, tmp_path, prepared_from):
    tokenizer, texts = Tokenizer.from_file(tokenizer_path), ["1" * 500, "1" * 10]
    tokenizer.enable_truncation(128)
    tokenizer.enable_padding(length=128)
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    prepared_from(texts, tokenizer=path)
    assert [len(ids) for ids in documents(tmp_path / "out")] == [500, 10]


@pytest.mark.parametrize("name, part", [
    ("missing.json", "no such tokenizer"), ("train:12", "from 258 to 65536"), ("train:70000", "from 258"),
                                        ("nonsense", "expected train:N"),
    ("OWNER/NAME", "OWNER/REPOSITORY@REVISION"), ("bad.json", "not a tokenizer.json")])
def test_a_wrong_tokenizer_is_one_line(name, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{}")
    with pytest.raises((ValueError, FileNotFoundError), match=part) as error:
        run(monkeypatch, f"--source={parquet(tmp_path / 'a.parquet', ['a'])}", f"--tokenizer={name}",
            f"--out={tmp_path}/out")
    assert "\n" not in str(error.value)


def test_utf16_is_lossless(tmp_path, prepared_from):
    texts = [text for text in HARD if text and "\uffff" not in text] + random_texts(300, seed=6)
    texts = [text for text in texts if "\uffff" not in text]
    prepared_from(texts + ['a' + chr(0xffff)], tokenizer="utf16")
    assert decoded(tmp_path / "out") == texts
    meta = shard_format.read_meta(tmp_path / "out")
    assert meta["tokenizer"]["vocab_size"] == 65_536 and meta["tokenizer"]["eot_id"] == 0xFFFF
    assert meta["shards"][0]["skipped"] == {"holds the end of text": 1}
    tokenizer = tokenizing.load_tokenizer(tmp_path / "out" / "tokenizer.json")
    sizes = tokenizing.token_bytes(tokenizer)
    assert [int(sizes[ids].sum()) for ids in documents(tmp_path / "out")] == [len(text.encode()) for text in texts]
    assert tokenizer.encode("aé🙂", add_special_tokens=False).ids == [0x61, 0xE9, 0xD83D, 0xDE42]
    assert tokenizer.decode([0x61, 0xFFFF, 0xD83D],
                            skip_special_tokens=True) == "a\ufffd", "half a pair, as a model may sample it"
    assert prepare.main() is None, "a second run finds it whole"


# ----------------------------------------------------------------------------------------------------------------------
# The embedded corpus

def test_stdlib_in_two_processes_gives_the_same_bytes(tmp_path):
    """Part of the library, for speed; everything else as the first command of a newcomer does it."""
    (tmp_path / "part.py").write_text(
        "import itertools, prepare\nfrom machinery import sources\nread = sources.read_stdlib\n"
        "sources.read_stdlib = lambda *unused: itertools.islice(read(*unused), 0, None, 8)\n"
        "if __name__ == '__main__':\n prepare.main()\n")
    results = [subprocess.run([sys.executable, tmp_path / "part.py", f"--out={tmp_path}/{seed}", f"--workers={seed}"],
                              capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)}, timeout=100)
               for seed in (1, 2)]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    meta = shard_format.read_meta(tmp_path / "1")
    assert meta["tokenizer"]["vocab_size"] == 3072 and meta["shards"][0]["val"]["documents"] > 2
    for part in ("of more than 512 tokens", "bytes per token", "rows skipped", f"ids by {tokenizing.FAST}"):
        assert part in results[0].stdout
    assert not results[0].stderr, "quiet where it is not a terminal"
    tokenizer = tokenizing.load_tokenizer(tmp_path / "1" / "tokenizer.json")
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4, "single digits"


def test_stdlib_leaves_tests_out():
    names = [name for name, text in sources.read_stdlib(None, None, None) if text]
    assert {"lib/argparse.py", "lib/json/decoder.py", "pydoc/lambda"} <= set(names) and len(set(names)) == len(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


# ----------------------------------------------------------------------------------------------------------------------
# Reading documents

def test_nulls_and_empty_texts_are_counted(tokenizer_path, tmp_path, monkeypatch):
    run(monkeypatch, f"--source={parquet(tmp_path / 'a.parquet', ['alpha beta', None, 'gamma', ''])}",
        f"--tokenizer={tokenizer_path}",
        f"--out={tmp_path}/out", "--val_fraction=0")
    assert decoded(tmp_path / "out") == ["alpha beta", "gamma"]
    assert shard_format.read_meta(tmp_path / "out")["shards"][0]["skipped"] == {"empty": 1, "null": 1}


def test_string_types_give_the_same_shards(tokenizer_path, tmp_path, monkeypatch):
    texts, shards = texts_of(20) + [None, "ünï"], []
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())):
        where = tmp_path / str(len(shards))
        where.mkdir()
        data = [text and text.encode() for text in texts] if kind == pa.binary() else pa.array(texts).cast(kind)
        parquet(where / "a.parquet", data, text_type=kind if kind == pa.binary() else None)
        run(monkeypatch, f"--source={where}/a.parquet",
            f"--tokenizer={tokenizer_path}", f"--out={where}/out")
        shards.append({name: data for name, data in contents(where / "out").items() if name != "meta.json"})
    assert all(other == shards[0] for other in shards) and len(shards[0]) > 2


def test_a_file_without_rows_between_others(tokenizer_path, tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet", ["one"])
    pq.ParquetWriter(tmp_path / "b.parquet", pa.schema([("text", pa.string()), ("id", pa.string())])).close()
    parquet(tmp_path / "c.parquet", ["", "   "])
    parquet(tmp_path / "d.parquet", ["", ""])
    run(monkeypatch, f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
        "--val_fraction=0")
    assert decoded(tmp_path / "out") == ["one", "   "]
    assert sorted(path.name for path in (tmp_path / "out/train").iterdir()) == ["00000.bin", "00000.idx", "00002.bin",
                                                                                "00002.idx"]
    assert shard_format.open_shards(tmp_path / "out", "val") == [] and not list((tmp_path / "out/val").iterdir())


def test_id_columns_of_any_name_or_none(tokenizer_path, tmp_path, monkeypatch):
    texts = texts_of(200)
    parquet(tmp_path / "a.parquet", texts)
    parquet(tmp_path / "b.parquet", texts, id_column="doc_id")
    parquet(tmp_path / "c.parquet", texts, ids=None)
    held = []
    for out, batch in (("one", 256), ("two", 7)):
        monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", batch)
        run(monkeypatch, f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/{out}",
            "--val_fraction=0.2")
        held.append([(entry["val"]["documents"], entry["val"]["bin_sha256"])
                     for entry in shard_format.read_meta(tmp_path / out)["shards"]])
    assert held[0] == held[1] and all(20 < n < 60 for n, _ in held[0])
    assert held[0][1] == held[0][2] != held[0][0], "without an id column of that name, the text decides"


def test_bad_unicode_costs_one_row(tokenizer_path, tmp_path, monkeypatch):
    binary = pa.array([b"good", b"x \xed\xa0\xbd y", b"fine"])
    text = pa.StringArray.from_buffers(3, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "lone \\ud83d end"}\n{"text": "raw \xff byte"}\n\n'
                                       b'{"text": "pair \\ud83d\\ude42"}\n')
    run(monkeypatch, f"--source={tmp_path}/*.[jp]*", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
        "--val_fraction=0")
    assert decoded(tmp_path / "out") == ["good", "x \ufffd\ufffd\ufffd y", "fine", "lone \ufffd end",
                                         "raw \ufffd byte", "pair 🙂"]


def test_jsonl_plain_gzip_and_zstd(tokenizer_path, tmp_path, monkeypatch):
    texts, shards = texts_of(50) + ["two\nlines", "ünï"], []
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:999]) + gzip.compress(lines[999:]))
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(lines)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        run(monkeypatch, f"--source={tmp_path}/{name}", f"--tokenizer={tokenizer_path}",
            f"--out={tmp_path}/{name}-out", "--val_fraction=0")
        assert decoded(tmp_path / f"{name}-out") == texts
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"cut.jsonl.gz: [\d,]+ bytes, cannot be read: Truncated"):
        run(monkeypatch, f"--source={cut}", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/cut")


def test_a_glob_of_any_files_has_a_shard_for_each(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    run(monkeypatch, f"--source={tmp_path}/*", "--tokenizer=utf16", f"--out={tmp_path}/out", "--val_fraction=0")
    assert len(shard_format.read_meta(tmp_path / "out")["shards"]) == 2 and decoded(tmp_path / "out") == ["a", "b"]


def test_sources_in_the_downloads_directory_are_the_users(tmp_path, monkeypatch):
    (tmp_path / "out/downloads").mkdir(parents=True)
    (tmp_path / "out/downloads/a.txt").write_text("a")
    run(monkeypatch, f"--source={tmp_path}/out/downloads/a.txt", "--tokenizer=utf16", f"--out={tmp_path}/out", "--val_fraction=0")
    assert decoded(tmp_path / "out") == ["a"] and (tmp_path / "out/downloads/a.txt").exists()


def test_only_fineweb_edus_shards_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    meta = {"sources": ["hf://datasets/o/d@0/f.parquet"]}
    sources.check_space(meta, SimpleNamespace(source=meta["sources"][0], keep_downloads=False, out=tmp_path))
    with pytest.raises(ValueError, match="needed"):
        sources.check_space(meta, SimpleNamespace(source="fineweb-edu", keep_downloads=False, out=tmp_path))


def test_rows_still_to_be_read(tmp_path):
    """Of three sources the first is done: 3 documents and 1, one more skipped."""
    names = [parquet(tmp_path / f"{name}.parquet", texts_of(5)) for name in "abc"]
    done = {"skipped": {"empty": 1}, "train": {"documents": 3}, "val": {"documents": 1}}
    count = lambda names, limit: sources.count_rows({"sources": names, "shards": [done, None, None]}, SimpleNamespace(max_documents=limit))
    assert count(names, None) == 10 and count(names, 9) == 5 and count([*names[:2], "x.jsonl"], None) is None


def test_text_and_id_in_one_column(tmp_path, monkeypatch):
    run(monkeypatch, f"--source={parquet(tmp_path / 'a.parquet', ['a', 'b'])}", "--text_column=id", "--tokenizer=utf16",
        f"--out={tmp_path}/out", "--val_fraction=0")
    assert len(decoded(tmp_path / "out")) == 2


def test_txt_files_of_a_glob_are_the_documents_of_one_shard(tokenizer_path, tmp_path, monkeypatch):
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    run(monkeypatch, f"--source={tmp_path}/*.txt", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
        "--val_fraction=0")
    assert decoded(tmp_path / "out") == ["text a", "text b",
                                         "text c"] and len(shard_format.read_meta(tmp_path / "out")["shards"]) == 1


@pytest.mark.parametrize("lines, part", [
    (b'{"text": "a"}\n{"text": \n', "line 2"), (b'["a"]\n', "line 1"), (b'{"body": "a"}\n', "'text'"),
                                         (b"[" * 100_000, "line 1")])
def test_a_bad_json_line_is_one_line(lines, part, tokenizer_path, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(lines)
    with pytest.raises(ValueError, match=part) as error:
        run(monkeypatch, f"--source={tmp_path}/a.jsonl", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out")
    assert "a.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_text_that_is_no_text_is_counted(tokenizer_path, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": 5}\n{"text": null}\n{"text": ["a"]}\n{"text": "a"}\n')
    run(monkeypatch, f"--source={tmp_path}/a.jsonl", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
        "--val_fraction=0")
    assert shard_format.read_meta(tmp_path / "out")["shards"][0]["skipped"] == {"not text": 2, "null": 1}


@pytest.mark.parametrize("flags, part", [
    (["--source=missing/*.parquet"], "no such file"), (["--source=a.csv"], "expected a name that ends in"),
                                         (["--text_column=body"], "--text_column"),
    (["--shards=0:2"], "A < B <= 1"), (["--text_column=n"], "cannot be read")])
def test_a_wrong_source_is_one_line(flags, part, tokenizer_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), "a.parquet")
    Path("a.csv").write_text("text\n")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(part)) as error:
        run(monkeypatch, "--source=a.parquet", f"--tokenizer={tokenizer_path}", "--out=out", *flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flags", [["--fraction=1"], ["--val_fraction=1"], ["--val_fraction=-1"], ["--workers=0"],
                                   ["--shards=3"], ["--stats"],
                                   ["--max_documents=0"], ["--sourc=a"]])
def test_a_wrong_flag_exits_with_2(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prepare.py", *flags])
    with pytest.raises(SystemExit) as error:
        prepare.parse_args()
    assert error.value.code == 2 and flags[0].split("=")[0] in capsys.readouterr().err


def test_a_truncated_parquet_file_keeps_the_shards_before_it(tokenizer_path, tmp_path, monkeypatch):
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(50, seed=name))
    flags = f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", "--workers=2"
    run(monkeypatch, *flags, f"--out={tmp_path}/clean")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-8])
    one_line(command(*flags, f"--out={tmp_path}/out"), "b.parquet", f"{len(whole) - 8:,} bytes", "run again")
    assert [bool(entry) for entry in shard_format.read_meta(tmp_path / "out")["shards"]] == [True, False, False]
    with pytest.raises(ValueError, match="2 of 3 source files are not done"):
        shard_format.open_shards(tmp_path / "out", "train")
    (tmp_path / "b.parquet").write_bytes(whole)
    run(monkeypatch, *flags, f"--out={tmp_path}/out")
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


@pytest.mark.parametrize("where", ["a parquet page", "the batch reader"])
def test_a_read_error_in_the_middle_ends_the_run_and_the_next_completes_it(where, tokenizer_path, tmp_path,
                                                                           monkeypatch):
    path = parquet(tmp_path / "a.parquet", texts_of(3000), row_group_size=1000)
    flags = f"--source={path}", f"--tokenizer={tokenizer_path}"
    run(monkeypatch, *flags, f"--out={tmp_path}/clean")
    whole = Path(path).read_bytes()
    with monkeypatch.context() as patch:
        if where == "a parquet page":
            place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
            Path(path).write_bytes(whole[:place] + b"\xff" * 64 + whole[place + 64:])
        else:
            def broken(file, *columns, read=sources.read_parquet):
                for number, row in enumerate(read(file, *columns)):
                    if number == 1500:
                        raise pa.ArrowInvalid("offset overflow while concatenating arrays")
                    yield row
            patch.setitem(sources.READERS, ".parquet", broken)
        with pytest.raises(ValueError, match="a.parquet: .* cannot be read"):
            run(monkeypatch, *flags, f"--out={tmp_path}/out")
    assert not [path for path in contents(tmp_path / "out")
                if path.endswith((".bin", ".idx"))], "nothing under a final name"
    Path(path).write_bytes(whole)
    run(monkeypatch, *flags, f"--out={tmp_path}/out")
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_max_documents_takes_the_first_and_reads_no_more(tokenizer_path, tmp_path, monkeypatch):
    texts = texts_of(250)
    for i in range(5):
        parquet(tmp_path / f"{i}.parquet", texts[50 * i:50 * i + 50] if i < 4 else ["never reached"])
    opened = []
    monkeypatch.setitem(sources.READERS, ".parquet", lambda file, *rest: opened.append(file)
                        or sources.read_parquet(file, *rest))
    run(monkeypatch, f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
        "--val_fraction=0", "--max_documents=120")
    assert decoded(tmp_path / "out") == texts[:120]
    assert [Path(name).name for name in opened] == ["0.parquet", "1.parquet", "2.parquet"]
    assert len(shard_format.read_meta(tmp_path / "out")["sources"]) == 3
    before = contents(tmp_path / "out")
    (tmp_path / "out/train/00001.bin").unlink()
    run(monkeypatch, f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
        "--val_fraction=0", "--max_documents=120")
    assert contents(tmp_path / "out") == before


def test_max_documents_holds_for_training_a_tokenizer_too(tmp_path, monkeypatch):
    parquet(tmp_path / "a.parquet", texts_of(20))
    (tmp_path / "b.parquet").write_bytes(b"no parquet file")
    run(monkeypatch, f"--source={tmp_path}/*.parquet", "--tokenizer=train:300", f"--out={tmp_path}/out",
        "--max_documents=15")
    assert sum(len(documents(tmp_path / "out", split)) for split in shard_format.SPLITS) == 15


def test_memory_does_not_grow_with_the_file(tokenizer_path, tmp_path):
    """One row group of 40 MB and one of 160 MB of long documents: the main process and its workers stay as they are."""
    peaks = []
    for n in (20, 80):
        path = tmp_path / f"{n}.parquet"
        texts = [(" ".join(texts_of(1, seed, 1)) + " ") * (2_000_000 // 6) for seed in range(n)]
        pq.write_table(pa.table({"text": texts}), path, row_group_size=n, use_dictionary=False,
                       write_batch_size=1, compression="none")  # pages of 1 MB
        # VmHWM, because ru_maxrss counts what this process had when it made that one; without the stats, because they
        # map the shards, and pages of a mapped file would count too.
        script = ("import re, resource, prepare\nif __name__ == '__main__':\n"
                  " prepare.print_stats = lambda *unused: None\n prepare.main()\n"
                  " print(re.search('VmHWM: *\\t *(\\\\d+)', open('/proc/self/status').read())[1], "
                  "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)")
        (tmp_path / "measure.py").write_text(script)
        result = subprocess.run([sys.executable, tmp_path / "measure.py", f"--source={path}", "--tokenizer=utf16",
                                 f"--out={tmp_path}/{n}", "--workers=2"],
                                capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=100)
        assert result.returncode == 0, result.stderr
        peaks.append([int(kilobytes) / 1024 for kilobytes in result.stdout.split("\n")[-2].split()])
        path.unlink()
    assert all(after < before + 60 for before, after in zip(*peaks)) and max(peaks[1]) < 350, f"MiB: {peaks}"


# ----------------------------------------------------------------------------------------------------------------------
# Split

def test_split_depends_on_seed_and_id_alone(tokenizer_path, tmp_path, monkeypatch):
    texts = texts_of(400)
    parquet(tmp_path / "a.parquet", texts[:200], ids="a")
    parquet(tmp_path / "b.parquet", texts[200:], ids="b")
    one = [f"--source={tmp_path}/[ab].parquet", f"--tokenizer={tokenizer_path}", "--val_fraction=0.1"]
    assert command(*one, f"--out={tmp_path}/1", "--workers=1", PYTHONHASHSEED="1").returncode == 0
    assert command(*one, f"--out={tmp_path}/2", "--workers=3", PYTHONHASHSEED="2").returncode == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    pq.write_table(pa.table({"text": texts[::-1], "id": [f"{'ab'[i // 200]}{i % 200}" for i in range(400)][::-1]}),
                   tmp_path / "reversed.parquet")
    run(monkeypatch, f"--source={tmp_path}/reversed.parquet", *one[1:], f"--out={tmp_path}/3")
    assert sorted(decoded(tmp_path / "1", "val")) == sorted(decoded(tmp_path / "3", "val")) != []
    run(monkeypatch, *one, f"--out={tmp_path}/4", "--split_seed=1")
    assert sorted(decoded(tmp_path / "1", "val")) != sorted(decoded(tmp_path / "4", "val"))


def test_split_rule_is_the_documented_one_and_duplicates_go_to_one_side(tmp_path, monkeypatch):
    ids = [f"x{i % 500}" for i in range(1000)]
    pq.write_table(pa.table({"text": [f"{name} {i}" for i, name in enumerate(ids)], "id": ids}), tmp_path / "a.parquet")
    run(monkeypatch, f"--source={tmp_path}/a.parquet", "--tokenizer=utf16", f"--out={tmp_path}/out",
        "--val_fraction=0.3", "--split_seed=7")
    threshold = lambda name: int.from_bytes(hashlib.blake2b(f"7:{name}".encode(), digest_size=8).digest(),
                                            "big") / 2**64
    held = {name for name in ids if threshold(name) < 0.3}
    sides = [{text.split()[0] for text in decoded(tmp_path / "out", split)} for split in shard_format.SPLITS]
    assert sides[1] == held and not sides[0] & sides[1] and 100 < len(held) < 200


@pytest.mark.parametrize("n, fraction", [(10, 0.05), (1, 0.05), (1, 0), (1, 0.999999)])
def test_a_side_without_documents_is_said(n, fraction, tmp_path, monkeypatch, capsys):
    run(monkeypatch, f"--source={parquet(tmp_path / 'a.parquet', texts_of(n))}", "--tokenizer=utf16",
        f"--out={tmp_path}/out", f"--val_fraction={fraction}")
    printed = capsys.readouterr().out
    for split in shard_format.SPLITS:
        assert (f"{split}: no document" in printed) == (not documents(tmp_path / "out", split))


def test_another_preparation_in_the_same_directory_is_refused(tokenizer_path, tmp_path, monkeypatch):
    base = {"source": parquet(tmp_path / "a.parquet", texts_of(20)), "tokenizer": tokenizer_path,
            "out": tmp_path / "out", "val_fraction": 0.1, "split_seed": 0}
    flags = lambda **changed: [f"--{key}={value}" for key, value in {**base, **changed}.items()]
    run(monkeypatch, *flags())
    before = contents(tmp_path / "out")
    for changed, field in (({"split_seed": 1}, "split seed: 0 there, 1 now"),
                           ({"val_fraction": 0.2}, "split fraction: 0.1 there"),
                           ({"source": parquet(tmp_path / ("b" * 60 + ".parquet"), ["b"])}, "sources: .*a.parquet.* there, .*b.parquet.* now"),
                           ({"tokenizer": "train:300"}, "tokenizer name"),
                           ({"tokenizer": "utf16"}, "tokenizer name"), ({"text_column": "id"}, "columns"),
                           ({"max_documents": 5}, "max_documents: None there, 5")):
        with pytest.raises(ValueError, match=field):
            run(monkeypatch, *flags(**changed))
        assert contents(tmp_path / "out") == before
    parquet(tmp_path / "a.parquet", texts_of(21))
    with pytest.raises(ValueError, match="a.parquet: not the file that"):
        run(monkeypatch, *flags())
    assert contents(tmp_path / "out") == before


# ----------------------------------------------------------------------------------------------------------------------
# Nothing lost

def test_workers_and_batches_do_not_show(tokenizer_path, tmp_path, monkeypatch):
    for name in "ab":
        parquet(tmp_path / f"{name}.parquet", texts_of(1500, seed=name) + ["x " * 50_000], row_group_size=400)
    found = []
    for out, workers, batch in (("1", 1, 256), ("2", 2, 256), ("3", 3, 10)):
        monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", batch)
        run(monkeypatch, f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/{out}",
            f"--workers={workers}",
            "--val_fraction=0.1")
        found.append(contents(tmp_path / out))
    assert found[0] == found[1] == found[2]


def test_killed_at_any_moment_and_run_again(tokenizer_path, tmp_path):
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(2000, seed=name, words=300))
    flags = f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", "--workers=2", "--val_fraction=0.1"
    start = time.monotonic()
    assert command(*flags, f"--out={tmp_path}/clean").returncode == 0
    seconds, draw, cut = time.monotonic() - start, random.Random(8), 0
    for attempt in range(3):
        process = subprocess.Popen([sys.executable, ROOT / "prepare.py", *flags, f"--out={tmp_path}/out"],
                                   stdout=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.3, 1) * seconds)
        process.send_signal(signal.SIGKILL)
        cut += process.wait() == -signal.SIGKILL
    assert command(*flags, f"--out={tmp_path}/out").returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "clean") and cut


def descendants(pid):
    """The process ids of a process's children, their children and so on."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return children + [p for child in children for p in descendants(child)]


def test_workers_do_not_outlive_a_killed_run(tokenizer_path, tmp_path):
    source = parquet(tmp_path / "a.parquet", texts_of(60_000, words=300))
    process = subprocess.Popen([sys.executable, ROOT / "prepare.py", f"--source={source}",
                                f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out", "--workers=2"])
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("out/train/*.tmp")) or len(descendants(process.pid)) < 4:  # two of Python's own
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    workers = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    alive = lambda: [pid for pid in workers if Path(f"/proc/{pid}").exists()
                     and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]]
    while alive():
        assert time.monotonic() < deadline, alive()
        time.sleep(0.05)


@pytest.mark.parametrize("moment", ("start", "starting workers", "work"))
def test_interrupt_is_one_line(tokenizer_path, tmp_path, moment):
    source = parquet(tmp_path / "a.parquet", texts_of(60_000, words=300))
    process = subprocess.Popen([sys.executable, ROOT / "prepare.py", f"--source={source}",
                                f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out", "--workers=2"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    reached = {"start": lambda: len(descendants(process.pid)) >= 2, "starting workers": lambda: len(descendants(process.pid)) > 2,
               "work": lambda: any(path.stat().st_size for path in tmp_path.glob("out/train/*.tmp"))}[moment]
    while not reached():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    errors = process.communicate(timeout=20)[1]
    assert errors == "prepare.py: interrupted; run the same command again to go on\n" and process.returncode == 1


def test_two_runs_at_once_in_one_directory_are_refused(tokenizer_path, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    source = parquet(tmp_path / "a.parquet", ["a"])
    code = ("import fcntl, os, sys, time\nfcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
            "print(flush=True)\ntime.sleep(60)")
    holder = subprocess.Popen([sys.executable, "-c", code, out], stdout=subprocess.PIPE)
    holder.stdout.readline()
    with pytest.raises(ValueError, match="another prepare.py"):
        run(monkeypatch, f"--source={source}", "--tokenizer=utf16", f"--out={out}")
    holder.kill()
    holder.wait()
    run(monkeypatch, f"--source={source}", "--tokenizer=utf16", f"--out={out}")


def test_a_failing_write_ends_in_one_line_and_the_next_run_completes(tokenizer_path, tmp_path, monkeypatch):
    """A limit on the size of files stands for the full disk: the write fails in the same place."""
    source = parquet(tmp_path / "a.parquet", texts_of(5000))
    flags = f"--source={source}", f"--tokenizer={tokenizer_path}", "--workers=2"
    run(monkeypatch, *flags, f"--out={tmp_path}/clean")
    result = subprocess.run(["bash", "-c", "ulimit -f 64; trap '' XFSZ; exec \"$@\"", "-", sys.executable,
                             ROOT / "prepare.py", *flags, f"--out={tmp_path}/out"],
                            capture_output=True, text=True)
    one_line(result, "File too large")
    assert not [name for name in contents(tmp_path / "out") if name.endswith((".bin", ".idx"))]
    run(monkeypatch, *flags, f"--out={tmp_path}/out")
    assert contents(tmp_path / "out") == contents(tmp_path / "clean")


def test_too_little_space_is_said_before_the_work(tokenizer_path, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match="GB free, at least"):
        run(monkeypatch, f"--source={parquet(tmp_path / 'a.parquet', texts_of(50))}", f"--tokenizer={tokenizer_path}",
            f"--out={tmp_path}/out")
    assert not contents(tmp_path / "out")


@pytest.fixture
def prepared(tokenizer_path, tmp_path, monkeypatch):
    """A directory of three shards, and the flags that made it."""
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(60, seed=name))
    flags = (f"--source={tmp_path}/*.parquet", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out",
             "--val_fraction=0.2")
    run(monkeypatch, *flags)
    return tmp_path / "out", flags


def flip(path, at=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [
    lambda out: (out / "train/00001.bin").unlink(),
    lambda out: os.truncate(out / "train/00001.bin", 100),
    lambda out: flip(out / "val/00001.bin"),
    lambda out: flip(out / "train/00001.idx", 8),
    lambda out: (out / "train/00001.idx").write_bytes((out / "train/00001.idx").read_bytes()[::-1]),
    lambda out: (out / "train/00001.bin").write_bytes(bytes(len((out / "train/00001.bin").read_bytes()))),
])
def test_check_finds_damage_and_the_next_run_repairs_it(damage, prepared, monkeypatch):
    out, flags = prepared
    before = contents(out)
    run(monkeypatch, f"--check={out}", "--stats")
    damage(out)
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, f"--check={out}")
    assert re.fullmatch(r"prepare.py: shard 00001: [^\n]+",
                        str(error.value.code)), "it, and no other; a text as exit code is exit 1"
    run(monkeypatch, *flags)
    assert contents(out) == before


def test_check_knows_the_tokenizer(prepared, monkeypatch):
    out, flags = prepared
    before = contents(out)
    flip(out / "tokenizer.json", 5)
    with pytest.raises(SystemExit, match="tokenizer.json: its sha256"):
        run(monkeypatch, f"--check={out}")
    run(monkeypatch, *flags)
    assert contents(out) == before


def test_what_a_killed_run_left_under_a_final_name_goes(prepared_from, tmp_path):
    (tmp_path / "out/val").mkdir(parents=True)
    (tmp_path / "out/val/00000.bin").write_bytes(b"of a run with another fraction, killed before meta.json was written")
    assert not list((prepared_from(["a"]) / "val").iterdir())


def test_check_as_a_command(prepared):
    out, _ = prepared
    good = command(f"--check={out}", "--stats")
    assert good.returncode == 0 and "3 shards are what meta.json says" in good.stdout
    meta = shard_format.read_meta(out)
    totals = [sum(entry[split][key] for entry in meta["shards"]) for split in shard_format.SPLITS
              for key in ("documents", "tokens")]
    assert re.search(r"^all\s+" + r"\s+".join(map(str, totals)), good.stdout.replace(",", ""),
                     re.M) and "tokens in a document" in good.stdout
    for number in (0, 2):
        flip(out / f"train/{number:05d}.bin")
    bad = command(f"--check={out}")
    assert bad.returncode == 1 and re.findall(r"shard (\d+):", bad.stderr) == ["00000", "00002"]
    assert command("--check=nowhere").returncode == 1


def test_stats_count_eligible_documents_and_tokens(capsys, prepared_from):
    lengths = [10, 511, 512, 513, 2048, 5000]  # with the end of text: one more
    prepared_from(['x' * n for n in lengths], tokenizer="utf16")
    table = {line[:26].strip(): line[26:].split()[:2] for line in capsys.readouterr().out.replace(",", "").splitlines()}
    for limit in (512, 1024, 2048, 4096):
        eligible = [n + 1 for n in lengths if n + 1 > limit]  # a window needs limit + 1 tokens
        assert table[f"of more than {limit} tokens"] == [str(len(eligible)), str(sum(eligible))], limit


# ----------------------------------------------------------------------------------------------------------------------
# The reader

def test_reader_needs_no_network_library(prepared):
    code = (f"import sys; from machinery.shards import open_shards; open_shards({str(prepared[0])!r}, 'train')[0].map(); "
            "sys.exit(bool({'requests', 'huggingface_hub', 'httpx'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_reader_checks_sizes_and_the_index(prepared):
    out, _ = prepared
    tokens, starts = shard_format.open_shards(out, "train")[0].map()
    assert tokens.dtype == np.uint16 and starts.dtype == np.int64 and not tokens.flags.writeable
    os.truncate(out / "val/00002.bin", 4)
    with pytest.raises(ValueError, match="val/00002.bin: 4 bytes; expected"):
        shard_format.open_shards(out, "val")
    assert len(shard_format.open_shards(out, "train")) == 3
    index = np.fromfile(out / "train/00000.idx", "<i8")
    index[[3, 4]] = index[[4, 3]]
    index.tofile(out / "train/00000.idx")
    with pytest.raises(ValueError, match="index does not belong"):
        shard_format.open_shards(out, "train")[0].map()
    with pytest.raises(FileNotFoundError, match="no prepared data"):
        shard_format.read_meta(out / "train")
    (out / "meta.json").write_text('{"format": 9}')
    with pytest.raises(ValueError, match="format 9; expected 1"):
        shard_format.read_meta(out)


def test_offsets_are_64_bit():
    starts = shard_format.document_starts(np.array([2_000_000_000, 2_000_000_000, 5], np.int32))
    assert starts.dtype == np.int64 and starts.tolist() == [0, 2_000_000_000, 4_000_000_000, 4_000_000_005]


def test_reading_beyond_four_gigabytes(tmp_path):
    """A sparse shard: the file has holes and takes no space."""
    (tmp_path / "train").mkdir()
    starts, eot_id = [0, 1_200_000_000, 2_300_000_000, 2_500_000_000], 9
    with open(tmp_path / "train/00000.bin", "wb") as file:
        file.truncate(2 * starts[-1])
        for start in starts[1:]:
            file.seek(2 * (start - 1))
            file.write(np.array([eot_id, 7], "<u2")[:2 if start < starts[-1] else 1].tobytes())
    np.array(starts, "<i8").tofile(tmp_path / "train/00000.idx")
    meta = {"tokenizer": {"eot_id": eot_id, "vocab_size": 10},
            "shards": [{"train": {"documents": 3, "tokens": starts[-1], "longest": 1_200_000_000}}]}
    tokens, found = shard_format.Shard(tmp_path, "train", 0, meta).map()
    assert [tokens[i] for i in found[1:3].tolist()] == [7, 7]


# ----------------------------------------------------------------------------------------------------------------------
# The network

def megabytes(n, seed=0):
    return random.Random(seed).randbytes(n)


def test_a_cut_file_at_the_final_name_is_completed(server, tmp_path):
    data = server.files["/f.bin"] = megabytes(300_000)
    (tmp_path / "f.bin").write_bytes(data[:100_000])
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    assert [wanted for _, _, wanted, _ in server.log] == ["bytes=100000-"] and len(list(tmp_path.iterdir())) == 1


def test_another_file_at_the_final_name_is_noticed(server, tmp_path):
    """Its first bytes are not this file's: the server's sha256 says so, and the next run fetches it afresh."""
    data = server.files["/f.bin"] = megabytes(300_000)
    (tmp_path / "f.bin").write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match="sha256"):
        sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")
    assert not list(tmp_path.glob("*.bin"))
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data


def test_a_server_that_ignores_range(server, tmp_path):
    data = server.files["/f.bin"] = megabytes(300_000)
    whole = lambda handler, data, start: handler.send(200, data)
    server.script["/f.bin"] = [lambda handler, data, start: handler.send(200, data, cut=233_000)] + [whole] * 5
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    assert len(server.log) == 2


def test_a_206_that_starts_elsewhere_is_not_appended(server, tmp_path):
    data = server.files["/f.bin"] = megabytes(300_000)
    elsewhere = {"Content-Range": "bytes 100-299999/300000"}
    server.script["/f.bin"] = [lambda handler, data, start: handler.send(200, data, cut=200_000),
                               lambda handler, data, start: handler.send(206, data[100:], elsewhere)]
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    assert len(server.log) == 3


def test_a_file_that_changes_between_two_tries_is_fetched_anew(server, tmp_path):
    old, new = megabytes(300_000, seed=1), megabytes(300_000, seed=2)
    server.files["/f.bin"] = old
    etag = f'"{hashlib.sha256(old).hexdigest()}"'

    def cut(handler, data, start):
        handler.send(200, data, {"ETag": etag}, cut=200_000)
        server.files["/f.bin"] = new
    server.script["/f.bin"] = [cut]
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == new


@pytest.mark.parametrize("header", ["Repr-Digest", "Digest", "ETag"])
def test_a_wrong_sha256_is_noticed(header, server, tmp_path):
    data, digest = megabytes(3000), hashlib.sha256(b"another file")
    value = {"Repr-Digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:",
             "Digest": f"sha-256={base64.b64encode(digest.digest()).decode()}",
             "ETag": f'"{digest.hexdigest()}"'}[header]
    server.files["/f.bin"] = data
    server.script["/f.bin"] = [lambda handler, data, start: handler.send(200, data, {header: value})]
    with pytest.raises(ValueError, match=digest.hexdigest()):
        sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")
    assert not list(tmp_path.glob("f.bin*")) or not (tmp_path / "f.bin").exists()


def test_a_complete_partial_and_416(server, tmp_path):
    data = server.files["/f.bin"] = megabytes(300_000)
    (tmp_path / "f.bin.part").write_bytes(data)
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    assert [wanted for method, _, wanted, _ in server.log if method == "GET"] == ["bytes=300000-"], "not fetched again"
    (tmp_path / "f.bin").rename(tmp_path / "f.bin.part")
    with open(tmp_path / "f.bin.part", "ab") as file:
        file.write(b"too long")
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data


def test_retry_after_is_honoured(server, tmp_path, monkeypatch):
    monkeypatch.undo()  # real sleeping
    data = server.files["/f.bin"] = megabytes(3000)
    server.script["/f.bin"] = [lambda handler, data, start: handler.send(429, b"slow down", {"Retry-After": "1"})] * 2
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    times = [when for *_, when in server.log]
    assert len(times) == 3 and all(after - before >= 0.99 for before, after in zip(times, times[1:]))


@pytest.mark.parametrize("status", [429, 503, 404, 403])
def test_a_refusal_for_ever_is_one_line(status, server, tmp_path, monkeypatch):
    server.files["/f.parquet"] = b"data"
    server.script["/f.parquet"] = [lambda handler, data, start: handler.send(status, b"an error text")] * 99
    with pytest.raises(ValueError, match=f"/f.parquet: cannot be fetched: .*{status}") as error:
        run(monkeypatch, f"--source={server.url}/f.parquet", "--tokenizer=utf16", f"--out={tmp_path}/out")
    assert "\n" not in str(error.value) and len(server.log) == (7 if status in (429, 503) else 1)
    assert b"error text" not in b"".join(contents(tmp_path).values())


def test_reset_then_503_then_the_rest(server, tmp_path):
    data = server.files["/f.bin"] = megabytes(3_000_000)
    server.script["/f.bin"] = [lambda handler, data, start: handler.send(200, data, {"ETag": '"v1"'}, cut=1_500_000),
                               lambda handler, data, start: handler.send(503, b"busy")]
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    assert [wanted for _, _, wanted, _ in server.log][0] is None and server.log[2][2] == server.log[1][2] != "bytes=0-"


def test_a_stalled_transfer_is_taken_up_again(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sources, "DOWNLOAD_TIMEOUT", (1, 0.3))
    data, release = server.files.setdefault("/f.bin", megabytes(3000)), threading.Event()

    def stall(handler, data, start):
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:1000])
        handler.wfile.flush()
        release.wait(10)
    server.script["/f.bin"] = [stall]
    start = time.monotonic()
    assert Path(sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")).read_bytes() == data
    release.set()
    assert time.monotonic() - start < 5 and "trying again" in capsys.readouterr().err


def test_a_broken_body_for_ever_ends(server, tmp_path):
    server.files["/f.bin"] = megabytes(3000)
    server.script["/f.bin"] = [lambda handler, data, start: handler.send(200, data, cut=1000)] * 99
    with pytest.raises(ValueError, match="tries in a row brought nothing"):
        sources.download(f"{server.url}/f.bin", tmp_path / "f.bin")
    assert len(server.log) <= sources.DOWNLOAD_TRIES + 1


def test_a_url_from_end_to_end_and_its_download_is_deleted(server, tokenizer_path, tmp_path, monkeypatch):
    texts = texts_of(30)
    server.files["/data/f.parquet"] = Path(parquet(tmp_path / "f.parquet", texts)).read_bytes()
    flags = f"--source={server.url}/data/f.parquet", f"--tokenizer={tokenizer_path}", "--val_fraction=0"
    run(monkeypatch, *flags, f"--out={tmp_path}/out")
    run(monkeypatch, *flags, f"--out={tmp_path}/kept", "--keep_downloads")
    assert decoded(tmp_path / "out") == texts and not (tmp_path / "out/downloads").exists()
    assert [path.name for path in (tmp_path / "kept/downloads").iterdir()] == ["f.parquet"]
    entry = shard_format.read_meta(tmp_path / "out")["shards"][0]
    assert entry["sha256"] == hashlib.sha256(server.files["/data/f.parquet"]).hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(prepare.shutil, "rmtree", lambda *unused, **flags: None)  # the folder stays, but what was in it?
        run(monkeypatch, *flags, f"--out={tmp_path}/used")
    assert not list((tmp_path / "used/downloads").iterdir()), "each file goes as soon as it is used"
    n = len(server.log)
    run(monkeypatch, *flags, f"--out={tmp_path}/out")
    assert len(server.log) == n, "what is done asks the network nothing"


@pytest.fixture
def hub(server, tokenizer_path, tmp_path):
    """A hub with three of the corpus's shards and a tokenizer; a function that runs prepare.py against it."""
    for number in range(3):
        path = parquet(tmp_path / "x.parquet", texts_of(3000, seed=number), ids=f"s{number}-", row_group_size=500)
        server.files[f"fineweb-edu-dedup/train-{number:05d}-of-00234.parquet"] = Path(path).read_bytes()
    server.files["tokenizer.json"] = Path(tokenizer_path).read_bytes()
    code = ("import sys, prepare\nfrom machinery import sources\nif __name__ == '__main__':\n"
            " sources.FINEWEB_EDU = ('hf://datasets/o/n@' + sys.argv.pop(1)\n"
            "                        + '/fineweb-edu-dedup/train-{:05d}-of-00234.parquet')\n"
            " try:\n  prepare.main()\n except (ValueError, OSError) as error:\n  sys.exit(f'prepare.py: {error}')\n")
    (tmp_path / "run_hub.py").write_text(code)

    def run_hub(*flags, revision=REVISION, **environment):
        return subprocess.run([sys.executable, tmp_path / "run_hub.py", revision, "--source=fineweb-edu",
                               "--val_fraction=0", "--workers=1", *flags],
                              capture_output=True, text=True, timeout=100, env=os.environ | {
                                  "PYTHONPATH": str(ROOT), "HF_ENDPOINT": server.url, "HF_HOME": f"{tmp_path}/hf_home",
                                  "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"} | environment)
    return run_hub


def test_hub_shards_and_tokenizer(hub, server, tokenizer_path, tmp_path):
    tokenizer = f"--tokenizer=o/t@{REVISION}"
    result = hub("--shards=0:2", tokenizer, f"--out={tmp_path}/out")
    assert result.returncode == 0, result.stderr
    assert decoded(tmp_path / "out") == texts_of(3000, seed=0) + texts_of(3000, seed=1)
    assert not (tmp_path / "out/downloads").exists() and not list((tmp_path / "hf_home").rglob("*.parquet"))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == Path(tokenizer_path).read_bytes()

    # With --keep_downloads they stay in the hub's own cache, where the next run finds them without a network.
    assert hub("--shards=0:2", tokenizer, f"--out={tmp_path}/kept", "--keep_downloads").returncode == 0
    assert len(list((tmp_path / "hf_home").rglob("*.parquet"))) == 2
    n = len(server.log)
    result = hub("--shards=0:2", tokenizer, f"--out={tmp_path}/offline", HF_HUB_OFFLINE="1")
    assert result.returncode == 0 and len(server.log) == n, result.stderr
    assert contents(tmp_path / "offline") == contents(tmp_path / "out") == contents(tmp_path / "kept")
    assert len(list((tmp_path / "hf_home").rglob("*.parquet"))) == 2, "not ours to delete"
    one_line(hub("--shards=2:3", tokenizer, f"--out={tmp_path}/none", HF_HUB_OFFLINE="1"),
             "train-00002-of-00234.parquet", "cannot be fetched")


def test_another_revision_of_the_corpus_is_refused(hub, server, tokenizer_path, tmp_path):
    flags = "--shards=0:2", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out"
    assert hub(*flags).returncode == 0
    before = contents(tmp_path / "out")
    one_line(hub(*flags, revision="b" * 40), "sources", "choose another --out")
    assert contents(tmp_path / "out") == before


def test_max_documents_reads_only_the_row_groups_it_needs(hub, server, tokenizer_path, tmp_path):
    name = "fineweb-edu-dedup/train-00000-of-00234.parquet"
    big = parquet(tmp_path / "x.parquet", texts_of(2000, words=2000), row_group_size=100)
    server.files[name] = Path(big).read_bytes()
    size = len(server.files[name])
    result = hub("--max_documents=150", f"--tokenizer={tokenizer_path}", f"--out={tmp_path}/out")
    assert result.returncode == 0, result.stderr
    assert len(documents(tmp_path / "out")) == 150
    spans = [re.fullmatch(r"bytes=(\d+)-(\d+)", wanted).groups() for _, path, wanted, _ in server.log if path == name
             and wanted]
    read = sum(min(int(last), size - 1) - int(first) + 1 for first, last in spans)
    assert spans and read < size / 2, f"{read:,} of {size:,} bytes"
    assert not [entry for entry in server.log if entry[1] == name.replace("00000-", "00001-")
                and entry[2]], "the next file is not read"


def test_a_hub_that_is_away_is_one_line(tmp_path):
    assert one_line(command("--source=fineweb-edu", "--shards=0:1", "--tokenizer=utf16", f"--out={tmp_path}/out",
                            HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1"),
                    "train-00000-of-00234.parquet", "cannot be fetched")
