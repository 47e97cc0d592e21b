"""Score checkpoints and reference models, sample, and carry checkpoints to and from the Hugging Face format.

    score     held-out loss on prepared validation documents; with --suite or --tasks, benchmarks of lm-evaluation-harness
    sample    continue prompts
    probe     what can be read from the residual stream at each depth, and what each block does for the loss
    export    a checkpoint as a Hugging Face Llama folder
    import    such a folder as a checkpoint

Usage:
    python evaluate.py score  out/smoke-binary-s1 out/smoke-learned-s1
    python evaluate.py score  out/paper-binary-s1 --suite=paper --data_dir=DIR
    python evaluate.py score  --hf=HuggingFaceTB/SmolLM2-135M --suite=paper --dtype=bfloat16
    python evaluate.py sample out/smoke-binary-s1 --prompt 'def main():' 'import '
    python evaluate.py probe  out/smoke-binary-s1
    python evaluate.py export out/smoke-binary-s1 DIR

Under torchrun, score spreads the requests over the processes. A request's score is the log-likelihood of its
continuation, and whether greedy decoding gives it. The last token is never an input; what is too long loses its beginning:

    context c0 c1 c2, continuation a0 a1       input   c0 c1 c2 a0
                                               scored        a0 a1       the logits at c2 and at a0

Equal inputs are run once, and so is a prefix that several share: prefix and suffixes lie in one row as a tree, or, where a
row would be too long, the suffixes are run on the prefix's keys and values. So a question is read once for all its
answers, and MMLU's worked examples once for all questions of a subject. Short rows are packed: there is little padding.

A checkpoint is a run directory (its newest checkpoint is taken) or a step-*.pt file, with the run's tokenizer.json beside
it. score writes heldout-STEP.json, or SUITE-STEP.json for compare.py, there (in out/NAME/ for a reference model).
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from machinery.checkpoints import hash_tensors, load_model
from machinery.files import sha256, write_whole
from machinery.harness import MAX_LENGTH, HarnessLM, print_suite, score_suite
from machinery.huggingface import export_checkpoint, import_folder, open_reference
from machinery.probe import draw_probe, probe
from machinery.runs import run_directory
from machinery.scorer import Candidate, cut_documents
from machinery.shards import open_shards, read_meta
from machinery.tokenizer import load_tokenizer, token_bytes, vocab_size

# The paper's benchmarks: (tasks, shots). WikiText's windows are the longest inputs: memory trouble shows first.
SUITES = {"paper": [("wikitext,hellaswag,arc_easy,arc_challenge,piqa,winogrande,openbookqa,commonsense_qa,lambada_openai,"
                     "mmlu", 0), ("mmlu", 5)]}


# ----------------------------------------------------------------------------------------------------------------------
# What is scored: a function from ids to logits and a tokenizer, be it a checkpoint of ours or a reference model


def open_checkpoint(path, device, dtype):
    """Return the Candidate of a checkpoint of ours. Raises ValueError if its tokenizer has more ids than the model."""
    model, state = load_model(path, device)
    model.to(getattr(torch, dtype))
    tokenizer_path, V, eot_id = run_directory(path) / "tokenizer.json", model.config.vocab_size, state["eot_id"]
    tokenizer = load_tokenizer(tokenizer_path)
    if (n_ids := vocab_size(tokenizer)) > V:
        raise ValueError(f"{tokenizer_path}: {n_ids:,} ids, but the model of {path} has {V:,}")
    codebook = getattr(model.model.embed_tokens, "codebook", None)
    note = ""
    if codebook is not None and not codebook[eot_id].any():  # the paper, "Method": hidden states and logits are exactly 0
        note = f"its code is all zero, so the first token after it costs exactly ln V = {math.log(V):.4f} nats"

    def encode(texts, special):
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def generate(ids, new, temperature, top_k, generator=None):
        return model.generate(torch.tensor([ids], device=device), new, temperature, top_k, eot_id, generator, n_ids)

    return Candidate(
        lambda idx, **options: model(idx, **options)[0], model.new_cache, encode, tokenizer.decode, generate, eot_id,
        "the end-of-text token that separates documents in training", n_ids, model.config.block_size,
        {"name": str(path), "step": state["step"], "data": state["data"], "model_config": state["model_config"],
         "weights_sha256": hash_tensors(sorted(model.state_dict().items())),
         "tokenizer_sha256": sha256(tokenizer_path.read_bytes())}, note)


# ----------------------------------------------------------------------------------------------------------------------
# Scoring


# ----------------------------------------------------------------------------------------------------------------------
# Held-out loss, document by document


def find_data(name, data_dir, n_ids):
    """Return data_dir if it is prepared for the n_ids of the model called name; raises ValueError otherwise."""
    if not data_dir:
        raise ValueError(f"{name}: it does not say what data it was trained on; give --data=DIR")
    if (found := read_meta(data_dir)["tokenizer"]["vocab_size"]) != n_ids:
        raise ValueError(f"{name}: vocab_size {n_ids}, but {data_dir} has {found}; give --data=DIR")
    return data_dir


def score_heldout(lm, data_dir):
    """Return the held-out score on the validation documents of a prepared directory, as plain values.

    Keys: loss (nats per target), loss_stderr (over documents), perplexity, bits_per_byte, documents (a list of
    {targets, bytes, nats}); the end-of-text target counts, and stands for no byte.
    Raises ValueError if there are no validation documents.
    """
    sizes = token_bytes(load_tokenizer(Path(data_dir) / "tokenizer.json"))
    windows, owners, n = [], [], 0
    for shard in open_shards(data_dir, "val"):
        for document, ids in cut_documents(*shard.map(), lm.max_length):
            windows.append((ids[:1], ids[1:]))
            owners.append(n + document)
        n += shard.documents
    if not windows:
        raise ValueError(f"{data_dir}: no validation documents; prepare it with a larger --val_fraction")
    scored = [(len(ids), sizes[ids].sum(), -score) for (_, ids), (score, _) in zip(windows, lm.score(windows))]
    targets, n_bytes, nats = (np.bincount(owners, values, n) for values in zip(*scored))  # float64 sums by document
    documents = [{"targets": int(t), "bytes": int(b), "nats": x} for t, b, x in zip(targets, n_bytes, nats.tolist())]
    loss = nats.sum() / targets.sum()
    # A ratio of two sums over documents (Cochran, Sampling Techniques, 2.11): documents are the independent units, not tokens.
    stderr = math.sqrt(((nats - loss * targets) ** 2).sum() * n / (n - 1)) / targets.sum() if n > 1 else math.nan
    return {"loss": loss, "loss_stderr": stderr, "perplexity": math.exp(loss),
            "bits_per_byte": nats.sum() / math.log(2) / n_bytes.sum(), "documents": documents}


# ----------------------------------------------------------------------------------------------------------------------
# Benchmarks


def command_score(args):
    """Score every checkpoint and reference model on held-out documents, or on benchmarks; print, and write the JSON files."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # only finished scores are exchanged
        args.device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else args.device
    plan = SUITES[args.suite] if args.suite else [(args.tasks, args.num_fewshot)] if args.tasks else None
    names = [(path, open_checkpoint) for path in args.checkpoints] + [(name, open_reference) for name in args.hf]
    for name, opened in names:
        candidate = opened(name, args.device, args.dtype)
        out = run_directory(name) if opened is open_checkpoint else Path("out") / Path(name).name
        # What the scores depend on beside the inputs is in the file's name: one model's are never taken for another's.
        identity = f"{candidate.facts['weights_sha256']} {args.dtype} {args.no_share}"
        cache = out / f".finished-{sha256(identity.encode())[:16]}"
        lm = HarnessLM(candidate, args.device, args.max_length, args.batch_tokens, not args.no_share, cache)
        if plan:
            label = args.suite or args.tasks.replace(",", "+")
            label += f"_{args.num_fewshot}shot" * (args.num_fewshot is not None) + f"_limit{args.limit}" * bool(args.limit)
            result = score_suite(lm, plan, args)
        else:
            label, data_dir = "heldout", find_data(name, args.data or candidate.facts.get("data"), candidate.n_ids)
            result = {"checkpoint": str(name), "step": candidate.facts["step"], "data": str(data_dir), "dtype": args.dtype,
                      "max_length": lm.max_length, **score_heldout(lm, data_dir)}
        if lm.part > 0:
            continue
        step = candidate.facts["step"]
        target = out / (f"{label}.json" if step is None else f"{label}-{step:08d}.json")
        out.mkdir(parents=True, exist_ok=True)
        write_whole(target, json.dumps(result, default=str).encode())  # before anything is printed: hours may be in it
        for file in out.glob(f"{cache.name}.*"):
            file.unlink()
        if plan:
            print_suite(result)
        else:
            print(f"{name}: step {step}, loss {result['loss']:.4f} +-{result['loss_stderr']:.4f} nats, perplexity "
                  f"{result['perplexity']:.3f}, {result['bits_per_byte']:.4f} bits/byte, {len(result['documents']):,} documents, "
                  f"{sum(document['targets'] for document in result['documents']):,} targets")
        print(f"written to {target}")
    if dist.is_initialized():
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# Sampling

