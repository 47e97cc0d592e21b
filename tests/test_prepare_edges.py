"""prepare.py at the edges: what ends it is one line, what the machine lacks does not stop it, and
whatever text and names the user has are taken right or refused."""

import errno
import os
import subprocess
import sys
from pathlib import Path

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
    end_of,
    entries,
    final_names,
    parquet,
    run,
    texts_of,
)

import prepare
from machinery import errors, files, sources, workers

# What ends a command

def two_text_columns(folder):
    text = pa.array(["a", "b"])
    table = pa.Table.from_arrays([text, text], names=["text", "text"])
    pq.write_table(table, folder / "a.parquet")


def two_id_columns(folder):
    text = pa.array(["a", "b"])
    table = pa.Table.from_arrays([text, text, text], names=["text", "id", "id"])
    pq.write_table(table, folder / "a.parquet")


def numbers(folder):
    pq.write_table(pa.table({"text": [1, 2]}), folder / "a.parquet")


def lists(folder):
    pq.write_table(pa.table({"text": [["a"], ["b"]]}), folder / "a.parquet")


def structs(folder):
    pq.write_table(pa.table({"text": [{"a": "b"}]}), folder / "a.parquet")


def no_parquet(folder):
    (folder / "a.parquet").write_bytes(b"<html>")


def empty(folder):
    (folder / "a.parquet").touch()


def cut(folder):
    whole = parquet(folder / "a.parquet", texts_of(9)).read_bytes()
    (folder / "a.parquet").write_bytes(whole[:-8])


def a_folder(folder):
    (folder / "a.parquet").mkdir()


def out_is_a_file(folder):
    parquet(folder / "a.parquet", ["a"])
    (folder / "out").write_text("a file")


def meta_is_garbled(folder):
    parquet(folder / "a.parquet", ["a"])
    (folder / "out").mkdir()
    (folder / "out/meta.json").write_text("{")


def meta_lacks_most(folder):
    parquet(folder / "a.parquet", ["a"])
    (folder / "out").mkdir()
    (folder / "out/meta.json").write_text('{"format": 1}')


def meta_lacks_some(folder):
    meta_lacks_most(folder)
    (folder / "out/meta.json").write_text(
        '{"format": 1, "sources": ["a"], "shards": [null], "tokenizer": {"name": "x"}}')


def meta_is_a_folder(folder):
    parquet(folder / "a.parquet", ["a"])
    (folder / "out/meta.json").mkdir(parents=True)


