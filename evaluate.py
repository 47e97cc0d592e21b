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
import bisect
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import keyword
import logging
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from scipy.stats import rankdata
from tqdm import tqdm

from codes import binary_codes, recode
from model import BITS, Decoder, FixedCodes, ModelConfig, build_input, hash_tensors, load_model
from prepare import Utf16, load_tokenizer, open_shards, read_meta, token_bytes, vocab_size, write_whole

# The paper's benchmarks: (tasks, shots). WikiText's windows are the longest inputs: memory trouble shows first.
SUITES = {"paper": [("wikitext,hellaswag,arc_easy,arc_challenge,piqa,winogrande,openbookqa,commonsense_qa,lambada_openai,"
                     "mmlu", 0), ("mmlu", 5)]}
# Where the harness keeps them: to index all its 14,000 files takes 5 seconds, these a few hundredths.
TASK_FOLDERS = {"arc_easy": "arc", "arc_challenge": "arc", "lambada_openai": "lambada", "mmlu": "mmlu/default", **{
    name: name for name in ("wikitext", "hellaswag", "piqa", "winogrande", "openbookqa", "commonsense_qa")}}
MAX_LENGTH = 2048       # the paper's, for every model: a longer context would give a reference longer prompts and windows
BOOTSTRAP_ITERS = 1000  # of the harness, for LAMBADA's perplexity alone; its default of 100,000 takes half a minute
FEWSHOT_SEED = 1234     # the harness's default
SHARING_COST = 8        # a group must save more than this part of its tokens, as rows of groups are wider; else one shared
                        # word would be enough
ROW = 512               # the longest row that several sequences may lie in: attention there is dense
CACHED = 4              # times --batch_tokens: positions whose keys and values a batch may look at
SOFTMAX_ROWS = 128      # logits in float32 at a time
PADDING = 32            # a batch ends where more than this part of --batch_tokens would be padding


# ----------------------------------------------------------------------------------------------------------------------
# What is scored: a function from ids to logits and a tokenizer, be it a checkpoint of ours or a reference model

@dataclass
class Candidate:
    """A model that can be scored.

    forward(idx (B, T), positions=None, mask=None, cache=None, select=(rows, columns)) -> logits (n, V), as Decoder.forward;
    encode(texts, special) -> lists of ids; special lets the tokenizer add what it adds to a text (a Llama's BOS);
    generate(prompt ids, max_new_tokens, temperature, top_k, generator=None) -> the ids that follow, one by one.
    """
    forward: Callable
    new_cache: Callable
    encode: Callable
    decode: Callable
    generate: Callable
    prefix_id: int      # stands for an empty context
    prefix_reason: str
    n_ids: int          # ids that the tokenizer knows; a head may have more rows
    context: int        # the most positions the model takes
    facts: dict         # what it is: name, step, hashes
    note: str = ""      # what to know about its scores


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def run_directory(path):
    return Path(path) if Path(path).is_dir() else Path(path).parent


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


