"""A checkpoint as a Hugging Face Llama folder, and such a folder as a checkpoint. For evaluate.py
export and import. Our parameters have a Llama's names and layout, so only the input table needs
work."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from codes import FIXED, binary_codes, recode
from inputs import INPUT_FIELDS, INPUTS, FixedCodes, build_input
from machinery.candidates import load_finite, run_tokenizer
from machinery.checkpoints import save_checkpoint
from machinery.errors import explained
from machinery.files import sha256, write_whole
from machinery.runs import run_directory
from machinery.tokenizer import Utf16, load_tokenizer
from model import Decoder, ModelConfig

CARD = """# {name}

A Llama-style decoder language model: {step:,} updates, input interface `{input}`.

{about}
"""

ABOUT_LEARNED = "Its input table is trained."
ABOUT_FIXED = (
    "Its input table is fixed, not trained. Row t of `model.embed_tokens.weight` is the "
    "{n_code}-number `{input}` code of\nthe id t, {lift}d {n_tile} times. `nanobit` in config.json "
    "holds what it is made of. Keep it frozen in further training.")

ABOUT_SHARED = (
    "Its input table was made by the trained `{input}` interface: row t of "
    "`model.embed_tokens.weight` is what\nthat gives for the id t. Further training would move "
    "each row alone, as `{input}` cannot.")

# Of ModelConfig: what an input table is made of.
TABLE_FIELDS = tuple(name for name in INPUT_FIELDS if name != "table_free")
READ_BACK = ("learned", "tied", "lowdim", *FIXED)  # the inputs whose values a table still shows


@torch.no_grad()
def input_matrix(table, vocab_size, head):
    """Return what an input interface gives for every id, float32 [V, C]: the table a Llama would
    look up."""
    return table(torch.arange(vocab_size)[None], torch.float32, head)[0]


def adds_tokens(tokenizer):
    """Return whether a tokenizer puts tokens around a text, such as a Llama's bos."""
    return tokenizer.num_special_tokens_to_add(False) > 0


def describe_table(config, table):
    """Return the plain values that the table is made of, and what the model card says of it."""
    made_of = {name: getattr(config, name) for name in TABLE_FIELDS}
    for name in ("matrix", "offset"):
        if hasattr(table, name):
            made_of[name] = getattr(table, name).tolist()
    if config.input not in READ_BACK:
        return made_of, ABOUT_SHARED.format(**made_of)
    if not isinstance(table, FixedCodes):
        return made_of, ABOUT_LEARNED
    n_tile = config.n_embd // config.n_code
    return made_of, ABOUT_FIXED.format(n_code=config.n_code, n_tile=n_tile, **made_of)


def llama_configs(config, bos, eos, dtype, nanobit):
    """Return {name: content} of the folder's JSON files but the tokenizer's own; bos and eos are
    (id, token)."""
    return {
        "config": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "vocab_size": config.vocab_size, "hidden_size": config.n_embd,
            "intermediate_size": config.n_ffn, "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head, "num_key_value_heads": config.n_head,
            "head_dim": config.n_embd // config.n_head, "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps, "rope_theta": config.rope_theta,
            "max_position_embeddings": config.block_size, "tie_word_embeddings": False,
            "attention_bias": False, "mlp_bias": False, "bos_token_id": bos[0],
            "eos_token_id": eos[0], "torch_dtype": dtype, "nanobit": nanobit},
        "generation_config": {"bos_token_id": bos[0], "eos_token_id": eos[0]},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos[1], "eos_token": eos[1],
            "model_max_length": config.block_size, "clean_up_tokenization_spaces": False}}


