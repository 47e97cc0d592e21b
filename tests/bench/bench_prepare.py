"""How fast prepare.py is, side by side with what people use, from parquet files to uint16 ids on disk.

    python tests/bench/bench_prepare.py [--copies=2] [--runs=3] [--scaling]

Each method is a process of its own, from the start of the interpreter to its end, in turn, the median of the runs. Real
English documents and the SmolLM2 tokenizer from ../shared. All must write the same ids. The last line is JSON.

    prepare        python prepare.py --workers=2, with split, index, sha256 and resume
    one_worker     the same with --workers=1: all in one process, whose CPU seconds are the speed of a core
    datasets       datasets.map(batched, num_proc=2) with the fast tokenizer, then a memory-mapped file, as nanoGPT does
    encode_batch   tokenizers' encode_batch (its own threads) over batches of 1000
    tiktoken       bare encode_to_numpy over texts already in memory, one process; its ids are not written
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

from machinery import tokenizer as tokenizing  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
TOKENIZER = SHARED / "smollm2" / "tokenizer.json"
sys.path.insert(0, str(ROOT))


def run_datasets(files, out):
    """transformers' AutoTokenizer, where it is installed, adds nothing but its own overhead to this same tokenizer."""
    import datasets
    import numpy as np
    from tokenizers import Tokenizer
    try:
        from transformers import PreTrainedTokenizerFast
        fast = PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER))
        encode = lambda texts: fast(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    except ImportError:
        tokenizer = Tokenizer.from_file(str(TOKENIZER))
        tokenizer.encode_special_tokens = True
        encode = lambda texts: [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]

    def process(rows):
        ids = [i + [0] for i in encode(rows["text"])]
        return {"ids": ids, "len": [len(i) for i in ids]}

    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=f"{out}.cache")
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
    from tokenizers import Tokenizer
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.encode_special_tokens = True
    with open(out, "wb") as file:
        for path in files:
            for batch in pq.ParquetFile(path).iter_batches(1000, columns=["text"]):
                for encoding in tokenizer.encode_batch(batch.column(0).to_pylist(), add_special_tokens=False):
                    file.write(np.array(encoding.ids + [0], np.uint16).tobytes())


def run_tiktoken(files, out):
    """Print the tokens per second of bare tiktoken, by the clock of this process alone."""
    import pyarrow.parquet as pq
    import tiktoken
    texts = [text for path in files for text in pq.read_table(path, columns=["text"]).column(0).to_pylist()]
    pattern, ranks = tokenizing.find_twin(tokenizing.load_tokenizer(TOKENIZER))
    encoding = tiktoken.Encoding("bare", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    start, cpu = time.perf_counter(), time.process_time()
    tokens = sum(len(encoding.encode_to_numpy(text)) + 1 for text in texts)
    print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}))


def measure(command):
    """Return (wall seconds, CPU seconds of the process and the children it waited for, stdout). Workers are nobody's children
    by then, so the CPU seconds of prepare.py --workers=2 are not to be had."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"})
    output, errors = process.communicate()
    if process.returncode:
        sys.exit(errors)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, output


def flat_ids(out):
    """The train ids of a prepared directory; the other methods do not split, so there is no val."""
    return b"".join(path.read_bytes() for path in sorted((out / "train").glob("*.bin")))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=2, help="times the corpus of 58.7 MB (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each method (default: %(default)s)")
    parser.add_argument("--methods", default="prepare,one_worker,datasets,encode_batch,tiktoken",
                        help="prepare, and what to compare it with (default: all)")
    parser.add_argument("--scaling", action="store_true", help="prepare.py alone, on 1, 2 and 4 copies")
    parser.add_argument("--as", dest="method", help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "prepare" not in args.methods.split(","):
        parser.error("--methods: the ratios need prepare")
    if args.method:
        return globals()[f"run_{args.method}"](args.files[1:], args.files[0])
    corpus = sorted((SHARED / "corpus").glob("*.parquet"))
    if not corpus:
        sys.exit("no ../shared/corpus here")
    folder = Path(tempfile.mkdtemp())
    try:
        files = []
        for copy in range(max(args.copies, 4 if args.scaling else 0)):
            for path in corpus:
                files.append(folder / f"{copy}-{path.name}")
                files[-1].symlink_to(path)

        def once(method, files, run):
            out = folder / f"{method}-{run}"
            if method in ("prepare", "one_worker"):
                n = len(files) // len(corpus)
                source = f"{folder}/[0-{n - 1}]-*.parquet"
                result = measure([sys.executable, ROOT / "prepare.py", f"--source={source}",
                                  f"--tokenizer={TOKENIZER}", f"--out={out}", f"--workers={1 + (method == 'prepare')}",
                                  "--val_fraction=0"])
            else:
                result = measure([sys.executable, __file__, f"--as={method}", out, *files])
            ids = flat_ids(out) if out.is_dir() else out.read_bytes() if out.exists() else None
            for path in folder.glob(f"{method}-{run}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return result, ids

        if args.scaling:
            medians = {n: statistics.median(once("prepare", files[:n * len(corpus)], run)[0][0] for run in range(args.runs))
                       for n in (1, 2, 4)}
            for n, wall in medians.items():
                print(f"x{n}: {wall:6.2f} s; per copy beyond the first: " + (f"{(wall - medians[1]) / (n - 1):.2f} s" if n > 1 else "-"))
            print(json.dumps({"scaling": medians}))
            return
        files = files[:args.copies * len(corpus)]
        walls, cpus, bare, reference = {}, {}, [], None
        for run in range(args.runs):
            for method in args.methods.split(","):
                (wall, cpu, output), ids = once(method, files, run)
                if method == "tiktoken":
                    bare.append(json.loads(output))
                    continue
                walls.setdefault(method, []).append(wall)
                cpus.setdefault(method, []).append(cpu)
                reference = reference or ids
                assert ids == reference, f"{method} wrote other ids"
                print(f"run {run} {method:14} {wall:7.2f} s", flush=True)
        tokens = len(reference) // 2
        wall = {method: statistics.median(values) for method, values in walls.items()}
        result = {"tokens": tokens, "wall": wall, "cpu": {method: statistics.median(values) for method, values in cpus.items() if method != "prepare"},
                  "ratio": {method: wall[method] / wall["prepare"] for method in wall},
                  "python": platform.python_version(), "cores": os.cpu_count()}
        for method, seconds in wall.items():
            print(f"{method:14} {seconds:7.2f} s {tokens / seconds / 1e6:7.2f} Mtokens/s "
                  f"{result['ratio'][method]:6.2f} x the time of prepare.py")
        if bare and "one_worker" in cpus:
            result["bare_tokens_per_cpu_second"] = statistics.median(row["tokens"] / row["cpu"] for row in bare)
            result["prepare_tokens_per_cpu_second"] = tokens / result["cpu"]["one_worker"]
            print(f"tokens per CPU second: bare tiktoken {result['bare_tokens_per_cpu_second']:,.0f}, "
                  f"prepare.py {result['prepare_tokens_per_cpu_second']:,.0f}, "
                  f"{result['prepare_tokens_per_cpu_second'] / result['bare_tokens_per_cpu_second']:.3f} of it")
        print(json.dumps(result))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