def open_reference(name, device, dtype):
    """Return the Candidate of a Hugging Face model, by hub name or local folder. Raises ValueError without transformers."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    except ImportError:
        raise ValueError(f"--hf={name} needs the transformers package; pip install transformers safetensors") from None
    tokenizer = AutoTokenizer.from_pretrained(name)
    prefix_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).to(device).eval()
    # Its name from transformers 5 on, and before.
    keys_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def forward(idx, positions=None, mask=None, cache=None, select=None):
        past = None if cache is None else DynamicCache()
        for i, layer in enumerate(cache or ()):
            past.update(layer["k"], layer["v"], i)
        columns, where = select[1].unique(return_inverse=True)
        logits = model(idx, attention_mask=mask, position_ids=positions, logits_to_keep=columns,
                       **{keys_name: past, "use_cache": cache is not None}).logits
        if cache is not None:
            cache[:] = [{"k": layer.keys, "v": layer.values} for layer in past.layers]
        return logits[select[0], where]

    def generate(ids, new, temperature, top_k, generator=None):
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
        idx = model.generate(torch.tensor([ids], device=device), max_new_tokens=new, pad_token_id=prefix_id, **options)
        return idx[0, len(ids):].tolist()

    return Candidate(
        forward, list, lambda texts, special: tokenizer(texts, add_special_tokens=special)["input_ids"],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True), generate,
        prefix_id, "its tokenizer's bos, else eos, token", len(tokenizer), model.config.max_position_embeddings,
        {"name": str(name), "step": None, "weights_sha256": hash_tensors(sorted(model.state_dict().items())),
         "tokenizer_sha256": sha256(tokenizer.backend_tokenizer.to_str().encode())})


# ----------------------------------------------------------------------------------------------------------------------
# Scoring

def share_prefixes(rows, limits):
    """Cut sorted rows into groups whose common prefix is run once. Rows that begin alike are one group, or the groups of
    those among them that begin alike further, whichever saves more tokens, less one in SHARING_COST of what is left to run.

    Args:
        rows: int32 arrays, all different, in an order that keeps equal beginnings together.
        limits: how much of each row, from its start, may be in a prefix.
    Returns: (prefix length, first row, last row + 1) of each group; length 0 for a row on its own.

        a b c d          -> (3, 0, 3)      the prefix a b c, then d, e f and g
        a b c e f
        a b c g
        x y              -> (0, 3, 4)
    """
    stack = []  # nested intervals of rows that begin alike, the widest first: [common length, first row, saved, groups]
    before = np.cumsum([0, *map(len, rows)])
    for end in range(1, len(rows) + 1):
        common = -1
        if end < len(rows):
            n = min(limits[end - 1], limits[end])
            differ = np.flatnonzero(rows[end - 1][:n] != rows[end][:n])
            common = int(differ[0]) if differ.size else n
        start, saved, groups = end - 1, 0, [(0, end - 1, end)]
        while stack and stack[-1][0] > common:  # these intervals end here: each is one group, or the groups inside it
            length, start, inside, members = stack.pop()
            saved, groups = inside + saved, members + groups
            again = (end - start - 1) * length
            if (whole := again - (before[end] - before[start] - again) / SHARING_COST) > saved:
                saved, groups = whole, [(length, start, end)]
        if stack and stack[-1][0] == common:
            stack[-1][2] += saved
            stack[-1][3] += groups
        else:
            stack.append([common, start, saved, groups])
    return stack[0][3] if stack else []


def count_tokens(group):
    """Return the tokens that a group costs: (prefix length, [(row, what is scored on it), ...])."""
    length, members = group
    return length + sum(len(row) - length for row, _ in members)


def lay_out(rows):
    """Return (ids, positions, trees, branches, pieces) of packed rows: lists of groups, each of which lies in its row as a
    tree, the prefix once and then the suffixes, each of which sees the prefix and itself.

        ids        a b c d e f g x y       of the rows a b c d, a b c e f, a b c g and x y
        positions  0 1 2 3 3 4 3 0 1
        trees      0 0 0 0 0 0 0 1 1
        branches   0 0 0 1 2 2 3 1 1       0 is seen by all of its tree

    The four are int64 (B, T), padded on the right with a tree of their own; pieces are (key, targets, places): where the
    targets are predicted, as indices into the flattened ids.
    """
    shape = len(rows), max(sum(map(count_tokens, row)) for row in rows)
    ids, positions, branches = np.zeros((3, *shape), np.int64)
    trees, pieces = np.full(shape, -1), []
    for b, row in enumerate(rows):
        at = 0
        for tree, (length, members) in enumerate(row):
            front = np.arange(at, at + length)
            ids[b, front], positions[b, front], trees[b, front] = members[0][0][:length], np.arange(length), tree
            at += length
            for branch, (own, scored) in enumerate(members, 1):
                n = len(own) - length
                back = np.arange(at, at + n)
                ids[b, back], positions[b, back], trees[b, back] = own[length:], np.arange(length, len(own)), tree
                branches[b, back] = branch
                at += n
                places = b * shape[1] + np.concatenate((front, back))
                pieces += [(key, targets, places[len(own) - len(targets):]) for key, targets in scored]
    return ids, positions, trees, branches, pieces


class HarnessLM(TemplateLM):
    """lm-evaluation-harness's LM over a Candidate: loglikelihood, loglikelihood_rolling, generate_until.

    Args:
        max_length: T, the most positions of an input; None takes the smaller of MAX_LENGTH and the candidate's own.
        batch_tokens: tokens to run at a time, padding included; halved where memory does not suffice.
        share: run common prefixes once. Without it every distinct input is a row of its own; the scores are the same.
        cache: finished requests are kept in files of this name (.0 for process 0), and taken from them; None keeps none.
    """

    def __init__(self, candidate, device="cpu", max_length=None, batch_tokens=2048, share=True, cache=None):
        super().__init__()
        self.candidate, self._device, self.batch_tokens, self.share = candidate, torch.device(device), batch_tokens, share
        self.max_length = min(MAX_LENGTH, candidate.context) if max_length is None else max_length
        if not 1 <= self.max_length <= candidate.context:
            raise ValueError(f"--max_length={max_length}: {candidate.facts['name']} takes 1 to {candidate.context}")
        self.audit = {}     # task -> its requests: how many, how many cut, their hashes
        self.finished = {}  # digest of (input, targets) -> (log-likelihood, is greedy)
        self.part, self.parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.cache = None if cache is None else Path(cache)
        for path in sorted(self.cache.parent.glob(f"{self.cache.name}.*")) if self.cache else ():
            for line in path.read_text().splitlines():
                if len(fields := line.split()) == 3 and len(fields[0]) == 32:  # a killed run may leave half a line
                    self.finished[fields[0]] = (float(fields[1]), fields[2] == "1")
        if self.parts > 1:
            dist.barrier()  # nobody writes before everyone has read

    eot_token_id = property(lambda self: self.candidate.prefix_id)

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.candidate.encode([string], add_special_tokens is not False)[0]

    def encode_all(self, texts, special=True):
        """Return {text: int32 ids}: each distinct text encoded once, in batches that use all cores."""
        texts = list(dict.fromkeys(texts))
        return {text: np.array(ids, np.int32) for at in range(0, len(texts), 1024)
                for text, ids in zip(texts[at:at + 1024], self.candidate.encode(texts[at:at + 1024], special))}

    def encode_pairs(self, pairs):
        """Return [(context ids, continuation ids), ...] of (context, continuation) texts, as TemplateLM encodes one.

        Spaces that end a context go to the continuation, whose ids are what the joint text has beyond the context's. Where
        that is nothing (one token spans the join) it is encoded on its own. The prefix token stands for an empty context.
        """
        moved = [(kept := context.rstrip(), context[len(kept):] + continuation) for context, continuation in pairs]
        joint = self.encode_all(text for context, rest in moved if context for text in (context, context + rest))
        alone = self.encode_all((rest for _, rest in moved), special=False)
        encoded, prefix = [], np.array([self.prefix_token_id], np.int32)
        for context, rest in moved:
            ids, front = alone[rest], joint.get(context, prefix[:0])
            if len(front):
                beyond = joint[context + rest][len(front):]
                encoded.append((front, beyond if len(beyond) else ids))
            else:  # empty, or nothing that the tokenizer has an id for
                encoded.append((prefix, ids[1:] if ids[:1].tolist() == prefix.tolist() else ids))
        return encoded

    def note(self, request, texts, ids, truncated=False):
        """Enter a request in the audit of its task: its texts, its ids, and whether it loses its beginning."""
        empty = {"n_requests": 0, "n_truncated": 0, "prompts": [], "tokens": []}
        entry = self.audit.setdefault(request.task_name, empty)
        entry["n_requests"] += 1
        entry["n_truncated"] += truncated
        for key, parts in (("prompts", texts), ("tokens", [part.tolist() for part in ids])):
            entry[key].append(sha256(json.dumps([request.doc_id, *parts]).encode()))

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = self.encode_pairs([request.args for request in requests])
        for request, pair in zip(requests, pairs):
            self.note(request, request.args, pair, truncated=sum(map(len, pair)) > self.max_length + 1)
        return self.score(pairs)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """Return the log-likelihood in nats of each whole text: every token once, the first after the prefix token."""
        encoded = self.encode_all((request.args[0] for request in requests), special=False)
        pairs = [(np.array([self.prefix_token_id], np.int32), encoded[request.args[0]]) for request in requests]
        for request, pair in zip(requests, pairs):
            self.note(request, ("", *request.args), pair)  # a page is not cut but read in windows
        return [nats for nats, _ in self.score(pairs)]

    def _loglikelihood_tokens(self, requests, **_):
        return self.score([(np.array(context, np.int32), np.array(ids, np.int32)) for _, context, ids in requests])

    def generate_until(self, requests, disable_tqdm=False):
        """Return the text that continues each (context, generation arguments) request, up to its first stop sequence."""
        from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
        texts = []
        for request in tqdm(requests, unit=" requests", disable=None):
            prompt = np.array(self.tok_encode(request.args[0]) or [self.prefix_token_id], np.int32)
            options = normalize_gen_kwargs(request.args[1])
            new, stops, ids, text = min(options["max_gen_toks"], self.max_length - 1), options["until"], [], ""
            self.note(request, request.args, [prompt], truncated=len(prompt) > self.max_length - new)
            prompt = prompt[-(self.max_length - new):].tolist()
            for i in self.candidate.generate(prompt, new, options.get("temperature", 0.0), options.get("top_k")):
                ids.append(i)
                text = self.candidate.decode(ids)
                if any(stop in text for stop in stops):
                    break
            texts.append(postprocess_generated_text(text, stops, None))
        return texts

    def cut(self, context, continuation):
        """Yield the (input, targets) pieces of a request. Only a continuation of more than T tokens (a WikiText page) has
        several: windows that score each token once, the last of them full too, as the harness's rolling windows do.

            context p, page t0 .. t6, T = 3        input   p  t0 t1    t2 t3 t4    t3 t4 t5
                                                   scored  t0 t1 t2    t3 t4 t5          t6
        """
        T, n = self.max_length, len(continuation)
        ids = np.concatenate((context, continuation))
        for start in range(0, n, T):
            end = min(start + T, n)
            at = len(context) + end - 1
            yield ids[max(at - T, 0):at], continuation[start:end]

    def score(self, pairs):
        """Return [(log-likelihood in nats, is greedy), ...] of (context, continuation) int32 ids; (0.0, True) for an empty
        continuation."""
        scores, todo, owners = [(0.0, True)] * len(pairs), {}, []
        for i, pair in enumerate(pairs):
            for row, targets in self.cut(*pair):
                row, targets = row.tobytes(), targets.tobytes()
                key = hashlib.blake2b(row + b"|" + targets, digest_size=16).hexdigest()
                owners.append((i, key))
                if key not in self.finished:
                    todo[key] = (row, targets)
        self.run(todo)
        for i, key in owners:
            nats, greedy = self.finished[key]
            scores[i] = (scores[i][0] + nats, scores[i][1] and greedy)
        return scores

    def run(self, todo):
        """Score {key: (row, targets)}, int32 as bytes, into self.finished."""
        scored = {}  # row -> [(key, targets), ...] to score at its end
        for key, (row, targets) in todo.items():
            scored.setdefault(row, []).append((key, np.frombuffer(targets, np.int32)))
        rows = [(np.frombuffer(row, np.int32), scored[row]) for row in sorted(scored)]
        # A prefix has at most one place where something is scored: its last, the end of a context.
        limits = [len(row) - max(len(targets) for _, targets in pieces) + 1 for row, pieces in rows]
        cuts = share_prefixes([row for row, _ in rows], limits if self.share else [0] * len(rows))
        batches = self.plan([(length, rows[start:end]) for length, start, end in cuts][self.part::self.parts])
        tokens = lambda packed: sum(count_tokens(group) for row in packed for group in row)
        bar = tqdm(total=sum(tokens(packed) for _, packed in batches), unit=" tokens", unit_scale=True,
                   disable=self.part > 0 or None)
        prefix, cache = None, None
        while batches:
            shared, packed = batches[0]
            try:
                if shared is not prefix:
                    prefix, cache = shared, self.run_prefix(shared)
                found = self.score_rows(packed, cache)
            except RuntimeError as error:
                short = isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
                if not short or len(packed) == 1:
                    raise
                self.batch_tokens //= 2
                print(f"out of memory; continuing with --batch_tokens={self.batch_tokens}", file=sys.stderr)
                batches = [(shared, half) for shared, packed in batches for half in (packed[::2], packed[1::2]) if half]
                continue
            self.finished |= found
            if self.cache:
                self.cache.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{self.cache}.{self.part}", "a") as file:
                    file.writelines(f"{key} {nats!r} {greedy:d}\n" for key, (nats, greedy) in found.items())
            bar.update(tokens(packed))
            batches = batches[1:]
        bar.close()
        if self.parts > 1:
            parts = [None] * self.parts
            dist.all_gather_object(parts, {key: self.finished[key] for key in todo if key in self.finished})
            for part in parts:
                self.finished |= part

    def plan(self, groups):
        """Return the batches [(shared prefix, perhaps empty, packed rows), ...] of groups, the longest rows first, so that
        memory trouble shows at once. A group too long for one row has its prefix run alone, its suffixes packed on that."""
        whole, large = [], []
        for group in groups:
            (large if len(group[1]) > 1 and count_tokens(group) > ROW else whole).append(group)
        batches = self.pack(whole, np.empty(0, np.int32))
        for length, members in sorted(large, key=lambda group: -group[0]):
            shared = members[0][0][:length - 1]  # less its last token, at which something may be scored
            batches += self.pack([(0, [(row[len(shared):], pieces)]) for row, pieces in members], shared)
        return batches

    def pack(self, groups, shared):
        """Return batches of groups, as plan does. A row's first group is the longest that is left; then come, up to ROW and
        to the length of the batch's first row, the longest that fit."""
        groups = sorted(groups, key=count_tokens)
        sizes, batches = [count_tokens(group) for group in groups], []
        while groups:
            T, rows, padding = sizes[-1], [], 0
            most = min(self.batch_tokens // T, CACHED * self.batch_tokens // (T + len(shared)))
            while groups and len(rows) < max(most, 1) and padding * PADDING <= self.batch_tokens:
                room, row, i = T, [], len(groups)
                while i:
                    row.append(groups.pop(i - 1))
                    room -= sizes.pop(i - 1)
                    i = bisect.bisect_right(sizes, min(room, ROW - T + room)) if self.share else 0
                rows.append(row)
                padding += room
            batches.append((shared, rows))
        return batches

    @torch.inference_mode()
    def run_prefix(self, prefix):
        """Return the keys and values of a prefix, int32 ids; None of an empty one."""
        if not len(prefix):
            return None
        ids = torch.from_numpy(prefix[None].astype(np.int64)).to(self.device)
        cache = self.candidate.new_cache()
        self.candidate.forward(ids, cache=cache, select=(ids[0, :0], ids[0, :0]))
        return cache

    @torch.inference_mode()
    def score_rows(self, rows, cache):
        """Run packed rows as one batch on a prefix's keys and values, or on none; return {key: (log-likelihood, is greedy)}."""
        ids, positions, trees, branches, pieces = lay_out(rows)
        # Answers to one question begin at one place.
        places, index = np.unique(np.concatenate([places for *_, places in pieces]), return_inverse=True)
        tensor = lambda array: torch.from_numpy(array).to(self.device)
        past, options = 0, {}
        if cache:
            past = cache[0]["k"].size(2)
            options["cache"] = [{name: t.expand(len(rows), -1, -1, -1) for name, t in layer.items()} for layer in cache]
        if any(len(row) > 1 or len(row[0][1]) > 1 for row in rows):
            tree, branch = tensor(trees), tensor(branches)
            seen = (tree[:, :, None] == tree[:, None]).tril()
            seen &= (branch[:, None] == 0) | (branch[:, :, None] == branch[:, None])
            options |= {"positions": past + tensor(positions), "mask": F.pad(seen, (past, 0), value=True)[:, None]}
        select = tuple(map(tensor, np.divmod(places, ids.shape[1])))
        logits = self.candidate.forward(tensor(ids), select=select, **options)
        targets, index = tensor(np.concatenate([targets for _, targets, _ in pieces]).astype(np.int64)), tensor(index)
        nats, greedy = torch.empty(len(index), device=self.device), torch.empty_like(index, dtype=torch.bool)
        # In float32, also for a bfloat16 model; a few rows at a time, which stay in a CPU's cache. By the harness's own
        # formula: log_softmax is 8e-6 nats a token off the exact value on a CPU, logsumexp is not.
        for at in range(0, len(places), SOFTMAX_ROWS):
            some, here = logits[at:at + SOFTMAX_ROWS].float(), (index >= at) & (index < at + SOFTMAX_ROWS)
            nats[here] = F.log_softmax(some, dim=-1)[index[here] - at, targets[here]]
            greedy[here] = some.max(dim=-1).indices[index[here] - at] == targets[here]  # argmax takes three times as long
        starts = np.cumsum([0, *(len(targets) for _, targets, _ in pieces[:-1])])
        nats = np.add.reduceat(nats.double().cpu().numpy(), starts).tolist()
        greedy = np.logical_and.reduceat(greedy.cpu().numpy(), starts).tolist()
        return {key: scored for (key, *_), scored in zip(pieces, zip(nats, greedy))}


# ----------------------------------------------------------------------------------------------------------------------
# Held-out loss, document by document

def cut_documents(tokens, starts, block_size):
    """Yield (document, ids) windows that together hold every target of every document once.

    Args:
        tokens, starts: a mapped shard, uint16 [n_tokens] and int64 [n_documents + 1].
        block_size: T; a window has 2 to T + 1 ids, the first of them context only:

            document   t0 t1 t2 t3 t4 t5 t6          T = 3
            window     t0>t1>t2>t3                   targets t1 t2 t3
            window              t3>t4>t5>t6          targets t4 t5 t6
    """
    for document, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        for at in range(start, end - 1, block_size):
            yield document, tokens[at:min(at + block_size + 1, end)].astype(np.int32)


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

def load_tasks(names, num_fewshot=None, data_dir=None, include_path=None):
    """Return the harness's own tasks, {"tasks": {name: Task}, "groups": {name: Group}, ...}.

    Args:
        data_dir: a folder of hub-shaped copies (ORG/NAME/*.jsonl with a README.md that names the configurations), where the
            data sets are found by their own names; None takes the hub, or its cache where HF_HUB_OFFLINE=1 is set.
        include_path: a folder of further task YAML files.
    Raises ValueError for an unknown task, FileNotFoundError for one whose data cannot be had.
    """
    if data_dir is not None:
        os.environ["HF_DATASETS_OFFLINE"] = "1"  # what is not there is missing; a --hf model may still come from the hub
    from lm_eval.tasks import TaskManager, __file__ as tasks_file
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    own = [str(Path(include_path).resolve())] if include_path else []
    manager = TaskManager(include_defaults=False, include_path=own + [
        str(Path(tasks_file).parent / TASK_FOLDERS[name]) for name in names if name in TASK_FOLDERS])
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=own)
    loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"--tasks: no task {name!r}; lm-eval ls tasks lists all, --include_path=DIR adds others")
        try:
            with contextlib.chdir(data_dir or "."):
                for kind, found in manager.load([name]).items():
                    loaded[kind] |= found
        except (OSError, KeyError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())[:160]
            raise FileNotFoundError(f"{name}: its data set cannot be loaded ({reason}); give --data_dir=DIR with a copy of it "
                                    "in DIR/ORG/NAME") from None
    for name, task in loaded["tasks"].items():
        if num_fewshot is not None and task.get_config("num_fewshot") != 0:  # 0 in a task's file is meant, the harness says
            task.set_config("num_fewshot", num_fewshot)
        if shots := task.get_config("num_fewshot"):
            if (n := len(list(task.fewshot_docs()))) < shots:
                raise ValueError(f"{name}: {shots} examples are asked for, but it has {n}; give --num_fewshot={n}")
        else:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(FEWSHOT_SEED)
    return loaded


