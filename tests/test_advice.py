"""What an error message tells the user to type works: each advice is provoked, read and followed.

A row is a command that must end in an error, what spoils the place first, the advice as a pattern,
and what a user does who follows it, one after another: "AGAIN --x=1", the command with that flag;
another command, such as the one advised; or a function, what is done by hand. A number after a
backslash is a group of the pattern. Each must succeed.
"""

import argparse
import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile

import pytest
import torch
from preparing import ROOT
from stages import COMPARE, EXPORT, PREPARE, RESUME, RUN_FLAGS, SCORE, run_stage

from machinery import machine, scorer, shards, sweep
from machinery.arguments import parse_prepare_args
from machinery.files import only_process_in

TRAIN = ["train.py", *RUN_FLAGS, "--data=DATA", "--out=OUT", "--max_targets=640"]
SMOKE = ["train.py", "--preset=smoke", "--device=cpu", "--dtype=float32", "--data=NEW", "--out=OUT",
         "--max_targets=2048", "--eval_windows=2"]
SAMPLE = ["evaluate.py", "sample", "RUN", "--device=cpu", "--max_new_tokens=3"]
TASK = ["evaluate.py", "score", "RUN", "--device=cpu", "--tasks=own", "--include_path=TASKS"]
TWO = [*PREPARE, "--source=s?.jsonl", "--tokenizer=DATA/tokenizer.json"]
PARQUET = [*PREPARE, "--source=SOURCE.parquet"]
TASK_FILE = """
task: own
dataset_path: {}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_choice: [a, b]
doc_to_target: 0
"""


class Place:
    """A folder with a run, its data and a source; what is done there."""

    def __init__(self, folder, monkeypatch, capsys):
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        self.patch, self.held = pytest.MonkeyPatch(), None

    def __truediv__(self, name):
        return self.folder / name

    def told(self, command):
        return run_stage(self.monkeypatch, self.capsys, self.folder, command)

    def run(self, command):
        code, told = self.told(command)
        assert code == 0, f"{' '.join(command)}\n{told}"

    def edit(self, name, **fields):
        values = json.loads((self / name).read_text()) | fields
        (self / name).write_text(json.dumps(values))

    def hold(self, name):
        (self / name).mkdir()
        self.held = only_process_in(self / name, "other")
        self.held.__enter__()

    def save(self, name, **changes):
        state = torch.load(self / "RUN/step-00000010.pt", weights_only=True)
        torch.save(state | changes, self / name)


# What spoils a place

def clean(place):
    pass


def prepared(place):
    place.run(PREPARE)


def otherwise_prepared(place):
    place.run([*PREPARE, "--split_seed=1"])


def bad_parquet(place):
    (place / "SOURCE.parquet").write_bytes(b"bad")


def parquet(place):
    import pyarrow as pa
    import pyarrow.parquet as pq
    pq.write_table(pa.table({"id": ["a", "b"], "words": ["one", "two"]}), place / "SOURCE.parquet")


def bad_meta(place):
    prepared(place)
    (place / "NEW/meta.json").write_text("{")


def bad_shard(place):
    prepared(place)
    (place / "NEW/train/00000.bin").write_bytes(b"short")


def half_prepared(place):
    """The second of two sources cannot be read."""
    for number in (1, 2):
        lines = [json.dumps({"text": f"{number} the cat sat on the mat " * 9 + str(i)}) + "\n"
                 for i in range(40)]
        (place / f"s{number}.jsonl").write_text("".join(lines))
    good = (place / "s2.jsonl").read_text()
    (place / "s2.jsonl").write_text("{")
    code, _ = place.told(TWO)
    assert code == 1
    (place / "s2.jsonl").write_text(good)


def bad_tokenizer(place):
    place.run(TRAIN)
    for name in ("DATA", "RUN"):
        with open(place / name / "tokenizer.json", "a") as file:
            file.write("\n")


def trained(place):
    place.run(TRAIN)


def cut_checkpoints(place):
    trained(place)
    for path in (place / "OUT").glob("step-*.pt"):
        path.write_bytes(path.read_bytes()[:-100])


def full_disk(place):
    usage = shutil.disk_usage(place.folder)
    place.patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1))


def held(place):
    place.hold("NEW")


def held_run(place):
    place.hold("OUT")


