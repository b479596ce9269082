"""Cross entropy over a large vocabulary without its logits.

A micro-batch of 16,384 tokens over 102,400 ids has logits of 6.7 GB in fp32, and the usual loss holds three tensors of
that size. Here the vocabulary is walked in pieces: once for the log of the softmax's denominator, and once more for the
gradients, which are made in the forward pass. Each row of the head's gradient is one matrix product over all tokens,
rounded once, as in the usual way; a fourth product, the logits again, is the price.
"""

from __future__ import annotations

import types

import torch
from torch import nn

from .memory import LOSS_ELEMENTS

IGNORED = -100
FP16_ROOM = 2.0**-8
"""fp16 ends at 65,504, and a row of the head's gradient is a sum over all tokens of a micro-batch."""


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, denominator: torch.Tensor, step: int
    ):
        rows, vocab = hidden.shape[0], weight.shape[0]
        counted = labels != IGNORED
        pieces = [slice(start, min(start + step, vocab)) for start in range(0, vocab, step)]

        def logits(piece: slice) -> torch.Tensor:
            return (hidden @ weight[piece].t()).float()

        def at_target(piece: slice) -> tuple[torch.Tensor, torch.Tensor]:
            """(N, 1) column of each row's label in this piece, and whether it is there: no wait for the device."""
            inside = (labels >= piece.start) & (labels < piece.stop)
            return (labels - piece.start).clamp(0, piece.stop - piece.start - 1)[:, None], inside

        log_sum = hidden.new_full((rows,), -torch.inf, dtype=torch.float32)
        target = hidden.new_full(
            (rows,), torch.nan, dtype=torch.float32
        )  # a label outside the vocabulary stays NaN, and is seen
        for piece in pieces:
            z = logits(piece)
            column, inside = at_target(piece)
            target = torch.where(inside, z.gather(1, column).squeeze(1), target)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(z, dim=1))
            z = z if len(pieces) == 1 else None  # let go before the next piece is made
        loss = torch.where(counted, log_sum - target, 0.0).sum() / denominator

        grad_hidden = grad_weight = None
        if any(ctx.needs_input_grad[:2]):
            # Softmax minus target is of the order of 1 and fits 16 bits; divided by the step's tokens it would vanish in
            # fp16. So the division, and the loss scale, come in the backward pass, where both are known.
            shrunk = hidden * FP16_ROOM if hidden.dtype is torch.float16 else hidden
            grad_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32)
            grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
            for piece in pieces:
                z = logits(piece) if z is None else z
                z.sub_(log_sum[:, None]).exp_()
                column, inside = at_target(piece)
                z.scatter_add_(1, column, -inside[:, None].float())
                z.mul_(counted[:, None])
                z = z.to(hidden.dtype)
                grad_hidden += z @ weight[piece]
                if grad_weight is not None:
                    grad_weight[piece] = z.t() @ shrunk
                z = None
        ctx.grads, ctx.denominator, ctx.dtype = (grad_hidden, grad_weight), denominator, hidden.dtype
        return loss

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        if ctx.grads is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward pass")
        (grad_hidden, grad_weight), ctx.grads = ctx.grads, None
        factor = grad_loss / ctx.denominator
        if grad_weight is not None:
            grad_weight.mul_(factor / FP16_ROOM if ctx.dtype is torch.float16 else factor)
        return grad_hidden.mul_(factor).to(ctx.dtype), grad_weight, None, None, None


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, denominator=None,
              elements: int = LOSS_ELEMENTS) -> torch.Tensor:  # fmt: skip
    """Cross entropy of `hidden @ weight.T` against `labels`, summed over the counted rows and divided.

    Args:
        hidden: (N, h), in the type of the products.
        weight: (V, h), the head.
        labels: (N,); rows of -100 do not count.
        denominator: what the sum is divided by; the number of counted rows when not given.
        elements: how many logits may exist at a time.

    Returns:
        A scalar in fp32. Gradients flow to `hidden` and `weight`.
    """
    if denominator is None:
        denominator = (labels != IGNORED).sum().clamp(min=1)
    denominator = torch.as_tensor(denominator, device=hidden.device).float()
    step = max(256, min(weight.shape[0], elements // max(1, hidden.shape[0])))
    return _HeadLoss.apply(hidden, weight, labels, denominator, step)


def use_chunked_loss(model: nn.Module) -> None:
    """Let a causal language model of transformers compute its training loss by `head_loss`.

    The head is still called as a module, so that ZeRO-3 gathers its weight around the call; it returns the loss where
    the logits would be. Without labels (evaluation, generation) nothing is changed.
    """
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ValueError("a head with a bias has no chunked loss")
    plain = head.forward
    asked: dict = {}

    def remember(module, args, kwargs):
        asked.clear()
        if kwargs.get("labels") is not None and torch.is_grad_enabled():
            asked.update(labels=kwargs["labels"], items=kwargs.get("num_items_in_batch"))

    def forward(self, hidden):
        if not asked:
            return plain(hidden)
        labels = nn.functional.pad(asked["labels"], (0, 1), value=IGNORED)[..., 1:].reshape(-1)
        flat = hidden.reshape(-1, hidden.shape[-1])
        if torch.is_autocast_enabled(flat.device.type):
            flat = flat.to(torch.get_autocast_dtype(flat.device.type))
        return head_loss(flat, self.weight, labels.to(flat.device), asked["items"])

    def loss(logits, labels=None, **kwargs):
        return logits  # it is the loss already

    usual = model.loss_function
    head.forward = types.MethodType(forward, head)
    model.register_forward_pre_hook(remember, with_kwargs=True)
    model.loss_function = lambda *args, **kwargs: (loss if asked else usual)(*args, **kwargs)
