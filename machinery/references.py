"""Reference models: any causal language model of Hugging Face transformers as a Candidate, scored
as our own are. For evaluate.py score --hf."""

import inspect

import torch

from machinery.checkpoints import hash_tensors
from machinery.files import sha256
from machinery.scorer import Candidate


def open_reference(name, device, dtype):
    """Return the Candidate of a Hugging Face model, by hub name or local folder. Raises ValueError
    without transformers."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        raise ValueError(f"--hf={name} needs the transformers package; "
                         "pip install transformers safetensors") from None
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
    model.to(device).eval()
    bos_id = tokenizer.bos_token_id
    prefix_id = tokenizer.eos_token_id if bos_id is None else bos_id

    def encode(texts, special):
        return tokenizer(texts, add_special_tokens=special)["input_ids"]

    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=True)

    def generate(ids, max_new_tokens, temperature, top_k, generator=None):
        options = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": top_k}
        idx = model.generate(torch.tensor([ids], device=device), max_new_tokens=max_new_tokens,
                             pad_token_id=prefix_id, **options)
        return idx[0, len(ids):].tolist()

    return Candidate(
        forward=as_decoder_forward(model), new_cache=list, encode=encode, decode=decode,
        generate=generate, prefix_id=prefix_id,
        prefix_reason="its tokenizer's bos, else eos, token", n_ids=len(tokenizer),
        context=model.config.max_position_embeddings,
        facts={"name": str(name), "step": None,
               "weights_sha256": hash_tensors(sorted(model.state_dict().items())),
               "tokenizer_sha256": sha256(tokenizer.backend_tokenizer.to_str().encode())})


def as_decoder_forward(model):
    """Return a transformers model's forward pass with the arguments and the result of ours."""
    from transformers import DynamicCache
    # Its name from transformers 5 on, and before.
    takes = inspect.signature(model.forward).parameters
    keys_name = "cache" if "cache" in takes else "past_key_values"

    def forward(idx, positions=None, mask=None, cache=None, select=None):
        past = None if cache is None else DynamicCache()
        for i, layer in enumerate(cache or ()):
            past.update(layer["k"], layer["v"], i)
        columns, where = select[1].unique(return_inverse=True)
        logits = model(idx, attention_mask=mask, position_ids=positions, logits_to_keep=columns,
                       **{keys_name: past, "use_cache": cache is not None}).logits
        if cache is not None:
            cache[:] = [{"k": layer.keys, "v": layer.values} for layer in past.layers]
        return logits[select[0], where]

    return forward