def no_memory(place):
    def fail(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    place.patch.setattr("model.Decoder.loss", fail)
    place.patch.setattr(scorer.Scorer, "score", fail)


def no_compiler(place):
    def fail(model):
        from torch._inductor.exc import InvalidCxxCompiler
        raise InvalidCxxCompiler

    place.patch.setattr(machine, "compile_model", fail)


def empty_run(place):
    (place / "OUT").mkdir()


def imported(place):
    place.run(EXPORT)
    place.run(["evaluate.py", "import", "NEW", "OUT"])


def exported(place):
    place.run(EXPORT)


def other_code(place):
    exported(place)
    place.edit("NEW/config.json", nanobit={"input": "binary"})


def without_nanobit(place):
    config = json.loads((place / "NEW/config.json").read_text())
    del config["nanobit"]
    (place / "NEW/config.json").write_text(json.dumps(config))


def no_validation(place):
    place.run([*PREPARE, "--tokenizer=DATA/tokenizer.json", "--val_fraction=0"])


def trained_on_stdlib(place):
    place.save("RUN/step-00000020.pt", data="data/stdlib")


def read_only_run(place):
    whole = tempfile.TemporaryFile

    def refuse(dir):
        if dir.name == "RUN":
            raise OSError(30, "Read-only file system", str(dir))
        return whole(dir=dir)

    place.patch.setattr(tempfile, "TemporaryFile", refuse)


def not_a_number(place):
    state = torch.load(place / "RUN/step-00000010.pt", weights_only=True)["model"]
    state["lm_head.weight"][0, 0] = float("nan")
    place.save("RUN/step-00000020.pt", model=state)


def cut_checkpoint(place):
    (place / "RUN/step-00000020.pt").write_bytes((place / "RUN/step-00000010.pt").read_bytes()[:99])


def task(place, data_set="json\ndataset_kwargs: {data_files: {test: docs.jsonl}}"):
    (place / "TASKS").mkdir()
    (place / "TASKS/own.yaml").write_text(TASK_FILE.format(data_set))
    (place / "docs.jsonl").write_text('{"q": "x"}\n{"q": "y"}\n')


def task_of_the_hub(place):
    task(place, "org/name")
    place.patch.setenv("HF_DATASETS_OFFLINE", "1")


def no_home(place):
    from datasets import config
    task(place)
    for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
        place.patch.setattr(config, name, f"{os.devnull}/home/cache")


def copy_of_data_set(place):
    (place / "COPIES/org/name").mkdir(parents=True)
    shutil.copy(place / "docs.jsonl", place / "COPIES/org/name/test.jsonl")


def scored_unlike(place):
    task(place)
    place.run(TASK)
    place.run([*TASK, "--limit=1", "--out=OTHER"])


def unfinished(place):
    place.edit("RUN/config.json", max_targets=2560)


def scored_on_lost_data(place):
    place.run(RESUME)
    place.run(["evaluate.py", "score", "RUN", "--device=cpu"])
    place.edit("RUN/heldout-00000020.json", data="gone", data_sha256=None)


def twice(place):
    shutil.copytree(place / "RUN", place / "OUT")
    place.edit("OUT/config.json", micro_batch=2)  # else the two count as one


def a_file(place):
    (place / "NEW").touch()


# What is done by hand

def put_back(place):
    for name in ("DATA", "RUN"):
        shutil.copy(place / "OUT/tokenizer.json", place / name)


def remove_new(place):
    shutil.rmtree(place / "NEW")


def edited(flag, command):
    """Return a command with another value of its flag."""
    name = flag.split("=")[0]
    return [word for word in command if word.split("=")[0] != name] + [flag]


ROWS = [
    # prepare.py
    ([*PARQUET], parquet, r"--text_column can be id, (\w+)", [r"AGAIN --text_column=\1"]),
    (PARQUET, bad_parquet, "replace it and run again", [parquet, "AGAIN --text_column=words"]),
    (PREPARE, otherwise_prepared, "prepared differently; .*; choose another --out",
     ["AGAIN --out=OUT"]),
    ([*PREPARE, "--shards=1:2"], clean, r"expected A:B with 0 <= A < B <= (\d)",
     [r"AGAIN --shards=0:\1"]),
    (PREPARE, bad_meta, r"delete (\S+) and prepare it again", [remove_new, "AGAIN"]),
    (["prepare.py", "--check=NEW"], bad_shard, "run the same prepare.py command again to repair",
     [PREPARE, "AGAIN"]),
    (edited("--tokenizer=train:5", PREPARE), clean, r"expected train:N with N from (\d+) to",
     [r"AGAIN --tokenizer=train:\1"]),
    (edited("--tokenizer=no", PREPARE), clean, r"expected train:N, (\w+),",
     [r"AGAIN --tokenizer=\1"]),
    (["prepare.py", "--join", "NEW", "--out=NEW"], prepared,
     "there is prepared data; choose another --out", ["AGAIN --out=OUT"]),
    (["prepare.py", "--join", "DATA"], clean, "goes with (--out)=DIR", [r"AGAIN \1=OUT"]),
    (["prepare.py", "--stats"], clean, "goes with (--check)=DIR", [r"AGAIN \1=DATA"]),
    (PREPARE, held, "at work here; choose another (--out), or wait", [r"AGAIN \1=OUT"]),
    (PREPARE, full_disk, "give another (--out), or take fewer files with --shards",
     [r"AGAIN \1=OUT"]),
    # train.py
    (SMOKE, clean, r"run (python prepare.py --out=\S+) \(or give --data=DIR\)",
     [r"\1 --workers=1", "AGAIN"]),
    (edited("--data=NONE", TRAIN), clean, r"\(or give (--data)=DIR\)", [r"AGAIN \1=DATA"]),
    (edited("--data=NEW", TRAIN), half_prepared, "run the same prepare.py command again to finish",
     [TWO, "AGAIN"]),
    ([*TRAIN, "--block_size=2048", "--tokens_per_step=4096"], clean,
     r"a smaller (--block_size) would do", [r"AGAIN \1=16 --tokens_per_step=128"]),
    ([*TRAIN, "--vocab_size=400"], clean, r"give (--vocab_size=\d+) or another --data",
     [r"AGAIN \1"]),
    ([*TRAIN, "--vocab_size=4000", "--n_embd=48"], clean,
     r"or (--vocab_size=\d+) with other sizes: (n_embd)=.*; (\d+) or (\d+) would do",
     [r"AGAIN \1 --\2=\3", r"AGAIN \1 --\2=\4 --out=NEW"]),
    ([*TRAIN, "--n_embd=40"], clean, r"(n_embd)=.*; (\d+) or (\d+) would do",
     [r"AGAIN --\1=\2", r"AGAIN --\1=\3 --out=NEW"]),
    ([*TRAIN, "--micro_batch=3"], clean, r"(--micro_batch=\d+) would do", [r"AGAIN \1"]),
    ([*TRAIN, "--tokens_per_step=40"], clean, r"a multiple of block_size x streams = (\d+)",
     [r"AGAIN --tokens_per_step=\1"]),
    ([*TRAIN, "--warmup_steps=99"], clean, r"at most decay_steps=(\d+)",
     [r"AGAIN --warmup_steps=\1"]),
    ([*TRAIN, "--device=cuda"], clean, "(--device=cpu) works everywhere", [r"AGAIN \1"]),
    ([*TRAIN, "--input=binary", "--code_width=12", "--table_free"], clean, "leave one out",
     ["AGAIN --table_free=false", "AGAIN --code_width=0 --out=NEW"]),
    (TRAIN, trained, "(--resume) continues it, another (--out) starts a new one",
     [r"AGAIN \1", r"AGAIN \2=NEW"]),
    ([*TRAIN, "--resume", "--max_lr=1"], trained, "give the first run's flags, or another (--out)",
     [[*TRAIN, "--resume"], r"AGAIN \1=NEW"]),
    (edited("--max_targets=128", [*TRAIN, "--resume"]), trained,
     r"give (--max_targets=\d+) or more, or another (--out)", [r"AGAIN \1", r"AGAIN \2=NEW"]),
    ([*TRAIN, "--resume"], cut_checkpoints, "give another (--out) to start anew",
     [r"AGAIN \1=NEW"]),
    (edited("--out=NEW", TRAIN), bad_tokenizer, "run the same prepare.py command again to repair",
     [put_back, "AGAIN"]),
    (TRAIN, held_run, "at work here; choose another (--out), or wait", [r"AGAIN \1=NEW"]),
    (TRAIN, no_memory, r"a smaller (--micro_batch), (--checkpoint_activations=block) or "
     "--parallel=fsdp needs less", [r"AGAIN \1=1 \2 --resume"]),
    ([*TRAIN, "--compile"], no_compiler, "--compile .* leave it out", [[*TRAIN, "--resume"]]),
    # evaluate.py
    (edited("OUT", ["evaluate.py", "sample", "--device=cpu"]), empty_run,
     r"train one with (train.py --out=\S+)", [TRAIN, "AGAIN"]),
    (["evaluate.py", "score", "OUT", "--device=cpu"], imported, "give (--data)=DIR",
     [r"AGAIN \1=DATA"]),
    (["evaluate.py", "score", "RUN", "--device=cpu"], clean, r"\(or give (--data)=DIR\)",
     [r"AGAIN \1=DATA"]),
    (["evaluate.py", "score", "RUN", "--device=cpu"], trained_on_stdlib,
     "run (python prepare.py) ", [r"\1 --workers=1 --tokenizer=DATA/tokenizer.json", "AGAIN"]),
    (edited("--data=NEW", SCORE), otherwise_prepared, "give (--data)=DIR with this model's",
     [r"AGAIN \1=DATA"]),
    (edited("--data=NEW", SCORE), no_validation, "prepare it with a larger (--val_fraction)",
     [[*PREPARE[:-1], "--tokenizer=DATA/tokenizer.json", "--val_fraction=0.5", "--out=OUT"],
      "AGAIN --data=OUT"]),
    (SCORE, bad_tokenizer, "put back the tokenizer.json of the data", [put_back, "AGAIN"]),
    (SCORE, read_only_run, "give (--out)=DIR to write elsewhere", [r"AGAIN \1=OUT"]),
    (SCORE, no_memory, "(--dtype=bfloat16) needs half, a smaller (--batch_tokens) less",
     [r"AGAIN \1", r"AGAIN \2=64"]),
    ([*SCORE, "--max_length=99"], clean, r"takes 1 to (\d+)", [r"AGAIN --max_length=\1"]),
    (edited("--device=cuda", SCORE), clean, "(--device=cpu) works everywhere", [r"AGAIN \1"]),
    (SAMPLE, not_a_number, "use an earlier checkpoint of the run",
     ["evaluate.py sample RUN/step-00000010.pt --device=cpu"]),
    (SAMPLE, cut_checkpoint, "use another of the run",
     ["evaluate.py sample RUN/step-00000010.pt --device=cpu"]),
    (EXPORT, exported, "name a directory that does not", ["evaluate.py export RUN OUT"]),
    (["evaluate.py", "import", "NEW", "RUN"], exported, "name another run directory",
     ["evaluate.py import NEW OUT"]),
    (["evaluate.py", "import", "NEW", "OUT"], other_code,
     "take nanobit out of config.json to import it as a learned table",
     [without_nanobit, "AGAIN"]),
    (["evaluate.py", "score", "RUN", "--limit=1", "--include_path=TASKS"], task,
     "give (--tasks) or --suite too", [r"AGAIN \1=own --device=cpu"]),
    ([*TASK, "--num_fewshot=7"], task, r"give (--num_fewshot=\d+)", [r"AGAIN \1"]),
    (TASK, no_home, "set HF_HOME=DIR to a place that you can write to", ["AGAIN"]),
    (TASK, task_of_the_hub, r"give (--data_dir)=DIR with a copy of it in DIR/ORG/NAME",
     [copy_of_data_set, r"AGAIN \1=COPIES"]),
    # compare.py and codes.py
    ([*COMPARE, "--by=n_layers"], clean, r"did you mean (\w+)\?", [r"AGAIN --by=\1"]),
    (["compare.py", "RUN", "--out=NEW"], clean, r"there are (.*) \(seeds",
     [r"AGAIN '--baseline=\1'"]),
    (COMPARE, a_file, "name another directory", ["AGAIN --out=OUT"]),
    (["compare.py", "OUT", *COMPARE[1:]], twice, "leave one out", [COMPARE]),
    ([*COMPARE, "--resamples=5"], clean, r"expected (\d+) or more", [r"AGAIN --resamples=\1"]),
    (COMPARE, unfinished,
     r"finish it with train.py (--resume), and score it with (python evaluate.py score \S+)",
     [RESUME, r"\2 --device=cpu", "AGAIN"]),
    (COMPARE, scored_on_lost_data, r"score it again with (python evaluate.py score \S+)",
     [r"\1 --device=cpu", "AGAIN"]),
    (["compare.py", "RUN/earlier_choice-00000010.json", "--published=no"], clean,
     r"expected some of (\w+),", [r"AGAIN --published=\1"]),
    (["compare.py", "RUN/own-00000010.json", "OTHER/RUN/own_limit1-00000010.json"], scored_unlike,
     r"score both alike \(--limit", [[*TASK, "--out=OTHER"], "compare.py RUN/own-00000010.json "
                                      "OTHER/RUN/own-00000010.json"]),
    (["codes.py", "--vocab_size=16"], clean, "of more than 32 ids", ["AGAIN --vocab_size=33"])]


@pytest.fixture
def small_library(tmp_path_factory, monkeypatch):
    """A Python library of three files, so that to prepare it takes a moment."""
    library = tmp_path_factory.mktemp("library")
    for path in sorted((ROOT / "machinery").glob("t*.py")):
        shutil.copy(path, library)
    path_of = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *more: str(library)
                        if name == "stdlib" else path_of(name, *more))