def export_checkpoint(path, out, dtype="float32"):
    """Write a checkpoint as a Hugging Face Llama folder. Raises FileExistsError if out is there
    already, ValueError for a checkpoint that is no Llama."""
    from safetensors.torch import save_file
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists; name a directory that does not")
    model, state = load_finite(path)
    config, table = model.config, model.model.embed_tokens
    if config.ffn != "swiglu":
        raise ValueError(f"{path}: ffn={config.ffn} is no Llama's; only swiglu models can be "
                         "exported")
    tokenizer, _ = run_tokenizer(path, state)
    if isinstance(tokenizer, Utf16):
        raise ValueError(f"{path}: its ids are UTF-16 code units, for which there is no Hugging "
                         "Face tokenizer")
    weights = {name: w for name, w in model.state_dict().items() if "embed_tokens" not in name}
    weights["model.embed_tokens.weight"] = input_matrix(table, config.vocab_size,
                                                        model.lm_head.weight)
    for name, w in weights.items():
        weights[name] = w.detach().to(getattr(torch, dtype)).contiguous()
    made_of, about = describe_table(config, table)
    nanobit = {"step": state["step"], **made_of}
    eos_id = state["eot_id"]
    bos_id = state.get("bos_id", eos_id)
    files = llama_configs(config, (bos_id, tokenizer.id_to_token(bos_id)),
                          (eos_id, tokenizer.id_to_token(eos_id)), dtype, nanobit)
    tokenizer_json = (run_directory(path) / "tokenizer.json").read_bytes()
    if adds_tokens(tokenizer) and not state.get("template"):
        # What the model was not trained with, its users must not get.
        tokenizer_json = json.dumps(json.loads(tokenizer_json) | {"post_processor": None}).encode()
    aside = out.with_name(f"{out.name}.tmp")
    aside.mkdir(parents=True, exist_ok=True)
    save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (aside / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    (aside / "tokenizer.json").write_bytes(tokenizer_json)
    card = CARD.format(name=out.name, about=about, **nanobit)
    (aside / "README.md").write_text(card, encoding="utf-8")
    aside.rename(out)
    print(f"written to {out}")


def read_llama_config(folder):
    """Return (ModelConfig, config.json) of a Hugging Face Llama folder. Raises ValueError for one
    the decoder does not cover."""
    hf = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    expected = {"model_type": "llama", "hidden_act": "silu", "mlp_bias": False,
                "attention_bias": False, "rope_type": "default",
                "head_dim": hf["hidden_size"] // hf["num_attention_heads"]}
    found = {key: hf.get(key, value) for key, value in expected.items()}
    found["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    wrong = [f"{key} {found[key]} (expected {value})" for key, value in expected.items()
             if found[key] != value]
    if wrong:
        raise ValueError(f"config.json: {', '.join(wrong)}")
    ends = hf.get("bos_token_id"), hf.get("eos_token_id")
    if ends == (None, None) or any(isinstance(end, list) for end in ends):
        raise ValueError(f"config.json: bos_token_id {ends[0]}, eos_token_id {ends[1]}; "
                         "expected an id each, or one of the two")
    nanobit = hf.get("nanobit", {})
    made_of = {key: nanobit[key] for key in TABLE_FIELDS if key in nanobit}
    if made_of.get("input", "learned") not in READ_BACK and made_of["input"] in INPUTS:
        print(f"{folder}: the values of its {made_of['input']} input cannot be had back from the "
              "table; imported as a learned one")
        made_of = {}
    config = ModelConfig(
        vocab_size=hf["vocab_size"], block_size=hf["max_position_embeddings"],
        n_layer=hf["num_hidden_layers"], n_head=hf["num_attention_heads"],
        n_embd=hf["hidden_size"], n_ffn=hf["intermediate_size"], norm_eps=hf["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or hf.get("rope_theta") or 10_000),
        **{"input": "learned"} | made_of)
    return config, hf


def read_weights(folder, config):
    """Return (the folder's input table in its own dtype, {name: float32} of the decoder's other
    weights): shared key/value heads and a tied head are written out, which changes no logit."""
    from safetensors.torch import load_file
    weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    table = weights.pop("model.embed_tokens.weight", None)
    if table is None:
        raise ValueError("no *.safetensors with model.embed_tokens.weight here")
    weights = {name: w.float() for name, w in weights.items()}
    weights.setdefault("lm_head.weight", table.float())  # a tied model has none
    C, n_head = config.n_embd, config.n_head
    for name, w in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = w.view(-1, C // n_head, C)  # one of them serves several query heads in a row
            weights[name] = heads.repeat_interleave(n_head // len(heads), 0).view(C, C)
    return table, weights


def make_input(config, nanobit, table):
    """Return the input interface of config that has this table (V, C), made as nanobit says."""
    own = build_input(config)
    if config.input in ("learned", "lowdim"):
        interleaved = config.input == "lowdim" and config.lift != "tile"
        every = config.n_embd // config.n_code if interleaved else 1
        own.weight.data.copy_(table[:, ::every][:, :own.weight.size(1)])
    elif "matrix" in nanobit:
        matrix, offset = (np.array(nanobit[name], np.uint8) for name in ("matrix", "offset"))
        codebook = recode(binary_codes(config.vocab_size), matrix, offset)
        stored = {"codebook": codebook, "matrix": matrix, "offset": offset}
        own.load_state_dict({name: torch.from_numpy(array) for name, array in stored.items()})
    return own


def import_folder(folder, out):
    """Write a Hugging Face Llama folder as a checkpoint in the run directory out; return its path.

    A model of ours keeps its interface where the table tells its values (READ_BACK); any other
    Llama becomes a learned one. Raises ValueError
    for an input matrix that is not the code that config.json claims.
    """
    with explained(str(folder), "expected the folder of a Hugging Face Llama"):
        config, hf = read_llama_config(folder)
        table, weights = read_weights(folder, config)
    nanobit = hf.get("nanobit", {})
    own = make_input(config, nanobit, table)
    made = input_matrix(own, config.vocab_size, weights["lm_head.weight"]).to(table.dtype)
    if not torch.equal(made, table):
        raise ValueError(f"{folder}: model.embed_tokens.weight is not the {config.input} code that "
                         "config.json claims; take nanobit out of config.json to import it as a "
                         "learned table")
    for name, tensor in own.state_dict().items():
        weights[f"model.embed_tokens.{name}"] = tensor
    try:
        with torch.device("meta"):
            Decoder(config).load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from None
    step, tokenizer_path = nanobit.get("step", 0), Path(folder) / "tokenizer.json"
    tokenizer = load_tokenizer(tokenizer_path)
    path = Path(out) / f"step-{step:08d}.pt"
    if path.exists():
        raise FileExistsError(f"{path} exists; name another run directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.parent / "tokenizer.json", tokenizer_path.read_bytes())
    bos_id, eos_id = hf.get("bos_token_id"), hf.get("eos_token_id")
    save_checkpoint(
        out, step, keep=sys.maxsize, model=weights, model_config=asdict(config), data="",
        bos_id=eos_id if bos_id is None else bos_id, eot_id=bos_id if eos_id is None else eos_id,
        template=adds_tokens(tokenizer), tokenizer_sha256=sha256(tokenizer_path.read_bytes()))
    print(f"written to {path}")
    return path
