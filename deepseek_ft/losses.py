"""Cross entropy over a large vocabulary without its logits.

A micro-batch of 16,384 tokens over 102,400 ids has logits of 6.7 GB in fp32, and the usual loss holds three tensors of
that size. Here the vocabulary is walked in pieces: once for the log of the softmax's denominator, and once more for the
gradients, which are made in the forward pass. Each row of the head's gradient is one matrix product over all tokens,
rounded once, as in the usual way; a fourth product, the logits again, is the price. Evaluation walks it once.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .errors import RunError
from .memory import LOSS_ELEMENTS
from .ranks import within

IGNORED = -100
FP16_ROOM = 2.0**-8
"""fp16 ends at 65,504, and a row of the head's gradient is a sum over all tokens of a micro-batch."""


@dataclass(frozen=True)
class Softening:
    """What a recipe or a family does to the loss and to the logits."""

    smoothing: float = 0.0
    """Share of the target that is spread evenly over the vocabulary (arXiv:1512.00567 §7)."""
    cap: float | None = None
    """Logits z become cap tanh(z / cap), as in Gemma 2 (arXiv:2408.00118 §2)."""


Pair = tuple[torch.Tensor, torch.Tensor]
"""(N, k) and (V, k): a part of the logits is the one times the other's transpose. The head is a part; an adapter on it is
another, of the adapter's rank."""
Rows = tuple[int, torch.Tensor]
"""First id and (n, h): rows of the head that stand in the place of its own, and are trained where those are not."""