def name_of(row):
    return re.sub(r"\W+", " ", row[2])[:40] if isinstance(row, tuple) else None


@pytest.mark.parametrize("command, spoil, advice, steps", ROWS, ids=map(name_of, ROWS))
def test_advice_works(command, spoil, advice, steps, place, small_library, monkeypatch, capsys):
    monkeypatch.chdir(place)
    place = Place(place, monkeypatch, capsys)
    spoil(place)
    code, told = place.told(command)
    place.patch.undo()
    found = re.search(advice, told)
    assert code in (1, 2, 69) and found, (code, told)
    for step in steps:
        if callable(step):
            step(place)
        else:
            place.run(follow(step, found, command))


def follow(step, found, command):
    """Return the command that a step means, with what was found in the message."""
    words = step if isinstance(step, list) else shlex.split(found.expand(step))
    if words[0] == "AGAIN":
        for flag in words[1:]:
            command = edited(flag, command)
        return command
    return words[1:] if words[0] == "python" else words


# What cannot be followed here: the flag, package, variable or program that is named is there

CODE = sorted([*ROOT.glob("*.py"), *ROOT.glob("machinery/*.py")])
ELSEWHERE = {"--disable", "--copies", "--run", "--docs", "--model"}  # of ruff, pip and the benches


def texts():
    """Yield every string of the code, and the README."""
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path.name, node.value
    yield "README.md", (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_flag_that_is_named_is_there(place, monkeypatch, capsys):
    from torch.distributed.run import get_args_parser
    known, add = set(), argparse._ActionsContainer.add_argument

    def note(self, *names, **settings):
        known.update(names)
        return add(self, *names, **settings)

    monkeypatch.setattr(argparse._ActionsContainer, "add_argument", note)
    get_args_parser()
    for stage in ("prepare", "train", "evaluate", "compare", "codes"):
        assert run_stage(monkeypatch, capsys, place, [f"{stage}.py", "--help"])[0] == 0
    for name, text in texts():
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z_]+", text):
            assert flag in known | ELSEWHERE, f"{name}: {flag}"


