"""The command line of prepare.py: its flags, and the checks that need no file."""

import argparse
import os
import re
from pathlib import Path

from machinery.tokenizer import SMOLLM2, check_name
from machinery.workers import count_cores


def parse_prepare_args(description):
    """Return the command line's settings, with the defaults that depend on the source."""
    parser = argparse.ArgumentParser(
        description=description, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("documents")
    group.add_argument("--source", default="stdlib",
                       help="stdlib, fineweb-edu, an http(s) or hf:// URL, or a path or glob of "
                       ".parquet, .jsonl, .jsonl.gz, .jsonl.zst or .txt files "
                       "(default: %(default)s)")
    group.add_argument("--shards",
                       help="A:B, take only the source files numbered A to B - 1, each of which "
                       "becomes one train and one val shard (default: all)")
    group.add_argument("--max_documents", type=int,
                       help="take only the first so many documents (default: all)")
    group.add_argument("--text_column", default="text",
                       help="name of the text column (default: %(default)s)")
    group.add_argument("--id_column", default="id",
                       help="name of the id column; documents without one are split by their text "
                       "(default: %(default)s)")
    group = parser.add_argument_group("what becomes of them")
    group.add_argument("--tokenizer",
                       help="train:N, utf16, a tokenizer.json, or a Hugging Face "
                       "OWNER/REPOSITORY@REVISION (default: train:3072 for stdlib, else "
                       f"{SMOLLM2})")
    group.add_argument("--val_fraction", type=float,
                       help="share held out (default: 0.05 for stdlib, else 0.001)")
    group.add_argument("--split_seed", type=int, default=0,
                       help="seed of the split (default: %(default)s)")
    group.add_argument("--out", help="directory to write (default: data/ and the source's name)")
    group.add_argument("--workers", type=int, default=count_cores(),
                       help="processes (default: the %(default)s cores that it may use)")
    group.add_argument("--keep_downloads", action="store_true",
                       help="do not delete downloaded files after use")
    group = parser.add_argument_group("instead of preparing")
    group.add_argument("--check", metavar="DIR", help="verify every shard of a prepared directory")
    group.add_argument("--join", metavar="DIR", nargs="+",
                       help="with --out: make one directory of those that several machines "
                       "prepared, each with other --shards")
    group.add_argument("--stats", action="store_true",
                       help="with --check: print its size and its documents' lengths")
    args = parser.parse_args()
    if args.join and not args.out:
        parser.error("--join goes with --out=DIR")
    embedded = args.source == "stdlib"
    if args.tokenizer is None:
        args.tokenizer = "train:3072" if embedded else SMOLLM2
    for flag in ("source", "tokenizer", "out", "check"):
        if getattr(args, flag) is not None:  # a shell leaves the ~ of --out=~/data alone
            setattr(args, flag, os.path.expanduser(getattr(args, flag)))
    if args.out is None:
        name = re.sub(r"[*?\[\]!]+", "", Path(args.source).name.split(".")[0]).strip("-_ ")
        args.out = f"data/{name or 'corpus'}"
    if args.val_fraction is None:
        args.val_fraction = 0.05 if embedded else 0.001
    check_args(parser, args)
    return args


def check_args(parser, args):
    """End in one line if a flag's value cannot be meant."""
    for flag in ("source", "text_column", "tokenizer", "out", "check"):
        if getattr(args, flag) == "":
            parser.error(f"--{flag}=: expected a value")
    if not 0 <= args.val_fraction < 1:
        parser.error(f"--val_fraction={args.val_fraction}: expected 0 or more and less than 1")
    first, _, last = (args.shards or "0:1").partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        parser.error(f"--shards={args.shards}: expected A:B with A < B, as in 0:2")
    if args.workers < 1 or (args.max_documents is not None and args.max_documents < 1):
        parser.error("--workers and --max_documents: expected 1 or more")
    if args.stats and not args.check:
        parser.error("--stats goes with --check=DIR")
    try:
        check_name(args.tokenizer)
    except ValueError as error:
        parser.error(error)
