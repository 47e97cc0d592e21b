"""Speed of the benchmark scorer against lm-evaluation-harness's own hf backend: same weights, machine, documents and run.

    python tests/bench/bench_evaluate.py --model=DIR --run=RUN --data_dir=DIR [--dtype=bfloat16] [--docs=40]

--model is a Hugging Face folder, --run the same weights as a checkpoint of ours: evaluate.py import makes it of any Llama,
and writes shared key and value heads out, which is more to compute; with --model=the export of the checkpoint both have
that. For each task the hf backend is timed at several batch sizes and its best is taken; ours is timed as the reference
model and as a checkpoint, sharing and not. Each time is of the model's work alone: requests are built and encoded before.
All are timed in turn, --repeats times, and the fastest counts. The last line weights the tasks by the tokens of the full
sets. Ends in one JSON line.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import evaluate  # noqa: E402
from machinery import harness, huggingface  # noqa: E402

# Thousands of tokens of the full sets as the hf backend runs them.
FULL_SETS = {"hellaswag": 3144, "arc_easy": 249, "arc_challenge": 156, "openbookqa": 22, "piqa": 129, "winogrande": 54,
             "commonsense_qa": 53, "mmlu": 1765, "lambada_openai": 397, "mmlu_5shot": 10133, "wikitext": 330}


def requests_of(task, docs, data_dir):
    """Return the harness's requests of a task: all answers of its first documents.

    mmlu_5shot stands for whole subjects, of which the full set has 246 questions each and local copies may have five: two
    subjects' worked examples, each followed by docs questions of any subject.
    """
    name, shots = task.removesuffix("_5shot"), 5 if task.endswith("_5shot") else 0
    leaves = list(harness.load_tasks([name], shots, data_dir)["tasks"].values())
    for leaf in leaves:
        leaf.build_all_requests(limit=max(1, docs // len(leaves) + 1) if name == "mmlu" else docs, rank=0, world_size=1)
    requests = [request for leaf in leaves for request in leaf.instances]
    if task == "mmlu_5shot":
        questions = [request.args[0].rpartition("\n\n")[2] for request in requests[::4]][:docs]
        examples = [leaf.instances[0].args[0].rpartition("\n\n")[0] for leaf in leaves[:2]]
        requests = [dataclasses.replace(requests[0], arguments=(f"{example}\n\n{question}", f" {letter}"))
                    for example in examples for question in questions for letter in "ABCD"]
    return requests


def timed(ways, repeats, clock):
    """Return {name: least seconds} of functions: all of them once, then all again, for a machine whose speed changes."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, score in ways.items():
            with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                start = clock()
                score()
                best[name] = min(best[name], clock() - start)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data_dir", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--docs", type=int, default=40)
    parser.add_argument("--tasks", default=",".join(FULL_SETS))
    parser.add_argument("--batch_sizes", default="4,8,16,32", help="of the hf backend")
    parser.add_argument("--no_plain", action="store_true", help="leave our own plain path out")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--cpu_time", action="store_true", help="one thread, its own seconds: for a machine that is not quiet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1 if args.cpu_time else torch.get_num_threads())
    import transformers
    from lm_eval.models.huggingface import HFLM
    transformers.logging.set_verbosity_error()
    hf = HFLM(pretrained=args.model, dtype=args.dtype, device=args.device, max_length=2048, batch_size=8)
    candidates = {"ours, checkpoint": evaluate.open_checkpoint(args.run, args.device, args.dtype),
                  "ours, reference": huggingface.open_reference(args.model, args.device, args.dtype)}
    print(f"{args.device}, {args.dtype}, {torch.get_num_threads()} threads, {clock.__name__}, torch {torch.__version__}, transformers {transformers.__version__}")
    ratios = {}
    for task in args.tasks.split(","):
        requests = requests_of(task, 2 if task == "wikitext" else args.docs, args.data_dir)
        sizes = [int(n) for n in args.batch_sizes.split(",")]
        if task == "wikitext":
            ways = {f"hf {n}": (lambda n=n: (setattr(hf, "batch_size_per_gpu", n), hf.loglikelihood_rolling(requests))) for n in sizes}
        else:
            pairs = [(request.args, *hf._encode_pair(*request.args)) for request in requests]
            ways = {f"hf {n}": (lambda n=n: hf._loglikelihood_tokens(pairs, override_bs=n)) for n in sizes}
        for name, candidate in candidates.items():
            for share in (True,) if args.no_plain else (True, False):
                def run(candidate=candidate, share=share):
                    lm = harness.HarnessLM(candidate, args.device, share=share)
                    return lm.loglikelihood_rolling(requests) if task == "wikitext" else lm._loglikelihood_tokens(pairs)
                ways[name + ("" if share else ", no_share")] = run
        seconds = timed(ways, args.repeats, clock)
        best = min(value for name, value in seconds.items() if name.startswith("hf"))
        ratios[task] = {name: best / value for name, value in seconds.items() if not name.startswith("hf")}
        print(f"{task:16} {len(requests):5} requests  " + "  ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
              + "  | times as fast: " + "  ".join(f"{name} {value:.2f}" for name, value in ratios[task].items()), flush=True)
    weight = {task: FULL_SETS[task] for task in ratios}
    suite = {name: sum(weight.values()) / sum(weight[task] / ratios[task][name] for task in ratios) for name in next(iter(ratios.values()))}
    print("suite, weighted by the full sets' tokens: " + "  ".join(f"{name} {value:.2f}" for name, value in suite.items()))
    print(json.dumps({"dtype": args.dtype, "device": args.device, "torch": torch.__version__, "docs": args.docs, "ratios": ratios, "suite": suite}))


if __name__ == "__main__":
    main()