def command_sample(args):
    """Print continuations of every prompt, as they are made."""
    candidate = open_checkpoint(args.checkpoint, args.device, "float32")
    for prompt in args.prompt:
        if not (ids := candidate.encode([prompt], False)[0]):
            raise ValueError("--prompt is empty; give it a text to continue")
        for i in range(args.num_samples):
            generator = torch.Generator(args.device).manual_seed(args.seed + i)
            told, shown = list(ids), ""
            for new in candidate.generate(ids, args.max_new_tokens, args.temperature, args.top_k, generator):
                told.append(new)
                text = candidate.decode(told)
                if not text.endswith("\ufffd"):  # half a character waits for its other bytes
                    print(text[len(shown):], end="", flush=True)
                    shown = text
            print(candidate.decode(told)[len(shown):] + "\n" + "-" * 80)


# ----------------------------------------------------------------------------------------------------------------------
# Probe: what can be read linearly from the residual stream at each depth, and what each block does for the loss


def command_probe(args):
    """Print what each depth knows and what each block is for; write the JSON file and the figure into the run."""
    model, state = load_model(args.checkpoint, args.device)
    run = run_directory(args.checkpoint)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    data_dir = find_data(args.checkpoint, args.data or state["data"], vocab_size(tokenizer))
    result = probe(model, tokenizer, data_dir, args.positions)
    facts = {"checkpoint": str(args.checkpoint), "step": state["step"], "data": str(data_dir)}
    path = run / f"probe-{state['step']:08d}.json"
    write_whole(path, json.dumps(facts | result).encode())
    draw_probe(result, path.with_suffix(".png"))
    print(f"linear readouts, fitted at {result['positions_fitted']:,} positions, scored at {result['positions_scored']:,} "
          f"of other documents\n(identity among {result['identities']} ids; {result['code']} code; keyword, space first, "
          "digit: area under the ROC curve; bytes: R^2)\n\ndepth  " + "".join(f"{name:>13}" for name in result["chance"]))
    for depth, values in (("chance", result["chance"]), *enumerate(result["depths"])):
        print(f"{depth:<7}" + "".join(f"{value:13.4f}" for value in values.values()))
    print(f"\nloss of the {result['windows']} windows: {result['loss']:.4f} nats per target; more if a block's addition is")
    for i, (skipped, swapped) in enumerate(zip(result["skipped"], result["swapped"]), 1):
        print(f"block {i:<4}  skipped {skipped:+.4f}  swapped {swapped:+.4f}")
    print(f"written to {path} and {path.with_suffix('.png')}")


