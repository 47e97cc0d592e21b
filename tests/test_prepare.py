"""prepare.py: documents in, whole shards out, nothing lost; and the reader of the shards.

The ids have test_twin.py, the network test_downloads.py. Not tested, because the design makes the
fault impossible: one source file gives one shard, however short (a corpus is not cut into shards of
a fixed size, so there is no remainder to lose); the split is a threshold on a hash, so no count can
round to nothing.
"""

import gzip
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparing import (
    ROOT,
    assert_is_line,
    assert_one_line,
    command,
    contents,
    decoded,
    descendants,
    documents,
    end_of,
    entries,
    final_names,
    is_alive,
    parquet,
    run,
    texts_of,
)

import prepare
from machinery import shards as shard_format
from machinery import sources, twin
from machinery.shards import NOTES, SPLITS, open_shards, read_meta

INTERRUPTED = "prepare.py: interrupted; run the same command again to go on\n"


def spawn(*flags, **settings):
    """Start prepare.py as a process of its own."""
    arguments = [sys.executable, ROOT / "prepare.py", *flags]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL, text=True, **settings)


# The embedded corpus

def test_stdlib_in_two_processes_gives_the_same_bytes(tmp_path):
    """Part of the library, for speed; all else as a newcomer's first command does it."""
    (tmp_path / "part.py").write_text(
        "import itertools, prepare\n"
        "from machinery import sources\n"
        "read = sources.read_stdlib\n"
        "sources.read_stdlib = lambda *unused: itertools.islice(read(*unused), 0, None, 10)\n"
        "if __name__ == '__main__':\n"
        "    prepare.main()\n")
    results = []
    for seed in (1, 2):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(seed)}
        results.append(subprocess.run(
            [sys.executable, tmp_path / "part.py", f"--out={tmp_path}/{seed}", f"--workers={seed}"],
            capture_output=True, text=True, env=environment, timeout=100))
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    meta = read_meta(tmp_path / "1")
    assert meta["tokenizer"]["vocab_size"] == 3072 and meta["shards"][0]["val"]["documents"] > 2
    parts = "of more than 512 tokens", "bytes per token", "rows skipped", f"ids by {twin.FAST}"
    assert all(part in results[0].stdout for part in parts)
    assert not results[0].stderr, "quiet where it is not a terminal"


def test_stdlib_leaves_tests_out():
    names = [name for name, text in sources.read_stdlib(None, None, None) if text]
    assert {"lib/argparse.py", "lib/json/decoder.py", "pydoc/lambda"} <= set(names)
    assert len(set(names)) == len(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


# Reading documents

def test_nulls_and_empty_texts_are_counted(tmp_path, prep):
    parquet(tmp_path / "a.parquet", ["alpha beta", None, "gamma", ""])
    out = prep()
    assert decoded(out) == ["alpha beta", "gamma"]
    assert entries(out)[0]["skipped"] == {"empty": 1, "null": 1}


def test_string_types_give_the_same_shards(tmp_path, prep):
    texts, shards = [*texts_of(20), None, "ünï"], []
    kinds = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(),
             pa.dictionary(pa.int32(), pa.string()))
    for number, kind in enumerate(kinds):
        if kind == pa.binary():
            column = pa.array([text and text.encode() for text in texts], kind)
        else:
            column = pa.array(texts).cast(kind)
        parquet(tmp_path / f"{number}.parquet", column)
        files = contents(prep(f"{number}.parquet", out=number, val_fraction=0.1))
        del files["meta.json"]
        shards.append(files)
    assert all(other == shards[0] for other in shards) and len(shards[0]) > 2


def test_a_file_without_rows_between_others(tmp_path, prep):
    parquet(tmp_path / "a.parquet", ["one"])
    schema = pa.schema([("text", pa.string()), ("id", pa.string())])
    pq.ParquetWriter(tmp_path / "b.parquet", schema).close()
    parquet(tmp_path / "c.parquet", ["", "   "])
    parquet(tmp_path / "d.parquet", ["", ""])
    out = prep()
    assert decoded(out) == ["one", "   "]
    written = sorted(path.name for path in (out / "train").iterdir())
    assert written == ["00000.bin", "00000.idx", "00002.bin", "00002.idx"]
    assert open_shards(out, "val") == [] and not list((out / "val").iterdir())


