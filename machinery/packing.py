"""Which tokens are run together: requests are cut to the model's length, rows that begin alike
become groups, groups are packed into rows, rows into batches. For machinery/scorer.py; numpy alone.

A row is an int32 array of ids to run, and what is scored on it a list of pieces (key, targets): the
targets, int32, are predicted at the row's last positions.
"""

import bisect
from typing import NamedTuple

import numpy as np

SHARING_COST = 8  # a group must save more than this part of its tokens: its rows get wider, and
#                   else one shared word would be enough
ROW = 512         # the longest row that several sequences may lie in: attention there is dense
CACHED = 4        # times batch_tokens: positions whose keys and values a batch may look at
PADDING = 32      # a batch ends where more than this part of batch_tokens would be padding


class Group(NamedTuple):
    """Rows that begin alike; what they share is run once."""
    length: int    # of the shared prefix, in ids; 0 for a row on its own
    members: list  # [(row, pieces), ...]


def cut_request(context, continuation, max_length):
    """Yield the (input, targets) pieces of a request, int32 ids each.

    Only a continuation of more than T = max_length ids (a WikiText page) has several: windows that
    score each id once, the last of them full too, as the harness's rolling windows do.

        context p, page t0 .. t6, T = 3        input   p  t0 t1    t2 t3 t4    t3 t4 t5
                                               scored  t0 t1 t2    t3 t4 t5          t6
    """
    ids = np.concatenate((context, continuation))
    for start in range(0, len(continuation), max_length):
        end = min(start + max_length, len(continuation))
        at = len(context) + end - 1
        yield ids[max(at - max_length, 0):at], continuation[start:end]


def cut_documents(tokens, starts, block_size):
    """Yield (document, ids int32) windows that together hold every target of every document once.

    Args:
        tokens, starts: a mapped shard, uint16 [n_tokens] and int64 [n_documents + 1].
        block_size: T; a window has 2 to T + 1 ids, the first of them context only:

            document   t0 t1 t2 t3 t4 t5 t6          T = 3
            window     t0>t1>t2>t3                   targets t1 t2 t3
            window              t3>t4>t5>t6          targets t4 t5 t6
    """
    for document, start in enumerate(starts[:-1].tolist()):
        end = int(starts[document + 1])
        for at in range(start, end - 1, block_size):
            yield document, tokens[at:min(at + block_size + 1, end)].astype(np.int32)


def common_length(one, other):
    """Return how many ids two arrays of one length have in common at their beginnings."""
    differing = np.flatnonzero(one != other)
    return int(differing[0]) if differing.size else len(one)


def share_prefixes(rows, limits):
    """Cut sorted rows into groups whose common prefix is run once.

    Rows that begin alike are one group, or the groups of those among them that begin alike further,
    whichever saves more tokens, less one in SHARING_COST of what is left to run.

    Args:
        rows: int32 arrays, all different, in an order that keeps equal beginnings together.
        limits: how much of each row, from its start, may be in a prefix.
    Returns: (prefix length, first row, last row + 1) of each group; length 0 for a row on its own.

        a b c d          -> (3, 0, 3)      the prefix a b c, then d, e f and g
        a b c e f
        a b c g
        x y              -> (0, 3, 4)
    """
    # Nested intervals of rows that begin alike, the widest first: [common length, first row, the
    # tokens that its groups save, its groups].
    open_intervals = []
    before = np.cumsum([0, *map(len, rows)])  # ids of all rows before each
    for end in range(1, len(rows) + 1):
        common = -1  # after the last row every interval ends
        if end < len(rows):
            n = min(limits[end - 1], limits[end])
            common = common_length(rows[end - 1][:n], rows[end][:n])
        start, saved, groups = end - 1, 0, [(0, end - 1, end)]
        while open_intervals and open_intervals[-1][0] > common:
            length, start, earlier_saved, earlier = open_intervals.pop()
            saved, groups = earlier_saved + saved, earlier + groups
            again = (end - start - 1) * length  # what one group of all of them does not run again
            left = before[end] - before[start] - again
            if again - left / SHARING_COST > saved:
                saved, groups = again - left / SHARING_COST, [(length, start, end)]
        if open_intervals and open_intervals[-1][0] == common:
            open_intervals[-1][2] += saved
            open_intervals[-1][3] += groups
        else:
            open_intervals.append([common, start, saved, groups])
    return open_intervals[0][3] if open_intervals else []


