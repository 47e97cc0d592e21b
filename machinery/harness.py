"""lm-evaluation-harness: its model interface over the scorer, its tasks, and its results as plain values."""

import bisect
import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from machinery.files import sha256
from machinery.scorer import (
    CACHED,
    PADDING,
    ROW,
    SOFTMAX_ROWS,
    count_tokens,
    lay_out,
    share_prefixes,
)

# Where the harness keeps them: to index all its 14,000 files takes 5 seconds, these a few hundredths.
TASK_FOLDERS = {"arc_easy": "arc", "arc_challenge": "arc", "lambada_openai": "lambada", "mmlu": "mmlu/default", **{
    name: name for name in ("wikitext", "hellaswag", "piqa", "winogrande", "openbookqa", "commonsense_qa")}}

MAX_LENGTH = 2048       # the paper's, for every model: a longer context would give a reference longer prompts and windows

BOOTSTRAP_ITERS = 1000  # of the harness, for LAMBADA's perplexity alone; its default of 100,000 takes half a minute

FEWSHOT_SEED = 1234     # the harness's default


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
        from lm_eval.models.utils import (
            normalize_gen_kwargs,
            postprocess_generated_text,
        )
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
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks import __file__ as tasks_file
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
