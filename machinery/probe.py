"""What can be read linearly from the residual stream at each depth, and what each block does for
the loss. For evaluate.py probe."""

import contextlib
import itertools
import keyword
import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import rankdata

from codes import binary_codes
from machinery.packing import cut_documents
from machinery.shards import open_shards
from machinery.tokenizer import token_bytes
from model import BITS

N_IDENTITIES = 256  # ids that the identity readout chooses between: the most frequent
RIDGE = 1e-3        # of a feature's variance
WINDOWS_AT_A_TIME = 16


def is_keyword(text):
    return keyword.iskeyword(text.strip())


def begins_with_space(text):
    return text.startswith(" ")


def is_digit(text):
    return text.strip().isdigit()


PROPERTIES = {"keyword": is_keyword, "space first": begins_with_space, "digit": is_digit}


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
        losses.append(loss.view(len(part), -1).double().mean(1))
    return torch.cat(losses).cpu().numpy()


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


def read_linearly(x, classes, targets, test):
    """Fit linear readouts of x (N, C) where test (bool, (N,)) is false; return what they say where
    it is true.

    classes int64 (N,), -1 for none, are read by linear discriminant analysis: the largest of an
    affine function each. targets float64 (N, M) are read by ridge regression.
    Returns (classes (N_test,), targets (N_test, M)).
    """
    fit, known = ~test, ~test & (classes >= 0)
    std = x[fit].std(0)
    x = (x - x[fit].mean(0)) / torch.where(std > 0, std, 1)
    ridge, mean = RIDGE * torch.eye(x.size(1), dtype=x.dtype), targets[fit].mean(0)
    covariance = x[fit].T @ x[fit] / fit.sum()
    weights = torch.linalg.solve(covariance + ridge, x[fit].T @ (targets[fit] - mean) / fit.sum())
    n = torch.bincount(classes[known])
    centres = torch.zeros(len(n), x.size(1), dtype=x.dtype)
    centres = centres.index_add_(0, classes[known], x[known]) / n[:, None]
    within = x[known] - centres[classes[known]]
    directions = torch.linalg.solve(within.T @ within / known.sum() + ridge, centres.T)
    offsets = (n / n.sum()).log() - (centres * directions.T).sum(1) / 2
    return (x[test] @ directions + offsets).argmax(1), x[test] @ weights + mean


def area_under_roc(scores, truth):
    """Return how often a true case scores above a false one, ties counted half (Mann-Whitney); nan
    if all are alike."""
    n = int(truth.sum())
    if not 0 < n < len(truth):
        return math.nan
    ranks = rankdata(scores)[truth].sum() - n * (n + 1) / 2
    return float(ranks / (n * (len(truth) - n)))


def read_codes(model):
    """Return (uint8 [V, K], "own" or "binary"): the bits of the model's own codes where it has
    such, else of the binary ones."""
    V = model.config.vocab_size
    if model.config.input not in BITS:
        return torch.from_numpy(binary_codes(V)), "binary"
    every_id = torch.arange(V, device=model.lm_head.weight.device)
    return model.model.embed_tokens.compute(every_id).cpu(), "own"


def lexical_columns(tokenizer):
    """Return int64 [n_ids, 4]: the PROPERTIES of every id's text, and its length in bytes."""
    rows = []
    for i, n_bytes in enumerate(token_bytes(tokenizer).tolist()):
        word = tokenizer.decode([i])
        rows.append([*(check(word) for check in PROPERTIES.values()), n_bytes])
    return torch.tensor(rows)


def frequent_classes(ids, test, vocab_size):
    """Return (int64 (N,): the rank of each id among the N_IDENTITIES most frequent where test is
    false, else -1; how many they are)."""
    counts = torch.bincount(ids[~test], minlength=vocab_size)
    n = min(N_IDENTITIES, int((counts > 0).sum()))
    frequent = counts.argsort(descending=True, stable=True)[:n]
    ranks = torch.full((vocab_size,), -1).index_put_((frequent,), torch.arange(n))
    return ranks[ids], n


