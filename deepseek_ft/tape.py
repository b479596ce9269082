"""A layer's tape: its operations as transformers 5.24 runs them, each with the bytes that it saves for the backward pass and the
bytes that its backward pass works in. `memory.py` walks it backwards; `timing.py` takes what moves from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .shapes import EXPERTS, LayerKind
from .workload import FP32, Workload

NF4_BLOCK = 64
NF4_BYTES = (4 + 0.127) / 8  # a weight's 4 bits, and its share of block scales after double quantisation (QLoRA §3)


@dataclass(frozen=True)
class Op:
    """One operation of a layer: bytes it saves for the backward pass, bytes its backward pass works in beside them."""

    name: str
    saves: float
    work: float
    weights: tuple[str, ...] = ()
    """Parameters whose gradients appear here."""


def layer_tape(load: Workload, kind: LayerKind) -> list[Op]:
    """The operations of a layer in order, bytes per token, and what 4-bit weights and DoRA add to them."""
    ops = _layer_tape(load, kind)
    if load.adapter is not None and load.adapter.quantized:
        ops = [replace(op, work=op.work + _unpacked(load, kind, op) / load.tokens) for op in ops]
    if load.adapter is None or not load.adapter.dora:
        return ops
    # peft's DoraLinearLayer multiplies the adapter out, in the adapter's type, by an identity as wide as the input, and adds
    # the weight for the norms; nothing of that is saved. The results of base and adapter are, for the rows' factors.
    adapted = [w for n, w in kind.weights.items() if len(w) == 2 and load.adapter.adapts(n)]
    if not adapted:
        return ops
    saves = sum(2 * load.element * out for out, _ in adapted)
    work = max(load.trained_element * into * into + 3 * load.trained_element * out * into for out, into in adapted)
    return [*ops, Op("DoRA norms", saves, load.element * load.shape.hidden_size + work / load.tokens)]


def _unpacked(load: Workload, kind: LayerKind, op: Op) -> float:
    """Bytes of the largest 4-bit weight of an operation in full: its backward pass unpacks one at a time, with its scales."""
    weights = [math.prod(kind.weights[n]) for n in op.weights if is_in_four_bits(n, kind.weights[n])]
    return max(weights, default=0) * (load.element + FP32 / NF4_BLOCK)


def is_in_four_bits(name: str, shape: tuple[int, ...]) -> bool:
    """bitsandbytes replaces linear layers; not embeddings, norms, biases, routers or fused experts."""
    return len(shape) == 2 and name != "mlp.gate.weight"


def _layer_tape(load: Workload, kind: LayerKind) -> list[Op]:
    """The operations of a layer in order, bytes per token.

    `work` counts what is alive only in that operation's backward pass: the gradient that comes in, those that go out,
    temporaries, and the residual branch's gradient that waits.
    """
    shape, w = load.shape, kind.weights
    e, f = load.element, FP32
    stream = f if load.autocast else e  # of the residual stream
    h, heads = shape.hidden_size, shape.heads
    q, k, v = heads * shape.qk_head_dim, shape.kv_heads * shape.qk_head_dim, shape.kv_heads * shape.v_head_dim
    out = heads * shape.v_head_dim
    residual = stream * h
    ops: list[Op] = []

    def full(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in w)

    def kept(width: float, *names: str) -> float:
        """A linear layer's input, saved if its own weight or its adapter is trained; autocast casts it for each."""
        present = full(*names)
        if load.adapter is None:
            return e * width * (len(present) if load.autocast else 1)
        adapted = [n for n in present if load.adapter.adapts(n)]
        # Without DeepSpeed the adapters are fp32: peft casts each one's input to that, and autocast back, into its own copy.
        copies = len(adapted) if not load.strategy.deepspeed and e < f else min(1, len(adapted))
        return e * width * copies + e * load.adapter.rank * len(adapted)

    def norm(name: str, width: float, carried: float, weight: str, entering: int) -> Op:
        """RMSNorm computes in fp32: it saves the fp32 copy, 1/rms and, when its weight is trained, the normalised copy."""
        normalised = 0 if load.adapter is not None else entering * width
        work = carried + 4 * f * width + (entering * width if entering < f else 0)
        return Op(name, f * width + f + normalised, work, full(weight))

    # -- attention
    ops.append(norm("input norm", h, residual, "input_layernorm.weight", stream))
    if shape.latent:
        rope = shape.rope_head_dim
        latent = w["self_attn.kv_a_layernorm.weight"][0]
        up = w["self_attn.kv_b_proj.weight"][0]
        down = ("self_attn.q_proj.weight", "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
        ops.append(Op("q and kv down", kept(h, *down), residual + e * (q + latent + rope) + 2 * e * h, full(*down)))
        if "self_attn.q_a_layernorm.weight" in w:
            rank = w["self_attn.q_a_layernorm.weight"][0]
            ops.append(norm("q norm", rank, residual + e * (latent + rope), "self_attn.q_a_layernorm.weight", e))
            name = "self_attn.q_b_proj.weight"
            ops.append(Op("q up", kept(rank, name), residual + e * (q + rank + latent + rope), full(name)))
        ops.append(norm("kv norm", latent, residual + e * (q + rope), "self_attn.kv_a_layernorm.weight", e))
        name = "self_attn.kv_b_proj.weight"
        ops.append(Op("kv up", kept(latent, name), residual + e * (3 * q + up + latent), full(name)))
        if load.flash:
            ops.append(
                Op("attention", e * (2 * q + up + out) + f * heads + load.mask, residual + e * (2 * out + 2 * q + up))
            )
    else:
        names = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
        biases = tuple(n.replace("weight", "bias") for n in names)
        ops.append(Op("qkv", kept(h, *names), residual + e * (q + k + v) + 2 * e * h, full(*names, *biases)))
        if "self_attn.q_norm.weight" in w:
            both = norm("", q + k, 0, "", e).saves - f + f * (heads + shape.kv_heads)
            ops.append(Op("qk norm", both, residual + e * (q + k + v) + 4 * f * q,
                          full("self_attn.q_norm.weight", "self_attn.k_norm.weight")))  # fmt: skip
        ops.append(Op("rope", 0, residual + e * (3 * q + k + v)))
        if load.flash:
            if load.isolated:  # with a mask transformers repeats the heads that several queries share
                k, v = heads * shape.qk_head_dim, heads * shape.v_head_dim
            ops.append(
                Op("attention", e * (q + k + v + out) + f * heads + load.mask, residual + e * (2 * out + q + k + v))
            )
    if not load.flash:
        scores = f * heads * load.attended
        values = f * heads * shape.v_head_dim if e < f else e * w.get("self_attn.kv_b_proj.weight", (v,))[0]
        # torch's plain attention scales q and k into fp32 copies and keeps the softmax; its backward makes two more.
        ops.append(Op("attention", scores + 2 * f * q + values + e * out, residual + 2 * scores + 2 * f * q + f * out))
    name = "self_attn.o_proj.weight"
    o_input = kept(out, name) if load.adapter is not None else 0  # attention has saved its output already
    ops.append(Op("output", max(0, o_input - e * out), residual + e * out + e * h,
                  full(name, "self_attn.o_proj.bias")))  # fmt: skip

    # -- feed-forward
    ops.append(norm("post norm", h, residual, "post_attention_layernorm.weight", stream))

    def mlp(width: float, prefix: str, shares_input: bool = False) -> Iterator[Op]:
        gate, up, down = (f"{prefix}{n}_proj.weight" for n in ("gate", "up", "down"))
        # In backward order: down, product, up, activation, gate.
        into = kept(h, gate, up) if not shares_input else kept(h, gate, up) - (0 if load.adapter else e * h)
        yield Op("gate", into, residual + e * width + 3 * e * h, full(gate, f"{prefix}gate_proj.bias"))
        yield Op("activation", e * width, residual + 2 * e * width + e * h)
        yield Op("up", 0, residual + 2 * e * width + e * h, full(up, f"{prefix}up_proj.bias"))
        yield Op("product", 2 * e * width, residual + 3 * e * width)
        yield Op("down", kept(width, down), residual + e * width + e * h, full(down, f"{prefix}down_proj.bias"))

    if EXPERTS[0] not in w:
        dense = list(mlp(w["mlp.gate_proj.weight"][0], "mlp."))
        ops += dense if load.tiled_mlp == 1 else [_tiled(load, dense, residual)]
        return ops
    experts, twice, _ = w[EXPERTS[0]]
    width, chosen = twice // 2, shape.experts_per_token
    waiting = residual + e * h
    trained = 0 if load.adapter is not None else 1
    # Adapted experts are computed with a copy of their fused weights to which the adapter's product is added (peft's
    # ParamWrapper); the copy is saved, and its gradient is as large.
    own = load.adapter is not None and load.adapter.experts
    merged = [e * math.prod(w[name]) / load.tokens if own else 0 for name in EXPERTS]
    trained_input = 1 if own else trained
    ops += [
        # The router reads an fp32 copy; its scores, choices and the sorting of tokens by expert are small.
        Op("router", e * h * trained + (f * h * trained if e < f else 0) + 2 * f * experts + 6 * 8 * chosen,
           residual + 2 * f * experts + f * h, full("mlp.gate.weight")),
        Op("dispatch", 0, waiting + 2 * e * h * chosen),
        Op("experts up", e * h * chosen * trained_input + merged[0],
           waiting + 2 * e * width * chosen + e * h * chosen + merged[0], full(EXPERTS[0])),
        Op("experts activation", 2 * e * width * chosen, waiting + 5 * e * width * chosen),
        Op("experts product", e * width * chosen, waiting + 3 * e * width * chosen),
        Op("experts down", e * width * chosen * trained_input + merged[1],
           waiting + e * (h + width) * chosen + merged[1], full(EXPERTS[1])),
        Op("combine", e * h * chosen, residual + 3 * f * h * chosen),  # back to the order of tokens: one copy too many
    ]  # fmt: skip
    shared = w.get("mlp.shared_experts.down_proj.weight")
    if shared:
        ops += mlp(shared[1], "mlp.shared_experts.", shares_input=True)
    return ops


def _tiled(load: Workload, dense: list[Op], residual: float) -> Op:
    """A feed-forward in tiles: what enters is kept whole, and one tile at a time is computed again with all that it saves."""
    into, tiles = dense[0].saves, load.tiled_mlp
    h = load.element * load.shape.hidden_size
    each, fullest = sum(op.saves for op in dense) - into, 0.0
    for op in reversed(dense):
        fullest = max(fullest, each + op.work - residual)
        each -= op.saves
    # Beside the tile: the gradient that came in, the pieces of the one that goes out, before and after they are joined.
    return Op("feed-forward in tiles", into, residual + 2 * h + fullest / tiles, tuple(n for op in dense for n in op.weights))