def test_every_package_that_is_named_is_in_the_requirements():
    wanted = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    found = set()
    for _, text in texts():
        for names in re.findall(r"pip install (?!-r)([\w -]+)", text):
            found.update(names.split())
    assert "transformers" in found
    for package in found:
        assert re.search(rf"\b{package}\b", wanted), package


def test_the_commands_that_make_data_are_read_as_meant(monkeypatch):
    """Those that would download: what they would do."""
    for folder in ("data/stdlib", "data/fineweb-edu", "/big/fineweb-edu", "data/mine"):
        command = shards.how_to_make(folder).split(",")[0].split()
        monkeypatch.setattr(sys, "argv", command[1:])
        args = parse_prepare_args("")
        assert args.out == folder and (args.source == "fineweb-edu") == ("fineweb" in folder)


def test_the_grammar_of_a_sweep_is_told_by_one_that_works():
    with pytest.raises(ValueError, match="as in") as refused:
        sweep.parse_sweep("seed")
    assert len(sweep.parse_sweep(str(refused.value).split("as in ")[1])) == 6


def test_the_cache_of_the_hub_moves_with_its_variable(tmp_path):
    code = ("import datasets.config as d, huggingface_hub.constants as h; "
            "print(h.HF_HUB_CACHE, d.HF_DATASETS_CACHE)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env=os.environ | {"HF_HOME": str(tmp_path)})
    assert [path.startswith(str(tmp_path)) for path in done.stdout.split()] == [True, True]


def test_the_harness_lists_its_tasks():
    command = [sys.executable, "-m", "lm_eval", "ls", "tasks", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8",
                          env=os.environ | {"PYTHONIOENCODING": "utf-8"})  # it prints bullets
    assert done.returncode == 0 and "List available tasks" in done.stdout, done.stderr
