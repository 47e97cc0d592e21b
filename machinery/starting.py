"""What a run of train.py starts from: new weights, or with --init_from a checkpoint's."""

import json
from dataclasses import fields
from pathlib import Path

from codes import spelling_codes
from inputs import INPUT_FIELDS
from machinery.candidates import check_finite, run_tokenizer, vocabulary_sha256
from machinery.checkpoints import check_is_ours, checkpoint_file, file_sha256, read_checkpoint
from machinery.errors import explained
from machinery.runs import ADDED
from machinery.tokenizer import load_tokenizer, token_spellings
from model import Decoder, ModelConfig

# What the shapes and the meaning of a checkpoint's weights allow no flag to change. Positions have
# no weights: block_size, rope_theta and norm_eps are only taken from it where no flag gives them.
SIZES = ("vocab_size", "n_layer", "n_head", "n_embd", "n_ffn", "ffn")
INPUT = "model.embed_tokens."  # begins the names of an input interface's weights and codes


def start_settings(given):
    """Return {flag: value} of what --init_from stands for: init_from (the file) and
    init_from_sha256, both None without it; the checkpoint's sizes; and all that its input is made
    of, unless the flags given have another --input. A run that is resumed has them in its own
    config.json: the checkpoint may be gone.

    Raises ValueError for a size that is not the checkpoint's, or a file that is none, OSError for
    one that cannot be read.
    """
    path = given.get("init_from")
    if path is None:
        return {"init_from": None, "init_from_sha256": None}
    own = Path(given.get("out", "")) / "config.json"
    if given.get("resume") and own.is_file():
        with explained(own, "expected what train.py writes"):
            found = ADDED | json.loads(own.read_bytes())
            start = {name: found[name] for name in ("init_from", "init_from_sha256")}
    else:
        path = checkpoint_file(path)
        state = read_checkpoint(path, facts_only=True)
        check_is_ours(path, state, ("step", "model", "model_config"))
        found = state["model_config"]
        start = {"init_from": str(path), "init_from_sha256": file_sha256(path)}
    for name in SIZES:
        if given.get(name, found[name]) != found[name]:
            raise ValueError(f"--{name}={given[name]}, but the weights of {path} are of "
                             f"{name}={found[name]}; leave it out")
    same_input = given.get("input", found["input"]) == found["input"]
    for field in fields(ModelConfig):
        if field.name in found and (same_input or field.name not in INPUT_FIELDS):
            start[field.name] = found[field.name]
    return start


def new_model(args, config, step, say):
    """Return the Decoder of a run with its first weights; what a checkpoint of its own will replace
    after `step` updates.

    Raises ValueError for codes that cannot be, and where --init_from does not fit.
    """
    tokenizer, spellings = load_tokenizer(Path(args.data) / "tokenizer.json"), None
    if config.input == "spelling":
        spellings = token_spellings(tokenizer)
        _, alike = spelling_codes(spellings, config.positions)
        say(f"  spelt alike in {config.positions} bytes and told apart by the last: {alike:,} of "
            f"{config.vocab_size:,} ids")
    model = Decoder(config, args.seed, spellings)
    if args.init_from and not step:
        take_weights(model, args, tokenizer, say)
    return model


def take_weights(model, args, tokenizer, say):
    """Load the weights of --init_from into a new model: the body and the output, and the input if
    it is the same in all that it is made of. Raises ValueError where they do not fit."""
    path, config = args.init_from, model.config
    state = read_checkpoint(path)
    check_is_ours(path, state, ("step", "model", "model_config", "eot_id"))
    theirs, _ = run_tokenizer(path, state)
    if vocabulary_sha256(theirs) != vocabulary_sha256(tokenizer):
        raise ValueError(f"--init_from={path}: {args.data} was prepared with another tokenizer; "
                         f"give --data=DIR prepared with --tokenizer of the checkpoint's")
    there = ModelConfig(**state["model_config"])
    same = all(getattr(there, name) == getattr(config, name) for name in INPUT_FIELDS)
    weights = {name: w for name, w in state["model"].items() if same or not name.startswith(INPUT)}
    expected = [name for name in model.state_dict() if same or not name.startswith(INPUT)]
    differing = sorted(weights.keys() ^ set(expected))
    if differing:
        raise ValueError(f"{path}: it and the model differ in {', '.join(differing)}")
    check_finite(path, weights.items())
    with explained(path, "expected a checkpoint of train.py"):
        model.load_state_dict(weights, strict=False)
    parameters = dict(model.named_parameters())
    sizes = {False: 0, True: 0}
    for name, p in parameters.items():
        sizes[name.startswith(INPUT)] += p.numel()
    told = "kept" if same else f"new, in place of {there.input}"
    say(f"start: {path}, after {state['step']:,} updates; body and output kept, "
        f"{sizes[False]:,} values; input {config.input} {told}, {sizes[True]:,} trainable values")
