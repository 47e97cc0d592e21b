"""What can be read linearly from the residual stream at each depth, and what each block does for the loss."""

import contextlib
import itertools
import keyword
import math

import numpy as np
import torch
import torch.nn.functional as F
from codes import binary_codes
from scipy.stats import rankdata

from machinery.scorer import cut_documents
from machinery.shards import open_shards
from machinery.tokenizer import token_bytes, vocab_size
from model import BITS

N_IDENTITIES = 256  # ids that the identity readout chooses between: the most frequent

RIDGE = 1e-3        # of a feature's variance

PROPERTIES = {"keyword": lambda text: keyword.iskeyword(text.strip()), "space first": lambda text: text.startswith(" "),
              "digit": lambda text: text.strip().isdigit()}


def full_windows(data_dir, block_size, positions):
    """Return (ids int64 [N, T + 1], document int64 [N]) of about `positions` targets: validation windows of full
    length, the first of every document before the second of any. Raises ValueError unless four documents have one."""
    windows = {}
    for number, shard in enumerate(open_shards(data_dir, "val")):
        for document, ids in cut_documents(*shard.map(), block_size):
            if len(ids) == block_size + 1:
                windows.setdefault((number, document), []).append(ids)
    if len(windows) < 4:
        raise ValueError(f"{data_dir}: {len(windows)} validation documents of more than {block_size} tokens; a probe needs 4")
    found = [(i, ids) for turn in itertools.zip_longest(*windows.values()) for i, ids in enumerate(turn) if ids is not None]
    documents, found = zip(*found[:max(8, positions // block_size)])
    return torch.from_numpy(np.stack(found)).long(), np.array(documents)


@torch.inference_mode()
def window_losses(model, windows):
    """Return the loss of each window (N, T + 1), nats per target: float64 [N]. No batch has a single window."""
    losses = []
    for part in windows.to(model.lm_head.weight.device).tensor_split(-(-len(windows) // 16)):
        logits = model(part[:, :-1])[0].float()
        loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none")
        losses.append(loss.view(len(part), -1).double().mean(1))
    return torch.cat(losses).cpu().numpy()


def read_linearly(x, classes, targets, test):
    """Fit linear readouts of x (N, C) where test (bool, (N,)) is false; return what they say where it is true.

    classes int64 (N,), -1 for none, are read by linear discriminant analysis: the largest of an affine function each.
    targets float64 (N, M) are read by ridge regression. Returns (classes (N_test,), targets (N_test, M)).
    """
    fit, known = ~test, ~test & (classes >= 0)
    std = x[fit].std(0)
    x = (x - x[fit].mean(0)) / torch.where(std > 0, std, 1)
    ridge, mean = RIDGE * torch.eye(x.size(1), dtype=x.dtype), targets[fit].mean(0)
    weights = torch.linalg.solve(x[fit].T @ x[fit] / fit.sum() + ridge, x[fit].T @ (targets[fit] - mean) / fit.sum())
    n = torch.bincount(classes[known])
    centres = torch.zeros(len(n), x.size(1), dtype=x.dtype).index_add_(0, classes[known], x[known]) / n[:, None]
    within = x[known] - centres[classes[known]]
    directions = torch.linalg.solve(within.T @ within / known.sum() + ridge, centres.T)
    offsets = (n / n.sum()).log() - (centres * directions.T).sum(1) / 2
    return (x[test] @ directions + offsets).argmax(1), x[test] @ weights + mean


def area_under_roc(scores, truth):
    """Return how often a true case scores above a false one, ties counted half (Mann-Whitney); nan if all are alike."""
    n = int(truth.sum())
    ranks = rankdata(scores)[truth].sum() - n * (n + 1) / 2
    return float(ranks / (n * (len(truth) - n))) if 0 < n < len(truth) else math.nan


def probe(model, tokenizer, data_dir, positions):
    """Return, as plain values, what the residual stream tells at each depth (the input, then after each block), what
    chance would, and how much the loss grows without each block.

    Readouts are of the token at the position itself, fitted on every other validation document and scored on the rest:
    identity (share right among the N_IDENTITIES most frequent ids), code and bit (share of positions with all bits, and
    of bits, right: of the model's own code where that has bits, else of the binary code), keyword, space first and
    digit (area under the ROC curve), bytes (the length; R^2). A block is skipped, so that it adds nothing to the
    stream, or swapped: it adds what it would in another window.
    """
    windows, documents = full_windows(data_dir, model.config.block_size, positions)
    streams = [[] for _ in range(model.config.n_layer + 1)]
    with contextlib.ExitStack() as hooks:
        for stream, module in zip(streams, [*model.model.layers, model.model.norm]):
            keep = lambda _, x, stream=stream: stream.append(x[0].float().cpu())
            hooks.enter_context(module.register_forward_pre_hook(keep))
        losses = window_losses(model, windows)

    V, n_ids, ids = model.config.vocab_size, vocab_size(tokenizer), windows[:, :-1].flatten()
    test = torch.from_numpy(documents % 2 == 1).repeat_interleave(model.config.block_size)
    own = model.config.input in BITS
    every_id = torch.arange(V, device=model.lm_head.weight.device)
    codes = model.model.embed_tokens.compute(every_id).cpu() if own else torch.from_numpy(binary_codes(V))
    words = [tokenizer.decode([i]) for i in range(n_ids)]
    sizes = token_bytes(tokenizer).tolist()
    lexical = torch.tensor([*zip(*(map(check, words) for check in PROPERTIES.values()), sizes)])
    K, targets = codes.size(1), torch.cat((codes[:n_ids], lexical), 1).double()[ids]
    counts = torch.bincount(ids[~test], minlength=V)
    frequent = counts.argsort(descending=True, stable=True)[:min(N_IDENTITIES, (counts > 0).sum())]
    classes = torch.full((V,), -1).index_put_((frequent,), torch.arange(len(frequent)))[ids]
    truth, which = targets[test], classes[test]

    def rate(found, read):
        """Return the readings' scores on the test positions, from class indices and regression outputs."""
        right = (read[:, :K] > 0.5) == (truth[:, :K] > 0.5)
        areas = [area_under_roc(read[:, i].numpy(), truth[:, i].numpy() > 0) for i in range(K, K + len(PROPERTIES))]
        error = (read[:, -1] - truth[:, -1]).square().mean() / truth[:, -1].var(correction=0)
        return {"identity": (found == which)[which >= 0].double().mean().item(),
                "code": right.all(1).double().mean().item(), "bit": right.double().mean().item(),
                **dict(zip(PROPERTIES, areas)), "bytes": 1 - error.item()}

    common = targets[~test].mean(0).expand_as(truth)  # what is said without a look at the stream
    read = lambda stream: read_linearly(torch.cat(stream).flatten(0, 1).double(), classes, targets, test)
    result = {"windows": len(windows), "positions_fitted": int((~test).sum()), "positions_scored": len(truth),
              "identities": len(frequent), "code": "own" if own else "binary", "loss": losses.mean(),
              "chance": rate(torch.zeros_like(which), common), "depths": [rate(*read(stream)) for stream in streams]}
    changes = {"skipped": lambda _, x, output: x[0], "swapped": lambda _, x, output: x[0] + (output - x[0]).roll(1, 0)}
    for name, change in changes.items():
        result[name] = []
        for block in model.model.layers:
            with block.register_forward_hook(change):
                result[name].append((window_losses(model, windows) - losses).mean())
    return result


def draw_probe(result, path):
    """Write the probe's figure: readouts against depth, and the loss that a change to each block costs."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    plt.style.use("petroff10")
    plt.rcParams.update({"font.size": 9.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.alpha": 0.3, "axes.axisbelow": True})
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.3, 4), layout="constrained")
    for (name, chance), marker in zip(result["chance"].items(), "osD^v<>"):
        left.plot([(depth[name] - chance) / (1 - chance) for depth in result["depths"]], marker=marker, label=name)
    left.set(xlabel="depth (blocks passed; 0 is the input)", ylabel="linear readout (0: chance, 1: perfect)",
             xticks=range(len(result["depths"])))
    blocks = np.arange(1, len(result["skipped"]) + 1)
    for name, offset in (("skipped", -0.2), ("swapped", 0.2)):
        right.bar(blocks + offset, result[name], 0.4, label=name)
    right.set(xlabel="block", ylabel=f"increase of the loss of {result['loss']:.3f} (nats per target)", xticks=blocks)
    right.legend(title="its addition to the stream is", frameon=False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=7, frameon=False)
    figure.savefig(path, dpi=200)