class _Walk:
    """The vocabulary in pieces of `step` ids."""

    def __init__(self, parts: Sequence[Pair], labels: torch.Tensor, step: int, soft: Softening, rows: Rows | None = None):
        self.parts, self.labels, self.soft, self.rows = parts, labels, soft, rows
        self.vocab = parts[0][1].shape[0]
        self.pieces = [slice(start, min(start + step, self.vocab)) for start in range(0, self.vocab, step)]
        self._rooms: dict[torch.dtype, torch.Tensor] = {}

    def _room(self, piece: slice, dtype: torch.dtype) -> torch.Tensor:
        """(N, ids of the piece), the same memory for every piece: fresh memory costs a CPU more than the softmax does."""
        rows = self.labels.shape[0]
        if dtype not in self._rooms:
            self._rooms[dtype] = self.labels.new_empty(rows * self.pieces[0].stop, dtype=dtype)
        columns = piece.stop - piece.start
        return self._rooms[dtype][: rows * columns].view(rows, columns)

    def replaced(self, piece: slice) -> tuple[slice, slice] | None:
        """Those of the rows that are in a piece: where in the piece, and which of them."""
        if self.rows is None:
            return None
        first, rows = self.rows
        start, stop = max(first, piece.start), min(first + rows.shape[0], piece.stop)
        return (slice(start - piece.start, stop - piece.start), slice(start - first, stop - first)) if start < stop else None

    def weight(self, part: int, piece: slice) -> torch.Tensor:
        weight = self.parts[part][1][piece]
        if part or (found := self.replaced(piece)) is None:
            return weight
        there, which = found
        return torch.cat([weight[: there.start], self.rows[1][which].to(weight.dtype), weight[there.stop :]])

    def logits(self, piece: slice) -> torch.Tensor:
        (hidden, _), *more = self.parts
        product = self._room(piece, hidden.dtype)
        torch.mm(hidden, self.weight(0, piece).t().to(hidden.dtype), out=product)
        z = self.as_type(product, piece, torch.float32)
        for hidden, weight in more:
            z += hidden @ weight[piece].t()
        return z if self.soft.cap is None else z.div_(self.soft.cap).tanh_().mul_(self.soft.cap)

    def as_type(self, numbers: torch.Tensor, piece: slice, dtype: torch.dtype) -> torch.Tensor:
        return numbers if numbers.dtype is dtype else self._room(piece, dtype).copy_(numbers)

    def at_target(self, piece: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, 1) column of each row's label in this piece, and whether it is there: no wait for the device."""
        inside = (self.labels >= piece.start) & (self.labels < piece.stop)
        return (self.labels - piece.start).clamp(0, piece.stop - piece.start - 1)[:, None], inside

    def losses(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Each row's loss (N,), the log of its denominator, and the logits where one piece is all of them."""
        rows, smoothing = self.labels.shape[0], self.soft.smoothing
        log_sum = self.labels.new_full((rows,), -torch.inf, dtype=torch.float32)
        # A label outside the vocabulary stays NaN, and is seen.
        target, total = torch.full_like(log_sum, torch.nan), torch.zeros_like(log_sum)
        here, few = torch.empty_like(log_sum), max(1, rows // 16)
        for piece in self.pieces:
            z = self.logits(piece)
            column, inside = self.at_target(piece)
            target = torch.where(inside, z.gather(1, column).squeeze(1), target)
            for some, to in zip(z.split(few), here.split(few), strict=True):
                torch.logsumexp(some, dim=1, out=to)  # it copies what it is given
            log_sum = torch.logaddexp(log_sum, here)
            if smoothing:
                total += z.sum(dim=1)
        expected = target if not smoothing else (1 - smoothing) * target + smoothing / self.vocab * total
        loss = torch.where(self.labels != IGNORED, log_sum - expected, 0.0)
        return loss, log_sum, z if len(self.pieces) == 1 else None

    def gradients(
        self, log_sum: torch.Tensor, z: torch.Tensor | None, needed: Sequence[bool], mantissa: torch.Tensor
    ) -> list[torch.Tensor | None]:
        """Of the sum of the losses divided by `mantissa`, for each tensor of `parts` in turn, and for `rows` if there are any:
        fp32 for (N, k), the weight's own type for (V, k) and (n, h)."""
        counted = (self.labels != IGNORED)[:, None] / mantissa
        # Softmax minus target is of the order of 1 and fits 16 bits; divided by the step's tokens it would vanish in
        # fp16. So only the denominator's mantissa is divided by here, before the rounding, and its power of two, which
        # rounds nothing, in the backward pass, where the loss scale is known too.
        found: list[torch.Tensor | None] = []
        both = 2 * len(self.parts)
        for (hidden, weight), of_hidden, of_weight in zip(self.parts, needed[:both:2], needed[1:both:2], strict=True):
            found.append(hidden.new_zeros(hidden.shape, dtype=torch.float32) if of_hidden else None)
            found.append(torch.empty_like(weight) if of_weight else None)
        of_rows = torch.empty_like(self.rows[1]) if self.rows is not None and needed[-1] else None
        found += [] if self.rows is None else [of_rows]
        shrunk = [hidden * FP16_ROOM if hidden.dtype is torch.float16 else hidden for hidden, _ in self.parts]
        cap, smoothing = self.soft.cap, self.soft.smoothing
        for piece in self.pieces:
            z = self.logits(piece) if z is None else z
            slope = None if cap is None else 1 - (z / cap).square()
            z.sub_(log_sum[:, None]).exp_()
            column, inside = self.at_target(piece)
            z.scatter_add_(1, column, -(1 - smoothing) * inside[:, None].float())
            if smoothing:
                z.sub_(smoothing / self.vocab)
            if slope is not None:
                z.mul_(slope)
            z.mul_(counted)
            for i, (hidden, _) in enumerate(self.parts):
                if found[2 * i + 1] is not None:
                    _product(self.as_type(z, piece, hidden.dtype).t(), shrunk[i], found[2 * i + 1][piece])
            if of_rows is not None and (inside_piece := self.replaced(piece)) is not None:
                there, which = inside_piece
                of_rows[which] = z[:, there].to(shrunk[0].dtype).t() @ shrunk[0]
            # A label's own share is most of a row's gradient: apart and in fp32, so that what a piece rounds is small.
            own = torch.where(inside[:, None], z.gather(1, column), 0.0)
            z.scatter_add_(1, column, -own)
            for i, (hidden, _) in enumerate(self.parts):
                if found[2 * i] is not None:
                    weight = self.weight(i, piece)
                    found[2 * i] += self.as_type(z, piece, hidden.dtype) @ weight
                    found[2 * i].addcmul_(own, weight[column.squeeze(1)])
            z = None
        return found


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, labels: torch.Tensor, denominator: torch.Tensor, step: int, soft: Softening, first: int | None, *tensors: torch.Tensor
    ):
        pairs = tensors if first is None else tensors[:-1]
        walk = _Walk(list(zip(pairs[::2], pairs[1::2], strict=True)), labels, step, soft, None if first is None else (first, tensors[-1]))
        losses, log_sum, z = walk.losses()
        needed = ctx.needs_input_grad[5:]
        mantissa, ctx.exponent = torch.frexp(denominator)
        ctx.grads = walk.gradients(log_sum, z, needed, mantissa) if any(needed) else None
        ctx.dtypes = [hidden.dtype for hidden in pairs[::2]]
        ctx.pairs = len(pairs)
        return losses.sum() / denominator

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        if ctx.grads is None:
            raise RuntimeError("the chunked loss keeps its gradients for one backward pass")
        grads, ctx.grads = ctx.grads, None
        factor = torch.ldexp(grad_loss, -ctx.exponent)
        for i, grad in enumerate(grads):
            dtype = ctx.dtypes[i // 2 if i < ctx.pairs else 0]
            if grad is not None and i % 2 == 0 and i < ctx.pairs:
                grads[i] = grad.mul_(factor).to(dtype)
            elif grad is not None:
                grad.mul_(factor / FP16_ROOM if dtype is torch.float16 else factor)
        return None, None, None, None, None, *grads


def _product(a: torch.Tensor, b: torch.Tensor, to: torch.Tensor) -> None:
    if to.dtype is a.dtype:
        torch.mm(a, b, out=to)
    else:  # under autocast the head and its gradient are fp32
        to.copy_(a @ b)


def _step(hidden: torch.Tensor, vocab: int, elements: int) -> int:
    """Ids in a piece: neither its logits nor its rows of the head are more than `elements`."""
    return max(256, min(vocab, elements // max(1, *hidden.shape)))


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, denominator=None, elements: int = LOSS_ELEMENTS,
              soft: Softening = Softening(), adapter: Pair | None = None, rows: Rows | None = None) -> torch.Tensor:  # fmt: skip
    """Cross entropy of `hidden @ weight.T` against `labels`, summed over the counted rows and divided.

    Args:
        hidden: (N, h), in the type of the products.
        weight: (V, h), the head.
        labels: (N,); rows of -100 do not count.
        denominator: what the sum is divided by; the number of counted rows when not given.
        elements: how many logits may exist at a time.
        adapter: (N, r) and (V, r), whose product is added to the logits.
        rows: what some rows of the weight are replaced by.

    Returns:
        A scalar in fp32. Gradients flow to whatever of hidden, weight, adapter and rows wants them; where there are rows, not
        to a weight.
    """
    if denominator is None:
        denominator = (labels != IGNORED).sum().clamp(min=1)
    denominator = torch.as_tensor(denominator, device=hidden.device).float()
    step = _step(hidden, weight.shape[0], elements)
    if rows is not None:
        weight = weight.detach()
    first, replacing = (None, ()) if rows is None else (rows[0], (rows[1],))
    return _HeadLoss.apply(labels, denominator, step, soft, first, hidden, weight, *(adapter or ()), *replacing)


@torch.no_grad()
def head_nll(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, elements: int = LOSS_ELEMENTS,
             soft: Softening = Softening(), adapter: Pair | None = None, rows: Rows | None = None) -> torch.Tensor:  # fmt: skip
    """Each row's negative log likelihood in nats, (N,) in fp32; 0 where the label is -100. The arguments of `head_loss`."""
    parts = [(hidden, weight), *([adapter] if adapter else [])]
    return _Walk(parts, labels, _step(hidden, weight.shape[0], elements), soft, rows).losses()[0]


# ------------------------------------------------------------------------------------- another's kernels


def liger_loss(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, denominator=None, soft: Softening = Softening()
) -> torch.Tensor:
    """`head_loss` by Liger's Triton kernels (arXiv:2410.10989 §3.2): rows in pieces, not ids. For a GPU.

    The gradient of the head is summed in fp32, which takes 4 bytes for each of its weights beside it: in 16 bits, as is
    Liger's default, each piece of rows would round the sum anew.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if denominator is None:
        denominator = (labels != IGNORED).sum().clamp(min=1)
    denominator = torch.as_tensor(denominator, device=hidden.device).float()
    total = liger_fused_linear_cross_entropy(
        hidden, weight.to(hidden.dtype), labels, ignore_index=IGNORED, reduction="sum", accum_dtype=torch.float32,
        label_smoothing=soft.smoothing, softcap=soft.cap,
    )  # fmt: skip
    return total / denominator


def check_liger(
    vocab: int, dtype: torch.dtype, device: torch.device, soft: Softening = Softening(), loss: Callable = liger_loss
) -> None:
    """Hold Liger's kernels, as this driver and compiler build them, against float64 and against `head_loss`.

    A head of the vocabulary and 64 columns, 256 rows with some that do not count.

    Args:
        loss: what is held against them.

    Raises:
        RunError: the loss is off by more than 1e-5, or a gradient by more than 1e-6, and by twice what `head_loss` is.
    """
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=random).to(device, dtype) for n in (256, vocab))
    labels = torch.randint(0, vocab, (256,), generator=random).to(device)
    labels[::7] = IGNORED

    def answer(by: Callable, wide: bool = False) -> list[torch.Tensor]:
        tensors = [x.to(torch.float64 if wide else dtype).requires_grad_() for x in (hidden, weight)]
        value = by(*tensors)
        value.backward()
        return [value.detach().double(), *(x.grad.double() for x in tensors)]

    def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        z = hidden @ weight.t()
        z = z if soft.cap is None else soft.cap * (z / soft.cap).tanh()
        return nn.functional.cross_entropy(z, labels, ignore_index=IGNORED, label_smoothing=soft.smoothing)

    true = answer(exact, wide=True)
    theirs = answer(lambda h, w: loss(h, w, labels, soft=soft))
    ours = answer(lambda h, w: head_loss(h, w, labels, soft=soft))
    far = [float((a - b).norm() / b.norm()) for a, b in zip(theirs, true, strict=True)]
    near = [float((a - b).norm() / b.norm()) for a, b in zip(ours, true, strict=True)]
    allowed = [max(2 * error, least) for error, least in zip(near, (1e-5, 1e-6, 1e-6), strict=True)]
    wrong = [f"{name} by {error:.1e}, allowed {most:.1e}" for name, error, most in
             zip(("the loss", "the gradient of what enters the head", "the gradient of the head"), far, allowed, strict=True)
             if not error <= most]  # fmt: skip
    if wrong:
        raise RunError(
            f"Liger's loss over {vocab:,} ids in {str(dtype).removeprefix('torch.')} is not exact on this machine, relative to float64: "
            f"{'; '.join(wrong)}. Use train.loss=chunked, or another version of liger-kernel or triton"
        )


# ---------------------------------------------------------------------------------------- in a model


class Head:
    """A causal language model's head, which can be asked for the loss, or for each token's, in place of its logits.

    It is still called as a module, so that ZeRO-3 makes its weight whole around the call. What it returns goes where the
    logits would; a cap on the logits that the model would put on it is taken over.
    """

    def __init__(self, model: nn.Module):
        """
        Raises:
            ValueError: this head, or what the model does with its logits, is not known here.
        """
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.module = self.model.get_output_embeddings()
        trained = getattr(self.module, "modules_to_save", None)  # peft's copy of a head that is trained as a whole
        if trained is not None:
            self.module = trained[self.module.active_adapters[0]]
        self.adapter = _adapter_of(self.module)
        self.has_rows = hasattr(self.module, "token_adapter")  # peft's wrapper around a head of which new rows are trained
        self.base = self.module.base_layer if self.adapter else self.module.token_adapter.base_layer if self.has_rows else self.module
        if getattr(self.base, "bias", None) is not None:
            raise ValueError("a head with a bias has no chunked loss")
        config = self.model.config
        for name in ("logits_scaling", "logit_scale", "lm_head_multiplier"):
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise ValueError(f"the model changes its logits by {name}, which the chunked loss does not know")
        self.cap = getattr(config, "final_logit_softcapping", None)
        self.smoothing = 0.0
        self.in_training = False
        self.by_liger = False
        self._labels: torch.Tensor | None = None
        self._next: torch.Tensor | None = None
        """Labels that are each token's next already (transformers' `shift_labels`)."""
        self._items = None
        self._each = False
        self._install()

    # ------------------------------------------------------------------------------------ what is asked for

    def use_for_training(self, smoothing: float = 0.0, liger: bool = False) -> Head:
        """Let the model compute its training loss without logits. Without labels (generation) nothing is changed.

        Args:
            liger: by `liger_loss`, which knows no adapter on the head, and no rows of it.

        Raises:
            ValueError: there is one.
        """
        if liger and (self.adapter or self.has_rows):
            raise ValueError(f"Liger's loss knows no {'adapter on' if self.adapter else 'single rows of'} the head")
        self.in_training, self.smoothing, self.by_liger = True, smoothing, liger
        return self

    @contextlib.contextmanager
    def scoring(self, labels: torch.Tensor) -> Iterator[None]:
        """Inside, a call of the model without labels returns as `logits` each position's negative log likelihood of the
        next label, (B, T) in fp32; 0 at the last position and where there is no target."""
        self._labels, self._each = labels, True
        try:
            yield
        finally:
            self._labels, self._each = None, False

    # ------------------------------------------------------------------------------------------ how it is done

    def _install(self) -> None:
        usual, plain = self.model.loss_function, self.module.forward

        def before(module, args, kwargs):
            if self._each:
                pass
            elif self.in_training and kwargs.get("labels") is not None and torch.is_grad_enabled():
                self._labels, self._next = kwargs["labels"], kwargs.get("shift_labels")
                self._items = kwargs.get("num_items_in_batch")
            else:
                self._labels = None
            if self._labels is not None and self.cap is not None:
                module.config.final_logit_softcapping = None  # done here

        def after(module, args, kwargs, output):
            if self.cap is not None:
                module.config.final_logit_softcapping = self.cap
            if not self._each:
                self._labels = self._items = self._next = None

        def forward(module, hidden, *args, **kwargs):
            return plain(hidden, *args, **kwargs) if self._labels is None else self._asked(hidden)

        def loss(logits, *args, **kwargs):
            return logits if self._labels is not None and not self._each else usual(logits, *args, **kwargs)

        self.module.forward = types.MethodType(forward, self.module)
        self.model.register_forward_pre_hook(before, with_kwargs=True)
        self.model.register_forward_hook(after, with_kwargs=True, always_call=True)
        self.model.loss_function = loss

    def _asked(self, hidden: torch.Tensor) -> torch.Tensor:
        shape, flat = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
        following = self._next
        if self._each or following is None:
            following = nn.functional.pad(self._labels, (0, 1), value=IGNORED)[..., 1:]
        labels = following.reshape(-1).to(flat.device)
        soft = Softening(0.0 if self._each else self.smoothing, self.cap)

        if torch.is_autocast_enabled(flat.device.type):  # weights are cast piece by piece, in the products
            flat = flat.to(torch.get_autocast_dtype(flat.device.type))

        def answer(adapter: Pair | None = None, rows: Rows | None = None) -> torch.Tensor:
            if self._each:
                return head_nll(flat, self.base.weight, labels, soft=soft, adapter=adapter, rows=rows).view(shape)
            if self.by_liger:
                return liger_loss(flat, self.base.weight, labels, self._items, soft)
            return head_loss(flat, self.base.weight, labels, self._items, soft=soft, adapter=adapter, rows=rows)

        if self.has_rows:
            from .tokens import rows_of

            if (rows := rows_of(self.module)) is None:
                return within(self.base, answer)
            first, holder, name = rows
            return within(self.base, lambda: within(holder, lambda: answer(rows=(first, holder[name]))))
        if not self.adapter:
            return answer()
        if self.module.disable_adapters or self.module.merged:
            return within(self.base, answer)
        (name,) = self.adapter
        down, up = self.module.lora_A[name], self.module.lora_B[name]
        low = down(self.module.lora_dropout[name](flat.to(down.weight.dtype))) * self.module.scaling[name]
        return within(self.base, lambda: within(up, lambda: answer((low, up.weight))))


def _adapter_of(head: nn.Module) -> list[str]:
    """Names of the LoRA adapters on a head.

    Raises:
        ValueError: a kind, or a number of them, that the chunked loss does not know.
    """
    if not hasattr(head, "lora_A") or not hasattr(head, "base_layer"):
        return []
    names = list(head.active_adapters)
    if len(names) != 1 or getattr(head, "use_dora", {}).get(names[0]):
        raise ValueError("the chunked loss knows one LoRA adapter on the head, and no DoRA")
    return names


def use_smoothed_loss(model: nn.Module, smoothing: float) -> None:
    """The usual loss, with all its logits, of smoothed labels."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model

    def loss(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **kwargs):
        following = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shift_labels is None else shift_labels
        targets = following.reshape(-1).to(logits.device)
        count = (targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        total = nn.functional.cross_entropy(logits.float().reshape(-1, vocab_size), targets, ignore_index=IGNORED,
                                            label_smoothing=smoothing, reduction="sum")  # fmt: skip
        return total / torch.as_tensor(count, device=total.device)

    base.loss_function = loss
