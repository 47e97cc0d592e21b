"""How fast prepare.py is, side by side with what people use, from parquet files to uint16 ids.

    python tests/bench/bench_prepare.py [--copies=2] [--runs=3] [--scaling]

Each method is a process of its own, from the start of the interpreter to its end, in turn, the
median of the runs. Real English documents and the SmolLM2 tokenizer from ../shared. All must write
the same ids. The last line is JSON.

    prepare        python prepare.py --workers=2, with split, index, sha256 and resume
    one_worker     the same with --workers=1: all in one process, whose CPU seconds are the speed
                   of a core
    datasets       datasets.map(batched, num_proc=2) with the fast tokenizer, then a memory-mapped
                   file, as nanoGPT does
    encode_batch   tokenizers' encode_batch (its own threads) over batches of 1000
    tiktoken       bare encode_to_numpy over texts already in memory, one process; its ids are not
                   written
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
TOKENIZER = SHARED / "smollm2" / "tokenizer.json"
sys.path.insert(0, str(ROOT))


def load_fast_tokenizer():
    """Return the function from texts to lists of ids that users of datasets.map have.

    transformers' tokenizer adds nothing but its own overhead to this same tokenizer.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError:
        tokenizer = load_plain_tokenizer()
        return lambda texts: [encoding.ids for encoding in
                              tokenizer.encode_batch(texts, add_special_tokens=False)]
    fast = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))
    return lambda texts: fast(texts, add_special_tokens=False,
                              split_special_tokens=True)["input_ids"]


def load_plain_tokenizer():
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.encode_special_tokens = True
    return tokenizer


def run_datasets(files, out):
    import datasets
    import numpy as np
    encode = load_fast_tokenizer()

    def process(rows):
        ids = [i + [0] for i in encode(rows["text"])]
        return {"ids": ids, "len": [len(i) for i in ids]}

    data = datasets.load_dataset("parquet", data_files=files, split="train",
                                 cache_dir=f"{out}.cache")
    data = data.map(process, batched=True, num_proc=2, remove_columns=data.column_names)
    file = np.memmap(out, dtype=np.uint16, mode="w+", shape=(sum(data["len"]),))
    at = 0
    for n in range(64):
        shard = np.concatenate(data.shard(64, n, contiguous=True).with_format("numpy")["ids"])
        file[at:at + len(shard)] = shard
        at += len(shard)
    file.flush()


def run_encode_batch(files, out):
    import numpy as np
    import pyarrow.parquet as pq
    tokenizer = load_plain_tokenizer()
    with open(out, "wb") as file:
        for path in files:
            for batch in pq.ParquetFile(path).iter_batches(1000, columns=["text"]):
                texts = batch.column(0).to_pylist()
                for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
                    file.write(np.array(encoding.ids + [0], np.uint16).tobytes())


def run_tiktoken(files, out):
    """Print the tokens per second of bare tiktoken, by the clock of this process alone."""
    import pyarrow.parquet as pq
    import tiktoken

    from machinery.tokenizer import load_tokenizer
    from machinery.twin import find_twin
    texts = []
    for path in files:
        texts += pq.read_table(path, columns=["text"]).column(0).to_pylist()
    pattern, ranks = find_twin(load_tokenizer(TOKENIZER))
    encoding = tiktoken.Encoding("bare", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    start, cpu = time.perf_counter(), time.process_time()
    tokens = sum(len(encoding.encode_to_numpy(text)) + 1 for text in texts)
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start,
                      "cpu": time.process_time() - cpu}))


METHODS = {"datasets": run_datasets, "encode_batch": run_encode_batch, "tiktoken": run_tiktoken}