def right_answer(task, sample):
    """Return the log-likelihood of a document's right answer, None where the task is not of that kind."""
    gold, responses = 0, sample["filtered_resps"]
    if task.OUTPUT_TYPE == "multiple_choice":
        gold = task.doc_to_text(sample["doc"]) if task.multiple_input else task.doc_to_target(sample["doc"])
        gold = task.doc_to_choice(sample["doc"]).index(gold) if isinstance(gold, str) else gold
    if task.OUTPUT_TYPE == "generate_until" or not isinstance(gold, int) or not 0 <= gold < len(responses):
        return None
    return responses[gold] if task.OUTPUT_TYPE == "loglikelihood_rolling" else responses[gold][0]


def run_tasks(lm, loaded, limit=None):
    """Run loaded tasks; return ({task: entry}, {group that is in no other: {metrics, tasks}}) of plain values.

    A task's entry has its metrics as the harness defines them, version, num_fewshot, n_docs, n_requests, n_truncated,
    prompts_sha256 (over the sorted hashes of every (document, context, continuation)), tokens_sha256 (the same over ids), and
    docs: {doc_id, responses, loglikelihood (of the right answer), each metric}, lists over documents.
    """
    from lm_eval.evaluator import evaluate
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else the harness forks this process, model and all, for a bootstrap
    lm.audit.clear()
    # The harness's own bars, one for each of MMLU's 57 subjects: none without a terminal, and gone when they are full.
    bars = mock.patch.object(tqdm, "__init__", functools.partialmethod(tqdm.__init__, disable=None, leave=False))
    with contextlib.redirect_stdout(sys.stderr), bars:
        results = evaluate(lm, loaded, limit=limit, bootstrap_iters=BOOTSTRAP_ITERS)
    metrics = {name: {key.removesuffix(",none"): value for key, value in values.items() if "," in key}
               for name, values in results["results"].items()}
    tasks = {}
    for name, task in loaded["tasks"].items():
        samples = [s for s in results["samples"][name] if s["filter"] == results["samples"][name][0]["filter"]]
        audit = lm.audit[name]
        tasks[name] = {
            "metrics": metrics[name], "version": results["versions"].get(name), "num_fewshot": results["n-shot"][name],
            "n_docs": len(samples), "n_requests": audit["n_requests"], "n_truncated": audit["n_truncated"],
            **{f"{key}_sha256": sha256("".join(sorted(audit[key])).encode()) for key in ("prompts", "tokens")},
            "docs": {"doc_id": [s["doc_id"] for s in samples], "responses": [s["filtered_resps"] for s in samples],
                     "loglikelihood": [right_answer(task, s) for s in samples],
                     **{key: [s[key] for s in samples] for key in samples[0]["metrics"]}}}
    inner = {child for children in loaded["group_map"].values() for child in children}
    groups = {name: {"metrics": metrics.get(name, {}), "tasks": [task.task_name for task in group.get_all_tasks()]}
              for name, group in loaded["groups"].items() if name not in inner}
    return tasks, groups


