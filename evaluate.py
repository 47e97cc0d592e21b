"""Score checkpoints and reference models, sample from them, look inside, and carry them to and from
the Hugging Face format.

    score     held-out loss on prepared validation documents; with --suite or --tasks, benchmarks of
              lm-evaluation-harness. Under torchrun the processes share the requests
    sample    continue prompts
    probe     what can be read from the residual stream at each depth, and what each block does for
              the loss
    export    a checkpoint as a Hugging Face Llama folder
    import    such a folder as a checkpoint

Usage:
    python evaluate.py score  out/smoke-binary-s1 out/smoke-learned-s1
    python evaluate.py score  out/paper-binary-s1 --suite=paper --data_dir=DIR
    python evaluate.py score  --hf=HuggingFaceTB/SmolLM2-135M --suite=paper --dtype=bfloat16
    python evaluate.py sample out/smoke-binary-s1 --prompt 'def main():' 'import '
    python evaluate.py probe  out/smoke-binary-s1
    python evaluate.py export out/smoke-binary-s1 DIR

A checkpoint is a run directory (its newest checkpoint is taken) or a step-*.pt file, with the run's
tokenizer.json beside it. score writes heldout-STEP.json, or SUITE-STEP.json for compare.py, there
(in out/NAME/ for a reference model); other data than the run's own, another dtype or length are in
the file's name. probe writes probe-STEP.json and .png.

What is scored is a request: the log-likelihood of a continuation after a context, and whether
greedy decoding gives it. The last token is never an input; what is too long loses its beginning:

    context c0 c1 c2, continuation a0 a1       input   c0 c1 c2 a0
                                               scored        a0 a1   the logits at c2 and at a0
"""

import math
from pathlib import Path

import numpy as np
import torch

from inputs import FixedCodes
from machinery import scores
from machinery.candidates import Candidate, load_finite, run_tokenizer, vocabulary_sha256
from machinery.checkpoints import hash_tensors
from machinery.errors import one_line
from machinery.files import sha256
from machinery.huggingface import export_checkpoint, import_folder
from machinery.options import parse_evaluate_args
from machinery.packing import cut_documents
from machinery.processes import check_same_everywhere, refuse_under_torchrun
from machinery.references import open_reference
from machinery.runs import data_fingerprint
from machinery.scorer import MAX_LENGTH, Scorer, join_processes, leave_processes
from machinery.shards import open_shards, read_meta
from machinery.tokenizer import load_tokenizer, token_bytes
from machinery.tokenizer import vocab_size as tokenizer_size

# The paper's benchmarks: (tasks, shots). Of the answers to a question acc takes the one of the
# greatest ln p, acc_norm the one of the greatest ln p per character of the
# answer. WikiText's windows are the longest inputs: memory trouble shows first.
SUITES = {"paper": [("wikitext,hellaswag,arc_easy,arc_challenge,piqa,winogrande,openbookqa,"
                     "commonsense_qa,lambada_openai,mmlu", 0), ("mmlu", 5)]}
MOST_NATS = 700  # exp of more has no float64


def open_checkpoint(path, device, dtype):
    """Return a checkpoint of ours as a Candidate: a function from ids to logits, and a tokenizer.

    Raises ValueError if its tokenizer has more ids than the model.
    """
    model, state = load_finite(path, device)
    model.to(getattr(torch, dtype))
    tokenizer, tokenizer_sha256 = run_tokenizer(path, state)
    V, n_ids, eot_id = model.config.vocab_size, tokenizer_size(tokenizer), state["eot_id"]
    # An imported model may begin with another token than it ends with, and its tokenizer put it
    # there; ours is trained on texts as they are.
    prefix_id, template = state.get("bos_id", eot_id), state.get("template", False)
    if n_ids > V:
        raise ValueError(f"{path}: its tokenizer has {n_ids:,} ids, but the model {V:,}")

    # ids (B, T) -> logits (B, T, V), or at n selected places (n, V)
    def forward(idx, **options):
        return model(idx, **options)[0]

    # texts -> lists of ids; special: add what the tokenizer adds to a text. Ours adds no BOS.
    def encode(texts, special):
        return [encoding.ids for encoding in
                tokenizer.encode_batch_fast(texts, add_special_tokens=special and template)]

    # a list of ids -> the ids that follow, one by one
    def generate(ids, max_new_tokens, temperature, top_k, generator=None):
        idx = torch.tensor([ids], device=device)  # (1, T)
        return model.generate(idx, max_new_tokens, temperature=temperature, top_k=top_k,
                              stop_id=eot_id, generator=generator, n_ids=n_ids)

    prefix_reason = "the end-of-text token that separates documents in training"
    if prefix_id != eot_id:
        prefix_reason = "the imported model's bos token"
    note, embed = "", model.model.embed_tokens
    if isinstance(embed, FixedCodes):
        prefix = torch.tensor([[prefix_id]], device=device)
        x = embed(prefix, torch.float32, model.lm_head.weight)
        if not x.any():  # so are hidden states and logits, exactly (the paper, "Method")
            note = ("its code is all zero, so the first token after it costs exactly "
                    f"ln V = {math.log(V):.4f} nats")
    return Candidate(
        forward=forward, new_cache=model.new_cache, encode=encode, decode=tokenizer.decode,
        generate=generate, prefix_id=prefix_id, prefix_reason=prefix_reason, n_ids=n_ids,
        context=model.config.block_size,
        facts={"name": str(path), "step": state["step"], "data": state["data"],
               "model_config": state["model_config"],
               "data_sha256": state.get("config", {}).get("data_fingerprint"),
               "weights_sha256": hash_tensors(sorted(model.state_dict().items())),
               "tokenizer_sha256": tokenizer_sha256,
               "vocabulary_sha256": vocabulary_sha256(tokenizer)},
        note=note)