# ----------------------------------------------------------------------------------------------------------------------
# To and from the Hugging Face format. Our parameters have a Llama's names and layout, so only the input table needs work


# ----------------------------------------------------------------------------------------------------------------------

def parse_args():
    """Return the command line's settings; .run is the command's function."""
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog=parser.prog)

    def command(name, help, run, *positional):
        """Add a command and its positional arguments (name, metavar, nargs); return its parser."""
        sub = commands.add_parser(name, usage=argparse.SUPPRESS, allow_abbrev=False, help=help)
        sub.set_defaults(run=run)
        for argument, metavar, nargs in positional:
            sub.add_argument(argument, metavar=metavar, nargs=nargs)
        return sub

    cuda, plain = torch.cuda.is_available(), "(default: %(default)s)"
    score = command("score", "held-out loss, or benchmarks", command_score, ("checkpoints", "CHECKPOINT", "*"))
    score.add_argument("--hf", action="append", default=[], metavar="NAME", help="Hugging Face model, a hub name or folder")
    score.add_argument("--data", help="held-out: prepared data directory (default: the one the run was trained on)")
    score.add_argument("--suite", choices=SUITES, help="benchmarks: the paper's ten tasks, MMLU also with five examples")
    score.add_argument("--tasks", help="benchmarks: the harness's names, separated by commas")
    score.add_argument("--num_fewshot", type=int, help="worked examples with --tasks (default: the task's own number)")
    score.add_argument("--limit", type=int, help="the first documents of each task only")
    score.add_argument("--data_dir", metavar="DIR", help="hub-shaped copies of the benchmarks' data (default: the hub)")
    score.add_argument("--include_path", metavar="DIR", help="further task YAML files")
    score.add_argument("--max_length", type=int, help=f"positions (default: the smaller of {MAX_LENGTH} and the model's own)")
    score.add_argument("--batch_tokens", type=int, default=16_384 if cuda else 2048, help=f"tokens at a time {plain}")
    score.add_argument("--no_share", action="store_true", help="run every distinct input whole, sharing no prefix")
    sample = command("sample", "continue prompts", command_sample, ("checkpoint", "CHECKPOINT", None))
    sample.add_argument("--prompt", nargs="+", default=["def main():\n"], help="texts to continue")
    sample.add_argument("--num_samples", type=int, default=1, help=f"continuations of each prompt {plain}")
    sample.add_argument("--max_new_tokens", type=int, default=200, help=f"tokens a continuation {plain}")
    sample.add_argument("--temperature", type=float, default=0.8, help=f"0 takes the most probable {plain}")
    sample.add_argument("--top_k", type=int, default=50, help=f"sample among the k most probable {plain}")
    sample.add_argument("--seed", type=int, default=1, help=f"of the first continuation, then counted up {plain}")
    prober = command("probe", "what each depth holds", command_probe, ("checkpoint", "CHECKPOINT", None))
    prober.add_argument("--data", help="prepared data directory (default: the one the run was trained on)")
    prober.add_argument("--positions", type=int, default=16_384, help=f"held-out positions to look at {plain}")
    export = command("export", "write a Hugging Face Llama folder",
                     lambda args: export_checkpoint(args.checkpoint, args.out, args.dtype),
                     ("checkpoint", "CHECKPOINT", None), ("out", "DIR", None))
    command("import", "make a checkpoint of a Hugging Face Llama folder",
            lambda args: import_folder(args.folder, args.out), ("folder", "DIR", None), ("out", "RUN", None))
    for sub in (score, sample, prober):
        sub.add_argument("--device", default="cuda" if cuda else "cpu", help=f"cpu or cuda[:N] {plain}")
    for sub in (score, export):
        sub.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help=f"of the weights {plain}")
    args = parser.parse_args()
    if args.run is command_score:
        if not args.checkpoints and not args.hf:
            parser.error("nothing to score: name a CHECKPOINT or --hf=NAME")
        if args.suite and (args.tasks or args.num_fewshot is not None):
            parser.error("--suite has its own tasks and examples; leave --tasks and --num_fewshot out, or --suite")
        benchmarks_only = (args.limit, args.num_fewshot, args.data_dir, args.include_path)
        if not (args.suite or args.tasks) and any(value is not None for value in benchmarks_only):
            parser.error("--limit, --num_fewshot, --data_dir and --include_path are for benchmarks; give --tasks or --suite too")
        if (args.suite or args.tasks) and args.data:
            parser.error("--data is for the held-out loss; the benchmarks' data is --data_dir")
    return args


def main():
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {error}")