def score_suite(lm, plan, args):
    """Run [(task names, shots), ...]; return the plain values of the scores file. A task that the plan has again, with other
    shots, is named after them: mmlu and mmlu_5shot."""
    from lm_eval import __version__
    c, result = lm.candidate, {"tasks": {}, "groups": {}}
    for names, shots in plan:
        loaded = load_tasks(names.split(","), shots, args.data_dir, args.include_path)
        tasks, groups = run_tasks(lm, loaded, args.limit)
        mark = f"_{shots}shot" if set(tasks) & set(result["tasks"]) else ""
        result["tasks"] |= {name + mark: entry for name, entry in tasks.items()}
        result["groups"] |= {name + mark: {"metrics": group["metrics"], "tasks": [task + mark for task in group["tasks"]]}
                             for name, group in groups.items()}
    return {"model": c.facts, "protocol": {
        "lm_eval": __version__, "max_length": lm.max_length, "truncation": "left", "dtype": args.dtype, "limit": args.limit,
        "prefix_token_id": c.prefix_id, "prefix_token": c.prefix_reason, "note": c.note, "batch_tokens": lm.batch_tokens,
        "share": lm.share, "device": str(lm.device), "processes": lm.parts, "torch": torch.__version__,
        "bootstrap_iters": BOOTSTRAP_ITERS, "data": args.data_dir or "the hub or its cache"}, **result}


