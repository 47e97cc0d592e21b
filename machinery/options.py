"""The command line of evaluate.py: its flags, and the checks that need no file."""

import argparse
import functools
import math
import os

import torch

from machinery.scorer import MAX_LENGTH

MOST_SEED = 2**63 - 1


def whole_number(least, text):
    """Return text as an integer of at least `least`."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text}; expected {least} or more")
    return value


positive = functools.partial(whole_number, 1)
natural = functools.partial(whole_number, 0)


def seed(text):
    """Return text as a seed that torch.Generator takes, with room to count up from it."""
    value = natural(text)
    if value > MOST_SEED:
        raise argparse.ArgumentTypeError(f"{text}; expected 0 to {MOST_SEED}")
    return value


def temperature(text):
    """Return text as a finite number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; expected 0 or more")
    return value


def prompt(text):
    """Return a text to continue, which may not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("--prompt is empty; give it a text to continue")
    return text


def task_list(text):
    """Return names of tasks, separated by commas, without the spaces around them."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text}; expected names, separated by commas")
    return ",".join(names)


def place(text):
    """Return a path; a shell leaves the ~ of --out=~/x to the program."""
    return os.path.expanduser(text)


def device(text):
    """Return the name of a device that is there; auto takes the fastest kind."""
    kind, _, index = text.partition(":")
    there = {"cpu": 1, "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
             "mps": int(torch.backends.mps.is_available())}
    if text == "auto":
        return next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if kind not in there or (index and not index.isdigit()):
        raise argparse.ArgumentTypeError(f"{text}; expected auto, cpu, cuda, cuda:N or mps")
    if int(index or 0) >= there[kind]:
        raise argparse.ArgumentTypeError(
            f"{text}; torch {torch.__version__} sees {there[kind]} {kind} devices here; "
            "--device=cpu works everywhere")
    return text


def add_score_options(parser, suites):
    """Add what is scored, on which examples, and how: the options of score."""
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs="*", type=place)
    parser.add_argument("--hf", action="append", default=[], metavar="NAME", type=place,
                        help="Hugging Face model, a hub name or folder")
    parser.add_argument("--trust_remote_code", action="store_true",
                        help="run the code that an --hf model brings along")
    parser.add_argument("--data", type=place, help="held-out: prepared data directory (default: "
                        "the one the run was trained on)")
    parser.add_argument("--suite", choices=suites,
                        help="benchmarks: the paper's ten tasks, MMLU also with five examples")
    parser.add_argument("--tasks", type=task_list,
                        help="benchmarks: the harness's names, separated by commas")
    parser.add_argument("--num_fewshot", type=natural, help="worked examples with --tasks "
                        "(default: the task's own number)")
    parser.add_argument("--limit", type=positive, help="the first documents of each task only")
    parser.add_argument("--data_dir", metavar="DIR", type=place,
                        help="hub-shaped copies of the benchmarks' data (default: the hub)")
    parser.add_argument("--include_path", metavar="DIR", type=place,
                        help="further task YAML files")
    parser.add_argument("--max_length", type=positive, help="positions (default: the smaller of "
                        f"{MAX_LENGTH} and the model's own)")
    parser.add_argument("--batch_tokens", type=positive,
                        help="tokens at a time (default: 16384 on cuda, else 2048)")
    parser.add_argument("--no_share", action="store_true",
                        help="run every distinct input whole, sharing no prefix")


def check_score_options(parser, args):
    """End in one line, with exit code 2, where the options of score do not go together."""
    benchmarks = args.suite or args.tasks
    benchmarks_only = (args.limit, args.num_fewshot, args.data_dir, args.include_path)
    if not args.checkpoints and not args.hf:
        parser.error("nothing to score: name a CHECKPOINT or --hf=NAME")
    if args.suite and (args.tasks or args.num_fewshot is not None):
        parser.error("--suite has its own tasks and examples; leave --tasks and --num_fewshot out, "
                     "or --suite")
    if not benchmarks and any(value is not None for value in benchmarks_only):
        parser.error("--limit, --num_fewshot, --data_dir and --include_path are for benchmarks; "
                     "give --tasks or --suite too")
    if benchmarks and args.data:
        parser.error("--data is for the held-out loss; the benchmarks' data is --data_dir")
    if args.trust_remote_code and not args.hf:
        parser.error("--trust_remote_code is for --hf models; a checkpoint brings no code")


def add_sample_options(parser):
    """Add the prompts and how a next token is drawn: the options of sample."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=place)
    parser.add_argument("--prompt", nargs="+", default=["def main():\n"], type=prompt,
                        help="texts to continue")
    parser.add_argument("--num_samples", type=positive, default=1,
                        help="continuations of each prompt (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=positive, default=200,
                        help="tokens a continuation (default: %(default)s)")
    parser.add_argument("--temperature", type=temperature, default=0.8,
                        help="0 takes the most probable (default: %(default)s)")
    parser.add_argument("--top_k", type=positive, default=50,
                        help="sample among the k most probable (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=1,
                        help="of the first continuation, then counted up (default: %(default)s)")


def add_probe_options(parser):
    """Add the data and how much of them is looked at: the options of probe."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=place)
    parser.add_argument("--data", type=place, help="prepared data directory (default: the one the "
                        "run was trained on)")
    parser.add_argument("--positions", type=positive, default=16_384,
                        help="held-out positions to look at (default: %(default)s)")


def parse_evaluate_args(suites, description):
    """Return the command line's settings; .command is the command's name.

    A wrong flag ends the process with one line and exit code 2. Args: suites, the names of --suite.
    """
    parser = argparse.ArgumentParser(
        description=description, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command",
                                     prog=parser.prog)
    add_command = functools.partial(commands.add_parser, usage=argparse.SUPPRESS,
                                    allow_abbrev=False)
    score = add_command("score", help="held-out loss, or benchmarks")
    add_score_options(score, suites)
    sample = add_command("sample", help="continue prompts")
    add_sample_options(sample)
    probe = add_command("probe", help="what each depth holds")
    add_probe_options(probe)
    export = add_command("export", help="write a Hugging Face Llama folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT", type=place)
    export.add_argument("out", metavar="DIR", type=place)
    importer = add_command("import", help="make a checkpoint of a Hugging Face Llama folder")
    importer.add_argument("folder", metavar="DIR", type=place)
    importer.add_argument("out", metavar="RUN", type=place)
    for command in (score, probe):
        command.add_argument("--out", metavar="DIR", type=place, help="write to DIR/NAME/ (default:"
                             " to the run itself; to out/NAME/ for an --hf model)")
    for command in (score, sample, probe):
        command.add_argument("--device", default="auto", type=device,
                             help="auto, cpu, cuda[:N] or mps (default: %(default)s)")
    for command in (score, export):
        command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                             help="of the weights (default: %(default)s)")
    args = parser.parse_args()
    if args.command == "score":
        check_score_options(parser, args)
        if args.batch_tokens is None:
            args.batch_tokens = 16_384 if args.device.startswith("cuda") else 2048
    return args
