"""Log-likelihoods with each token run once, of a checkpoint of ours or of a reference model.

For evaluate.py's held-out loss and, through machinery/harness.py, for its benchmarks. Equal inputs
are run once, and so is a prefix that several share: prefix and suffixes lie in one row as a tree,
or, where a row would be too long, the suffixes are run on the prefix's keys and values. So a
question is read once for all its answers, and MMLU's worked examples once for all questions of a
subject. Short rows are packed: there is little padding (machinery/packing.py).
"""

import copy
import hashlib
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

from machinery.errors import is_out_of_memory
from machinery.packing import count_tokens, cut_request, lay_out, make_groups, plan_batches
from machinery.processes import check_same_everywhere, launched_processes
from machinery.runs import code_fingerprint

MAX_LENGTH = 2048   # the paper's, for every model: a longer context would give a reference longer
#                     prompts and windows
FINISHED = re.compile(r"([0-9a-f]{32}) (-?\d+\.?\d*(?:e[-+]\d+)?) ([01])")  # a request's line
SOFTMAX_ROWS = 128  # logits in float32 at a time, which stay in a CPU's cache


def join_processes(args):
    """Return args, under torchrun in a group of processes with the same, each on a GPU of its own.

    Raises ValueError where they, or the code, are not the same.
    """
    if launched_processes() == 1:
        return args
    dist.init_process_group("gloo")  # only finished scores are exchanged
    check_same_everywhere(vars(args) | {"code": code_fingerprint()})
    args = copy.copy(args)
    if args.device == "cuda":
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
    return args


def leave_processes():
    if dist.is_initialized():
        dist.destroy_process_group()


