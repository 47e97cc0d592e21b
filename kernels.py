"""The same formulae as in model.py, faster or smaller: a first reading skips this file.

    attend               F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=no mask)
    LinearCrossEntropy   F.cross_entropy((x @ weight.T).float(), targets, ignore_index=-1)
    selective_contexts   no formula: which values of a block are kept for the backward pass
"""

import math

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

# Attention on a CPU in BF16: queries at a time; longer rows use torch's own kernel.
ATTENTION_ROWS, ATTENTION_CONTEXT = 128, 1024
LOSS_ROWS = 1024  # rows of logits at a time: 0.2 GB in float32 at the paper's vocabulary
NO_FLOAT64 = ("mps",)  # Apple's GPUs


def attend(q, k, v, mask=None):
    """Return softmax(q k^T / sqrt(D)) v of (B, H, T, D) each: causal, or as (B, 1, T, keys) allows.

    On a CPU torch's own kernel (2.13) is a third as fast in BF16 as the matrix products it is made
    of. There short causal attention is those products, ATTENTION_ROWS queries at a time with the
    keys up to them, in about half the time. As in any attention that is not fused, scores are
    rounded to BF16 and their softmax is kept for the backward pass. A row's scores are made twice,
    so that they can be rounded as differences to their maximum: those that matter are then small.
    Values and gradients are within 1.6 times torch's error; with scores rounded as they are it was
    6 times where they spread by 16, growing with them.
    """
    B, H, T, D = q.size()
    short = mask is None and q.device.type == "cpu" and q.dtype == torch.bfloat16
    if not short or T > ATTENTION_CONTEXT:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    y = []
    with torch.autocast("cpu", enabled=False):  # it would widen the softmax
        for start in range(0, T, ATTENTION_ROWS):
            end = min(start + ATTENTION_ROWS, T)
            future = torch.full((end - start, end), -math.inf, dtype=q.dtype).triu(start + 1)
            rows, keys = q[:, start:end], k[:, :end].mT
            with torch.no_grad():
                scores = torch.baddbmm(future, rows, keys, alpha=D**-0.5)  # (B H, rows, keys)
                centre = future - scores.amax(-1, keepdim=True)
            scores = centre.baddbmm_(rows, keys, alpha=D**-0.5)  # in place: one pass less
            y.append(scores.softmax(-1) @ v[:, :end])
    return torch.cat(y, dim=1).view(B, H, T, D)


class LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of x W^T against targets, LOSS_ROWS rows of logits at a time.

    In float32. The gradients are made beside the loss, while the rows' logits are there, so that
    nothing is computed twice. F.linear_cross_entropy (torch 2.13) returns a BF16 loss for BF16
    hidden states: 10.9375 for 10.8422 at V = 49,152, where this is within 0.00001.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, with_gradients):
        matrix, counted = weight.to(x.dtype), targets >= 0
        n = counted.sum().clamp(min=1)
        # In float64 n equal losses have exactly that mean.
        exact = torch.float32 if x.device.type in NO_FLOAT64 else torch.float64
        loss = torch.zeros((), dtype=exact, device=x.device)
        if with_gradients:
            dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(x), LOSS_ROWS):
            rows = slice(start, start + LOSS_ROWS)
            h, keep, t = x[rows], counted[rows, None], targets[rows, None].clamp(min=0)
            logp = (h @ matrix.t()).float().log_softmax(-1)
            loss -= (logp.gather(1, t) * keep).sum(dtype=exact)
            if with_gradients:  # of the logits: softmax, less 1 at the target
                minus_one = torch.full_like(t, -1, dtype=torch.float32)
                g = logp.exp_().scatter_add_(1, t, minus_one).to(x.dtype)
                dx[rows] = (g @ matrix) * keep
                dweight += g.t() @ (h * keep)
        if with_gradients:
            ctx.save_for_backward(dx, dweight, n)
            ctx.weight_dtype = weight.dtype
        return (loss / n).float()

    @staticmethod
    def backward(ctx, grad):
        dx, dweight, n = ctx.saved_tensors
        return dx.mul_(grad / n), dweight.mul_(grad / n).to(ctx.weight_dtype), None, None


def selective_contexts():
    """Keep what a block's matrices and attention return, C and F wide, for the backward pass.

    The rest is cheap arithmetic and recomputed.
    """
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default])
