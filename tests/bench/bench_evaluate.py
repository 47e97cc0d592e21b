"""Speed of the benchmark scorer against lm-evaluation-harness's own hf backend: same weights,
machine, documents and run.

    python tests/bench/bench_evaluate.py --model=DIR --run=RUN --data_dir=DIR [--dtype=bfloat16]

--model is a Hugging Face folder, --run the same weights as a checkpoint of ours: evaluate.py import
makes it of any Llama, and writes shared key and value heads out, which is more to compute; with
--model=the export of the checkpoint both have that. For each task the hf backend is timed at
several batch sizes and its best is taken; ours is timed as the reference model and as a checkpoint,
sharing and not. Each time is of the model's work alone: requests are built and encoded before.
All are timed in turn, --repeats times, and the fastest counts. The last line weights the tasks by
the tokens of the full sets. Ends in one JSON line.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import evaluate  # noqa: E402
from machinery import benchmarks, references  # noqa: E402
from machinery.harness import HarnessLM  # noqa: E402
from machinery.scorer import Scorer  # noqa: E402

# Thousands of tokens of the full sets as the hf backend runs them.
FULL_SETS = {"hellaswag": 3144, "arc_easy": 249, "arc_challenge": 156, "openbookqa": 22,
             "piqa": 129, "winogrande": 54, "commonsense_qa": 53, "mmlu": 1765,
             "lambada_openai": 397, "mmlu_5shot": 10133, "wikitext": 330}


def requests_of(task, docs, data_dir):
    """Return the harness's requests of a task: all answers of its first documents.

    mmlu_5shot stands for whole subjects, of which the full set has 246 questions each and local
    copies may have five: two subjects' worked examples, each followed by docs questions of any
    subject.
    """
    name, shots = task.removesuffix("_5shot"), 5 if task.endswith("_5shot") else 0
    leaves = list(benchmarks.load_tasks([name], shots, data_dir)["tasks"].values())
    requests, limit = [], max(1, docs // len(leaves) + 1) if name == "mmlu" else docs
    for leaf in leaves:
        leaf.build_all_requests(limit=limit, rank=0, world_size=1)
        requests += leaf.instances
    if task != "mmlu_5shot":
        return requests
    questions = [request.args[0].rpartition("\n\n")[2] for request in requests[::4]][:docs]
    whole = []
    for leaf in leaves[:2]:
        examples = leaf.instances[0].args[0].rpartition("\n\n")[0]
        for question in questions:
            for letter in "ABCD":
                arguments = f"{examples}\n\n{question}", f" {letter}"
                whole.append(dataclasses.replace(requests[0], arguments=arguments))
    return whole


def timed(ways, repeats, clock):
    """Return {name: least seconds} of functions: all of them once, then all again, for a machine
    whose speed changes."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, score in ways.items():
            quiet = io.StringIO()
            with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet):
                start = clock()
                score()
                best[name] = min(best[name], clock() - start)
    return best


def score_theirs(hf, requests, pairs, batch_size):
    if pairs is None:
        hf.batch_size_per_gpu = batch_size
        hf.loglikelihood_rolling(requests)
    else:
        hf._loglikelihood_tokens(pairs, override_bs=batch_size)


def score_ours(candidate, requests, pairs, device, share):
    lm = HarnessLM(Scorer(candidate, device, share=share))
    if pairs is None:
        lm.loglikelihood_rolling(requests)
    else:
        lm._loglikelihood_tokens(pairs)


def ways_to_score(task, requests, hf, candidates, args):
    """Return {name: function} of the hf backend at each batch size, and of each candidate."""
    pairs = None  # of WikiText: its pages are read in windows
    if task != "wikitext":
        pairs = [(request.args, *hf._encode_pair(*request.args)) for request in requests]
    ways = {}
    for n in map(int, args.batch_sizes.split(",")):
        ways[f"hf {n}"] = functools.partial(score_theirs, hf, requests, pairs, n)
    for name, candidate in candidates.items():
        ours = functools.partial(score_ours, candidate, requests, pairs, args.device)
        ways[name] = functools.partial(ours, True)
        if not args.no_plain:
            ways[f"{name}, no_share"] = functools.partial(ours, False)
    return ways


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--docs", type=int, default=40)
    parser.add_argument("--tasks", default=",".join(FULL_SETS))
    parser.add_argument("--batch_sizes", default="4,8,16,32", help="of the hf backend")
    parser.add_argument("--no_plain", action="store_true", help="leave our own plain path out")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cpu_time", action="store_true",
                        help="one thread, its own seconds: for a machine that is not quiet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main():
    args = parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1 if args.cpu_time else torch.get_num_threads())
    import transformers
    from lm_eval.models.huggingface import HFLM
    transformers.logging.set_verbosity_error()
    hf = HFLM(pretrained=args.model, dtype=args.dtype, device=args.device, max_length=2048,
              batch_size=8)
    candidates = {
        "ours, checkpoint": evaluate.open_checkpoint(args.run, args.device, args.dtype),
        "ours, reference": references.open_reference(args.model, args.device, args.dtype)}
    print(f"{args.device}, {args.dtype}, {torch.get_num_threads()} threads, {clock.__name__}, "
          f"torch {torch.__version__}, transformers {transformers.__version__}")
    ratios = {}
    for task in args.tasks.split(","):
        requests = requests_of(task, 2 if task == "wikitext" else args.docs, args.data_dir)
        seconds = timed(ways_to_score(task, requests, hf, candidates, args), args.repeats, clock)
        best = min(value for name, value in seconds.items() if name.startswith("hf"))
        ratios[task] = {name: best / value for name, value in seconds.items()
                        if not name.startswith("hf")}
        print(f"{task:16} {len(requests):5} requests  "
              + "  ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
              + "  | times as fast: "
              + "  ".join(f"{name} {value:.2f}" for name, value in ratios[task].items()),
              flush=True)
    total, suite = sum(FULL_SETS[task] for task in ratios), {}
    for name in next(iter(ratios.values())):
        suite[name] = total / sum(FULL_SETS[task] / ratios[task][name] for task in ratios)
    print("suite, weighted by the full sets' tokens: "
          + "  ".join(f"{name} {value:.2f}" for name, value in suite.items()))
    print(json.dumps({"dtype": args.dtype, "device": args.device, "torch": torch.__version__,
                      "docs": args.docs, "ratios": ratios, "suite": suite}))


if __name__ == "__main__":
    main()