def test_id_columns_of_any_name_or_none(tmp_path, monkeypatch, prep):
    texts = texts_of(200)
    parquet(tmp_path / "a.parquet", texts)
    parquet(tmp_path / "b.parquet", texts, id_column="doc_id")
    parquet(tmp_path / "c.parquet", texts, ids=None)
    held = []
    for size in (256, 7):
        monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", size)
        out = prep(out=size, val_fraction=0.2)
        held.append([(entry["val"]["documents"], entry["val"]["bin_sha256"])
                     for entry in entries(out)])
    assert held[0] == held[1] and all(20 < n < 60 for n, _ in held[0])
    with_id, other_name, without = held[0]
    assert other_name == without != with_id, "without an id column of that name, the text decides"


def test_bad_unicode_costs_one_row(tmp_path, prep):
    binary = pa.array([b"good", b"x \xed\xa0\xbd y", b"fine"])
    text = pa.StringArray.from_buffers(3, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "lone \\ud83d end"}\n{"text": "raw \xff byte"}\n'
                                       b'\n{"text": "pair \\ud83d\\ude42"}\n')
    assert decoded(prep("*.[jp]*")) == ["good", "x \ufffd\ufffd\ufffd y", "fine",
                                        "lone \ufffd end", "raw \ufffd byte", "pair 🙂"]


def test_jsonl_plain_gzip_and_zstd(tmp_path, prep):
    texts = [*texts_of(50), "two\nlines", "ünï"]
    rows = [json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)]
    lines = "".join(rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    two_members = gzip.compress(lines[:999]) + gzip.compress(lines[999:])
    (tmp_path / "a.jsonl.gz").write_bytes(two_members)
    with pa.CompressedOutputStream(str(tmp_path / "a.jsonl.zst"), "zstd") as file:
        file.write(lines)
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert decoded(prep(name, out=f"{name}-out")) == texts
    (tmp_path / "cut.jsonl.gz").write_bytes(two_members[:-200])
    expected = r"cut.jsonl.gz: [\d,]+ bytes, cannot be read: Truncated"
    with pytest.raises(ValueError, match=expected):
        prep("cut.jsonl.gz", out="cut")


def test_a_glob_of_any_files_has_a_shard_for_each(tmp_path, prep):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    out = prep("*", tokenizer="utf16")
    assert len(entries(out)) == 2 and decoded(out) == ["a", "b"]


def test_txt_files_of_a_glob_are_the_documents_of_one_shard(tmp_path, prep):
    for name in "cab":
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    out = prep("*.txt")
    assert decoded(out) == ["text a", "text b", "text c"] and len(entries(out)) == 1


def test_text_and_id_in_one_column(tmp_path, prep):
    parquet(tmp_path / "a.parquet", ["a", "b"])
    assert len(decoded(prep("a.parquet", "--text_column=id", tokenizer="utf16"))) == 2


def test_sources_in_the_downloads_directory_are_the_users(tmp_path, prep):
    (tmp_path / "out/downloads").mkdir(parents=True)
    (tmp_path / "out/downloads/a.txt").write_text("a")
    assert decoded(prep("out/downloads/a.txt", tokenizer="utf16")) == ["a"]
    assert (tmp_path / "out/downloads/a.txt").exists()


def test_only_fineweb_edus_shards_are_large(tmp_path, monkeypatch):
    monkeypatch.setattr(sources.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    meta = {"sources": ["hf://datasets/o/d@0/f.parquet"], "shards": [None]}
    args = SimpleNamespace(source=meta["sources"][0], keep_downloads=False, out=tmp_path)
    sources.check_space(meta, args)
    args.source = "fineweb-edu"
    with pytest.raises(ValueError, match="needed"):
        sources.check_space(meta, args)


def test_rows_still_to_be_read(tmp_path):
    """Of three sources the first is done: 3 documents and 1, one more skipped."""
    names = [str(parquet(tmp_path / f"{name}.parquet", texts_of(5))) for name in "abc"]
    done = {"skipped": {"empty": 1}, "train": {"documents": 3}, "val": {"documents": 1}}

    def count(names, limit):
        meta = {"sources": names, "shards": [done, None, None]}
        return sources.count_rows(meta, SimpleNamespace(max_documents=limit))

    assert count(names, None) == 10 and count(names, 9) == 5
    assert count([*names[:2], "x.jsonl"], None) is None


@pytest.mark.parametrize("lines, part", [
    (b'{"text": "a"}\n{"text": \n', "line 2"), (b'["a"]\n', "line 1"),
    (b'{"body": "a"}\n', "'text'"), (b"[" * 100_000, "line 1")])
def test_a_bad_json_line_is_one_line(lines, part, tmp_path, prep):
    (tmp_path / "a.jsonl").write_bytes(lines)
    with pytest.raises(ValueError, match=part) as error:
        prep("a.jsonl")
    assert "a.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_a_text_that_is_no_text_is_counted(tmp_path, prep):
    (tmp_path / "a.jsonl").write_text(
        '{"text": 5}\n{"text": 0}\n{"text": null}\n{"text": ["a"]}\n{"text": "a"}\n')
    assert entries(prep("a.jsonl"))[0]["skipped"] == {"not text": 3, "null": 1}


@pytest.mark.parametrize("flag, part", [
    ("--source=missing/*.parquet", "no such file"),
    ("--source=a.csv", "expected a name that ends in"), ("--text_column=body", "--text_column"),
    ("--shards=0:2", "A < B <= 1"), ("--text_column=n", "cannot be read")])
def test_a_wrong_source_is_one_line(flag, part, tmp_path, monkeypatch, prep):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"text": ["a"], "n": [1]}), "a.parquet")
    Path("a.csv").write_text("text\n")
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(part)) as error:
        prep("a.parquet", flag)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", [
    "--fraction=1", "--val_fraction=1", "--val_fraction=-1", "--val_fraction=nan", "--workers=0",
    "--shards=3", "--shards=3:3", "--shards=3:2", "--stats", "--max_documents=0", "--sourc=a",
    "--tokenizer=train:12", "--tokenizer=train:70000", "--tokenizer=train:", "--out=",
    "--source=", "--text_column=", "--check=", "--join=a"])