class Scorer:
    """Scores (context, continuation) requests with a Candidate, in this process or in many.

    Args:
        max_length: T, the most positions of an input; None takes the smaller of MAX_LENGTH and the
            candidate's own.
        batch_tokens: tokens to run at a time, padding included; halved where memory does not do.
        share: run common prefixes once. Without it every distinct input is a row of its own; the
            scores are the same.
        cache: finished requests are kept in files of this name (.0 for process 0), and taken from
            them; None keeps none.
    Raises ValueError for a max_length that the candidate does not take.
    """

    def __init__(self, candidate, device="cpu", max_length=None, batch_tokens=2048, share=True,
                 cache=None):
        self.candidate = candidate
        self.device = torch.device(device)
        self.batch_tokens = batch_tokens
        self.share = share and candidate.shares
        self.max_length = min(MAX_LENGTH, candidate.context) if max_length is None else max_length
        if not 1 <= self.max_length <= candidate.context:
            raise ValueError(f"--max_length={max_length}: {candidate.facts['name']} takes 1 to "
                             f"{candidate.context}")
        self.part, self.parts = 0, 1  # this process, of so many
        if dist.is_initialized():
            self.part, self.parts = dist.get_rank(), dist.get_world_size()
        self.cache = None if cache is None else Path(cache)
        self.finished = {}  # digest of (input, targets) -> (log-likelihood, is greedy)
        self.read_cache()
        if self.parts > 1:
            dist.barrier()  # nobody writes before everyone has read

    def read_cache(self):
        """Take the finished requests of earlier processes. A killed one may leave half a line, a
        disk something else: what is not read is scored again."""
        paths = sorted(self.cache.parent.glob(f"{self.cache.name}.*")) if self.cache else []
        for path in paths:
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                found = FINISHED.fullmatch(line)
                if found:
                    key, nats, greedy = found.groups()
                    self.finished[key] = (float(nats), greedy == "1")

    def keep(self, found):
        """Add {key: (log-likelihood, is greedy)} to what is finished, here and in the cache."""
        self.finished |= found
        if self.cache:
            self.cache.parent.mkdir(parents=True, exist_ok=True)
            with open(f"{self.cache}.{self.part}", "a", encoding="utf-8") as file:
                for key, (nats, greedy) in found.items():
                    file.write(f"{key} {nats!r} {greedy:d}\n")

    def remove_cache(self):
        paths = self.cache.parent.glob(f"{self.cache.name}.*") if self.cache else []
        for path in paths:
            path.unlink()

    def score(self, pairs):
        """Return [(log-likelihood in nats, is greedy), ...] of (context, continuation) int32 ids;
        (0.0, True) for an empty continuation."""
        scores, todo, owners = [(0.0, True)] * len(pairs), {}, []
        for i, (context, continuation) in enumerate(pairs):
            for row, targets in cut_request(context, continuation, self.max_length):
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
        """Score {key: (row, targets)}, int32 as bytes, into self.finished; each process a part."""
        groups = make_groups(todo, self.share)[self.part::self.parts]
        batches = plan_batches(groups, self.batch_tokens, self.share, self.candidate.places)
        bar = tqdm(total=sum(map(count_tokens, groups)), unit=" tokens", unit_scale=True,
                   disable=self.part > 0 or None)
        prefix, cache = None, None
        while batches:
            shared, rows = batches[0]
            try:
                if shared is not prefix:
                    prefix, cache = shared, self.run_prefix(shared)
                found = self.score_rows(rows, cache)
            except (RuntimeError, MemoryError) as error:
                if len(rows) == 1 or not is_out_of_memory(error):
                    raise
                self.batch_tokens //= 2
                print(f"out of memory; continuing with --batch_tokens={self.batch_tokens}",
                      file=sys.stderr)
                batches = halve(batches)
                continue
            self.keep(found)
            bar.update(sum(sum(map(count_tokens, row)) for row in rows))
            batches = batches[1:]
        bar.close()
        own = {key: self.finished[key] for key in todo if key in self.finished}
        for found in self.gather(own):
            self.finished |= found

    def share_out(self, work, jobs):
        """Return [work(job), ...]: each process does a part, and all have the whole."""
        own = []
        for job in tqdm(jobs[self.part::self.parts], unit=" requests",
                        disable=self.part > 0 or None):
            own.append(work(job))
        results = [None] * len(jobs)
        for part, found in enumerate(self.gather(own)):
            results[part::self.parts] = found
        return results

    def gather(self, own):
        """Return what each process has, in their order."""
        if self.parts == 1:
            return [own]
        everyone = [None] * self.parts
        dist.all_gather_object(everyone, own)
        return everyone

    @torch.inference_mode()
    def run_prefix(self, prefix):
        """Return the keys and values of a prefix, int32 ids; None of an empty one."""
        if not len(prefix):
            return None
        ids = torch.from_numpy(prefix[None].astype(np.int64)).to(self.device)
        cache, nowhere = self.candidate.new_cache(), ids[0, :0]
        self.candidate.forward(ids, cache=cache, select=(nowhere, nowhere))
        return cache

    @torch.inference_mode()
    def score_rows(self, rows, cache):
        """Run packed rows as one batch on a prefix's keys and values, or on none; return {key:
        (log-likelihood, is greedy)}."""
        layout = lay_out(rows)
        T = layout.ids.shape[1]
        # Answers to one question begin at one place, whose logits are made once.
        wanted = np.concatenate([places for _, _, places in layout.scored])
        places, index = np.unique(wanted, return_inverse=True)
        past, options = 0, {}
        if cache:
            past = cache[0]["k"].size(2)
            options["cache"] = [expand(layer, len(rows)) for layer in cache]
        if any(len(row) > 1 or len(row[0].members) > 1 for row in rows):
            options["positions"] = past + self.tensor(layout.positions)
            options["mask"] = tree_mask(self.tensor(layout.trees), self.tensor(layout.branches),
                                        past)
        logits = self.candidate.forward(
            self.tensor(layout.ids),
            select=(self.tensor(places // T), self.tensor(places % T)), **options)
        targets = np.concatenate([targets for _, targets, _ in layout.scored]).astype(np.int64)
        nats, greedy = log_likelihoods(logits, self.tensor(index), self.tensor(targets))
        starts = np.cumsum([0, *(len(targets) for _, targets, _ in layout.scored[:-1])])
        # On the CPU in float64, which an Apple GPU has not.
        sums = np.add.reduceat(nats.cpu().double().numpy(), starts).tolist()
        for nats in sums:
            if not math.isfinite(nats):
                raise ValueError(f"{self.candidate.facts['name']}: a log-likelihood is {nats}: its "
                                 "weights or what it makes of this input are not finite")
        greedy = np.logical_and.reduceat(greedy.cpu().numpy(), starts).tolist()
        return {key: scored for (key, _, _), scored in zip(layout.scored, zip(sums, greedy))}

    def tensor(self, array):
        return torch.from_numpy(array).to(self.device)


def halve(batches):
    """Return the batches in halves, every other row each, so that both have long rows and short."""
    halves = []
    for shared, rows in batches:
        halves += [(shared, half) for half in (rows[::2], rows[1::2]) if half]
    return halves


def expand(layer, n):
    """Return one prefix's keys and values for n rows; a view, no copy."""
    return {name: tensor.expand(n, -1, -1, -1) for name, tensor in layer.items()}


def tree_mask(trees, branches, past):
    """Return the mask, bool (B, 1, T, past + T), of a Layout's trees and branches: an id sees the
    cached prefix, and before it in its own tree the tree's prefix and its own branch."""
    same_tree = trees[:, :, None] == trees[:, None]
    same_branch = branches[:, :, None] == branches[:, None]
    seen = same_tree.tril() & ((branches[:, None] == 0) | same_branch)
    return F.pad(seen, (past, 0), value=True)[:, None]


def log_likelihoods(logits, index, targets):
    """Return (nats float32 [n], greedy bool [n]) of targets [n], each predicted by the row index[n]
    of logits (m, V): its log-probability, and whether it is the first of the most probable.

    In float32, also for a bfloat16 model. By the harness's own formula: log_softmax is 8e-6 nats a
    token off the exact value on a CPU, logsumexp is not.
    """
    nats = torch.empty(len(index), device=logits.device)
    greedy = torch.empty_like(index, dtype=torch.bool)
    for at in range(0, len(logits), SOFTMAX_ROWS):
        some = logits[at:at + SOFTMAX_ROWS].float()
        here = (index >= at) & (index < at + SOFTMAX_ROWS)
        row, target = index[here] - at, targets[here]
        nats[here] = F.log_softmax(some, dim=-1)[row, target]
        greedy[here] = some.max(dim=-1).indices[row] == target  # argmax takes three times as long
    return nats, greedy
