"""One prepared directory of several: how machines share a preparation (prepare.py --join).

Each takes a range of the source files (--shards=A:B) into a directory of its own.
"""

import glob
import os
import shutil
from pathlib import Path

from machinery.checks import find_damage, identity, print_stats
from machinery.errors import explain, is_refusal
from machinery.files import only_process_in, sha256_of, sync, write_whole
from machinery.shards import SPLITS, read_meta, write_meta


def join(names, out, workers):
    """Make one prepared directory of several, with a shard for each of their sources, in order.

    The shards become links to the parts' own files, or copies on another file system; the parts
    stay, and may be deleted. Raises ValueError unless the parts are one preparation's, are whole to
    the byte, and out is new.
    """
    parts = find_parts(names)
    metas = [read_meta(part) for part in parts]
    check_parts(parts, metas, out)
    for part, meta in zip(parts, metas):
        check_bytes(part, meta, workers)
    os.makedirs(out, exist_ok=True)
    with only_process_in(out, "prepare.py"):
        joined = {**metas[0], "sources": [], "shards": []}
        for part, meta in zip(parts, metas):
            for number in range(len(meta["shards"])):
                take_shard(part, number, out, len(joined["shards"]) + number)
            joined["sources"] += meta["sources"]
            joined["shards"] += meta["shards"]
        write_whole(Path(out) / "tokenizer.json", (parts[0] / "tokenizer.json").read_bytes())
        write_meta(out, joined)
    print_stats(out)


def find_parts(names):
    """Return the directories that names or globs mean, in the order of their sources."""
    paths = []
    for name in names:
        paths += glob.glob(os.path.expanduser(name)) or [name]
    return sorted(map(Path, paths), key=lambda path: read_meta(path)["sources"][0])


def check_parts(parts, metas, out):
    """Raise ValueError unless the parts are finished, alike, and of different sources."""
    if (Path(out) / "meta.json").exists():
        raise ValueError(f"{out}: there is prepared data; choose another --out")
    first = identity(metas[0])
    seen = {}
    for part, meta in zip(parts, metas):
        n_todo = meta["shards"].count(None)
        if n_todo or meta["max_documents"]:
            found = f"{n_todo} source files to do" if n_todo else "made with --max_documents"
            raise ValueError(f"{part}: {found}; expected all documents of its source files")
        for key, value in identity(meta).items():
            if key != "sources" and value != first[key]:
                raise ValueError(f"{part}: {key} {value!s:.200}, but {first[key]!s:.200} in "
                                 f"{parts[0]}; expected parts of one preparation")
        for source in meta["sources"]:
            if source in seen:
                raise ValueError(f"{part}: {source} is in {seen[source]} too; expected each once")
            seen[source] = part


def check_bytes(part, meta, workers):
    """Raise ValueError unless a part's files are what its meta.json says."""
    damage = find_damage(part, meta, workers)
    for number, error in sorted(damage.items()):
        if is_refusal(error):
            raise error
        raise ValueError(f"{part}: shard {number:05d}: {explain(error)}")
    if sha256_of(part / "tokenizer.json") != meta["tokenizer"]["sha256"]:
        raise ValueError(f"{part}/tokenizer.json: its sha256 is not the one in meta.json")


def take_shard(part, number, out, new_number):
    """Link or copy the files of a part's shard to their names in out."""
    for split in SPLITS:
        folder = Path(out) / split
        folder.mkdir(exist_ok=True)
        for ending in (".bin", ".idx"):
            source = part / split / f"{number:05d}{ending}"
            target = folder / f"{new_number:05d}{ending}"
            target.unlink(missing_ok=True)  # of a join that was stopped
            if source.exists():
                link_or_copy(source, target)


def link_or_copy(source, target):
    """Give a file a second name, or copy it where a file system has no links."""
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        with open(target, "rb+") as file:
            sync(file)
