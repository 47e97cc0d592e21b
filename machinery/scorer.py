"""Log-likelihoods with each token run once: shared prefixes and packed rows."""

from dataclasses import dataclass
from typing import Callable

import numpy as np

SHARING_COST = 8        # a group must save more than this part of its tokens, as rows of groups are wider; else one shared

                        # word would be enough
ROW = 512               # the longest row that several sequences may lie in: attention there is dense

CACHED = 4              # times --batch_tokens: positions whose keys and values a batch may look at

SOFTMAX_ROWS = 128      # logits in float32 at a time

PADDING = 32            # a batch ends where more than this part of --batch_tokens would be padding


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
