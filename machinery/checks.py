"""What a prepared directory holds, and whether it is whole: for prepare.py's resume and --check."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from machinery.errors import explain, is_refusal
from machinery.files import changed_since, sha256_of
from machinery.shards import REPAIR, SPLITS, Shard, meta_time, open_shards, read_meta

BLOCK_SIZES = (256, 512, 1024, 2048, 4096)  # of the summary


def resume(data_dir, asked, is_same_source, workers):
    """Return the meta.json there without the shards that are damaged, to go on from.

    Its sources may be the first of those that are asked for now. What was changed before meta.json
    was written is known by its size, the rest by its sha256: it may be hundreds of GB.

    Args:
        asked: the meta.json of what is asked for now, without shards.
        is_same_source: the function from a source's entry in meta.json, and a time, to whether it
            is still that file.

    Raises ValueError if that is another preparation, or a source is no longer the file that it was.
    """
    since = meta_time(data_dir)
    done = read_meta(data_dir)
    n_done = len(done["sources"])
    more = asked["sources"][n_done:]
    if asked["max_documents"]:  # the other sources were not needed
        asked["sources"] = asked["sources"][:n_done]
    elif asked["sources"][:n_done] == done["sources"] and not learns(asked["tokenizer"]):
        done["sources"] = asked["sources"]
        done["shards"] += [None] * len(more)
    there, now = identity(done), identity(asked)
    differing = [f"{key}: {there.get(key)!s:.200} there, {now[key]!s:.200} now" for key in now
                 if there.get(key) != now[key]]
    if differing:
        raise ValueError(f"{data_dir} was prepared differently; {'; '.join(differing)}; choose "
                         "another --out")
    for entry in filter(None, done["shards"]):
        if not is_same_source(entry, since):
            raise ValueError(f"{entry['source']}: not the file that {data_dir} was prepared from; "
                             "choose another --out")
    for number, error in find_damage(data_dir, done, workers, since).items():
        if is_refusal(error):
            raise error
        print(f"shard {number:05d}: {error}: making it again", file=sys.stderr)
        done["shards"][number] = None
    return done


def learns(tokenizer):
    """Return whether a tokenizer is made from the documents, and so another with more of them."""
    return tokenizer["name"].startswith("train:")


def identity(meta):
    """Return what must be equal for two runs to be one preparation, by names for an error.

    Of a tokenizer not its name: that may be a path, and the sha256 tells.
    """
    fields = {key: meta.get(key) for key in ("sources", "columns", "max_documents")}
    for group in ("tokenizer", "split"):
        for key, value in meta.get(group, {}).items():
            fields[f"{group} {key}"] = value
    fields.pop("tokenizer name", None)
    return fields


def find_damage(data_dir, meta, workers, since=0):
    """Return {number: error} of the shards that are not, byte by byte, as in meta.json.

    Those unchanged since a time (in ns) are known by their size.
    """
    def examine(number):
        """Return the exception that says what is wrong with a source's shards, or None."""
        try:
            entry = meta["shards"][number]
            for split in SPLITS:
                if not entry or not entry[split]["documents"]:
                    continue
                shard = Shard(data_dir, split, number, meta)
                if changed_since(since, shard.path, shard.index_path):
                    shard.verify()
        except (ValueError, OSError, IndexError, MemoryError) as error:
            return error
        return None

    numbers = range(len(meta["shards"]))
    with ThreadPoolExecutor(workers) as pool:  # threads, because hashing and numpy let others run
        examined = pool.map(examine, numbers)
        found = list(tqdm(examined, total=len(numbers), desc="verifying", disable=None))
    return {number: error for number, error in zip(numbers, found) if error}


def check(data_dir, workers, stats):
    """Verify a prepared directory; exit with 1 and the list of what is wrong with it."""
    meta = read_meta(data_dir)
    damage = find_damage(data_dir, meta, workers)
    for number, entry in enumerate(meta["shards"]):
        if not entry:
            damage[number] = ValueError(f"no shard of {meta['sources'][number]} yet")
    lines = [f"shard {number:05d}: {explain(error)}" for number, error in sorted(damage.items())]
    tokenizer = Path(data_dir) / "tokenizer.json"
    if not tokenizer.exists():
        lines.append(f"{tokenizer}: missing; {REPAIR}")
    elif sha256_of(tokenizer) != meta["tokenizer"]["sha256"]:
        lines.append(f"{tokenizer}: its sha256 is not the one in meta.json; {REPAIR}")
    if lines:
        sys.exit("\n".join(f"prepare.py: {line}" for line in lines))
    print(f"{data_dir}: {len(meta['shards'])} shards are what meta.json says")
    if stats:
        print_stats(data_dir, histogram=True)


def print_stats(data_dir, histogram=False):
    """Print what a prepared directory holds.

    Documents, tokens, how many of them are long enough to train on, and, if asked for, a histogram
    of the documents' lengths.
    """
    meta = read_meta(data_dir)
    skipped = sum((Counter(entry["skipped"]) for entry in meta["shards"]), Counter())
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(skipped.items()))
    print(f"{data_dir}: {len(meta['shards'])} source files, tokenizer {meta['tokenizer']['name']}, "
          f"vocab_size {meta['tokenizer']['vocab_size']:,}; rows skipped: {reasons or 'none'}")
    replaced = sum(entry.get("replaced", 0) for entry in meta["shards"])
    if replaced:
        print(f"U+FFFD, for what was not Unicode, in {replaced:,} documents; expected UTF-8")
    table, powers = count_lengths(data_dir)
    print(f"{'':26}{'train documents':>16}{'tokens':>18}{'val documents':>16}{'tokens':>18}")
    for row, limit in zip(table, (0, *BLOCK_SIZES)):
        label = f"of more than {limit:,} tokens" if limit else "all"
        (documents, tokens), (val_documents, val_tokens) = row.tolist()
        print(f"{label:26}{documents:16,}{tokens:18,}{val_documents:16,}{val_tokens:18,}")
    line = f"{'bytes per token':26}"
    for side, split in enumerate(SPLITS):
        n_bytes = sum(entry[split]["bytes"] for entry in meta["shards"])
        line += f"{n_bytes / max(table[0, side, 1], 1):34.3f}"
    print(line)
    if not table[0, 0, 0]:
        print("train: no document; train.py will have nothing to learn from")
    if not table[0, 1, 0]:
        print("val: no document; train.py will not evaluate (a larger --val_fraction holds "
              "documents out)")
    if histogram:
        print("\ntokens in a document          documents, train and val")
        for power in np.flatnonzero(powers).tolist():
            n = int(powers[power])
            bar = "#" * (50 * n // int(powers.max()))
            print(f"{1 << power:9,} to {(2 << power) - 1:9,}{n:17,}  {bar}")


def count_lengths(data_dir):
    """Return the lengths of a prepared directory's documents, counted in two ways.

    int64 [limits, splits, 2]: documents and tokens in documents of more than 0 and of more than
    each of BLOCK_SIZES tokens; int64 [32]: documents of both splits by floor(log2(tokens)).
    """
    limits = (0, *BLOCK_SIZES)
    table = np.zeros((len(limits), len(SPLITS), 2), np.int64)
    powers = np.zeros(32, np.int64)
    for side, split in enumerate(SPLITS):
        for shard in open_shards(data_dir, split):
            lengths = np.diff(shard.map()[1])
            for row, limit in enumerate(limits):
                longer = lengths[lengths > limit]
                table[row, side] += (len(longer), longer.sum())
            powers += np.bincount(np.frexp(lengths)[1] - 1, minlength=32)
    return table, powers