def test_a_wrong_flag_exits_with_2(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prepare.py", flag])
    with pytest.raises(SystemExit) as error:
        prepare.parse_prepare_args("")
    assert error.value.code == 2 and flag.split("=")[0] in capsys.readouterr().err


def test_a_truncated_parquet_file_keeps_the_shards_before_it(tmp_path, flags, prep):
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(50, seed=name))
    clean = contents(prep("*.parquet", "--workers=2", out="clean"))
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(whole[:-8])
    told = end_of(*flags(), "--workers=2")
    assert_is_line(told, "b.parquet", f"{len(whole) - 8:,} bytes", "run again")
    assert [bool(entry) for entry in entries(tmp_path / "out")] == [True, False, False]
    with pytest.raises(ValueError, match="2 of 3 source files are not done"):
        open_shards(tmp_path / "out", "train")
    (tmp_path / "b.parquet").write_bytes(whole)
    assert contents(prep("*.parquet", "--workers=2")) == clean


def break_a_page(path, patch):
    """Overwrite part of the second row group."""
    whole = path.read_bytes()
    place = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    path.write_bytes(whole[:place] + b"\xff" * 64 + whole[place + 64:])


def break_the_reader(path, patch):
    """Let the reader fail at row 1500."""
    read = sources.read_parquet

    def broken(file, *columns):
        for number, row in enumerate(read(file, *columns)):
            if number == 1500:
                raise pa.ArrowInvalid("offset overflow while concatenating arrays")
            yield row

    patch.setitem(sources.READERS, ".parquet", broken)


@pytest.mark.parametrize("damage", [break_a_page, break_the_reader])
def test_a_read_error_in_the_middle_ends_the_run_and_the_next_completes_it(
        damage, tmp_path, monkeypatch, prep):
    path = parquet(tmp_path / "a.parquet", texts_of(3000), row_group_size=1000)
    clean, whole = contents(prep(out="clean")), path.read_bytes()
    with monkeypatch.context() as patch:
        damage(path, patch)
        with pytest.raises(ValueError, match="a.parquet: .* cannot be read"):
            prep()
    assert not final_names(tmp_path / "out")
    path.write_bytes(whole)
    assert contents(prep()) == clean


def test_max_documents_takes_the_first_and_reads_no_more(tmp_path, monkeypatch, prep):
    texts, opened = texts_of(250), []
    for i in range(4):
        parquet(tmp_path / f"{i}.parquet", texts[50 * i:50 * i + 50])
    parquet(tmp_path / "4.parquet", ["never reached"])

    def read_parquet(file, *columns, read=sources.read_parquet):
        opened.append(Path(file).name)
        return read(file, *columns)

    monkeypatch.setitem(sources.READERS, ".parquet", read_parquet)
    out = prep("*.parquet", "--max_documents=120")
    assert decoded(out) == texts[:120]
    assert opened == ["0.parquet", "1.parquet", "2.parquet"] and len(read_meta(out)["sources"]) == 3
    before = contents(out)
    (out / "train/00001.bin").unlink()
    assert contents(prep("*.parquet", "--max_documents=120")) == before


