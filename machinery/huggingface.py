"""To and from the Hugging Face format: reference models, export and import."""

import inspect
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from codes import binary_codes, recode

from machinery.checkpoints import hash_tensors, load_model
from machinery.files import sha256, write_whole
from machinery.runs import run_directory
from machinery.scorer import Candidate
from machinery.tokenizer import Utf16, load_tokenizer
from model import Decoder, FixedCodes, ModelConfig, build_input


def open_reference(name, device, dtype):
    """Return the Candidate of a Hugging Face model, by hub name or local folder. Raises ValueError without transformers."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
    except ImportError:
        raise ValueError(f"--hf={name} needs the transformers package; pip install transformers safetensors") from None
    tokenizer = AutoTokenizer.from_pretrained(name)
    prefix_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype)).to(device).eval()
    # Its name from transformers 5 on, and before.
    keys_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

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

    def generate(ids, new, temperature, top_k, generator=None):
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
        idx = model.generate(torch.tensor([ids], device=device), max_new_tokens=new, pad_token_id=prefix_id, **options)
        return idx[0, len(ids):].tolist()

    return Candidate(
        forward, list, lambda texts, special: tokenizer(texts, add_special_tokens=special)["input_ids"],
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True), generate,
        prefix_id, "its tokenizer's bos, else eos, token", len(tokenizer), model.config.max_position_embeddings,
        {"name": str(name), "step": None, "weights_sha256": hash_tensors(sorted(model.state_dict().items())),
         "tokenizer_sha256": sha256(tokenizer.backend_tokenizer.to_str().encode())})

CARD = """# {name}

A Llama-style decoder language model: {step:,} updates, input interface `{input}`.

