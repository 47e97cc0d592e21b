"""What is scored: a model and its tokenizer as functions, and the checks at opening a checkpoint of
ours. For evaluate.py, machinery/references.py and machinery/huggingface.py."""

import json
import sys
from dataclasses import dataclass
from typing import Callable

import torch

from machinery.checkpoints import check_is_ours, load_model
from machinery.files import sha256
from machinery.runs import run_directory
from machinery.tokenizer import UTF16_JSON, Utf16, load_tokenizer


@dataclass
class Candidate:
    """A model that can be scored.

    forward(idx (B, T), positions=None, mask=None, cache=None, select=(rows, columns)) -> logits
    (n, V), as Decoder.forward; encode(texts, special) -> lists of ids, where special lets the
    tokenizer add what it adds to a text (a Llama's BOS); generate(prompt ids, max_new_tokens,
    temperature, top_k, generator=None) -> the ids that follow, one by one.
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
    # Places in a row that it has buffers for; whether it obeys a tree's mask and positions, and
    # continues from keys and values.
    places: int = sys.maxsize
    shares: bool = True


def load_finite(path, device="cpu"):
    """Return load_model(path, device). Raises ValueError for weights that are not all finite."""
    model, state = load_model(path, device)
    check_is_ours(path, state, ("data", "eot_id"))
    check_finite(path, model.named_parameters())
    return model, state


def check_finite(path, named):
    """Raise ValueError unless all values of a checkpoint's (name, tensor) pairs are finite."""
    for name, weight in named:
        if not torch.isfinite(weight).all():
            raise ValueError(f"{path}: {name} holds values that are not finite; use an earlier "
                             "checkpoint of the run")


def run_tokenizer(path, state):
    """Return (tokenizer, sha256 of its file) of a checkpoint's run. Raises ValueError if it is not
    the one that the checkpoint was trained with."""
    path = run_directory(path) / "tokenizer.json"
    tokenizer, found = load_tokenizer(path), sha256(path.read_bytes())
    if state.get("tokenizer_sha256") not in (None, "", found):
        raise ValueError(f"{path}: its sha256 is not the checkpoint's; put back the tokenizer.json "
                         "of the data that the run was trained on")
    return tokenizer, found


def vocabulary_sha256(tokenizer):
    """Return the sha256 of what each id stands for, of a Tokenizer, a Utf16 or one of transformers:
    ids of two tokenizers with the same are the same texts, whatever else their files say."""
    if isinstance(tokenizer, Utf16):
        return sha256(UTF16_JSON)
    return sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
