"""The command line of evaluate.py: its flags, and the checks that need no file."""

import argparse
import functools

import torch

from machinery.scorer import MAX_LENGTH


def add_score_options(parser, suites, batch_tokens):
    parser.add_argument("checkpoints", metavar="CHECKPOINT", nargs="*")
    parser.add_argument("--hf", action="append", default=[], metavar="NAME",
                        help="Hugging Face model, a hub name or folder")
    parser.add_argument("--data", help="held-out: prepared data directory (default: the one the "
                        "run was trained on)")
    parser.add_argument("--suite", choices=suites,
                        help="benchmarks: the paper's ten tasks, MMLU also with five examples")
    parser.add_argument("--tasks", help="benchmarks: the harness's names, separated by commas")
    parser.add_argument("--num_fewshot", type=int, help="worked examples with --tasks (default: "
                        "the task's own number)")
    parser.add_argument("--limit", type=int, help="the first documents of each task only")
    parser.add_argument("--data_dir", metavar="DIR",
                        help="hub-shaped copies of the benchmarks' data (default: the hub)")
    parser.add_argument("--include_path", metavar="DIR", help="further task YAML files")
    parser.add_argument("--max_length", type=int, help=f"positions (default: the smaller of "
                        f"{MAX_LENGTH} and the model's own)")
    parser.add_argument("--batch_tokens", type=int, default=batch_tokens,
                        help="tokens at a time (default: %(default)s)")
    parser.add_argument("--no_share", action="store_true",
                        help="run every distinct input whole, sharing no prefix")


def check_score_options(parser, args):
    """End in one line where the options of score do not go together."""
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


def add_sample_options(parser):
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--prompt", nargs="+", default=["def main():\n"], help="texts to continue")
    parser.add_argument("--num_samples", type=int, default=1,
                        help="continuations of each prompt (default: %(default)s)")
    parser.add_argument("--max_new_tokens", type=int, default=200,
                        help="tokens a continuation (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0 takes the most probable (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=50,
                        help="sample among the k most probable (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1,
                        help="of the first continuation, then counted up (default: %(default)s)")


def add_probe_options(parser):
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--data", help="prepared data directory (default: the one the run was "
                        "trained on)")
    parser.add_argument("--positions", type=int, default=16_384,
                        help="held-out positions to look at (default: %(default)s)")


def parse_args(description, suites):
    """Return the command line's settings; .command is the command's name."""
    parser = argparse.ArgumentParser(
        description=description, usage=argparse.SUPPRESS, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command",
                                     prog=parser.prog)
    add_command = functools.partial(commands.add_parser, usage=argparse.SUPPRESS,
                                    allow_abbrev=False)
    cuda = torch.cuda.is_available()
    score = add_command("score", help="held-out loss, or benchmarks")
    add_score_options(score, suites, batch_tokens=16_384 if cuda else 2048)
    sample = add_command("sample", help="continue prompts")
    add_sample_options(sample)
    probe = add_command("probe", help="what each depth holds")
    add_probe_options(probe)
    export = add_command("export", help="write a Hugging Face Llama folder")
    export.add_argument("checkpoint", metavar="CHECKPOINT")
    export.add_argument("out", metavar="DIR")
    importer = add_command("import", help="make a checkpoint of a Hugging Face Llama folder")
    importer.add_argument("folder", metavar="DIR")
    importer.add_argument("out", metavar="RUN")
    for command in (score, sample, probe):
        command.add_argument("--device", default="cuda" if cuda else "cpu",
                             help="cpu or cuda[:N] (default: %(default)s)")
    for command in (score, export):
        command.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                             help="of the weights (default: %(default)s)")
    args = parser.parse_args()
    if args.command == "score":
        check_score_options(parser, args)
    return args
