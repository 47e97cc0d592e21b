"""Score checkpoints and reference models, sample from a checkpoint, carry one to and from the Hugging Face format.

    score     held-out loss on prepared validation documents; with --suite or --tasks, lm-evaluation-harness's benchmarks
    sample    continue prompts
    export    a checkpoint as a Hugging Face Llama folder
    import    such a folder as a checkpoint

Usage:
    python evaluate.py score  out/smoke-binary-s1 out/smoke-learned-s1
    python evaluate.py score  out/paper-binary-s1 --suite=paper --data_dir=DIR
    python evaluate.py score  --hf=HuggingFaceTB/SmolLM2-135M --suite=paper --dtype=bfloat16
    python evaluate.py sample out/smoke-binary-s1 --prompt='def main():' 'import '
    python evaluate.py export out/smoke-binary-s1 DIR
    torchrun --nproc_per_node=2 evaluate.py score out/paper-binary-s1 --suite=paper

A request is a context and a continuation; its score is the continuation's log-likelihood, and whether greedy decoding would
give it. The last token is never an input, and what is too long loses its beginning:

    context c0 c1 c2, continuation a0 a1      input   c0 c1 c2 a0
                                              scored        a0 a1      predicted at c2 and a0

Requests share what they have in common: equal inputs are run once, and so is a prefix of several inputs, whose keys and
values every one of its suffixes then attends to. So a question is read once for all its answers, and MMLU's worked examples
once for all questions of a subject.

A checkpoint is a run directory (its newest checkpoint is taken) or a step-*.pt file, with the run's tokenizer.json beside it.
score writes heldout-STEP.json, or SUITE-STEP.json for compare.py, beside the checkpoint (out/NAME/ for a reference model).
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from codes import binary_codes, recode
from model import Decoder, ModelConfig, load_model, pick
from prepare import load_tokenizer, open_shards, read_meta, token_bytes, vocab_size, write_whole

# The paper's benchmarks: (tasks, shots). WikiText's windows are the longest rows: memory trouble shows first.
SUITES = {"paper": [("wikitext hellaswag arc_easy arc_challenge piqa winogrande openbookqa commonsense_qa lambada_openai mmlu", 0),
                    ("mmlu", 5)]}
# Where the harness keeps these tasks: indexing all of its 14,000 files takes 5 seconds, these a few hundredths.
TASK_FOLDERS = {"wikitext": "wikitext", "hellaswag": "hellaswag", "arc_easy": "arc", "arc_challenge": "arc", "piqa": "piqa",
                "winogrande": "winogrande", "openbookqa": "openbookqa", "commonsense_qa": "commonsense_qa",
                "lambada_openai": "lambada", "mmlu": "mmlu/default"}
MAX_LENGTH = 2048        # the paper's, for every model: a longer context would give references longer prompts and windows
BOOTSTRAP_ITERS = 1000   # the harness's standard error of LAMBADA's perplexity; its default of 100,000 takes half a minute
GATHER_COST = 4          # a row on a shared prefix costs as if it were this many tokens longer (measured on a CPU)
CHUNK_BATCHES = 16       # batches between two writes of the finished requests


# ----------------------------------------------------------------------------------------------------------------------
# What is scored: a function from ids to logits with a tokenizer, be it a checkpoint of ours or a reference model

@dataclass
class Candidate:
    """A model that can be scored.

    forward(idx (B, T), positions=None, mask=None, cache=None, select=(rows, columns)) -> logits (n, V); see Decoder.forward.
    encode(texts, special): lists of ids; special lets the tokenizer add what it adds to every text (a Llama's BOS).
    """
    forward: object
    new_cache: object
    encode: object
    decode: object
    prefix_id: int      # stands for an empty context
    prefix_reason: str
    n_ids: int          # ids that the tokenizer knows; a head may have more rows
    context: int        # the most positions the model takes
    facts: dict         # what identifies it: name, step, hashes
    note: str = ""      # printed and stored with every score


def hash_weights(module):
    """Return the sha256 of a module's state, names and values."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        sha256.update(name.encode())
        sha256.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return sha256.hexdigest()


def run_directory(path):
    return Path(path) if Path(path).is_dir() else Path(path).parent


def open_checkpoint(path, device, dtype):
    """Return the Candidate of a checkpoint of ours. Raises ValueError if its tokenizer has more ids than the model."""
    model, state = load_model(path, device)
    model.to(getattr(torch, dtype))
    tokenizer_path = run_directory(path) / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_path)
    if (n_ids := vocab_size(tokenizer)) > model.config.vocab_size:
        raise ValueError(f"{tokenizer_path}: {n_ids:,} ids, but the model of {path} has {model.config.vocab_size:,}")
    codebook = getattr(model.model.embed_tokens, "codebook", None)
    zero = codebook is not None and not codebook[state["eot_id"]].any()
    return Candidate(
        lambda idx, **options: model(idx, **options)[0], model.new_cache,
        lambda texts, special: [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)],
        lambda ids: tokenizer.decode(ids), state["eot_id"], "the end-of-text token that separates documents in training",
        n_ids, model.config.block_size,
        {"name": str(path), "step": state["step"], "data": state["data"], "model_config": state["model_config"],
         "weights_sha256": hash_weights(model), "tokenizer_sha256": hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()},
        f"the code of id {state['eot_id']} is all zero, so the first token after an empty context costs exactly ln V = "
        f"{math.log(model.config.vocab_size):.4f} nats" if zero else "")


