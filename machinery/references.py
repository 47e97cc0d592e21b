"""Reference models: any causal language model of Hugging Face transformers as a Candidate, scored
as our own are. For evaluate.py score --hf."""

import inspect
import json
import sys
from pathlib import Path

import numpy as np
import torch

from machinery.candidates import Candidate, vocabulary_sha256
from machinery.checkpoints import hash_tensors
from machinery.errors import CACHE_PLACE, explained
from machinery.files import sha256
from machinery.packing import Group, make_groups
from machinery.processes import process_number
from machinery.scorer import MAX_LENGTH, Scorer

# What architectures call the most positions they take; Mamba and Bloom have no such limit.
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
# And how far back some of their layers look, counted in places of the row, not in positions.
WINDOW_FIELDS = ("sliding_window", "window_size", "attention_chunk_size", "local_attention")
# Nats a token by which packed rows may differ from the plain pass: rounding in these dtypes.
ROUNDING = {"float32": 1e-4, "bfloat16": 0.2}
WHOLE = "it does not obey a mask and positions, so every input is run whole, as with --no_share"


def open_reference(name, device, dtype, trust_remote_code=False):
    """Return the Candidate of a Hugging Face model, by hub name or local folder.

    Raises ValueError without transformers, or for a model that cannot be had.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError(f"--hf={name} needs the transformers package; "
                         "pip install transformers safetensors") from None
    with explained(f"--hf={name}", "expected a causal language model of the hub or in a folder; "
                   "one that brings its own code needs --trust_remote_code",
                   place="" if Path(name).exists() else CACHE_PLACE):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype),
                                                     trust_remote_code=trust_remote_code)
    model.to(device).eval()
    bos_id = tokenizer.bos_token_id
    prefix_id = tokenizer.eos_token_id if bos_id is None else bos_id
    if prefix_id is None:
        raise ValueError(f"--hf={name}: its tokenizer has neither a bos nor an eos token, one of "
                         "which stands for an empty context")

    def encode(texts, special):
        return tokenizer(texts, add_special_tokens=special)["input_ids"]

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    candidate = Candidate(
        forward=as_decoder_forward(model), new_cache=list, encode=encode, decode=decode,
        generate=as_decoder_generate(model, prefix_id), prefix_id=prefix_id,
        prefix_reason="its tokenizer's bos, else eos, token", n_ids=len(tokenizer),
        context=find_context(model.config), places=find_context(model.config),
        facts={"name": str(name), "step": None,
               "weights_sha256": hash_tensors(sorted(model.state_dict().items())),
               "tokenizer_sha256": tokenizer_sha256(tokenizer),
               "vocabulary_sha256": vocabulary_sha256(tokenizer)})
    notes = ["it runs code that came with it (--trust_remote_code)"] if trust_remote_code else []
    candidate.shares = obeys_masks(candidate, model, device, dtype)
    if not candidate.shares:
        notes.append(WHOLE)
    candidate.note = "; ".join(notes)
    if notes and process_number() == 0:
        print(f"--hf={name}: {candidate.note}", file=sys.stderr)
    return candidate


def tokenizer_sha256(tokenizer):
    """Return the sha256 of a transformers tokenizer; a slow one is its vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab()) if backend is None else backend.to_str()
    return sha256(text.encode())


def find_context(config):
    """Return the most positions that a model takes."""
    config = config.get_text_config()
    for field in CONTEXT_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return sys.maxsize


def as_decoder_forward(model):
    """Return a transformers model's forward pass with the arguments and the result of ours."""
    from transformers import DynamicCache
    takes = inspect.signature(model.forward).parameters
    # Its name from transformers 5 on, and before.
    keys_name = "cache" if "cache" in takes else "past_key_values"
    keeps = "logits_to_keep" in takes

    def forward(idx, positions=None, mask=None, cache=None, select=None):
        options, (rows, columns) = {}, select
        if mask is not None:  # eager attention adds it: a boolean one would add 0 and 1
            lowest = torch.finfo(model.dtype).min
            options["attention_mask"] = torch.zeros(mask.shape, dtype=model.dtype,
                                                    device=mask.device).masked_fill(~mask, lowest)
        if positions is not None:
            options["position_ids"] = positions
        if cache is not None:
            options[keys_name] = past = DynamicCache()
            for i, layer in enumerate(cache):
                past.update(layer["k"], layer["v"], i)
        kept, where = columns.unique(return_inverse=True)
        if keeps:
            options["logits_to_keep"] = kept
        logits = model(idx, use_cache=cache is not None, **options).logits
        if cache is not None:
            cache[:] = [{"k": layer.keys, "v": layer.values} for layer in past.layers]
        made_all = logits.size(1) == idx.size(1)  # also where it is asked for fewer
        return logits[rows, columns if made_all else where]

    return forward


def as_decoder_generate(model, pad_id):
    """Return a transformers model's generate with the arguments and the result of ours."""
    def generate(ids, max_new_tokens, temperature, top_k, generator=None):
        options = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0}
        if generator is not None:
            torch.manual_seed(generator.initial_seed())  # it takes no generator
        prompt = torch.tensor([ids], device=model.device)
        # All of the prompt is text: without a mask, ids that are the padding's would be left out.
        idx = model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=pad_id,
                             max_new_tokens=max_new_tokens, **options)
        return idx[0, len(ids):].tolist()

    return generate


def looks_back(config):
    """Return whether layers look back less far than inputs are long."""
    config = config.get_text_config()
    windows = [getattr(config, field, None) for field in WINDOW_FIELDS]
    limit = min(find_context(config), MAX_LENGTH)
    return any(isinstance(window, int) and 0 < window < limit for window in windows)


def obeys_masks(candidate, model, device, dtype):
    """Return whether a model gives the same scores with a tree's mask and positions, and on a
    cached prefix, as in plain passes: tried on two small trees of random ids."""
    takes = inspect.signature(model.forward).parameters
    if not {"attention_mask", "position_ids"} <= takes.keys() or looks_back(model.config):
        return False
    r = np.random.default_rng(0)
    n_ids = min(candidate.n_ids, model.config.get_text_config().vocab_size)
    n = min(24, candidate.context // 2)  # ids of the question; the answers after it are shorter

    def draw(n):
        return r.integers(0, n_ids, n).astype(np.int32)

    todo = {}
    for length in (n, n // 2):
        question = draw(length)
        for key, answer in enumerate((1, 2, n // 4, n // 4)):
            targets = draw(answer)
            row = np.concatenate((question, targets))[:-1]
            todo[length, key] = row.tobytes(), targets.tobytes()
    groups = make_groups(todo, share=True)
    scorer = Scorer(candidate, device)
    try:
        packed, plain, cached = scorer.score_rows([groups], None), {}, {}
        for group in groups:
            prefix = group.members[0][0][:group.length - 1]
            suffixes = []
            for row, pieces in group.members:
                plain |= scorer.score_rows([[Group(0, [(row, pieces)])]], None)
                suffixes.append(Group(0, [(row[len(prefix):], pieces)]))
            cached |= scorer.score_rows([suffixes[::2], suffixes[1::2]], scorer.run_prefix(prefix))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError):
        return False  # what an architecture raises that does not know them
    tokens = sum(len(targets) // 4 for _, targets in todo.values())  # of 4 bytes each
    for shared in (packed, cached):
        error = sum(abs(shared[key][0] - plain[key][0]) for key in todo)
        if not error <= ROUNDING[dtype] * tokens:
            return False
    return True