def test_max_documents_holds_for_training_a_tokenizer_too(tmp_path, prep):
    parquet(tmp_path / "a.parquet", texts_of(20))
    (tmp_path / "b.parquet").write_bytes(b"no parquet file")
    out = prep("*.parquet", "--max_documents=15", tokenizer="train:300", val_fraction=0.1)
    assert sum(len(documents(out, split)) for split in SPLITS) == 15


def peak_memory(tmp_path, *flags):
    """Run prepare.py; return the most memory, in MiB, of the main process and of a worker."""
    # VmHWM, because ru_maxrss counts what this process had when it made that one; without the
    # stats, because they map the shards, and pages of a mapped file would count too.
    (tmp_path / "measure.py").write_text(
        "import re, resource, prepare\n"
        "if __name__ == '__main__':\n"
        "    prepare.print_stats = lambda *unused: None\n"
        "    prepare.main()\n"
        "    status = open('/proc/self/status').read()\n"
        "    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "    print(re.search(r'VmHWM:\\s*(\\d+)', status)[1], workers)\n")
    result = subprocess.run([sys.executable, tmp_path / "measure.py", *flags], timeout=100,
                            capture_output=True, text=True,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    return [int(kilobytes) / 1024 for kilobytes in result.stdout.split("\n")[-2].split()]


def test_memory_does_not_grow_with_the_file(tmp_path):
    """A row group of 40 MB and one of 160 MB: the main process and its workers stay as they are."""
    peaks = []
    for n in (20, 80):
        path = tmp_path / f"{n}.parquet"
        words = [texts_of(1, seed, words=1)[0] + " " for seed in range(n)]
        table = pa.table({"text": [word * (2_000_000 // 6) for word in words]})
        pq.write_table(table, path, row_group_size=n, use_dictionary=False, write_batch_size=1,
                       compression="none")  # pages of 1 MB
        peaks.append(peak_memory(tmp_path, f"--source={path}", "--tokenizer=utf16",
                                 f"--out={tmp_path}/{n}", "--workers=2"))
        path.unlink()
    for before, after in zip(*peaks):
        assert after < before + 60 and after < 350, f"MiB: {peaks}"


def test_a_document_takes_a_few_times_its_size(tmp_path, flags):
    """Four of them for the text alone, where a character beyond the first 65,536 is in it."""
    peaks = []
    for size in (1, 25):
        text = ("\n".join(texts_of(500, words=100)) + "🙂\n") * (10 * size)
        (tmp_path / f"{size}.txt").write_text(text)
        asked = flags(f"{size}.txt", out=size)
        peaks.append(peak_memory(tmp_path, *asked, "--workers=1")[0])
    grown = (tmp_path / "25.txt").stat().st_size - (tmp_path / "1.txt").stat().st_size
    assert peaks[1] - peaks[0] < 9 * grown / 2**20, f"MiB: {peaks}, for {grown / 2**20:.0f} more"


# Split

def test_split_depends_on_seed_and_id_alone(tmp_path, prep):
    texts = texts_of(400)
    parquet(tmp_path / "a.parquet", texts[:200], ids="a")
    parquet(tmp_path / "b.parquet", texts[200:], ids="b")
    held = sorted(decoded(prep("[ab].parquet", out="ab", val_fraction=0.1), "val"))
    ids = [f"a{i}" for i in range(200)] + [f"b{i}" for i in range(200)]
    table = pa.table({"text": texts[::-1], "id": ids[::-1]})
    pq.write_table(table, tmp_path / "reversed.parquet")
    assert sorted(decoded(prep("reversed.parquet", val_fraction=0.1), "val")) == held != []
    other = prep("[ab].parquet", "--split_seed=1", out="other", val_fraction=0.1)
    assert sorted(decoded(other, "val")) != held


def test_split_rule_is_the_documented_one_and_duplicates_go_to_one_side(tmp_path, prep):
    ids = [f"x{i % 500}" for i in range(1000)]
    table = pa.table({"text": [f"{name} {i}" for i, name in enumerate(ids)], "id": ids})
    pq.write_table(table, tmp_path / "a.parquet")
    out = prep("*.parquet", "--split_seed=7", tokenizer="utf16", val_fraction=0.3)
    held = set()
    for name in ids:
        digest = hashlib.blake2b(f"7:{name}".encode(), digest_size=8).digest()
        if int.from_bytes(digest, "big") / 2**64 < 0.3:
            held.add(name)
    train, val = ({text.split()[0] for text in decoded(out, split)} for split in SPLITS)
    assert val == held and not train & val and 100 < len(held) < 200


@pytest.mark.parametrize("n, fraction", [(10, 0.05), (1, 0.05), (1, 0), (1, 0.999999)])
def test_a_side_without_documents_is_said(n, fraction, tmp_path, capsys, prep):
    parquet(tmp_path / "a.parquet", texts_of(n))
    out = prep(tokenizer="utf16", val_fraction=fraction)
    printed = capsys.readouterr().out
    for split in SPLITS:
        assert (f"{split}: no document" in printed) == (not documents(out, split))


def test_another_preparation_in_the_same_directory_is_refused(tmp_path, tokenizer_path):
    base = {"source": parquet(tmp_path / "a.parquet", texts_of(20)), "tokenizer": tokenizer_path,
            "out": tmp_path / "out", "val_fraction": 0.1, "split_seed": 0}
    other = parquet(tmp_path / ("b" * 60 + ".parquet"), ["b"])

    def prepare_with(**changed):
        run(*[f"--{key}={value}" for key, value in {**base, **changed}.items()])

    prepare_with()
    before = contents(tmp_path / "out")
    for changed, field in (({"split_seed": 1}, "split seed: 0 there, 1 now"),
                           ({"val_fraction": 0.2}, "split fraction: 0.1 there"),
                           ({"source": other}, "sources: .*a.parquet.* there, .*b.parquet.* now"),
                           ({"tokenizer": "train:300"}, "tokenizer name"),
                           ({"tokenizer": "utf16"}, "tokenizer name"),
                           ({"text_column": "id"}, "columns"),
                           ({"max_documents": 5}, "max_documents: None there, 5")):
        with pytest.raises(ValueError, match=field):
            prepare_with(**changed)
        assert contents(tmp_path / "out") == before
    parquet(tmp_path / "a.parquet", texts_of(21))
    with pytest.raises(ValueError, match="a.parquet: not the file that"):
        prepare_with()
    assert contents(tmp_path / "out") == before


def test_more_sources_are_added_to_what_is_done(tmp_path, flags, prep):
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(60, seed=name))
    clean = contents(prep(out="clean"))
    prep("*.parquet", "--shards=0:1")
    first = tmp_path / "out/train/00000.bin"
    made = first.stat().st_mtime_ns
    prep("*.parquet", "--shards=0:2")
    assert contents(prep()) == clean and first.stat().st_mtime_ns == made
    with pytest.raises(ValueError, match="prepared differently; sources"):
        prep("*.parquet", "--shards=1:3")
    with pytest.raises(ValueError, match="prepared differently; sources"):
        prep("*.parquet", "--shards=0:2")
    assert contents(tmp_path / "out") == clean


def test_more_sources_would_train_another_tokenizer(tmp_path, prep):
    for name in "ab":
        parquet(tmp_path / f"{name}.parquet", texts_of(60, seed=name))
    before = contents(prep("*.parquet", "--shards=0:1", tokenizer="train:300"))
    with pytest.raises(ValueError, match="prepared differently; sources"):
        prep(tokenizer="train:300")
    assert contents(tmp_path / "out") == before


def test_what_is_done_is_known_by_size_and_time(tmp_path, monkeypatch, prep):
    """To hash it all for nothing would read hundreds of GB."""
    parquet(tmp_path / "a.parquet", texts_of(60))
    out = prep()
    time.sleep(0.02)
    (out / "meta.json").write_bytes((out / "meta.json").read_bytes())
    hashed = []

    def sha256_of(*paths, read=sources.sha256_of):
        hashed.extend(Path(path).name for path in paths)
        return read(*paths)

    for module in (sources, shard_format):
        monkeypatch.setattr(module, "sha256_of", sha256_of)
    prep()
    assert not hashed
    run(f"--check={out}")
    assert hashed == ["00000.bin", "00000.idx"]
    source = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(source[:100] + b"x" + source[101:])
    os.utime(tmp_path / "b.parquet", (0, 0))  # an old file under the name of the source
    (tmp_path / "b.parquet").replace(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: not the file that"):
        prep()


# Nothing lost

def test_workers_and_batches_do_not_show(tmp_path, monkeypatch, prep):
    for name in "ab":
        texts = [*texts_of(1500, seed=name), "x " * 50_000]
        parquet(tmp_path / f"{name}.parquet", texts, row_group_size=400)
    found = []
    for workers, size in ((1, 256), (2, 256), (3, 10)):
        monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", size)
        out = prep("*.parquet", f"--workers={workers}", out=workers, val_fraction=0.1)
        found.append(contents(out))
    assert found[0] == found[1] == found[2]


def test_killed_at_any_moment_and_run_again(tmp_path, flags):
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(2000, seed=name, words=300))
    start = time.monotonic()
    assert command(*flags(out="clean", val_fraction=0.1), "--workers=2").returncode == 0
    seconds, draw, cut = time.monotonic() - start, random.Random(8), 0
    asked = [*flags(val_fraction=0.1), "--workers=2"]
    for _ in range(3):
        process = spawn(*asked)
        time.sleep(draw.uniform(0.3, 1) * seconds)
        process.send_signal(signal.SIGKILL)
        cut += process.wait() == -signal.SIGKILL
    assert command(*asked).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "clean") and cut


def test_killed_before_its_last_word(tmp_path, flags):
    """All shards are there, but the last one's entry is only noted beside meta.json."""
    for name in "ab":
        parquet(tmp_path / f"{name}.parquet", texts_of(9, seed=name))
    assert command(*flags()).returncode == 0
    clean, path = contents(tmp_path / "out"), tmp_path / "out" / "meta.json"
    meta = json.loads(path.read_text())
    path.with_name(NOTES).write_text(json.dumps([1, meta["shards"][1]]) + "\n")
    path.write_text(json.dumps(meta | {"shards": [meta["shards"][0], None]}))
    assert command(*flags()).returncode == 0
    assert contents(tmp_path / "out") == clean


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A source that takes seconds."""
    return parquet(tmp_path_factory.mktemp("large") / "a.parquet", texts_of(60_000, words=300))


def test_workers_do_not_outlive_a_killed_run(large, tmp_path, flags):
    process = spawn(*flags(), f"--source={large}", "--workers=2")
    deadline = time.monotonic() + 20
    # two of the descendants are Python's own
    while not list(tmp_path.glob("out/train/*.tmp")) or len(descendants(process.pid)) < 4:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    workers = descendants(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(map(is_alive, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_that_dies_is_one_line_and_the_next_run_completes(tmp_path, flags, prep):
    parquet(tmp_path / "a.parquet", texts_of(60_000, words=300))  # seconds of work
    clean = contents(prep(out="clean"))
    process = spawn(*flags(), "--workers=2", stderr=subprocess.PIPE)
    while not is_at_work(process, tmp_path / "out"):
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(max(map(int, descendants(process.pid))), signal.SIGKILL)  # the youngest is a worker
    errors = process.communicate(timeout=20)[1]
    assert_is_line(errors[:-1], "a worker died")
    assert process.returncode == 1 and not final_names(tmp_path / "out")
    assert contents(prep("*.parquet", "--workers=2")) == clean


def has_started(process, out):
    return len(descendants(process.pid)) >= 2


def starts_workers(process, out):
    return len(descendants(process.pid)) > 2


def is_at_work(process, out):
    return any(path.stat().st_size for path in out.glob("train/*.tmp"))


@pytest.mark.parametrize("moment", [has_started, starts_workers, is_at_work])
def test_interrupt_is_one_line(moment, large, tmp_path, flags):
    process = spawn(*flags(), f"--source={large}", "--workers=2", stderr=subprocess.PIPE,
                    start_new_session=True)
    while not moment(process, tmp_path / "out"):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    errors = process.communicate(timeout=20)[1]
    assert errors == INTERRUPTED and process.returncode == 130


@pytest.mark.parametrize("seconds", [0.005, 0.05])
def test_interrupted_twice_it_still_ends(seconds, large, tmp_path, flags):
    process = spawn(*flags(), f"--source={large}", "--workers=2", stderr=subprocess.PIPE,
                    start_new_session=True)
    while not is_at_work(process, tmp_path / "out"):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGINT)
    try:
        errors = process.communicate(timeout=20)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert errors == INTERRUPTED and process.returncode == 130


def test_two_runs_at_once_in_one_directory_are_refused(tmp_path, prep):
    parquet(tmp_path / "a.parquet", ["a"])
    (tmp_path / "out").mkdir()
    code = ("import sys, time\n"
            "from machinery.files import only_process_in\n"
            "with only_process_in(sys.argv[1], 'prepare.py'):\n"
            "    print(flush=True)\n"
            "    time.sleep(60)\n")
    arguments = [sys.executable, "-c", code, tmp_path / "out"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match="another prepare.py"):
            prep(tokenizer="utf16")
        holder.kill()
    prep(tokenizer="utf16")


def test_a_failing_write_ends_in_one_line_and_the_next_run_completes(tmp_path, flags, prep):
    """A limit on the size of files stands for the full disk: the write fails in the same place."""
    parquet(tmp_path / "a.parquet", texts_of(5000))
    clean = contents(prep(out="clean"))
    limited = "ulimit -f 64; trap '' XFSZ; exec \"$@\""
    result = subprocess.run(["bash", "-c", limited, "-", sys.executable, ROOT / "prepare.py",
                             *flags(), "--workers=2"], capture_output=True, text=True)
    assert_one_line(result, "File too large")
    assert not final_names(tmp_path / "out")
    assert contents(prep()) == clean


def test_too_little_space_is_said_before_the_work(tmp_path, monkeypatch, prep):
    parquet(tmp_path / "a.parquet", texts_of(50))
    monkeypatch.setattr(sources.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(ValueError, match="GB free, at least"):
        prep()
    assert not contents(tmp_path / "out")


@pytest.fixture
def prepared(tmp_path, prep):
    """A directory of three shards."""
    for name in "abc":
        parquet(tmp_path / f"{name}.parquet", texts_of(60, seed=name))
    return prep(val_fraction=0.2)


def flip(path, at=0):
    """Flip a bit of the byte at a place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut_off(path):
    os.truncate(path, 100)


def reverse(path):
    path.write_bytes(path.read_bytes()[::-1])


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("name, damage", [
    ("train/00001.bin", Path.unlink), ("train/00001.bin", cut_off), ("val/00001.bin", flip),
    ("train/00001.idx", lambda path: flip(path, 8)), ("train/00001.idx", reverse),
    ("train/00001.bin", zero)])
def test_check_finds_damage_and_the_next_run_repairs_it(name, damage, prepared, prep):
    before = contents(prepared)
    run(f"--check={prepared}", "--stats")
    damage(prepared / name)
    with pytest.raises(SystemExit) as error:
        run(f"--check={prepared}")
    # it, and no other; a text as exit code is exit 1
    assert re.fullmatch(r"prepare.py: shard 00001: [^\n]+", str(error.value.code))
    prep(val_fraction=0.2)
    assert contents(prepared) == before


def test_check_knows_the_tokenizer(prepared, prep):
    before = contents(prepared)
    flip(prepared / "tokenizer.json", 5)
    with pytest.raises(SystemExit, match="tokenizer.json: its sha256"):
        run(f"--check={prepared}")
    (prepared / "tokenizer.json").unlink()
    with pytest.raises(SystemExit, match="tokenizer.json: missing"):
        run(f"--check={prepared}")
    prep(val_fraction=0.2)
    assert contents(prepared) == before


def test_what_a_killed_run_left_under_a_final_name_goes(tmp_path, prep):
    """Of a run with another fraction, killed before meta.json was written."""
    (tmp_path / "out/val").mkdir(parents=True)
    (tmp_path / "out/val/00000.bin").write_bytes(b"left")
    parquet(tmp_path / "a.parquet", ["a"])
    assert not list((prep() / "val").iterdir())


def test_check_as_a_command(prepared, capsys):
    assert end_of(f"--check={prepared}", "--stats") == ""
    told = capsys.readouterr().out
    assert "3 shards are what meta.json says" in told and "tokens in a document" in told
    totals = []
    for split in SPLITS:
        for key in ("documents", "tokens"):
            totals.append(str(sum(entry[split][key] for entry in entries(prepared))))
    assert re.search(r"^all\s+" + r"\s+".join(totals), told.replace(",", ""), re.M)
    for number in (0, 2):
        flip(prepared / f"train/{number:05d}.bin")
    bad = command(f"--check={prepared}")
    assert bad.returncode == 1 and re.findall(r"shard (\d+):", bad.stderr) == ["00000", "00002"]
    assert_is_line(end_of("--check=nowhere"), "no prepared data")


def test_stats_count_eligible_documents_and_tokens(tmp_path, capsys, prep):
    lengths = [10, 511, 512, 513, 2048, 5000]  # with the end of text: one more
    parquet(tmp_path / "a.parquet", ["x" * n for n in lengths])
    prep(tokenizer="utf16")
    lines = capsys.readouterr().out.replace(",", "").splitlines()
    table = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    for limit in (512, 1024, 2048, 4096):
        eligible = [n + 1 for n in lengths if n + 1 > limit]  # a window needs limit + 1 tokens
        row = table[f"of more than {limit} tokens"]
        assert row == [str(len(eligible)), str(sum(eligible))], limit


# The reader

def test_reader_needs_no_network_library(prepared):
    code = ("import sys\n"
            "from machinery.shards import open_shards\n"
            "from machinery.tokenizer import load_tokenizer\n"
            "open_shards(sys.argv[1], 'train')[0].map()\n"
            "load_tokenizer(sys.argv[1] + '/tokenizer.json')\n"
            "sys.exit(bool({'requests', 'huggingface_hub', 'httpx'} & set(sys.modules)))\n")
    assert subprocess.run([sys.executable, "-c", code, prepared], cwd=ROOT).returncode == 0


def test_reader_checks_sizes_and_the_index(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens, starts = open_shards(prepared, "train")[0].map()
    assert tokens.dtype == np.uint16 and starts.dtype == np.int64 and not tokens.flags.writeable
    os.truncate(prepared / "val/00002.bin", 4)
    with pytest.raises(ValueError, match="val/00002.bin: 4 bytes; expected"):
        open_shards(prepared, "val")
    assert len(open_shards(prepared, "train")) == 3
    index = np.fromfile(prepared / "train/00000.idx", "<i8")
    index[[3, 4]] = index[[4, 3]]
    index.tofile(prepared / "train/00000.idx")
    with pytest.raises(ValueError, match="index does not belong"):
        open_shards(prepared, "train")[0].map()
    for name, advice in (("data/stdlib", "run python prepare.py (or"),
                         ("data/fineweb-edu", "prepare.py --source=fineweb-edu --shards=0:10 (or"),
                         ("x/fineweb-edu", "=fineweb-edu --shards=0:10 --out=x/fineweb-edu (or"),
                         ("x/mine", "prepare.py --out=x/mine, with --source=FILES unless")):
        with pytest.raises(FileNotFoundError, match="no prepared data") as error:
            read_meta(name)
        assert advice in str(error.value)
    (prepared / "meta.json").write_text('{"format": 9}')
    with pytest.raises(ValueError, match="format 9; expected 1"):
        read_meta(prepared)


def test_a_shard_keeps_nothing_mapped(prepared):
    """Pages of a mapped file count as memory, and a corpus has hundreds of files."""
    shards = open_shards(prepared, "train")
    for shard in shards:
        tokens, starts = shard.map()
        shard.verify()
        assert str(prepared / "train") in Path("/proc/self/maps").read_text()
        del tokens, starts
        assert str(prepared / "train") not in Path("/proc/self/maps").read_text()


def test_offsets_are_64_bit():
    lengths = np.array([2_000_000_000, 2_000_000_000, 5], np.int32)
    starts = shard_format.document_starts(lengths)
    assert starts.dtype == np.int64
    assert starts.tolist() == [0, 2_000_000_000, 4_000_000_000, 4_000_000_005]


def test_reading_beyond_four_gigabytes(tmp_path):
    """A sparse shard: the file has holes and takes no space."""
    (tmp_path / "train").mkdir()
    starts, eot_id = [0, 1_200_000_000, 2_300_000_000, 2_500_000_000], 9
    with open(tmp_path / "train/00000.bin", "wb") as file:
        file.truncate(2 * starts[-1])
        for start in starts[1:]:
            file.seek(2 * (start - 1))
            ids = [eot_id, 7] if start < starts[-1] else [eot_id]
            file.write(np.array(ids, "<u2").tobytes())
    np.array(starts, "<i8").tofile(tmp_path / "train/00000.idx")
    entry = {"documents": 3, "tokens": starts[-1], "longest": 1_200_000_000}
    meta = {"tokenizer": {"eot_id": eot_id, "vocab_size": 10}, "shards": [{"train": entry}]}
    tokens, found = shard_format.Shard(tmp_path, "train", 0, meta).map()
    assert [tokens[i] for i in found[1:3].tolist()] == [7, 7]