def print_suite(result):
    """Print the protocol, and a line for each group and each task in none."""
    m, p = result["model"], result["protocol"]
    print(f"\n{m['name']}: weights {m['weights_sha256'][:12]}, tokenizer {m['tokenizer_sha256'][:12]}, {p['dtype']}\n"
          f"  lm-eval {p['lm_eval']}, data: {p['data']}" + (f", the first {p['limit']} documents of each task" if p["limit"] else "")
          + f"; max_length {p['max_length']}, cut on the {p['truncation']}; {p['batch_tokens']:,} tokens a batch\n"
          f"  an empty context is id {p['prefix_token_id']}, {p['prefix_token']}" + (f"; {p['note']}" if p["note"] else ""))
    print(f"{'task':18} {'version':>7} {'shots':>5} {'documents':>9} {'requests':>9} {'truncated':>9}  metrics")
    grouped = {task for group in result["groups"].values() for task in group["tasks"]}
    for name, entry in {**result["tasks"], **result["groups"]}.items():
        if name in grouped:
            continue
        tasks = [result["tasks"][task] for task in entry.get("tasks", [name])]
        docs, requests, cut = (sum(task[key] for task in tasks) for key in ("n_docs", "n_requests", "n_truncated"))
        metrics = [f"{key} {value:.4f}" if isinstance(value, float) else "" for key, value in entry["metrics"].items()]
        print(f"{name:18} {tasks[0]['version']!s:>7} {tasks[0]['num_fewshot']:5} {docs:9,} {requests:9,} {cut:9,}  "
              + "  ".join(filter(None, metrics)))


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