def bad_tokenizer(folder):
    parquet(folder / "a.parquet", ["a"])
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe{")


@pytest.mark.parametrize("cause, parts", [
    (two_text_columns, ["a.parquet", "2 columns are called 'text'"]),
    (two_id_columns, ["a.parquet", "2 columns are called 'id'"]),
    (numbers, ["a.parquet", "expected text in the column 'text'"]),
    (lists, ["a.parquet", "expected text in the column 'text'"]),
    (structs, ["a.parquet", "expected text in the column 'text'"]),
    (no_parquet, ["a.parquet: 6 bytes, cannot be read", "replace it"]),
    (empty, ["a.parquet: 0 bytes, cannot be read", "replace it"]),
    (cut, ["a.parquet", "cannot be read", "replace it"]),
    (a_folder, ["no such file"]),
    (out_is_a_file, ["out"]),
    (meta_is_garbled, ["out/meta.json", "unreadable"]),
    (meta_lacks_most, ["out/meta.json", "unreadable"]),
    (meta_lacks_some, ["prepared differently", "choose another --out"]),
    (meta_is_a_folder, ["out/meta.json"]),
    (bad_tokenizer, ["tokenizer.json: not a tokenizer.json"])])
def test_each_cause_ends_in_one_line(cause, parts, tmp_path, flags):
    cause(tmp_path)
    has_tokenizer = (tmp_path / "tokenizer.json").exists()
    tokenizer = tmp_path / "tokenizer.json" if has_tokenizer else "utf16"
    assert_is_line(end_of(*flags("a.parquet", tokenizer=tokenizer)), *parts)
    assert not final_names(tmp_path / "out")


@pytest.mark.parametrize("error, part", [
    (PermissionError(errno.EACCES, "Permission denied"), "Permission denied; ask"),
    (OSError(errno.EIO, "I/O error"), "the disk or the network failed"),
    (OSError(errno.ESTALE, "stale"), "the network file system failed"),
    (MemoryError(), "not enough memory"), (pa.ArrowMemoryError("malloc"), "not enough memory")])
def test_a_failed_read_is_not_damage(error, part, tmp_path, monkeypatch, prep):
    """Of a source in the middle, and of the shards that are there."""
    def failing(*arguments):
        yield "d0", "the first row"
        raise error

    parquet(tmp_path / "a.parquet", texts_of(30))
    out = prep()
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setitem(sources.READERS, ".parquet", failing)
        with pytest.raises((OSError, MemoryError)) as told:
            prep(out="other")
        line = errors.explain(told.value)
        assert part in line and "a.parquet" in line and "replace" not in line and "\n" not in line
    with monkeypatch.context() as patch:
        patch.setattr("machinery.shards.Shard.verify", lambda shard: fail(error))
        patch.setattr("machinery.checks.changed_since", lambda *unused: True)
        with pytest.raises((OSError, MemoryError)):
            prep()
        assert contents(out) == before, "nothing is made again"
        with pytest.raises(SystemExit, match=part):
            run(f"--check={out}")


def fail(error):
    raise error


# Names

def test_a_tilde_is_the_home(tmp_path, tokenizer_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    parquet(tmp_path / "a.parquet", ["a"])
    (tmp_path / "t.json").write_bytes(Path(tokenizer_path).read_bytes())
    assert not end_of("--source=~/*.parquet", "--tokenizer=~/t.json", "--out=~/made/a")
    assert (tmp_path / "made/a/meta.json").exists()
    assert not end_of("--check=~/made/a")
    assert not end_of("--join", "~/made/a", "--out=~/made/b")


def test_a_tokenizer_is_known_by_its_sha256(tmp_path, tokenizer_path, prep):
    parquet(tmp_path / "a.parquet", texts_of(9))
    before = contents(prep())
    data = Path(tokenizer_path).read_bytes()
    (tmp_path / "same.json").write_bytes(data)
    assert contents(prep(tokenizer=tmp_path / "same.json")) == before
    (tmp_path / "other.json").write_bytes(data + b" ")
    with pytest.raises(ValueError, match="tokenizer sha256"):
        prep(tokenizer=tmp_path / "other.json")


@pytest.mark.parametrize("source, out", [
    ("stdlib", "data/stdlib"), ("fineweb-edu", "data/fineweb-edu"), ("x/*.parquet", "data/corpus"),
    ("x/part-??.jsonl", "data/part"), ("[ab]c_*.txt", "data/abc"), ("a.b.jsonl.gz", "data/a"),
    ("x/**/*.jsonl", "data/corpus"), ("https://h/d/f.parquet", "data/f"),
    ("hf://datasets/o/d@r/d/train-00000.parquet", "data/train-00000")])
def test_the_default_directory_is_named_by_the_source(source, out, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--source={source}"])
    assert prepare.parse_prepare_args("").out == out


@pytest.mark.parametrize("name", [b"caf\xe9.parquet", b"[x] 'y' \n.parquet", "漢.jsonl".encode()])
def test_a_source_may_have_any_name(name, tmp_path, flags):
    """Such as one that is not UTF-8: os.fsdecode gives it a place in str."""
    name = os.fsdecode(name)
    if name.endswith(".jsonl"):
        (tmp_path / name).write_text('{"text": "one"}\n')
    else:
        parquet(tmp_path / "a.parquet", ["one"]).rename(tmp_path / name)
    assert end_of(*flags(name)) == end_of(*flags(name)) == "", "found again by its name"
    assert decoded(tmp_path / "out") == ["one"]
    (tmp_path / name).write_bytes(b"damaged")
    assert_is_line(end_of(*flags(name, out="x")), name.split()[0])


# Text

@pytest.mark.parametrize("data, text", [
    ("naïve 漢🙂".encode("utf-16"), "naïve 漢🙂"), ("\ufeffnaïve".encode("utf-16-be"), "naïve"),
    ("naïve".encode("utf-8-sig"), "naïve"), ("naïve".encode(), "naïve"),
    ("naïve".encode("latin-1"), "na\ufffdve")])
def test_the_encoding_of_a_txt_file_is_recognised(data, text, tmp_path, prep, capsys):
    """As Windows writes them: with a mark of the encoding at the start."""
    (tmp_path / "a.txt").write_bytes(data)
    out = prep("a.txt")
    assert decoded(out) == [text]
    counted = entries(out)[0].get("replaced", 0)
    assert counted == ("\ufffd" in text) and entries(out)[0]["skipped"] == {}
    told = capsys.readouterr().out
    assert ("was not Unicode, in 1 document" in told) == bool(counted), told


def test_utf16_without_a_mark_is_refused_and_counted(tmp_path, prep):
    (tmp_path / "a.txt").write_bytes("naïve text".encode("utf-16-le"))
    (tmp_path / "b.txt").write_bytes(b"text")
    out = prep("*.txt")
    assert decoded(out) == ["text"] and entries(out)[0]["skipped"] == {"not text": 1}


def test_a_console_of_ascii_takes_any_name(tmp_path, flags):
    parquet(tmp_path / "a.parquet", ["one"])
    result = command(*flags(out="été"), PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and "?t?" in result.stdout, result.stderr
    (tmp_path / "b\udce9.parquet").write_bytes(b"damaged")
    assert_one_line(command(*flags(out="x"), PYTHONIOENCODING="ascii"), "b?.parquet")


# The machine

def test_the_cores_are_those_that_it_may_use(tmp_path, monkeypatch):
    if hasattr(os, "process_cpu_count"):
        monkeypatch.setattr(os, "process_cpu_count", lambda: 6)
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(workers, "CONTAINER_LIMIT", tmp_path / "cpu.max")
    assert workers.count_cores() == 6
    for limit, cores in (("max 100000", 6), ("250000 100000", 2), ("50000 100000", 1)):
        (tmp_path / "cpu.max").write_text(limit)
        assert workers.count_cores() == cores


def test_a_long_tmpdir_leaves_one_process(tmp_path, flags, prep):
    """The sockets of worker processes lie there, and their names may have 100 letters or so."""
    parquet(tmp_path / "a.parquet", texts_of(30))
    clean = contents(prep(out="clean"))
    long = tmp_path / ("x" * 100)
    long.mkdir()
    result = command(*flags(), "--workers=2", TMPDIR=str(long))
    assert result.returncode == 0 and "1 workers" in result.stdout, result.stderr
    assert "one process does it all" in result.stderr and contents(tmp_path / "out") == clean


def test_without_a_fork_server_workers_are_spawned(tmp_path, flags, prep):
    """As on Windows."""
    parquet(tmp_path / "a.parquet", texts_of(30))
    clean = contents(prep(out="clean"))
    (tmp_path / "run.py").write_text(
        "import multiprocessing\n"
        "multiprocessing.get_all_start_methods = lambda: ['spawn']\n"
        "import prepare\n"
        "if __name__ == '__main__':\n"
        "    prepare.main()\n")
    result = subprocess.run([sys.executable, tmp_path / "run.py", *flags(), "--workers=2"],
                            capture_output=True, text=True, timeout=100,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0 and "2 workers" in result.stdout, result.stderr
    assert contents(tmp_path / "out") == clean


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_file_system_without_locks_or_syncing(number, tmp_path, monkeypatch, prep, capsys):
    fcntl = pytest.importorskip("fcntl")
    parquet(tmp_path / "a.parquet", texts_of(30))
    clean = contents(prep(out="clean"))
    monkeypatch.setattr(fcntl, "flock", lambda *unused: fail(OSError(number, "no locks")))
    monkeypatch.setattr(os, "fsync", lambda *unused: fail(OSError(errno.EINVAL, "no syncing")))
    assert contents(prep()) == clean
    told = capsys.readouterr().err
    assert ("cannot be locked" in told) == (number != errno.ENOSYS), "a file is the lock for ENOSYS"


# Many sources, many machines

def test_what_is_written_for_a_source_does_not_grow_with_their_number(tmp_path, monkeypatch, prep):
    """meta.json tells of all sources; written again for each it would be quadratic."""
    written = 0

    def write_whole(path, data, write=files.write_whole):
        nonlocal written
        written += len(data) if Path(path).name == "meta.json" else 0
        write(path, data)

    for number in range(40):
        (tmp_path / f"{number:02d}.jsonl").write_text('{"text": "one"}\n')
    monkeypatch.setattr("machinery.shards.write_whole", write_whole)
    out = prep("*.jsonl", tokenizer="utf16")
    assert written < 3 * (out / "meta.json").stat().st_size
    assert not (out / "shards.jsonl").exists() and len(entries(out)) == 40


@pytest.mark.parametrize("n_done", [1, 3])
def test_a_stopped_run_knows_what_is_done(n_done, tmp_path, monkeypatch, prep):
    for name in "abcde":
        parquet(tmp_path / f"{name}.parquet", texts_of(30, seed=name))
    clean = contents(prep(out="clean"))
    path = tmp_path / f"{'abcde'[n_done]}.parquet"
    good = path.read_bytes()
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read"):
        prep()
    done = [bool(entry) for entry in entries(tmp_path / "out")]
    assert done == [number < n_done for number in range(5)]
    with open(tmp_path / "out/shards.jsonl", "ab") as file:
        file.write(b'\xff garbled\n[4, {"source": "cut off')
    made = (tmp_path / "out/train/00000.bin").stat().st_mtime_ns
    path.write_bytes(good)
    assert contents(prep()) == clean
    assert (tmp_path / "out/train/00000.bin").stat().st_mtime_ns == made


@pytest.fixture
def parts(tmp_path, prep):
    """Two parts of a preparation of five sources, and the whole; a function that joins them."""
    for name in "abcde":
        parquet(tmp_path / f"{name}.parquet", texts_of(40, seed=name))
    (tmp_path / "c.parquet").unlink()
    parquet(tmp_path / "c.parquet", [""])  # no document, so no file
    for part, shards in (("part-1", "0:2"), ("part-0", "2:5")):
        prep("*.parquet", f"--shards={shards}", out=part, val_fraction=0.2)
    prep(out="whole", val_fraction=0.2)

    def join(*names, out="joined"):
        run("--join", *[tmp_path / name for name in names], f"--out={tmp_path / out}")
        return tmp_path / out

    return join


@pytest.mark.parametrize("has_links", [True, False])
def test_joined_parts_are_the_whole(has_links, parts, tmp_path, monkeypatch, prep):
    if not has_links:
        monkeypatch.setattr(os, "link", lambda *unused: fail(OSError(errno.EXDEV, "elsewhere")))
    joined = parts("part-*")
    assert contents(joined) == contents(tmp_path / "whole")
    run(f"--check={joined}")
    before = contents(joined)
    assert contents(prep(out="joined", val_fraction=0.2)) == before, "and may be gone on with"


def test_what_is_no_part_is_refused(parts, tmp_path, prep):
    def refuse(part, *names):
        with pytest.raises((ValueError, OSError), match=part):
            parts(*names)
        assert not (tmp_path / "joined/meta.json").exists()

    refuse("is in .*part-1 too", "part-1", "whole")
    prep("[c-e].parquet", "--split_seed=1", out="seed", val_fraction=0.2)
    refuse("split seed", "part-1", "seed")
    prep("[c-e].parquet", tokenizer="utf16", out="utf16", val_fraction=0.2)
    refuse("tokenizer", "part-1", "utf16")
    prep("[c-e].parquet", "--max_documents=50", out="few", val_fraction=0.2)
    refuse("--max_documents", "part-1", "few")
    refuse("no prepared data", "part-1", "nowhere")
    data = (tmp_path / "part-0/train/00001.bin").read_bytes()
    (tmp_path / "part-0/train/00001.bin").write_bytes(data[:-2] + b"xx")
    refuse("shard 00001", "part-1", "part-0")
    (tmp_path / "e.parquet").write_bytes(b"")
    with pytest.raises(ValueError):
        prep("[c-e].parquet", out="undone", val_fraction=0.2)
    refuse("1 source files to do", "part-1", "undone")
    with pytest.raises(ValueError, match="there is prepared data"):
        parts("part-1", out="whole")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_place_that_cannot_be_written_is_one_line(number, tmp_path, monkeypatch, flags, capsys):
    parquet(tmp_path / "a.parquet", ["a"])
    monkeypatch.setattr("filelock.FileLock.acquire",
                        lambda lock: fail(OSError(number, "no", lock.lock_file)))
    assert_is_line(end_of(*flags()), "out", os.strerror(number))
    assert not capsys.readouterr().err