def measure(command):
    """Return (wall seconds, CPU seconds, stdout) of a command.

    The CPU seconds are those of the process and the children it waited for. Workers are nobody's
    children by then, so those of prepare.py --workers=2 are not to be had.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True,
                          env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        sys.exit(done.stderr)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, done.stdout


def run_once(method, folder, files, corpus_size, run):
    """Run a method on files; return (what measure does, the ids it wrote or None)."""
    out = folder / f"{method}-{run}"
    if method in METHODS:
        command = [sys.executable, __file__, f"--as={method}", out, *files]
    else:
        source = f"{folder}/[0-{len(files) // corpus_size - 1}]-*.parquet"
        command = [sys.executable, ROOT / "prepare.py", f"--source={source}",
                   f"--tokenizer={TOKENIZER}", f"--out={out}", "--val_fraction=0",
                   f"--workers={2 if method == 'prepare' else 1}"]
    measured = measure(command)
    ids = None
    if out.is_dir():  # the other methods do not split, so there is no val
        ids = b"".join(path.read_bytes() for path in sorted((out / "train").glob("*.bin")))
    elif out.exists():
        ids = out.read_bytes()
    for path in folder.glob(f"{method}-{run}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return measured, ids


def measure_scaling(args, folder, files, corpus_size):
    """Print the seconds of prepare.py alone on 1, 2 and 4 copies of the corpus."""
    medians = {}
    for n in (1, 2, 4):
        walls = [run_once("prepare", folder, files[:n * corpus_size], corpus_size, run)[0][0]
                 for run in range(args.runs)]
        medians[n] = statistics.median(walls)
        more = f"{(medians[n] - medians[1]) / (n - 1):.2f} s" if n > 1 else "-"
        print(f"x{n}: {medians[n]:6.2f} s; per copy beyond the first: {more}")
    print(json.dumps({"scaling": medians}))


def compare_methods(args, folder, files, corpus_size):
    """Print the median seconds of each method, and their ratios to prepare.py's."""
    walls, cpus, bare, reference = {}, {}, [], None
    for run in range(args.runs):
        for method in args.methods.split(","):
            (wall, cpu, output), ids = run_once(method, folder, files, corpus_size, run)
            if method == "tiktoken":
                row = json.loads(output)
                bare.append(row["tokens"] / row["cpu"])
                continue
            walls.setdefault(method, []).append(wall)
            cpus.setdefault(method, []).append(cpu)
            reference = reference or ids
            assert ids == reference, f"{method} wrote other ids"
            print(f"run {run} {method:14} {wall:7.2f} s", flush=True)
    tokens = len(reference) // 2
    wall = {method: statistics.median(values) for method, values in walls.items()}
    cpu = {method: statistics.median(values) for method, values in cpus.items()}
    cpu.pop("prepare")  # see measure
    ratio = {method: wall[method] / wall["prepare"] for method in wall}
    result = {"tokens": tokens, "wall": wall, "cpu": cpu, "ratio": ratio,
              "python": platform.python_version(), "cores": os.cpu_count()}
    for method, seconds in wall.items():
        print(f"{method:14} {seconds:7.2f} s {tokens / seconds / 1e6:7.2f} Mtokens/s "
              f"{ratio[method]:6.2f} x the time of prepare.py")
    if bare and "one_worker" in cpu:
        bare_speed, our_speed = statistics.median(bare), tokens / cpu["one_worker"]
        result["bare_tokens_per_cpu_second"] = bare_speed
        result["prepare_tokens_per_cpu_second"] = our_speed
        print(f"tokens per CPU second: bare tiktoken {bare_speed:,.0f}, prepare.py "
              f"{our_speed:,.0f}, {our_speed / bare_speed:.3f} of it")
    print(json.dumps(result))


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=2,
                        help="times the corpus of 58.7 MB (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3,
                        help="runs of each method (default: %(default)s)")
    parser.add_argument("--methods", default="prepare,one_worker,datasets,encode_batch,tiktoken",
                        help="prepare, and what to compare it with (default: all)")
    parser.add_argument("--scaling", action="store_true",
                        help="prepare.py alone, on 1, 2 and 4 copies")
    parser.add_argument("--as", dest="method", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.method:
        return METHODS[args.method](args.files[1:], args.files[0])
    if "prepare" not in args.methods.split(","):
        parser.error("--methods: the ratios need prepare")
    corpus = sorted((SHARED / "corpus").glob("*.parquet"))
    if not corpus:
        sys.exit("no ../shared/corpus here")
    folder = Path(tempfile.mkdtemp())
    try:
        files = []
        for copy in range(4 if args.scaling else args.copies):
            for path in corpus:
                files.append(folder / f"{copy}-{path.name}")
                files[-1].symlink_to(path)
        work = measure_scaling if args.scaling else compare_methods
        work(args, folder, files, len(corpus))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
