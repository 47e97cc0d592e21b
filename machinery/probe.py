"""What can be read linearly from the residual stream at each depth, and what each block does for
the loss. For evaluate.py probe."""

import contextlib
import itertools
import math
import os

import numpy as np
import torch
import torch.nn.functional as F

from codes import binary_codes
from inputs import BITS
from machinery.packing import cut_documents
from machinery.readouts import ask, frequent_classes, lexical_columns, shuffle_ids
from machinery.shards import open_shards
from model import Decoder

WINDOWS_AT_A_TIME = 16


def full_windows(data_dir, block_size, positions):
    """Return (ids int64 [N, T + 1], document int64 [N]) of about `positions` targets: validation
    windows of full length, the first of every document before the second of any. Raises ValueError
    unless four documents have one."""
    windows = {}
    for number, shard in enumerate(open_shards(data_dir, "val")):
        for document, ids in cut_documents(*shard.map(), block_size):
            if len(ids) == block_size + 1:
                windows.setdefault((number, document), []).append(ids)
    if len(windows) < 4:
        raise ValueError(f"{data_dir}: {len(windows)} validation documents of more than "
                         f"{block_size} tokens; a probe needs 4")
    documents, found = [], []
    for turn in itertools.zip_longest(*windows.values()):
        for document, ids in enumerate(turn):
            if ids is not None:
                documents.append(document)
                found.append(ids)
    n = max(8, positions // block_size)
    return torch.from_numpy(np.stack(found[:n])).long(), np.array(documents[:n])


@torch.inference_mode()
def window_losses(model, windows):
    """Return the loss of each window (N, T + 1), nats per target: float64 [N]. No batch has a
    single window."""
    losses, n_batches = [], math.ceil(len(windows) / WINDOWS_AT_A_TIME)
    for part in windows.to(model.lm_head.weight.device).tensor_split(n_batches):
        logits = model(part[:, :-1])[0].float()
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(part), -1).cpu().double().mean(1))
    return torch.cat(losses).numpy()


def read_streams(model, windows):
    """Return (the residual stream at each depth, float32 (N * T, C) each: the input, then after
    each block; the loss of each window, float64 [N])."""
    batches = [[] for _ in range(model.config.n_layer + 1)]
    with contextlib.ExitStack() as hooks:
        for stream, module in zip(batches, [*model.model.layers, model.model.norm]):
            def keep(_, inputs, stream=stream):
                stream.append(inputs[0].float().cpu())
            hooks.enter_context(module.register_forward_pre_hook(keep))
        losses = window_losses(model, windows)
    return [torch.cat(stream).flatten(0, 1) for stream in batches], losses


def read_codes(model):
    """Return (uint8 [V, K], "own" or "binary"): the bits of the model's own codes where it has
    such, else of the binary ones."""
    V = model.config.vocab_size
    if model.config.input not in BITS:
        return torch.from_numpy(binary_codes(V)), "binary"
    every_id = torch.arange(V, device=model.lm_head.weight.device)
    return model.model.embed_tokens.compute(every_id).cpu(), "own"


def skip(_, inputs, output):
    return inputs[0]


def swap(_, inputs, output):
    return inputs[0] + (output - inputs[0]).roll(1, 0)


def loss_without(model, windows, losses):
    """Return {"skipped", "swapped": how much the loss grows if a block's addition to the stream is,
    for each block}: it adds nothing, or what it would in another window."""
    result = {"skipped": [], "swapped": []}
    for name, change in (("skipped", skip), ("swapped", swap)):
        for block in model.model.layers:
            with block.register_forward_hook(change):
                result[name].append((window_losses(model, windows) - losses).mean())
    return result