{about}
"""

FIXED = """Its input table is fixed, not trained. Row t of `model.embed_tokens.weight` is the {n_bits}-number `{input}` code of
the id t, {lift}d {n_tile} times. `nanobit` in config.json holds what it is made of. Keep it frozen in further training."""

INPUT_FIELDS = ("input", "code_seed", "code_offset", "code_values", "code_scale", "lift")  # of ModelConfig


@torch.no_grad()
def input_matrix(table, vocab_size, head):
    """Return what an input interface gives for every id, float32 [V, C]: the table a Llama would look up."""
    return table(torch.arange(vocab_size)[None], torch.float32, head)[0]


def export_checkpoint(path, out, dtype="float32"):
    """Write a checkpoint as a Hugging Face Llama folder. Raises FileExistsError if out is there already."""
    from safetensors.torch import save_file
    if Path(out).exists():
        raise FileExistsError(f"{out} exists; name a directory that does not")
    model, state = load_model(path)
    c, table, eot_id = model.config, model.model.embed_tokens, state["eot_id"]
    if c.ffn != "swiglu":
        raise ValueError(f"{path}: ffn={c.ffn} is no Llama's; only swiglu models can be exported")
    tokenizer_path = run_directory(path) / "tokenizer.json"
    if isinstance(tokenizer := load_tokenizer(tokenizer_path), Utf16):
        raise ValueError(f"{path}: its ids are UTF-16 code units, for which there is no Hugging Face tokenizer")
    eot = tokenizer.id_to_token(eot_id)
    weights = {name: tensor for name, tensor in model.state_dict().items() if "embed_tokens" not in name}
    weights["model.embed_tokens.weight"] = input_matrix(table, c.vocab_size, model.lm_head.weight)
    nanobit = {"step": state["step"], **{name: getattr(c, name) for name in INPUT_FIELDS},
               **{name: getattr(table, name).tolist() for name in ("matrix", "offset") if hasattr(table, name)}}
    about = "Its input table is trained."
    if isinstance(table, FixedCodes):
        about = FIXED.format(n_bits=c.n_bits, n_tile=c.n_embd // c.n_bits, **nanobit)
    files = {
        "config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": c.vocab_size, "hidden_size": c.n_embd,
            "intermediate_size": c.n_ffn, "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head,
            "num_key_value_heads": c.n_head, "head_dim": c.n_embd // c.n_head, "hidden_act": "silu",
            "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_theta, "max_position_embeddings": c.block_size, "tie_word_embeddings": False,
            "attention_bias": False, "mlp_bias": False, "bos_token_id": eot_id, "eos_token_id": eot_id, "torch_dtype": dtype,
            "nanobit": nanobit},
        "generation_config": {"bos_token_id": eot_id, "eos_token_id": eot_id},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": eot, "eos_token": eot,
                             "model_max_length": c.block_size, "clean_up_tokenization_spaces": False}}
    aside = Path(f"{out}.tmp")
    aside.mkdir(parents=True, exist_ok=True)
    save_file({name: w.detach().to(getattr(torch, dtype)).contiguous() for name, w in weights.items()},
              aside / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (aside / f"{name}.json").write_text(json.dumps(content, indent=1))
    (aside / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    (aside / "README.md").write_text(CARD.format(name=Path(out).name, about=about, **nanobit))
    aside.rename(out)
    print(f"written to {out}")


def read_llama_config(folder):
    """Return (ModelConfig, config.json) of a Hugging Face Llama folder. Raises ValueError for one the decoder does not cover."""
    hf = json.loads((Path(folder) / "config.json").read_text())
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    expected = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False, "attention_bias": False, "rope_type": "default",
                "head_dim": hf["hidden_size"] // hf["num_attention_heads"]}
    found = {key: hf.get(key, value) for key, value in expected.items()}
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if wrong := [f"{key} {found[key]} (expected {value})" for key, value in expected.items() if found[key] != value]:
        raise ValueError(f"{folder}/config.json: {', '.join(wrong)}")
    nanobit = hf.get("nanobit", {"input": "learned"})
    return ModelConfig(
        vocab_size=hf["vocab_size"], block_size=hf["max_position_embeddings"], n_layer=hf["num_hidden_layers"],
        n_head=hf["num_attention_heads"], n_embd=hf["hidden_size"], n_ffn=hf["intermediate_size"],
        norm_eps=hf["rms_norm_eps"], rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000),
        **{key: nanobit[key] for key in INPUT_FIELDS if key in nanobit}), hf


def import_folder(folder, out):
    """Write a Hugging Face Llama folder as a checkpoint in the run directory out; return its path.

    A model of ours keeps its interface. Any other Llama becomes a learned one, its shared key/value heads and a tied table
    written out, which changes no logit. Raises ValueError for an input matrix that is not the code that config.json claims.
    """
    from safetensors.torch import load_file
    config, hf = read_llama_config(folder)
    C, nanobit, weights = config.n_embd, hf.get("nanobit", {}), {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    if (table := weights.pop("model.embed_tokens.weight", None)) is None:
        raise FileNotFoundError(f"{folder}: no *.safetensors with model.embed_tokens.weight here")
    weights = {"lm_head.weight": table.float(), **{name: w.float() for name, w in weights.items()}}  # a tied one has no head
    for name in weights:
        if name.endswith(("k_proj.weight", "v_proj.weight")):  # one of them serves this many query heads in a row
            heads = weights[name].view(-1, C // config.n_head, C)
            weights[name] = heads.repeat_interleave(config.n_head // len(heads), 0).view(C, C)
    own = build_input(config)
    if config.input in ("learned", "lowdim"):
        every = 1 if config.input == "learned" or config.lift == "tile" else C // config.n_bits
        own.weight.data.copy_(table[:, ::every][:, :own.weight.size(1)])
    elif "matrix" in nanobit:
        recoding = {name: np.array(nanobit[name], np.uint8) for name in ("matrix", "offset")}
        own.load_state_dict({name: torch.from_numpy(array) for name, array in
                             {"codebook": recode(binary_codes(config.vocab_size), **recoding), **recoding}.items()})
    if not torch.equal(input_matrix(own, config.vocab_size, weights["lm_head.weight"]).to(table.dtype), table):
        raise ValueError(f"{folder}: model.embed_tokens.weight is not the {config.input} code that config.json claims; "
                         "take nanobit out of config.json to import it as a learned table")
    weights |= {f"model.embed_tokens.{name}": tensor for name, tensor in own.state_dict().items()}
    try:
        with torch.device("meta"):
            Decoder(config).load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from None
    tokenizer_path, path = Path(folder) / "tokenizer.json", Path(out) / f"step-{nanobit.get('step', 0):08d}.pt"
    load_tokenizer(tokenizer_path)
    if path.exists():
        raise FileExistsError(f"{path} exists; name another run directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent / "tokenizer.json", tokenizer_path.read_bytes())
    torch.save({"step": nanobit.get("step", 0), "model": weights, "model_config": asdict(config), "data": "",
                "eot_id": hf["eos_token_id"] if hf.get("bos_token_id") is None else hf["bos_token_id"],
                "tokenizer_sha256": sha256(tokenizer_path.read_bytes())}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    print(f"written to {path}")
    return path