def open_scorer(candidate, out, args):
    """Return the Scorer of a candidate, whose finished requests are kept in out until all are."""
    # What the scores depend on beside the inputs is in the file's name: one model's are never taken
    # for another's.
    identity = f"{candidate.facts['weights_sha256']} {args.dtype} {args.no_share}"
    finished = out / f".finished-{sha256(identity.encode())[:16]}"
    return Scorer(candidate, args.device, args.max_length, args.batch_tokens, not args.no_share,
                  cache=finished)


def find_data(name, prepared, tokenizer_vocabulary):
    """Return prepared, a directory, if its tokenizer is that of the model called name.

    Raises ValueError otherwise: ids of another tokenizer, even of as many, are other texts.
    """
    if not prepared:
        raise ValueError(f"{name}: it does not say what data it was trained on; give --data=DIR")
    meta, path = read_meta(prepared), Path(prepared) / "tokenizer.json"
    if sha256(path.read_bytes()) != meta["tokenizer"]["sha256"]:
        raise ValueError(f"{path}: its sha256 is not the one in meta.json; prepare it again")
    if vocabulary_sha256(load_tokenizer(path)) != tokenizer_vocabulary:
        raise ValueError(f"{name}: {prepared} was prepared with another tokenizer; give --data=DIR "
                         "with this model's")
    return prepared


def score_heldout(scorer, prepared):
    """Return the held-out score on the validation documents of a prepared directory, as plain
    values: loss = sum of nats / sum of targets, over all documents.

    Every target counts once, in windows of max_length inputs (packing.cut_documents). The
    end-of-text target counts, and stands for no byte.

    Keys: loss (nats per target), loss_stderr (over documents), perplexity, bits_per_byte, documents
    (a list of {targets, bytes, nats}). Raises ValueError if there are no validation documents.
    """
    sizes = token_bytes(load_tokenizer(Path(prepared) / "tokenizer.json"))
    windows, owners, n = [], [], 0
    for shard in open_shards(prepared, "val"):
        for document, ids in cut_documents(*shard.map(), scorer.max_length):
            # A request: the context is the first id, the continuation the rest; its score is the
            # sum of their ln p.
            windows.append((ids[:1], ids[1:]))
            owners.append(n + document)
        n += shard.documents
    if not windows:
        raise ValueError(f"{prepared}: no validation documents; prepare it with a larger "
                         "--val_fraction")
    by_window = []
    for (_, ids), (score, _) in zip(windows, scorer.score(windows)):
        by_window.append((len(ids), sizes[ids].sum(), -score))
    # Sums by document, in float64.
    targets, n_bytes, nats = (
        np.bincount(owners, weights=values, minlength=n) for values in zip(*by_window))
    loss = nats.sum() / targets.sum()
    stderr = math.nan
    if n > 1:
        # A ratio of two sums over documents (Cochran, Sampling Techniques, 2.11): documents are the
        # independent units, not tokens.
        squares = ((nats - loss * targets) ** 2).sum()
        stderr = math.sqrt(squares * n / (n - 1)) / targets.sum()
    documents = [{"targets": int(t), "bytes": int(b), "nats": x}
                 for t, b, x in zip(targets, n_bytes, nats.tolist())]
    perplexity = math.exp(loss) if loss < MOST_NATS else math.inf
    return {"loss": loss, "loss_stderr": stderr, "perplexity": perplexity,
            "bits_per_byte": nats.sum() / math.log(2) / n_bytes.sum(), "documents": documents}


def heldout_result(name, scorer, args):
    """Return the held-out scores file of a candidate as plain values."""
    facts = scorer.candidate.facts
    prepared = find_data(name, args.data or facts.get("data"), facts["vocabulary_sha256"])
    facts["heldout_sha256"] = data_fingerprint(read_meta(prepared))
    check_same_everywhere({"data_sha256": facts["heldout_sha256"]})
    return {"checkpoint": str(name), "step": facts["step"], "data": str(prepared),
            "data_sha256": facts["heldout_sha256"], "dtype": args.dtype,
            "max_length": scorer.max_length, "weights_sha256": facts["weights_sha256"],
            "tokenizer_sha256": facts["tokenizer_sha256"], "note": scorer.candidate.note,
            **score_heldout(scorer, prepared)}