def make_groups(todo, share):
    """Return the Groups of {key: (row, targets)}, each distinct row once; without share a group has
    one row.

    Rows and targets are int32 as bytes: equal rows are one key of a dict, and sorting puts equal
    beginnings together.
    """
    scored = {}  # row -> its pieces
    for key, (row, targets) in todo.items():
        scored.setdefault(row, []).append((key, np.frombuffer(targets, np.int32)))
    members, limits = [], []
    for row in sorted(scored):
        members.append((np.frombuffer(row, np.int32), scored[row]))
        # A prefix has at most one place where something is scored: its last, the context's end.
        longest = max(len(targets) for _, targets in scored[row])
        limits.append(len(members[-1][0]) - longest + 1 if share else 0)
    shared = share_prefixes([row for row, _ in members], limits)
    return [Group(length, members[start:end]) for length, start, end in shared]


def count_tokens(group):
    """Return how many ids a group runs."""
    return group.length + sum(len(row) - group.length for row, _ in group.members)


def plan_batches(groups, batch_tokens, share, places):
    """Return the batches [(shared prefix, perhaps empty, packed rows), ...] of groups.

    The longest rows come first, so that memory trouble shows at once. A group too long for one row
    has its prefix run alone, and its suffixes packed on that; also one that has more than `places`
    places, for which some models have no buffers.
    """
    whole, large = [], []
    for group in groups:
        fits = len(group.members) == 1 or count_tokens(group) <= min(ROW, places)
        (whole if fits else large).append(group)
    batches = pack(whole, np.empty(0, np.int32), batch_tokens, share)
    for group in sorted(large, key=lambda group: -group.length):
        # Less its last id, at which something may be scored.
        prefix = group.members[0][0][:group.length - 1]
        suffixes = [Group(0, [(row[len(prefix):], pieces)]) for row, pieces in group.members]
        batches += pack(suffixes, prefix, batch_tokens, share)
    return batches


def pack(groups, prefix, batch_tokens, share):
    """Return batches of groups, as plan_batches does, on one prefix.

    A row's first group is the longest that is left; then come, up to ROW and to the length of the
    batch's first row, the longest that fit.
    """
    groups = sorted(groups, key=count_tokens)
    sizes = [count_tokens(group) for group in groups]
    batches = []
    while groups:
        width, rows, padding = sizes[-1], [], 0
        most = min(batch_tokens // width, CACHED * batch_tokens // (width + len(prefix)))
        while groups and len(rows) < max(most, 1) and padding * PADDING <= batch_tokens:
            row, room, at = [], width, len(groups)
            while at:
                row.append(groups.pop(at - 1))
                room -= sizes.pop(at - 1)
                at = bisect.bisect_right(sizes, min(room, ROW - width + room)) if share else 0
            rows.append(row)
            padding += room
        batches.append((prefix, rows))
    return batches


class Layout(NamedTuple):
    """Packed rows side by side: int64 (B, T) each, padded on the right with a tree of its own.

        ids        a b c d e f g x y       of the rows a b c d, a b c e f, a b c g and x y
        positions  0 1 2 3 3 4 3 0 1
        trees      0 0 0 0 0 0 0 1 1       a group each
        branches   0 0 0 1 2 2 3 1 1       0 is seen by all of its tree
    """
    ids: np.ndarray
    positions: np.ndarray
    trees: np.ndarray
    branches: np.ndarray
    scored: list  # [(key, targets, where they are predicted: indices into the flattened ids)]


def lay_out(rows):
    """Return the Layout of packed rows, which are lists of groups. Each group lies in its row as a
    tree: the prefix once, and then the suffixes, each of which sees the prefix and itself."""
    T = max(sum(map(count_tokens, row)) for row in rows)
    ids, positions, branches = np.zeros((3, len(rows), T), np.int64)
    trees, scored = np.full((len(rows), T), -1), []
    for b, row in enumerate(rows):
        at = 0
        for tree, group in enumerate(row):
            n = group.length
            front = np.arange(at, at + n)
            ids[b, front] = group.members[0][0][:n]
            positions[b, front] = np.arange(n)
            trees[b, front] = tree
            at += n
            for branch, (own, pieces) in enumerate(group.members, 1):
                back = np.arange(at, at + len(own) - n)
                ids[b, back] = own[n:]
                positions[b, back] = np.arange(n, len(own))
                trees[b, back] = tree
                branches[b, back] = branch
                at += len(back)
                places = b * T + np.concatenate((front, back))
                for key, targets in pieces:
                    scored.append((key, targets, places[len(own) - len(targets):]))
    return Layout(ids, positions, trees, branches, scored)