def rate(found, read, classes, targets, n_bits):
    """Return how good readings are: {readout: score}.

    Args:
        found, classes: int64 (N,), the class read and the true one, -1 for none.
        read, targets: float64 (N, n_bits + the lexical columns), what was read and what is true.
    """
    right = (read[:, :n_bits] > 0.5) == (targets[:, :n_bits] > 0.5)
    scores = {"identity": (found == classes)[classes >= 0].double().mean().item(),
              "code": right.all(1).double().mean().item(), "bit": right.double().mean().item()}
    for i, name in enumerate(PROPERTIES, n_bits):
        scores[name] = area_under_roc(read[:, i].numpy(), targets[:, i].numpy() > 0)
    error = (read[:, -1] - targets[:, -1]).square().mean()
    scores["bytes"] = 1 - (error / targets[:, -1].var(correction=0)).item()
    return scores


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


def probe(model, tokenizer, data_dir, positions):
    """Return, as plain values, what the residual stream tells at each depth (the input, then after
    each block), what chance would, and how much the loss grows without each block.

    Readouts are of the token at the position itself, fitted on every other validation document and
    scored on the rest: identity (share right among the N_IDENTITIES most frequent ids), code and
    bit (share of positions with all bits, and of bits, right: of the model's own code where that
    has bits, else of the binary code), keyword, space first and digit (area under the ROC curve),
    bytes (the length; R^2).
    """
    block_size = model.config.block_size
    windows, documents = full_windows(data_dir, block_size, positions)
    streams, losses = read_streams(model, windows)
    ids = windows[:, :-1].flatten()
    test = torch.from_numpy(documents % 2 == 1).repeat_interleave(block_size)
    codes, code_name = read_codes(model)
    lexical = lexical_columns(tokenizer)
    targets = torch.cat((codes[:len(lexical)], lexical), 1).double()[ids]
    classes, n_identities = frequent_classes(ids, test, model.config.vocab_size)
    truth = classes[test], targets[test], codes.size(1)
    common = targets[~test].mean(0).expand_as(targets[test])  # said without a look at the stream
    chance = rate(torch.zeros_like(classes[test]), common, *truth)
    depths = []
    for stream in streams:
        found, read = read_linearly(stream.double(), classes, targets, test)
        depths.append(rate(found, read, *truth))
    return {"windows": len(windows), "positions_fitted": int((~test).sum()),
            "positions_scored": int(test.sum()), "identities": n_identities, "code": code_name,
            "loss": losses.mean(), "chance": chance, "depths": depths,
            **loss_without(model, windows, losses)}


def print_probe(result):
    """Print the readouts by depth, and what each block does for the loss."""
    print(f"linear readouts, fitted at {result['positions_fitted']:,} positions, scored at "
          f"{result['positions_scored']:,} of other documents\n"
          f"(identity among {result['identities']} ids; {result['code']} code; keyword, space "
          "first, digit: area under the ROC curve; bytes: R^2)\n\n"
          "depth  " + "".join(f"{name:>13}" for name in result["chance"]))
    for depth, values in [("chance", result["chance"]), *enumerate(result["depths"])]:
        print(f"{depth:<7}" + "".join(f"{value:13.4f}" for value in values.values()))
    print(f"\nloss of the {result['windows']} windows: {result['loss']:.4f} nats per target; more "
          "if a block's addition is")
    for i, (skipped, swapped) in enumerate(zip(result["skipped"], result["swapped"]), 1):
        print(f"block {i:<4}  skipped {skipped:+.4f}  swapped {swapped:+.4f}")


def draw_probe(result, path):
    """Write the probe's figure: readouts against depth, and the loss that a change to each block
    costs."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.style.use("petroff10")
    plt.rcParams.update({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False,
                         "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 4), layout="constrained")
    for (name, chance), marker in zip(result["chance"].items(), "osD^v<>"):
        above = [(depth[name] - chance) / (1 - chance) for depth in result["depths"]]
        left.plot(above, marker=marker, label=name)
    left.set(xlabel="depth (blocks passed; 0 is the input)",
             ylabel="linear readout (0: chance, 1: perfect)", xticks=range(len(result["depths"])))
    blocks = np.arange(1, len(result["skipped"]) + 1)
    for name, offset in (("skipped", -0.2), ("swapped", 0.2)):
        right.bar(blocks + offset, result[name], 0.4, label=name)
    right.set(xlabel="block", xticks=blocks,
              ylabel=f"increase of the loss of {result['loss']:.3f} (nats per target)")
    right.legend(title="its addition to the stream is", frameon=False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7,
                  frameon=False)
    figure.savefig(path, dpi=200)