N_IDENTITIES = 256  # ids that the identity readout chooses between: the most frequent
RIDGE = 1e-3        # of a feature's variance
PROPERTIES = {"keyword": lambda text: keyword.iskeyword(text.strip()), "space first": lambda text: text.startswith(" "),
              "digit": lambda text: text.strip().isdigit()}


def full_windows(data_dir, block_size, positions):
    """Return (ids int64 [N, T + 1], document int64 [N]) of about `positions` targets: validation windows of full
    length, the first of every document before the second of any. Raises ValueError unless four documents have one."""
    windows = {}
    for number, shard in enumerate(open_shards(data_dir, "val")):
        for document, ids in cut_documents(*shard.map(), block_size):
            if len(ids) == block_size + 1:
                windows.setdefault((number, document), []).append(ids)
    if len(windows) < 4:
        raise ValueError(f"{data_dir}: {len(windows)} validation documents of more than {block_size} tokens; a probe needs 4")
    found = [(i, ids) for turn in itertools.zip_longest(*windows.values()) for i, ids in enumerate(turn) if ids is not None]
    documents, found = zip(*found[:max(8, positions // block_size)])
    return torch.from_numpy(np.stack(found)).long(), np.array(documents)


@torch.inference_mode()
def window_losses(model, windows):
    """Return the loss of each window (N, T + 1), nats per target: float64 [N]. No batch has a single window."""
    losses = []
    for part in windows.to(model.lm_head.weight.device).tensor_split(-(-len(windows) // 16)):
        logits = model(part[:, :-1])[0].float()
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(part), -1).double().mean(1))
    return torch.cat(losses).cpu().numpy()


def read_linearly(x, classes, targets, test):
    """Fit linear readouts of x (N, C) where test (bool, (N,)) is false; return what they say where it is true.

    classes int64 (N,), -1 for none, are read by linear discriminant analysis: the largest of an affine function each.
    targets float64 (N, M) are read by ridge regression. Returns (classes (N_test,), targets (N_test, M)).
    """
    fit, known = ~test, ~test & (classes >= 0)
    std = x[fit].std(0)
    x = (x - x[fit].mean(0)) / torch.where(std > 0, std, 1)
    ridge, mean = RIDGE * torch.eye(x.size(1), dtype=x.dtype), targets[fit].mean(0)
    weights = torch.linalg.solve(x[fit].T @ x[fit] / fit.sum() + ridge, x[fit].T @ (targets[fit] - mean) / fit.sum())
    n = torch.bincount(classes[known])
    centres = torch.zeros(len(n), x.size(1), dtype=x.dtype).index_add_(0, classes[known], x[known]) / n[:, None]
    within = x[known] - centres[classes[known]]
    directions = torch.linalg.solve(within.T @ within / known.sum() + ridge, centres.T)
    offsets = (n / n.sum()).log() - (centres * directions.T).sum(1) / 2
    return (x[test] @ directions + offsets).argmax(1), x[test] @ weights + mean


def area_under_roc(scores, truth):
    """Return how often a true case scores above a false one, ties counted half (Mann-Whitney); nan if all are alike."""
    n = int(truth.sum())
    ranks = rankdata(scores)[truth].sum() - n * (n + 1) / 2
    return float(ranks / (n * (len(truth) - n))) if 0 < n < len(truth) else math.nan


def probe(model, tokenizer, data_dir, positions):
    """Return, as plain values, what the residual stream tells at each depth (the input, then after each block), what
    chance would, and how much the loss grows without each block.

    Readouts are of the token at the position itself, fitted on every other validation document and scored on the rest:
    identity (share right among the N_IDENTITIES most frequent ids), code and bit (share of positions with all bits, and
    of bits, right: of the model's own code where that has bits, else of the binary code), keyword, space first and
    digit (area under the ROC curve), bytes (the length; R^2). A block is skipped, so that it adds nothing to the
    stream, or swapped: it adds what it would in another window.
    """
    windows, documents = full_windows(data_dir, model.config.block_size, positions)
    streams = [[] for _ in range(model.config.n_layer + 1)]
    with contextlib.ExitStack() as hooks:
        for stream, module in zip(streams, [*model.model.layers, model.model.norm]):
            keep = lambda _, x, stream=stream: stream.append(x[0].float().cpu())
            hooks.enter_context(module.register_forward_pre_hook(keep))
        losses = window_losses(model, windows)

    V, n_ids, ids = model.config.vocab_size, vocab_size(tokenizer), windows[:, :-1].flatten()
    test = torch.from_numpy(documents % 2 == 1).repeat_interleave(model.config.block_size)
    own = model.config.input in BITS
    every_id = torch.arange(V, device=model.lm_head.weight.device)
    codes = model.model.embed_tokens.compute(every_id).cpu() if own else torch.from_numpy(binary_codes(V))
    words = [tokenizer.decode([i]) for i in range(n_ids)]
    sizes = token_bytes(tokenizer).tolist()
    lexical = torch.tensor([*zip(*(map(check, words) for check in PROPERTIES.values()), sizes)])
    K, targets = codes.size(1), torch.cat((codes[:n_ids], lexical), 1).double()[ids]
    counts = torch.bincount(ids[~test], minlength=V)
    frequent = counts.argsort(descending=True, stable=True)[:min(N_IDENTITIES, (counts > 0).sum())]
    classes = torch.full((V,), -1).index_put_((frequent,), torch.arange(len(frequent)))[ids]
    truth, which = targets[test], classes[test]

    def rate(found, read):
        """Return the readings' scores on the test positions, from class indices and regression outputs."""
        right = (read[:, :K] > 0.5) == (truth[:, :K] > 0.5)
        areas = [area_under_roc(read[:, i].numpy(), truth[:, i].numpy() > 0) for i in range(K, K + len(PROPERTIES))]
        error = (read[:, -1] - truth[:, -1]).square().mean() / truth[:, -1].var(correction=0)
        return {"identity": (found == which)[which >= 0].double().mean().item(),
                "code": right.all(1).double().mean().item(), "bit": right.double().mean().item(),
                **dict(zip(PROPERTIES, areas)), "bytes": 1 - error.item()}

    common = targets[~test].mean(0).expand_as(truth)  # what is said without a look at the stream
    read = lambda stream: read_linearly(torch.cat(stream).flatten(0, 1).double(), classes, targets, test)
    result = {"windows": len(windows), "positions_fitted": int((~test).sum()), "positions_scored": len(truth),
              "identities": len(frequent), "code": "own" if own else "binary", "loss": losses.mean(),
              "chance": rate(torch.zeros_like(which), common), "depths": [rate(*read(stream)) for stream in streams]}
    changes = {"skipped": lambda _, x, output: x[0], "swapped": lambda _, x, output: x[0] + (output - x[0]).roll(1, 0)}
    for name, change in changes.items():
        result[name] = []
        for block in model.model.layers:
            with block.register_forward_hook(change):
                result[name].append((window_losses(model, windows) - losses).mean())
    return result


def draw_probe(result, path):
    """Write the probe's figure: readouts against depth, and the loss that a change to each block costs."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.style.use("petroff10")
    plt.rcParams.update({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.3, "axes.axisbelow": True})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 4), layout="constrained")
    for (name, chance), marker in zip(result["chance"].items(), "osD^v<>"):
        left.plot([(depth[name] - chance) / (1 - chance) for depth in result["depths"]], marker=marker, label=name)
    left.set(xlabel="depth (blocks passed; 0 is the input)", ylabel="linear readout (0: chance, 1: perfect)",
             xticks=range(len(result["depths"])))
    blocks = np.arange(1, len(result["skipped"]) + 1)
    for name, offset in (("skipped", -0.2), ("swapped", 0.2)):
        right.bar(blocks + offset, result[name], 0.4, label=name)
    right.set(xlabel="block", ylabel=f"increase of the loss of {result['loss']:.3f} (nats per target)", xticks=blocks)
    right.legend(title="its addition to the stream is", frameon=False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=200)


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

CARD = """# {name}

A Llama-style decoder language model: {step:,} updates, input interface `{input}`.

{about}
"""
FIXED = """Its input table is fixed, not trained. Row t of `model.embed_tokens.weight` is the {n_bits}-number `{input}` code of
the id t, {lift}d {n_tile} times. `nanobit` in config.json holds what it is made of. Keep it frozen in further training."""
INPUT_FIELDS = ("input", "code_seed", "code_offset", "code_values", "code_scale", "lift")  # of ModelConfig


@torch.no_grad()
def input_matrix(table, vocab_size, head):
    """Return what an input interface gives for every id, float32 [V, C]: the table a Llama would look up."""
    return table(torch.arange(vocab_size)[None], torch.float32, head)[0]


def export_checkpoint(path, out, dtype="float32"):
    """Write a checkpoint as a Hugging Face Llama folder. Raises FileExistsError if out is there already."""
    from safetensors.torch import save_file
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; name a directory that does not")
    model, state = load_model(path)
    c, table, eot_id = model.config, model.model.embed_tokens, state["eot_id"]
    if c.ffn != "swiglu":
        raise ValueError(f"{path}: ffn={c.ffn} is no Llama's; only swiglu models can be exported")
    tokenizer_path = run_directory(path) / "tokenizer.json"
    if isinstance(tokenizer := load_tokenizer(tokenizer_path), Utf16):
        raise ValueError(f"{path}: its ids are UTF-16 code units, for which there is no Hugging Face tokenizer")
    eot = tokenizer.id_to_token(eot_id)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    weights["model.embed_tokens.weight"] = input_matrix(table, c.vocab_size, model.lm_head.weight)
    nanobit = {"step": state["step"], **{name: getattr(c, name) for name in INPUT_FIELDS},
               **{name: getattr(table, name).tolist() for name in ("matrix", "offset") if hasattr(table, name)}}
    about = "Its input table is trained."
    if isinstance(table, FixedCodes):
        about = FIXED.format(n_bits=c.n_bits, n_tile=c.n_embd // c.n_bits, **nanobit)
    files = {
        "config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.n_embd,
            "intermediate_size": c.n_ffn, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
            "num_key_value_heads": c.n_head, "head_dim": c.n_embd // c.n_head, "hidden_act": "silu",
            "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "max_position_embeddings": c.block_size, "tie_word_embeddings": False,
            "attention_bias": False, "mlp_bias": False, "bos_token_id": eot_id, "eos_token_id": eot_id, "torch_dtype": dtype,
            "nanobit": nanobit},
        "generation_config": {"bos_token_id": eot_id, "eos_token_id": eot_id},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": eot, "eos_token": eot,
                             "model_max_length": c.block_size, "clean_up_tokenization_spaces": False}}
    aside = Path(f"{out}.tmp")
    aside.mkdir(parents=True, exist_ok=True)
    save_file({name: w.detach().to(getattr(torch, dtype)).contiguous() for name, w in weights.items()},
              aside / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (aside / f"{name}.json").write_text(json.dumps(content, indent=1))
    (aside / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    (aside / "README.md").write_text(CARD.format(name=Path(out).name, about=about, **nanobit))
    aside.rename(out)
    print(f"written to {out}")


def read_llama_config(folder):
    """Return (ModelConfig, config.json) of a Hugging Face Llama folder. Raises ValueError for one the decoder does not cover."""
    hf = json.loads((Path(folder) / "config.json").read_text())
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    expected = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "rope_type": "default",
                "head_dim": hf["hidden_size"] // hf["num_attention_heads"]}
    found = {key: hf.get(key, value) for key, value in expected.items()}
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if wrong := [f"{key} {found[key]} (expected {value})" for key, value in expected.items() if found[key] != value]:
        raise ValueError(f"{folder}/config.json: {', '.join(wrong)}")
    nanobit = hf.get("nanobit", {"input": "learned"})
    return ModelConfig(
        vocab_size=hf["vocab_size"], block_size=hf["max_position_embeddings"], n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"], n_embd=hf["hidden_size"], n_ffn=hf["intermediate_size"],
        norm_eps=hf["rms_norm_eps"], rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000),
        **{key: nanobit[key] for key in INPUT_FIELDS if key in nanobit}), hf


def import_folder(folder, out):
    """Write a Hugging Face Llama folder as a checkpoint in the run directory out; return its path.

    A model of ours keeps its interface. Any other Llama becomes a learned one, its shared key/value heads and a tied table
    written out, which changes no logit. Raises ValueError for an input matrix that is not the code that config.json claims.
    """
    from safetensors.torch import load_file
    config, hf = read_llama_config(folder)
    C, nanobit, weights = config.n_embd, hf.get("nanobit", {}), {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    if (table := weights.pop("model.embed_tokens.weight", None)) is None:
        raise FileNotFoundError(f"{folder}: no *.safetensors with model.embed_tokens.weight here")
    weights = {"lm_head.weight": table.float(), **{name: w.float() for name, w in weights.items()}}  # a tied one has no head
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):  # one of them serves this many query heads in a row
            heads = weights[name].view(-1, C // config.n_head, C)
            weights[name] = heads.repeat_interleave(config.n_head // len(heads), 0).view(C, C)
    own = build_input(config)
    if config.input in ("learned", "lowdim"):
        every = 1 if config.input == "learned" or config.lift == "tile" else C // config.n_bits
        own.weight.data.copy_(table[:, ::every][:, :own.weight.size(1)])
    elif "matrix" in nanobit:
        recoding = {name: np.array(nanobit[name], np.uint8) for name in ("matrix", "offset")}
        own.load_state_dict({name: torch.from_numpy(array) for name, array in
                             {"codebook": recode(binary_codes(config.vocab_size), **recoding), **recoding}.items()})
    if not torch.equal(input_matrix(own, config.vocab_size, weights["lm_head.weight"]).to(table.dtype), table):
        raise ValueError(f"{folder}: model.embed_tokens.weight is not the {config.input} code that config.json claims; "
                         "take nanobit out of config.json to import it as a learned table")
    weights |= {f"model.embed_tokens.{name}": tensor for name, tensor in own.state_dict().items()}
    try:
        with torch.device("meta"):
            Decoder(config).load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from None
    tokenizer_path, path = Path(folder) / "tokenizer.json", Path(out) / f"step-{nanobit.get('step', 0):08d}.pt"
    load_tokenizer(tokenizer_path)
    if path.exists():
        raise FileExistsError(f"{path} exists; name another run directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent / "tokenizer.json", tokenizer_path.read_bytes())
    torch.save({"step": nanobit.get("step", 0), "model": weights, "model_config": asdict(config), "data": "",
                "eot_id": hf["eos_token_id"] if hf.get("bos_token_id") is None else hf["bos_token_id"],
                "tokenizer_sha256": sha256(tokenizer_path.read_bytes())}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    print(f"written to {path}")
    return path


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