def probe(model, tokenizer, data_dir, positions, seed=1):
    """Return, as plain values, what the residual stream tells at each depth (the input, then after
    each block), what chance would, and how much the loss grows without each block.

    Readouts are of the token at the position itself, fitted on every other validation document and
    scored on the rest: identity (share right among the N_IDENTITIES most frequent ids), code and
    bit (share of positions with all bits, and of bits, right: of the model's own code where that
    has bits, else of the binary code), keyword, space first and digit (area under the ROC curve),
    bytes (the length; R^2). The last four are scored on ids that were kept from their fit.

    Two controls: untrained, the same model as its seed makes it, for what depth alone does; and
    random_labels, the trained stream with the labels of other ids, for what a readout has by heart
    (identity is nan there: another name for it is as good).
    """
    config = model.config
    windows, documents = full_windows(data_dir, config.block_size, positions)
    ids = windows[:, :-1].flatten()
    test = torch.from_numpy(documents % 2 == 1).repeat_interleave(config.block_size)
    codes, code_name = read_codes(model)
    lexical = lexical_columns(tokenizer)
    counts = torch.bincount(ids[~test], minlength=config.vocab_size)
    classes, n_identities = frequent_classes(ids, counts)
    questions = ask(ids, test, classes, codes, lexical, counts)
    mixed = shuffle_ids(ids.numpy())
    by_heart = ask(mixed[ids], test, torch.full_like(classes, -1), codes, lexical, counts)
    streams, losses = read_streams(model, windows)
    depths = [questions.answer(stream) for stream in streams]
    random_labels = [by_heart.answer(stream) for stream in streams]
    fresh = Decoder(config, seed).to(model.lm_head.weight.device).eval()
    untrained = [questions.answer(stream) for stream in read_streams(fresh, windows)[0]]
    return {"windows": len(windows), "positions_fitted": int((~test).sum()),
            "positions_scored": int(test.sum()),
            "words_scored": int((test & questions.held_out).sum()), "identities": n_identities,
            "code": code_name, "seed": seed, "loss": losses.mean(),
            "chance": questions.answer(None), "depths": depths, "untrained": untrained,
            "random_labels": random_labels, **loss_without(model, windows, losses)}


def print_probe(result):
    """Print the readouts by depth, and what each block does for the loss."""
    print(f"linear readouts, fitted at {result['positions_fitted']:,} positions, scored at "
          f"{result['positions_scored']:,} of other documents\n"
          f"(identity among {result['identities']} ids; {result['code']} code; keyword, space "
          "first, digit: area under the ROC curve; bytes: R^2;\nthe last four at "
          f"{result['words_scored']:,} positions, of ids that were kept from the fit)\n\n"
          "depth  " + "".join(f"{name:>13}" for name in result["chance"]))
    print_scores("chance", result["chance"])
    for depth, scores in enumerate(result["depths"]):
        print_scores(depth, scores)
    for title, rows in ((f"untrained, seed {result['seed']}", result["untrained"]),
                        ("random labels", result["random_labels"])):
        print(title)
        for depth, scores in enumerate(rows):
            print_scores(depth, scores)
    print(f"\nloss of the {result['windows']} windows: {result['loss']:.4f} nats per target; more "
          "if a block's addition is")
    for i, (skipped, swapped) in enumerate(zip(result["skipped"], result["swapped"]), 1):
        print(f"block {i:<4}  skipped {skipped:+.4f}  swapped {swapped:+.4f}")


def print_scores(depth, scores):
    print(f"{depth:<7}" + "".join(f"{value:13.4f}" for value in scores.values()))


def draw_probe(result, path):
    """Write the probe's figure: readouts against depth, and the loss that a change to each block
    costs."""
    os.environ["MPLBACKEND"] = "agg"  # a notebook's own is not to be had outside it
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator
    plt.style.use("petroff10")
    plt.rcParams.update({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False,
                         "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 4), layout="constrained")
    for (name, chance), marker in zip(result["chance"].items(), "osD^v<>"):
        above = [(depth[name] - chance) / (1 - chance) for depth in result["depths"]]
        line, = left.plot(above, marker=marker, label=name)
        above = [(depth[name] - chance) / (1 - chance) for depth in result["untrained"]]
        left.plot(above, color=line.get_color(), linestyle=":", linewidth=1)
    left.set(xlabel="depth (blocks passed; 0 is the input)", ylim=(-0.25, 1.05),
             ylabel="linear readout (0: chance, 1: perfect; dotted: untrained)")
    blocks = np.arange(1, len(result["skipped"]) + 1)
    for name, offset in (("skipped", -0.2), ("swapped", 0.2)):
        right.bar(blocks + offset, result[name], 0.4, label=name)
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # of 24 blocks some have room
    right.set(xlabel="block",
              ylabel=f"increase of the loss of {result['loss']:.3f} (nats per target)")
    right.legend(title="its addition to the stream is", frameon=False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7,
                  frameon=False)
    figure.savefig(path, dpi=200)