def open_reference(name, device, dtype):
    """Return the Candidate of a Hugging Face model, a hub name or a local folder; it needs the transformers package."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    except ImportError:
        raise ValueError("--hf needs the transformers package; pip install transformers") from None
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).to(device).eval()

    def forward(idx, positions=None, mask=None, cache=None, select=None):
        past = None if cache is None else DynamicCache()
        for i, layer in enumerate(cache or ()):
            past.update(layer["k"], layer["v"], i)
        columns, where = select[1].unique(return_inverse=True)
        logits = model(idx, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=cache is not None,
                       logits_to_keep=columns).logits
        if cache is not None:
            cache[:] = [{"k": layer.keys, "v": layer.values} for layer in past.layers]
        return logits[select[0], where]

    prefix_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Candidate(
        forward, list, lambda texts, special: tokenizer(texts, add_special_tokens=special)["input_ids"],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True), prefix_id, "the tokenizer's bos, else eos, token",
        len(tokenizer), model.config.max_position_embeddings,
        {"name": name, "step": None, "weights_sha256": hash_weights(model),
         "tokenizer_sha256": hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()})


# ----------------------------------------------------------------------------------------------------------------------
# Scoring

def share_prefixes(rows):
    """Cut sorted rows into groups that have a prefix run once: the cut that saves the most tokens.

    Args:
        rows: int32 arrays, all different, in an order that keeps equal beginnings together.
    Returns: (prefix length, first row, last row + 1) of each group; length 0 for a row on its own.

        a b c d          -> (3, 0, 3)      the prefix a b c, then d, e f and g
        a b c e f
        a b c g
        x y              -> (0, 3, 4)
    """
    stack = []  # nested intervals of rows that begin alike, the widest first: [common length, first row, saved, groups]
    for end in range(1, len(rows) + 1):
        common = -1
        if end < len(rows):
            n = min(len(rows[end - 1]), len(rows[end]))
            differ = np.flatnonzero(rows[end - 1][:n] != rows[end][:n])
            common = int(differ[0]) if differ.size else n
        start, saved, groups = end - 1, 0, [(0, end - 1, end)]
        while stack and stack[-1][0] > common:  # these intervals end here: one group, or the groups inside them
            length, start, inside, members = stack.pop()
            saved, groups = inside + saved, members + groups
            if (whole := (end - start - 1) * length - (end - start) * GATHER_COST) > saved:
                saved, groups = whole, [(length, start, end)]
        if stack and stack[-1][0] == common:
            stack[-1][2] += saved
            stack[-1][3] += groups
        else:
            stack.append([common, start, saved, groups])
    return stack[0][3] if stack else []


def count_tokens(group):
    """Return the tokens that a (prefix length, rows with what is scored on them) group costs."""
    length, members = group
    return length + sum(len(row) - length for row, _ in members)


class HarnessLM(TemplateLM):
    """lm-evaluation-harness's LM over a Candidate: loglikelihood, loglikelihood_rolling, generate_until.

    Args:
        max_length: T, the most positions of an input; None takes the smaller of MAX_LENGTH and the candidate's own.
        batch_tokens: positions, keys included, that are run at a time; halved where memory does not suffice.
        share: run common prefixes once. Without it every distinct input is a row of its own; the scores are the same.
        cache: path of a file of finished requests to continue from and add to, or None.
    Under torchrun each process scores a part of the requests, and all return all scores.
    """

    def __init__(self, candidate, device="cpu", max_length=None, batch_tokens=8192, share=True, cache=None):
        super().__init__()
        self.candidate, self._device = candidate, torch.device(device)
        self.max_length = min(MAX_LENGTH, candidate.context) if max_length is None else max_length
        if not 1 <= self.max_length <= candidate.context:
            raise ValueError(f"--max_length={max_length}: {candidate.facts['name']} takes 1 to {candidate.context} positions")
        self.batch_tokens, self.share = batch_tokens, share
        self.audit = {}     # task -> what its requests were
        self.finished = {}  # digest of (input, targets) -> (log-likelihood, is greedy)
        self.part, self.parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.file = None
        if cache is not None:
            for path in sorted(Path(cache).parent.glob(Path(cache).name + ".*")):
                for line in path.read_text().splitlines():
                    if len(fields := line.split()) == 3:  # a killed run may leave half a line
                        self.finished[fields[0]] = (float(fields[1]), fields[2] == "1")
            if self.parts > 1:
                dist.barrier()  # nobody writes before everyone has read
            self.file = open(f"{cache}.{self.part}", "a")

    eot_token_id = property(lambda self: self.candidate.prefix_id)
    tokenizer_name = property(lambda self: self.candidate.facts["tokenizer_sha256"])

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.candidate.encode([string], add_special_tokens is not False)[0]

    def encode_all(self, texts, special=True):
        """Return {text: int32 ids}; a benchmark repeats each context, and a batch is encoded on all cores."""
        texts = list(dict.fromkeys(texts))
        return {text: np.array(ids, np.int32) for at in range(0, len(texts), 1024)
                for text, ids in zip(texts[at:at + 1024], self.candidate.encode(texts[at:at + 1024], special))}

    def encode_pairs(self, pairs):
        """Return [(context ids, continuation ids), ...] of (context, continuation) strings, as TemplateLM encodes one.

        Spaces at a context's end go to the continuation; its ids are what the joint text has beyond the context's. Where
        that is nothing (one token spans the join) it is encoded on its own. The prefix token stands for an empty context.
        """
        moved = [(kept := context.rstrip(), context[len(kept):] + continuation) for context, continuation in pairs]
        joint = self.encode_all([text for context, continuation in moved if context for text in (context, context + continuation)])
        alone = self.encode_all([continuation for context, continuation in moved], special=False)
        encoded = []
        for context, continuation in moved:
            prefix, rest = np.array([self.prefix_token_id], np.int32), alone[continuation]
            if context:
                prefix = joint[context]
                beyond = joint[context + continuation][len(prefix):]
                rest = beyond if len(beyond) else rest
            elif len(rest) and rest[0] == prefix[0]:
                rest = rest[1:]
            encoded.append((prefix, rest))
        return encoded

    def note(self, request, context, continuation, ids):
        """Enter a request in the audit of its task: its text, its ids, and whether it loses its beginning."""
        entry = self.audit.setdefault(request.task_name, {"n_requests": 0, "n_truncated": 0, "prompts": [], "tokens": []})
        entry["n_requests"] += 1
        entry["n_truncated"] += sum(map(len, ids)) > self.max_length + 1 and request.request_type != "loglikelihood_rolling"
        entry["prompts"].append(hashlib.sha256(json.dumps([request.doc_id, context, continuation]).encode()).hexdigest())
        entry["tokens"].append(hashlib.sha256(json.dumps([request.doc_id, *(part.tolist() for part in ids)]).encode()).hexdigest())

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = self.encode_pairs([request.args for request in requests])
        for request, pair in zip(requests, pairs):
            self.note(request, *request.args, pair)
        return self.score(pairs)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        encoded = self.encode_all([request.args[0] for request in requests], special=False)
        pairs = [(np.array([self.prefix_token_id], np.int32), encoded[request.args[0]]) for request in requests]
        for request, pair in zip(requests, pairs):
            self.note(request, "", request.args[0], pair)
        return [nats for nats, _ in self.score(pairs)]

    def _loglikelihood_tokens(self, requests, **_):
        return self.score([(np.array(context, np.int32), np.array(ids, np.int32)) for _, context, ids in requests])

    def cut(self, context, continuation):
        """Yield the (input, targets) pieces of a request, int32 arrays. Only a continuation of more than T tokens (a WikiText
        page) has several; each token is scored once, from the prefix or in windows that follow each other:

            prefix p, page t0 .. t6, T = 3     input  p  t0 t1    t2 t3 t4    t3 t4 t5
                                               scored t0 t1 t2    t3 t4 t5          t6
        """
        T, n = self.max_length, len(continuation)
        ids = np.concatenate((context, continuation))
        if n <= T:
            yield ids[-(T + 1):-1], continuation
            return
        for start in range(0, n, T):
            end = min(start + T, n)
            at = len(context) + end - 1
            yield ids[at - T:at], continuation[start:end]

    def score(self, pairs):
        """Return [(log-likelihood in nats, is greedy), ...] of (context, continuation) int32 arrays; (0.0, True) for an empty
        continuation."""
        scores, todo, owners = [(0.0, True)] * len(pairs), {}, []
        for i, pair in enumerate(pairs):
            for row, targets in self.cut(*pair) if len(pair[1]) else ():
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
        """Score {key: (row, targets)}, int32 bytes, into self.finished."""
        keys, scored = list(todo), {}  # row -> the (number, targets) that are scored on it
        for number, key in enumerate(keys):
            scored.setdefault(todo[key][0], []).append((number, np.frombuffer(todo[key][1], np.int32)))
        order = sorted(scored)
        rows = [np.frombuffer(row, np.int32) for row in order]
        cuts = share_prefixes(rows) if self.share else [(0, i, i + 1) for i in range(len(rows))]
        groups = [(length, [(rows[i], scored[order[i]]) for i in range(start, end)]) for length, start, end in cuts]
        # Rows on their own come first and the longest of all first, so that memory trouble shows at once.
        groups.sort(key=lambda group: (group[0] > 0, -group[0], -len(group[1][0][0])))
        groups = groups[self.part::self.parts]
        self.nats, self.greedy = np.zeros(len(keys)), np.ones(len(keys), bool)
        bar = tqdm(total=sum(map(count_tokens, groups)), unit=" tokens", unit_scale=True, disable=self.part > 0 or None)
        while groups:
            n = self.take(groups)
            numbers = [number for _, members in groups[:n] for _, pieces in members for number, _ in pieces]
            self.nats[numbers], self.greedy[numbers] = 0, True
            try:
                self.run_groups(groups[:n])
            except RuntimeError as error:
                if not isinstance(error, torch.OutOfMemoryError) and "not enough memory" not in str(error) or self.batch_tokens < 2:
                    raise
                self.batch_tokens //= 2
                print(f"out of memory: continuing with --batch_tokens={self.batch_tokens}", file=sys.stderr)
                torch.cuda.empty_cache()
                continue
            found = {keys[i]: (float(self.nats[i]), bool(self.greedy[i])) for i in numbers}
            self.finished |= found
            if self.file:
                self.file.writelines(f"{key} {nats!r} {greedy:d}\n" for key, (nats, greedy) in found.items())
                self.file.flush()
            bar.update(sum(map(count_tokens, groups[:n])))
            groups = groups[n:]
        bar.close()
        if self.parts > 1:
            parts = [None] * self.parts
            dist.all_gather_object(parts, {key: self.finished[key] for key in keys if key in self.finished})
            for part in parts:
                self.finished |= part

    def take(self, groups):
        """Return how many of the first groups to run together: their prefixes fit one batch."""
        n = tokens = 0
        for group in groups:
            tokens += count_tokens(group)
            if n and (bool(group[0]) != bool(groups[0][0]) or (n + 1) * groups[0][0] > self.batch_tokens
                      or tokens > CHUNK_BATCHES * self.batch_tokens):
                break
            n += 1
        return n

    def run_groups(self, groups):
        """Run the prefixes of groups as one batch, then their suffixes on the prefixes' keys and values."""
        cache = None
        if groups[0][0]:
            cache = self.candidate.new_cache()
            wanted = [(g, *piece, len(row), 0, length) for g, (length, members) in enumerate(groups)
                      for row, pieces in members for piece in pieces]
            self.forward([members[0][0][:length] for length, members in groups], wanted, cache)
        suffixes = sorted(((g, length, row, pieces) for g, (length, members) in enumerate(groups)
                           for row, pieces in members if len(row) > length), key=lambda s: s[1] - len(s[2]))
        while suffixes:
            n, past, longest = 0, 0, len(suffixes[0][2]) - suffixes[0][1]
            for _, length, _, _ in suffixes:
                if n and (n + 1) * (max(past, length) + longest) > self.batch_tokens:
                    break
                n, past = n + 1, max(past, length)
            batch, suffixes = suffixes[:n], suffixes[n:]
            wanted = [(b, *piece, len(row), length, len(row)) for b, (_, length, row, pieces) in enumerate(batch) for piece in pieces]
            expanded, lengths = None, None
            if cache is not None:
                places = [g for g, _, _, _ in batch]
                # Suffixes of one prefix look at the same keys, which need no copy.
                expanded = [{name: t[places[:1], :, :past].expand(n, -1, -1, -1) if len(set(places)) == 1 else t[places, :, :past]
                             for name, t in layer.items()} for layer in cache]
                lengths = torch.tensor([length for _, length, _, _ in batch], device=self.device)
            self.forward([row[length:] for _, length, row, _ in batch], wanted, expanded, lengths)

    @torch.inference_mode()
    def forward(self, rows, wanted, cache=None, lengths=None):
        """Run rows (padded on the right, which a causal model never sees) and add up what is wanted of them.

        Args:
            wanted: (row, number, targets, input length, first, last): the targets, at the end of an input, that are predicted
                at its positions first .. last - 1, which rows holds.
            lengths: int64 (B,): how many of the cached positions each row continues.
        """
        idx = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for b, row in enumerate(rows):
            idx[b, :len(row)] = torch.tensor(row)
        places, targets, numbers = [], [], []
        for b, number, ids, n, first, last in wanted:
            start = max(n - len(ids), first)
            if start < last:
                places.append(b * idx.size(1) + np.arange(start, last) - first)
                targets.append(ids[start - n + len(ids):last - n + len(ids)])
                numbers.append(np.full(last - start, number))
        places, index = np.unique(np.concatenate(places or [np.empty(0, np.int64)]), return_inverse=True)
        options = {}
        if lengths is not None:
            past, steps = cache[0]["k"].size(2), torch.arange(idx.size(1), device=self.device)
            keys = torch.arange(past + idx.size(1), device=self.device)
            seen = (keys < lengths[:, None, None]) | ((keys >= past) & (keys - past <= steps[:, None]))
            options = {"positions": lengths[:, None] + steps, "mask": seen[:, None]}  # (B, T), (B, 1, T, past + T)
        select = tuple(torch.from_numpy(part).to(self.device) for part in np.divmod(places, idx.size(1)))
        logits = self.candidate.forward(idx.to(self.device), cache=cache, select=select, **options)
        if not numbers:
            return
        targets = torch.from_numpy(np.concatenate(targets)).long().to(self.device)
        index, numbers = torch.from_numpy(index).to(self.device), np.concatenate(numbers)
        best, total = [], []
        for part in logits.split(1024):  # float32 a part at a time: of 8192 x 49,152 logits it would be 1.6 GB
            best.append(part.argmax(-1))
            total.append(part.float().logsumexp(-1))
        nats = logits[index, targets].float() - torch.cat(total)[index]
        np.add.at(self.nats, numbers, nats.double().cpu().numpy())
        np.logical_and.at(self.greedy, numbers, (torch.cat(best)[index] == targets).cpu().numpy())

    def generate_until(self, requests, disable_tqdm=False):
        """Return the text that continues each (context, generation arguments) request, up to its first stop sequence."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
        texts, groups = [None] * len(requests), {}
        encoded = self.encode_all([request.args[0] for request in requests])
        for i, request in enumerate(requests):
            self.note(request, request.args[0], request.args[1], (encoded[request.args[0]],))
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for arguments, members in groups.items():
            options = normalize_gen_kwargs(json.loads(arguments), 256)
            stops = handle_stop_sequences(options.get("until"), eos=None)
            new = min(options["max_gen_toks"], self.max_length - 1)
            members.sort(key=lambda i: -len(encoded[requests[i].args[0]]))
            for at in range(0, len(members), n := max(1, self.batch_tokens // self.max_length)):
                batch = members[at:at + n]
                prompts = [encoded[requests[i].args[0]][-(self.max_length - new):] for i in batch]
                prompts = [p if len(p) else np.array([self.prefix_token_id], np.int32) for p in prompts]
                for i, ids in zip(batch, self.generate(prompts, new, stops, options["temperature"], options.get("top_k"))):
                    texts[i] = postprocess_generated_text(self.candidate.decode(ids), stops, None)
        return texts

    @torch.inference_mode()
    def generate(self, prompts, max_new_tokens, stops, temperature=0.0, top_k=None):
        """Return the ids that continue each prompt, up to the end-of-text token or a stop sequence in their text."""
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        idx = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for b, prompt in enumerate(prompts):
            idx[b, :len(prompt)] = torch.from_numpy(prompt)
        cache, every = self.candidate.new_cache(), torch.arange(len(prompts), device=self.device)
        logits = self.candidate.forward(idx.to(self.device), cache=cache, select=(every, lengths - 1))
        continued, done = [[] for _ in prompts], [False] * len(prompts)
        for step in range(max_new_tokens):
            new = pick(logits[:, :self.candidate.n_ids].float(), temperature, top_k, None)
            for b, i in enumerate(new[:, 0].tolist()):
                if not done[b]:
                    done[b] = i == self.eot_token_id
                    continued[b] += [] if done[b] else [i]
                    done[b] = done[b] or any(stop in self.candidate.decode(continued[b]) for stop in stops)
            if all(done) or step == max_new_tokens - 1:
                break
            keys = torch.arange(idx.size(1) + step + 1, device=self.device)
            seen = (keys < lengths[:, None]) | (keys >= idx.size(1))
            logits = self.candidate.forward(new, positions=lengths[:, None] + step, mask=seen[:, None, None], cache=cache,
                                            select=(every, torch.zeros_like(every)))
        return continued


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


def score_heldout(lm, data_dir):
    """Return the held-out score on the validation documents of a prepared directory, as plain values.

    Keys: loss (nats per target), loss_stderr (over documents), perplexity, bits_per_byte, documents (a list of
    {targets, bytes, nats}); the end-of-text target counts, and stands for no byte.
    Raises ValueError if there are no validation documents.
    """
    sizes = token_bytes(load_tokenizer(Path(data_dir) / "tokenizer.json"))
    documents, windows, owners = [], [], []
    for shard in open_shards(data_dir, "val"):
        for document, ids in cut_documents(*shard.map(), lm.max_length):
            windows.append((ids[:1], ids[1:]))
            owners.append(len(documents) + document)
        documents += [{"targets": 0, "bytes": 0, "nats": 0.0} for _ in range(shard.documents)]
    if not windows:
        raise ValueError(f"{data_dir}: no validation documents; prepare it with a larger --val_fraction")
    for owner, (_, targets), (nats, _) in zip(owners, windows, lm.score(windows)):
        documents[owner]["targets"] += len(targets)
        documents[owner]["bytes"] += int(sizes[targets].sum())
        documents[owner]["nats"] -= nats
    targets, n_bytes, nats = (np.array([d[key] for d in documents], float) for key in ("targets", "bytes", "nats"))
    loss = nats.sum() / targets.sum()
    # A ratio of two sums over documents (Cochran, Sampling Techniques, 2.11): documents are the independent units, not tokens.
    n = len(documents)
    stderr = math.sqrt(((nats - loss * targets) ** 2).sum() * n / (n - 1)) / targets.sum() if n > 1 else math.nan
    return {"loss": loss, "loss_stderr": stderr, "perplexity": math.exp(loss),
            "bits_per_byte": nats.sum() / math.log(2) / n_bytes.sum(), "documents": documents}


# ----------------------------------------------------------------------------------------------------------------------
# Benchmarks

def load_tasks(names, data_dir=None, include_path=None):
    """Return the harness's own task and group objects of names.

    Args:
        data_dir: a folder of hub-shaped copies (ORG/NAME/*.jsonl and a README.md that names the configurations), which the
            data sets are taken from by their own names; None takes the hub, or its cache where HF_HUB_OFFLINE=1 is set.
        include_path: a folder of further task YAML files.
    Raises ValueError for an unknown task, FileNotFoundError for one whose data are not to be had.
    """
    if data_dir is not None:
        if not Path(data_dir).is_dir():
            raise FileNotFoundError(f"--data_dir={data_dir}: no such directory")
        os.environ["HF_HUB_OFFLINE"] = "1"  # a set that is not there is missing; nothing waits for a network
    import lm_eval.tasks
    root = Path(lm_eval.tasks.__file__).parent
    known = set(names) <= set(TASK_FOLDERS)
    folders = sorted({str(root / TASK_FOLDERS[name]) for name in names}) if known else []
    manager = lm_eval.tasks.TaskManager(include_defaults=not known and not include_path,
                                        include_path=folders + ([str(Path(include_path).resolve())] if include_path else []))
    if not known and include_path and set(names) - set(manager.all_tasks):
        manager = lm_eval.tasks.TaskManager(include_path=str(Path(include_path).resolve()))
    tasks = []
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"--tasks: no task {name!r}; lm-eval ls tasks lists the harness's, --include_path=DIR adds others")
        try:
            with contextlib.chdir(data_dir or "."):
                loaded = manager._load_spec(name)
        except (OSError, KeyError, ValueError, ImportError) as error:
            raise FileNotFoundError(f"{name}: its data set cannot be loaded ({' '.join(str(error).split())[:200]}); "
                                    "give --data_dir=DIR with a copy at DIR/ORG/NAME") from None
        tasks += loaded if isinstance(loaded, list) else [loaded]  # a tag is a list of tasks
    return tasks


def gold_choice(task, doc, n_choices):
    """Return the index of a multiple-choice document's right answer, or None where there is not exactly one."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0 if n_choices == 1 else None
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    gold = task.doc_to_choice(doc).index(gold) if isinstance(gold, str) and gold in task.doc_to_choice(doc) else gold
    return gold if isinstance(gold, int) and 0 <= gold < n_choices else None


def run_tasks(lm, tasks, num_fewshot=None, limit=None):
    """Run task objects; return (tasks, groups): for each name its metrics as the harness defines them, with the audit and each
    document's scores.

    A task's entry: metrics, version, num_fewshot, n_docs, n_requests, n_truncated, prompts_sha256 (over the sorted hashes
    of all (document, context, continuation)), tokens_sha256 (the same over ids), docs: {doc_id, gold, responses, METRIC...}.
    """
    import lm_eval
    from lm_eval.api.group import Group
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # it would fork a process that holds a model, to bootstrap for 5 seconds
    leaves = {t.task_name: t for task in tasks for t in (task.get_all_tasks() if isinstance(task, Group) else [task])}
    lm.audit.clear()
    with contextlib.redirect_stdout(sys.stderr):
        local_rank = os.environ.pop("LOCAL_RANK", None)  # every rank needs the result, to stay in step
        try:
            results = lm_eval.simple_evaluate(lm, tasks=tasks, num_fewshot=num_fewshot, limit=limit, bootstrap_iters=BOOTSTRAP_ITERS)
        except ValueError as error:
            if "sample" not in str(error).lower():
                raise
            raise ValueError(f"--num_fewshot={num_fewshot}: a task has fewer examples than that ({error})") from None
        finally:
            if local_rank is not None:
                os.environ["LOCAL_RANK"] = local_rank

    def metrics(values):
        return {key.removesuffix(",none"): value for key, value in values.items() if "," in key}

    entries = {}
    for name, task in leaves.items():
        samples = results["samples"][name]
        samples = [s for s in samples if s["filter"] == samples[0]["filter"]]
        names = samples[0]["metrics"]
        audit = lm.audit[name]
        digest = {key: hashlib.sha256("".join(sorted(audit[key])).encode()).hexdigest() for key in ("prompts", "tokens")}
        entries[name] = {
            "metrics": metrics(results["results"][name]), "version": results["versions"].get(name),
            "num_fewshot": results["n-shot"][name], "n_docs": len(samples), "n_requests": audit["n_requests"],
            "n_truncated": audit["n_truncated"], "prompts_sha256": digest["prompts"], "tokens_sha256": digest["tokens"],
            "docs": {"doc_id": [s["doc_id"] for s in samples],
                     "gold": [gold_choice(task, s["doc"], len(s["filtered_resps"])) for s in samples],
                     "responses": [s["filtered_resps"] for s in samples], **{key: [s[key] for s in samples] for key in names}}}
    groups = {group.name: {"metrics": metrics(results["results"][group.name]),
                           "tasks": [t.task_name for t in group.get_all_tasks()], "top": group in tasks}
              for task in tasks if isinstance(task, Group) for group in [task, *task.get_all_groups()]
              if group.name in results["results"]}
    return entries, groups


def score_suite(lm, plan, args):
    """Run [(task names, shots), ...]; return the plain values that go into the scores file. A name gets its shots appended where
    the plan has the same task twice (mmlu and mmlu_5shot)."""
    import lm_eval
    c = lm.candidate
    result = {
        "model": c.facts,
        "protocol": {"lm_eval": lm_eval.__version__, "max_length": lm.max_length, "truncation": "left", "dtype": args.dtype,
                     "prefix_token_id": c.prefix_id, "prefix_token": c.prefix_reason, "note": c.note, "limit": args.limit,
                     "batch_tokens": lm.batch_tokens, "share": lm.share, "device": str(lm.device), "processes": lm.parts,
                     "torch": torch.__version__, "bootstrap_iters": BOOTSTRAP_ITERS,
                     "data": "the hub or its cache" if args.data_dir is None else str(args.data_dir)},
        "tasks": {}, "groups": {}}
    for names, shots in plan:
        entries, groups = run_tasks(lm, load_tasks(names, args.data_dir, args.include_path), shots, args.limit)
        mark = f"_{shots}shot" if any(name in result["tasks"] for name in entries) else ""
        result["tasks"] |= {name + mark: entry for name, entry in entries.items()}
        result["groups"] |= {name + mark: entry | {"tasks": [task + mark for task in entry["tasks"]]} for name, entry in groups.items()}
    return result


def print_suite(result):
    """Print the protocol and a line for each task that stands alone and each top group."""
    p = result["protocol"]
    print(f"\n{result['model']['name']}  weights {result['model']['weights_sha256'][:12]}  tokenizer {result['model']['tokenizer_sha256'][:12]}")
    print(f"  lm-eval {p['lm_eval']}, max_length {p['max_length']}, truncated on the {p['truncation']}, {p['dtype']}, up to "
          f"{p['batch_tokens']:,} tokens a batch" + (f", the first {p['limit']} documents" if p["limit"] else ""))
    print(f"  an empty context is id {p['prefix_token_id']}, {p['prefix_token']}" + (f"; {p['note']}" if p["note"] else ""))
    print(f"{'task':18} {'shots':>5} {'documents':>9} {'requests':>9} {'truncated':>9}   {'prompts':12}  metrics")
    grouped = {task for group in result["groups"].values() for task in group["tasks"]}
    rows = [(name, [name]) for name in result["tasks"] if name not in grouped]
    rows += [(name, group["tasks"]) for name, group in result["groups"].items() if group["top"]]
    for name, members in rows:
        tasks = [result["tasks"][task] for task in members]
        metrics = (result["groups"].get(name) or tasks[0])["metrics"]
        total = [sum(task[key] for task in tasks) for key in ("n_docs", "n_requests", "n_truncated")]
        prompts = tasks[0]["prompts_sha256"] if len(tasks) == 1 else hashlib.sha256(
            "".join(task["prompts_sha256"] for task in tasks).encode()).hexdigest()
        line = "  ".join(f"{key} {value:.4f}" + (f" +-{error:.4f}" if isinstance(error := metrics.get(key + "_stderr"), float) else "")
                         for key, value in metrics.items() if isinstance(value, float) and not key.endswith("_stderr"))
        print(f"{name:18} {tasks[0]['num_fewshot']:5} {total[0]:9,} {total[1]:9,} {total[2]:9,}   {prompts[:12]}  {line}")


def command_score(args):
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")  # only results are exchanged
        if args.device.startswith("cuda"):
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    plan = [(names.split(), shots) for names, shots in SUITES[args.suite]] if args.suite else [(args.tasks.split(","), args.num_fewshot)] if args.tasks else None
    if plan is None:
        print(f"{'model':40} {'step':>8} {'loss (nats)':>18} {'perplexity':>11} {'bits/byte':>9} {'documents':>9} {'targets':>11}")
    for path, opened in [(path, open_checkpoint) for path in args.checkpoints] + [(name, open_reference) for name in args.hf]:
        candidate = opened(path, args.device, args.dtype)
        run = run_directory(path) if opened is open_checkpoint else Path("out") / Path(path).name
        run.mkdir(parents=True, exist_ok=True)
        step = "" if candidate.facts["step"] is None else f"-{candidate.facts['step']:08d}"
        main_rank = not dist.is_initialized() or dist.get_rank() == 0
        if plan is None:
            lm = HarnessLM(candidate, args.device, args.max_length, args.batch_tokens, not args.no_share)
            data_dir = args.data or candidate.facts.get("data")
            if not data_dir:
                raise ValueError(f"{path}: no data directory is known; give --data=DIR")
            if (n_ids := read_meta(data_dir)["tokenizer"]["vocab_size"]) != candidate.n_ids:
                raise ValueError(f"{path}: its tokenizer has {candidate.n_ids} ids, but {data_dir} has {n_ids}; give --data=DIR")
            result = {"checkpoint": str(path), "step": candidate.facts["step"], "data": str(data_dir), "dtype": args.dtype,
                      **score_heldout(lm, data_dir)}
            if main_rank:
                write_whole(run / f"heldout{step}.json", json.dumps(result).encode())
                print(f"{str(path):40} {step[1:]:>8} {result['loss']:10.4f} +-{result['loss_stderr']:.4f} {result['perplexity']:11.3f} "
                      f"{result['bits_per_byte']:9.4f} {len(result['documents']):9,} {sum(d['targets'] for d in result['documents']):11,}")
            continue
        label = args.suite or args.tasks.replace(",", "+") + (f"_{args.num_fewshot}shot" if args.num_fewshot else "")
        target = run / f"{label}{f'-limit{args.limit}' if args.limit else ''}{step}.json"
        fingerprint = hashlib.sha256(f"{candidate.facts['weights_sha256']} {args.dtype} {args.no_share}".encode()).hexdigest()
        finished = run / f".finished-{fingerprint[:16]}"
        lm = HarnessLM(candidate, args.device, args.max_length, args.batch_tokens, not args.no_share, finished)
        result = score_suite(lm, plan, args)
        if main_rank:
            write_whole(target, json.dumps(result, default=str).encode())
            for left in run.glob(finished.name + ".*"):
                left.unlink()
            print_suite(result)
            print(f"written to {target}")


# ----------------------------------------------------------------------------------------------------------------------
# Sampling

def command_sample(args):
    model, state = load_model(args.checkpoint, args.device)
    tokenizer = load_tokenizer(run_directory(args.checkpoint) / "tokenizer.json")
    prompts = [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in args.prompt]
    if not all(prompts):
        raise ValueError("--prompt is empty; give it a text to continue")
    for prompt in prompts:
        for i in range(args.num_samples):
            generator = torch.Generator(args.device).manual_seed(args.seed + i)
            ids, shown = list(prompt), tokenizer.decode(prompt)
            print(shown, end="", flush=True)
            stream = model.generate(torch.tensor([prompt], device=args.device), args.max_new_tokens, args.temperature, args.top_k,
                                    state["eot_id"], generator, vocab_size(tokenizer))
            for new in stream:
                ids.append(new)
                text = tokenizer.decode(ids)
                if not text.endswith("\ufffd"):  # half a character: wait for its other bytes
                    print(text[len(shown):], end="", flush=True)
                    shown = text
            print(tokenizer.decode(ids)[len(shown):])
            print("-" * 80)


# ----------------------------------------------------------------------------------------------------------------------
# To and from the Hugging Face format

CARD = """# {name}

A Llama-style decoder trained with nanobit, {step:,} updates; input interface: {input}.

{about}
"""
FIXED = """`model.embed_tokens.weight` is fixed, not trained: row t is the {n_bits}-bit little-endian binary code of id t{recoding},
repeated {n_tile} times (0..{last}, 0..{last}, ...). Keep it frozen when training further. `nanobit` in config.json holds what it is made of."""


def export_checkpoint(path, out, dtype="float32"):
    """Write a checkpoint as a Hugging Face Llama folder; raises FileExistsError if it is there already."""
    from safetensors.torch import save_file
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; name a directory that does not")
    model, state = load_model(path)
    c = model.config
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    table = model.model.embed_tokens
    weights["model.embed_tokens.weight"] = table.weight if c.input == "learned" else table.codebook.repeat(1, table.n_tile)
    nanobit = {"input": c.input, "step": state["step"]}
    about = "Its input table is trained."
    if c.input != "learned":
        nanobit |= {"n_bits": c.n_bits, "lift": "tile", "n_tile": table.n_tile}
        if c.input == "gf2":
            nanobit |= {"code_seed": c.code_seed, "code_offset": c.code_offset,
                        "matrix": table.matrix.tolist(), "offset": table.offset.tolist()}
        about = FIXED.format(n_bits=c.n_bits, n_tile=table.n_tile, last=c.n_bits - 1,
                             recoding=", multiplied by the matrix A over GF(2), plus b" if c.input == "gf2" else "")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.n_embd,
              "intermediate_size": c.n_ffn, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
              "num_key_value_heads": c.n_head, "head_dim": c.n_embd // c.n_head, "hidden_act": "silu", "rms_norm_eps": c.norm_eps,
              "rope_theta": c.rope_theta, "max_position_embeddings": c.block_size, "tie_word_embeddings": False,
              "attention_bias": False, "mlp_bias": False, "bos_token_id": state["eot_id"], "eos_token_id": state["eot_id"],
              "torch_dtype": dtype, "nanobit": nanobit}
    tokenizer_path = run_directory(path) / "tokenizer.json"
    eot = load_tokenizer(tokenizer_path).id_to_token(state["eot_id"])
    aside = Path(f"{out}.tmp")
    aside.mkdir(parents=True)
    save_file({name: w.detach().to(getattr(torch, dtype)).contiguous() for name, w in weights.items()},
              aside / "model.safetensors", metadata={"format": "pt"})
    for name, content in (("config", config), ("generation_config", {"bos_token_id": state["eot_id"], "eos_token_id": state["eot_id"]}),
                          ("tokenizer_config", {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": eot, "eos_token": eot,
                                                "model_max_length": c.block_size, "clean_up_tokenization_spaces": False})):
        (aside / f"{name}.json").write_text(json.dumps(config if name == "config" else content, indent=1))
    (aside / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    (aside / "README.md").write_text(CARD.format(name=Path(out).name, step=state["step"], input=c.input, about=about))
    aside.rename(out)


def import_folder(folder, out):
    """Write a Hugging Face Llama folder as a checkpoint in the run directory out; return the path.

    A model of ours keeps its interface; any other Llama becomes a learned one, shared key/value heads and a tied table
    copied out, which changes no logit. Raises ValueError for a model that the decoder does not cover, or whose input matrix
    is not the code that its config.json claims.
    """
    from safetensors.torch import load_file
    hf = json.loads((Path(folder) / "config.json").read_text())
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    wrong = [f"{key}={hf.get(key)}" for key, allowed in {
        "model_type": ("llama",), "hidden_act": ("silu",), "attention_bias": (None, False), "mlp_bias": (None, False),
        "head_dim": (None, hf["hidden_size"] // hf["num_attention_heads"])}.items() if hf.get(key) not in allowed]
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        wrong.append(f"rope_type={rope.get('rope_type', rope.get('type'))}")
    if wrong:
        raise ValueError(f"{folder}: {', '.join(wrong)} in config.json; expected a plain Llama without biases")
    nanobit = hf.get("nanobit", {"input": "learned", "step": 0})
    config = ModelConfig(
        input=nanobit["input"], vocab_size=hf["vocab_size"], block_size=hf["max_position_embeddings"], n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"], n_embd=hf["hidden_size"], n_ffn=hf["intermediate_size"], norm_eps=hf["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta", 10_000.0)),
        **{key: nanobit[key] for key in ("code_seed", "code_offset") if key in nanobit})
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= {name: w.float() for name, w in load_file(file).items()}
    if "model.embed_tokens.weight" not in weights:
        raise FileNotFoundError(f"{folder}: no weights (*.safetensors) here")
    groups = config.n_head // hf.get("num_key_value_heads", config.n_head)
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):  # query heads i * groups .. use key/value head i
            head_dim = config.n_embd // config.n_head
            weights[name] = weights[name].view(-1, head_dim, config.n_embd).repeat_interleave(groups, 0).reshape(config.n_embd, -1)
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    if config.input != "learned":
        codes = binary_codes(config.vocab_size)
        if config.input == "gf2":
            recoding = {name: np.array(nanobit[name], np.uint8) for name in ("matrix", "offset")}
            codes = recode(codes, *recoding.values())
            weights |= {f"model.embed_tokens.{name}": torch.from_numpy(array) for name, array in recoding.items()}
        codes = torch.from_numpy(codes)
        if not torch.equal(weights.pop("model.embed_tokens.weight"), codes.repeat(1, config.n_embd // config.n_bits).float()):
            raise ValueError(f"{folder}: model.embed_tokens.weight is not the {config.input} code that config.json claims; "
                             "was it trained? Remove nanobit from config.json to import it as a learned table")
        weights["model.embed_tokens.codebook"] = codes
    try:
        with torch.device("meta"):
            Decoder(config).load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from None
    tokenizer_path = Path(folder) / "tokenizer.json"
    eot = hf["eos_token_id"] if hf.get("bos_token_id") is None else hf["bos_token_id"]
    load_tokenizer(tokenizer_path)
    path = Path(out) / f"step-{nanobit['step']:08d}.pt"
    if path.exists():
        raise FileExistsError(f"{path} exists; name another run directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parent / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    aside = path.with_suffix(".tmp")
    torch.save({"step": nanobit["step"], "model": weights, "model_config": asdict(config), "data": "", "eot_id": eot,
                "tokenizer_sha256": hashlib.sha256(tokenizer_path.read_bytes()).hexdigest()}, aside)
    aside.rename(path)
    return path


def command_export(args):
    export_checkpoint(args.checkpoint, args.out, args.dtype)
    print(f"written to {args.out}; transformers.AutoModelForCausalLM.from_pretrained({args.out!r}) loads it")


def command_import(args):
    print(f"written to {import_folder(args.folder, args.out)}")


# ----------------------------------------------------------------------------------------------------------------------

def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda[:N] (default: %(default)s)")

    score = commands.add_parser("score", parents=[common], allow_abbrev=False, help="held-out loss, or benchmarks")
    score.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT", help="run directory or step-*.pt file")
    score.add_argument("--hf", action="append", default=[], metavar="NAME", help="score a Hugging Face model, hub name or folder, too")
    score.add_argument("--data", help="held-out: prepared data directory (default: the one the run was trained on)")
    score.add_argument("--suite", choices=SUITES, help="benchmarks: the paper's ten tasks, MMLU also with five shots")
    score.add_argument("--tasks", help="benchmarks: the harness's names, separated by commas")
    score.add_argument("--num_fewshot", type=int, help="worked examples with --tasks (default: the task's own)")
    score.add_argument("--limit", type=int, help="the first documents of each task only")
    score.add_argument("--data_dir", metavar="DIR", help="hub-shaped local copies of the data sets (default: the hub and its cache)")
    score.add_argument("--include_path", metavar="DIR", help="further task YAML files")
    score.add_argument("--max_length", type=int, help=f"positions (default: the smaller of {MAX_LENGTH} and the model's own)")
    score.add_argument("--batch_tokens", type=int, help="positions at a time, halved if too many (default: 8192, on a GPU 65536)")
    score.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and compute (default: %(default)s)")
    score.add_argument("--no_share", action="store_true", help="run every distinct input whole, sharing no prefixes")
    score.set_defaults(run=command_score)

    sample = commands.add_parser("sample", parents=[common], allow_abbrev=False, help="continue prompts")
    sample.add_argument("checkpoint", metavar="CHECKPOINT", help="run directory or step-*.pt file")
    sample.add_argument("--prompt", nargs="+", default=["def main():\n"], help="texts to continue")
    sample.add_argument("--num_samples", type=int, default=1, help="continuations of each prompt (default: %(default)s)")
    sample.add_argument("--max_new_tokens", type=int, default=200, help="tokens a continuation (default: %(default)s)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the most probable (default: %(default)s)")
    sample.add_argument("--top_k", type=int, default=50, help="sample among the k most probable (default: %(default)s)")
    sample.add_argument("--seed", type=int, default=1, help="of the first sample; the next take the next (default: %(default)s)")
    sample.set_defaults(run=command_sample)

    export = commands.add_parser("export", allow_abbrev=False, help="write a Hugging Face Llama folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="run directory or step-*.pt file")
    export.add_argument("out", metavar="DIR", help="folder to write")
    export.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default: %(default)s)")
    export.set_defaults(run=command_export)

    imports = commands.add_parser("import", allow_abbrev=False, help="make a checkpoint of a Hugging Face Llama folder")
    imports.add_argument("folder", metavar="DIR", help="folder with config.json, *.safetensors and tokenizer.json")
    imports.add_argument("out", metavar="RUN", help="run directory to write")
    imports.set_defaults(run=command_import)

    args = parser.parse_args()
    if args.run is command_score:
        if not args.checkpoints and not args.hf:
            parser.error("nothing to score: name a CHECKPOINT or --hf=NAME")
        if args.suite and (args.tasks or args.num_fewshot is not None):
            parser.error("--suite has its own tasks and shots; drop --tasks and --num_fewshot, or --suite")
        args.batch_tokens = args.batch_tokens or (65_536 if args.device.startswith("cuda") else 8192)
    return args


def main():
    args = parse_args()
    args.run(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"evaluate.py: {error}")