def print_heldout(result):
    """Print a held-out score: nats per target, perplexity, bits per byte."""
    documents = result["documents"]
    targets = sum(document["targets"] for document in documents)
    print(f"{result['checkpoint']}: step {result['step']}, loss {result['loss']:.4f} "
          f"+-{result['loss_stderr']:.4f} nats, perplexity {result['perplexity']:.3f}, "
          f"{result['bits_per_byte']:.4f} bits/byte, {len(documents):,} documents, "
          f"{targets:,} targets")


def score_one(name, candidate, out, args):
    """Score a candidate on held-out documents or on benchmarks; write the scores file, print it."""
    check_same_everywhere({name: candidate.facts[name]
                           for name in ("weights_sha256", "tokenizer_sha256")})
    scorer = open_scorer(candidate, out, args)
    if args.suite or args.tasks:
        # Imported here: with the harness the import takes seconds, which nothing else needs.
        from machinery import benchmarks
        plan = SUITES[args.suite] if args.suite else [(args.tasks, args.num_fewshot)]
        result = benchmarks.score_suite(scorer, plan, args.dtype, args.limit, args.data_dir,
                                        args.include_path)
        show = benchmarks.print_suite
    else:
        result = heldout_result(name, scorer, args)
        show = print_heldout
    if scorer.part > 0:
        return
    # Before anything is printed: hours may be in it.
    usual_length = min(MAX_LENGTH, candidate.context)
    path = out / scores.scores_name(args, candidate.facts, usual_length)
    path = scores.write(path, result)
    scorer.remove_cache()
    show(result)
    print(f"written to {path}")


def command_score(args):
    """Score every checkpoint and every reference model."""
    args = join_processes(args)
    for path in args.checkpoints:
        out = scores.scores_directory(path, args.out, is_reference=False)
        score_one(path, open_checkpoint(path, args.device, args.dtype), out, args)
    for name in args.hf:
        out = scores.scores_directory(name, args.out, is_reference=True)
        candidate = open_reference(name, args.device, args.dtype, args.trust_remote_code)
        score_one(name, candidate, out, args)
    leave_processes()


def command_sample(args):
    """Print continuations of every prompt, as they are made."""
    candidate = open_checkpoint(args.checkpoint, args.device, "float32")
    for prompt in args.prompt:
        ids = candidate.encode([prompt], False)[0]
        if not ids:
            raise ValueError("--prompt is empty; give it a text to continue")
        for i in range(args.num_samples):
            generator = torch.Generator(args.device).manual_seed(args.seed + i)
            told, shown = list(ids), ""
            for new in candidate.generate(ids, args.max_new_tokens, args.temperature, args.top_k,
                                          generator):
                told.append(new)
                text = candidate.decode(told)
                if not text.endswith("\ufffd"):  # half a character waits for its other bytes
                    print(text[len(shown):], end="", flush=True)
                    shown = text
            print(candidate.decode(told)[len(shown):] + "\n" + "-" * 80)


def command_probe(args):
    """Print what each depth knows and what each block is for; write the JSON file and the figure
    into the run."""
    from machinery.probe import draw_probe, print_probe, probe
    out = scores.scores_directory(args.checkpoint, args.out, is_reference=False)
    model, state = load_finite(args.checkpoint, args.device)
    tokenizer, _ = run_tokenizer(args.checkpoint, state)
    prepared = find_data(args.checkpoint, args.data or state["data"], vocabulary_sha256(tokenizer))
    seed = state.get("config", {}).get("seed", 1)
    result = probe(model, tokenizer, prepared, args.positions, seed)
    facts = {"checkpoint": str(args.checkpoint), "step": state["step"], "data": str(prepared),
             "data_sha256": data_fingerprint(read_meta(prepared)),
             "weights_sha256": hash_tensors(sorted(model.state_dict().items()))}
    path = scores.write(out / f"probe-{state['step']:08d}.json", facts | result)
    draw_probe(result, path.with_suffix(".png"))
    print_probe(result)
    print(f"written to {path} and {path.with_suffix('.png')}")


def command_export(args):
    export_checkpoint(args.checkpoint, args.out, args.dtype)


def command_import(args):
    import_folder(args.folder, args.out)


COMMANDS = {"score": command_score, "sample": command_sample, "probe": command_probe,
            "export": command_export, "import": command_import}


def main():
    args = parse_evaluate_args(SUITES, __doc__)
    if args.command != "score":
        refuse_under_torchrun(args.command, "is the work of one process: leave torchrun out")
    COMMANDS[args.command](args)


if __name__ == "__main__":
    with one_line("evaluate.py", "--dtype=bfloat16 needs half, a smaller --batch_tokens less"):
        main()
