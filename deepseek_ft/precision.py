"""Numbers that a type cannot hold: found before the first step, named when they appear, and never trained on.

A step whose gradients are not finite is no training. Under fp16 it is left out, counted, and the loss scale goes down; at
the smallest scale, and in every other precision at once, the run ends. What is said is where the first number that is not
finite came from: the step's own rows go through the model once more, forward only, with every module watched. That happens
once or twice in a run, so no step pays for it.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .errors import CheckpointError, RunError
from .ranks import from_all

if TYPE_CHECKING:
    from .config import Config
    from .losses import Head
    from .optimizers import Optimizer
    from .strategies import Strategy
    from .trainer import FineTuneTrainer

FP16_END = 65504.0
"""The largest number that fp16 holds; what is 65,520 or more becomes infinite."""
STATIC_PATIENCE = 10
"""Steps in a row that a static loss scale may fail at: it does not adapt, so the next would fail as well."""
log = logging.getLogger(__name__)


def name_of(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


# --------------------------------------------------------------------------------- weights, before the first step


def check_weights(model: nn.Module, config: Config, source: str) -> None:
    """Hold the loaded weights against the run's precision: one pass over what this rank has in memory, no copy.

    Under ZeRO-3 each rank looks at its shard, and all of them know what any of them found.

    Raises:
        CheckpointError: a weight is NaN or infinite, or is beyond what fp16 holds in an fp16 run.
    """
    limit = FP16_END if config.train.precision == "fp16" else math.inf
    wrong = sorted({name for names in from_all([n for n, t in _held(model) if not _fits(t, limit)]) for name in names})
    if not wrong:
        return
    told = list(_in_files(source, limit)) or [f"{name} holds a number that is not finite" for name in wrong]
    broken = [line for line in told if "not finite" in line]
    told = broken or told
    found = "".join(f"\n  {line}" for line in told[:5]) + (f"\n  and {len(told) - 5} more tensors" if len(told) > 5 else "")
    if broken or config.train.precision != "fp16":
        raise CheckpointError(f"the weights in {source} hold numbers that are not finite, and a training that starts from them cannot "
                              f"learn:{found}\n  The file is damaged, or the run that wrote it had diverged: get it anew, or take an "
                              "earlier checkpoint")  # fmt: skip
    raise CheckpointError(f"the weights in {source} do not fit train.precision=fp16, which ends at 65,504; in it they become "
                          f"infinite:{found}\n  Use train.precision=bf16 (RTX 30 and 40 cards have it), or fp32")  # fmt: skip


def _held(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and floating-point numbers that this rank holds."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        shard = getattr(tensor, "ds_tensor", None)
        if shard is not None:
            # The last shard is padded with whatever was in that memory.
            mine = min(shard.numel(), max(0, tensor.ds_numel - rank * shard.numel()))
            tensor = shard.flatten()[:mine]
        if tensor.is_floating_point() and tensor.numel() and tensor.element_size() > 1 and not tensor.is_meta:
            yield name, tensor.detach()


def _fits(tensor: torch.Tensor, limit: float) -> bool:
    """Whether all numbers are finite and none is beyond the limit; `aminmax` hands a NaN on."""
    low, high = (float(x) for x in torch.aminmax(tensor))
    return math.isfinite(low) and math.isfinite(high) and max(-low, high) <= limit


def _in_files(source: str, limit: float) -> Iterator[str]:
    """What is wrong with the tensors of a folder's safetensors files, one line each: only for an error's words."""
    from safetensors import safe_open

    for path in sorted(Path(source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or not tensor.numel() or _fits(tensor, limit):
                    continue
                broken = ~torch.isfinite(tensor)
                if count := int(broken.sum()):
                    nan = int(torch.isnan(tensor).sum())
                    yield f"{name}: {count:,} of {tensor.numel():,} values are not finite ({nan:,} NaN, {count - nan:,} infinite)"
                    continue
                beyond = tensor.abs() > limit
                largest = float(tensor.abs().max())
                count = int(beyond.sum())
                yield f"{name}: {count:,} of {tensor.numel():,} values {'are' if count > 1 else 'is'} beyond it, the largest {largest:,.0f}"


# -------------------------------------------------------------------------------- where the first of them came from


@dataclass(frozen=True)
class Origin:
    """Where a forward pass first held a number that is not finite."""

    module: str | None
    """None: every output is finite, so it happened in the backward pass."""
    entered: bool = False
    """It was there already in what came in: made between modules, as in attention's own arithmetic."""
    rank: int = 0
    row: int = 0
    """Of the rank's rows in this step."""
    text: str = ""
    """What the document around it begins with."""

    def __str__(self) -> str:
        if self.module is None:
            return "every output of the forward pass is finite: it happened in the backward pass"
        what = f"first non-finite output: {self.module}"
        return what + (", whose input is not finite already: it was made just before it" if self.entered else "")

    @property
    def where(self) -> str:
        return f"rank {self.rank}, row {self.row + 1} of its rows in this step" + (
            f", in the document that begins {self.text!r}" if self.text else ""
        )


def _floats(things: Any) -> Iterator[torch.Tensor]:
    if isinstance(things, torch.Tensor):
        if things.is_floating_point() and things.numel():
            yield things
    elif isinstance(things, dict):
        yield from _floats(list(things.values()))
    elif isinstance(things, (list, tuple)):
        for thing in things:
            yield from _floats(thing)


def _bad(tensors: Iterable[torch.Tensor], tokens: int) -> torch.Tensor | None:
    """(tokens,) whether a number of that token is not finite; (1,) where the tensor has another layout."""
    found = None
    for tensor in tensors:
        each = tokens if tensor.numel() % tokens == 0 else 1
        bad = ~torch.isfinite(tensor).reshape(each, -1).all(dim=1)
        found = bad if found is None or found.shape != bad.shape else found | bad
    return found


@torch.no_grad()
def find_origin(model: nn.Module, wrapped: Any, batches: Sequence[dict], device: torch.device, head: Head | None = None,
                decode=None) -> Origin:  # fmt: skip
    """Run a step's rows through the model once more, forward only, and name the first module whose output is not finite.

    Collective: every rank calls it with as many batches, for under ZeRO-3, and under DDP, a forward pass is.

    Args:
        model: whose modules are watched.
        wrapped: what is called: the engine.
        decode: ids -> text, for the words about the row.
    """
    seen: list[tuple[str, torch.Tensor, torch.Tensor | None]] = []
    tokens = 1

    def watch(name: str):
        def after(module, args, kwargs, output):
            bad = _bad(_floats(output), tokens)
            if bad is not None:
                came_in = _bad(_floats([args, kwargs]), tokens)
                seen.append((name, bad, came_in))

        return after

    hooks = [m.register_forward_hook(watch(n), with_kwargs=True) for n, m in model.named_modules() if n]
    was_training = wrapped.training
    wrapped.eval()  # no dropout, nothing recomputed
    first: Origin | None = None
    order, rank = -1, dist.get_rank() if dist.is_initialized() else 0
    try:
        rows = 0
        for batch in batches:
            batch = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
            labels = batch.pop("labels")
            tokens = labels.numel()
            seen.clear()
            with head.scoring(labels) if head is not None else contextlib.nullcontext():
                wrapped(**batch, use_cache=False)
            if first is None:
                order = next((i for i, (_, bad, _) in enumerate(seen) if bool(bad.any())), -1)
                if order >= 0:
                    name, bad, came_in = seen[order]
                    at = int(bad.int().argmax()) if bad.numel() == tokens else 0
                    row, column = divmod(at, labels.shape[-1])
                    entered = came_in is not None and bool(came_in.any())
                    first = Origin(name, entered, rank, rows + row, _document(batch, row, column, decode))
            rows += labels.shape[0]
    finally:
        for hook in hooks:
            hook.remove()
        if was_training:
            wrapped.train()
    # The earliest in the pass of all ranks: they run the same modules in the same order, or one stage after another.
    stage = getattr(wrapped, "stage", None)
    found = [pair for pair in from_all(((stage.index if stage else 0, order), first)) if pair[1] is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else Origin(None)


def _document(batch: dict, row: int, column: int, decode, length: int = 24) -> str:
    """How the document around a position begins."""
    if decode is None:
        return ""
    begin = 0
    if "position_ids" in batch:
        starts = torch.nonzero(batch["position_ids"][row, : column + 1] == 0).flatten()
        begin = int(starts[-1]) if len(starts) else 0
    text = decode(batch["input_ids"][row, begin : begin + length].tolist())
    return text[:60] + "…" * (len(text) > 60)


# ------------------------------------------------------------------------------------------------- while it trains


class Numbers:
    """Of a run: which steps were no training, and why."""

    def __init__(self, trainer: FineTuneTrainer):
        self.trainer = trainer
        self.precision = trainer.config.train.precision
        self.skipped = 0
        """Steps without an update so far, those before a resume among them."""
        self.origin: Origin | None = None
        """Of the first overflow; or of the first in the forward pass, if there was one."""
        self.in_a_row = 0
        self._before: torch.Tensor | None = None
        self._since_logged = self._logged_step = 0
        self._scale: float | None = None
        self._patience = 1

    # ------------------------------------------------------------------------------- what the engine says

    def begin(self) -> None:
        """Once everything is wrapped: from here on the end at the smallest scale is ours to say, in words."""
        scaler = self._scaler()
        if hasattr(scaler, "raise_error_at_min_scale"):
            scaler.raise_error_at_min_scale = False
        self._scale, self._patience = self.loss_scale, getattr(scaler, "cur_hysteresis", 1)
        self._logged_step = self.trainer.state.global_step

    def _scaler(self) -> Any:
        """DeepSpeed's loss scaler, or torch's; None where losses are not scaled."""
        if self.precision != "fp16":
            return None
        engine = getattr(self.trainer.model_wrapped, "optimizer", None)
        for owner, name in ((engine, "loss_scaler"), (engine, "loss_scale_config"), (self.trainer.accelerator, "scaler")):
            if (scaler := getattr(owner, name, None)) is not None:
                return scaler  # of ZeRO, of stage 0, of torch
        return None

    @property
    def loss_scale(self) -> float | None:
        """None where losses are not scaled."""
        scaler = self._scaler()
        if scaler is None:
            return None
        return float(scaler.cur_scale if hasattr(scaler, "cur_scale") else scaler.get_scale())

    # ------------------------------------------------------------------------------------- step by step

    def begin_step(self) -> None:
        """Before the first micro-batch: what the loss of a step that is left out is taken back to."""
        if self.precision == "fp16":
            self._before = self.trainer._tr_loss.clone()

    def check(self, norm: float | None) -> None:
        """After the gradients of a step are known, the same on all ranks: before plain PyTorch's update, and after DeepSpeed's,
        which has left it out by itself.

        Raises:
            RunError: they are not finite, and it is not fp16 with a scale that can go down.
        """
        if norm is None or math.isfinite(norm):
            self.in_a_row = 0
            self._scale, self._patience = self.loss_scale, getattr(self._scaler(), "cur_hysteresis", 1)
            return
        self.in_a_row += 1
        step = self.trainer.state.global_step + 1
        if self.precision != "fp16":
            self._locate()
            raise RunError(self._diverged(step))
        before, self._scale = self._scale, self.loss_scale
        patience, self._patience = self._patience, getattr(self._scaler(), "cur_hysteresis", 1)
        broken_loss = any(from_all(not bool(torch.isfinite(self.trainer._tr_loss))))
        self._leave_out()
        scaler = self._scaler()
        smallest = getattr(scaler, "min_scale", getattr(scaler, "min_loss_scale", None)) or 1.0
        static = not getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", True))
        ends = self.in_a_row >= STATIC_PATIENCE if static or before is None else before <= smallest and patience <= 1
        if self.origin is None or (self.origin.module is None and (broken_loss or ends)):
            self._locate()
            now = "" if static or before == self._scale else f" -> {self._scale:g}"
            if self.trainer.args.process_index == 0:
                log.info("step %d: gradients overflowed (loss scale %g%s), no update; %s", step, before or 0, now, self.origin)
        if ends:
            raise RunError(self._at_the_end(step, static))

    def _leave_out(self) -> None:
        trainer = self.trainer
        self.skipped += 1
        self._since_logged += 1
        trainer.tokens -= trainer.step_tokens
        trainer.target_tokens -= trainer.step_targets
        if self._before is not None:
            trainer._tr_loss.copy_(self._before)

    def _locate(self) -> None:
        trainer = self.trainer
        tokenizer = trainer.processing_class
        with trainer.autocast_smart_context_manager():
            self.origin = find_origin(
                trainer.model, trainer.model_wrapped, trainer.step_batches, trainer.args.device, trainer.head,
                tokenizer.decode if tokenizer is not None else None,
            )  # fmt: skip

    def logged(self, logs: dict[str, float]) -> dict[str, float]:
        """Trainer's figures without the steps that were left out; no loss where all of them were."""
        steps = self.trainer.state.global_step - self._logged_step
        trained = steps - self._since_logged
        self._logged_step, since, self._since_logged = self.trainer.state.global_step, self._since_logged, 0
        if not since:
            return logs
        logs = dict(logs)
        if trained > 0:
            logs["loss"] = logs["loss"] * steps / trained
        else:
            del logs["loss"]
        if not math.isfinite(logs.get("grad_norm") or 0.0):
            logs["grad_norm"] = None
        return logs

    # ------------------------------------------------------------------------------------------ in words

    def _cause(self) -> str:
        if self.origin is None or self.origin.module is None:
            return f"  {self.origin}\n"
        return f"  {self.origin} ({self.origin.where})\n"

    def _diverged(self, step: int) -> str:
        trainer, optim = self.trainer, self.trainer.config.optim
        loss = float(trainer._tr_loss)
        what = f"the loss is {loss} at step {step}" if not math.isfinite(loss) else f"the gradients of step {step} are not finite"
        return (f"{what}: nothing after this would be training. The weights are still those of step {step - 1}\n{self._cause()}"
                f"  Lower optim.lr ({optim.lr:g}), warm up longer, keep optim.max_grad_norm ({optim.max_grad_norm:g}) at 1, and look at "
                "these rows: `deepseek-ft data show`")  # fmt: skip

    def _at_the_end(self, step: int, static: bool) -> str:
        scale = f"{self._scale or 1:g}"
        what = (f"the loss scale is static ({scale}), and it failed {self.in_a_row} times in a row: set fp16.loss_scale to 0, which "
                "adapts" if static else f"the loss scale is at its smallest ({scale}) and cannot go down further")  # fmt: skip
        forward = self.origin is not None and self.origin.module is not None
        why = ("  A number beyond 65,504 in the forward pass is none that a loss scale could mend" if forward
               else "  The gradients themselves are beyond 65,504")  # fmt: skip
        return (f"step {step}: gradients overflowed again in fp16, and {what}. {self.skipped} of {step} steps were left out\n"
                f"{self._cause()}{why}. Use train.precision=bf16, which has the range of fp32 (RTX 30 and 40 cards have it); or lower "
                f"optim.lr ({self.trainer.config.optim.lr:g}), and check the data and the weights")  # fmt: skip


# --------------------------------------------------------------------------------------------- which types really run


def types_in_use(trainer: FineTuneTrainer) -> dict[str, str | None]:
    """The type of everything that is trained with, read off the wrapped model.

    `products` is what matrix products are computed in, `master` what updates are added to, `states` the optimizer's
    moments (None until they exist), `communication` what gradients are exchanged in (None: there is nobody).
    """
    engine, optimizer = trainer.model_wrapped, getattr(trainer.model_wrapped, "optimizer", None)
    own = [p for p in trainer.model.parameters() if p.requires_grad]
    frozen = [p for p in trainer.model.parameters() if not p.requires_grad]
    parameters = _types(own)
    products = gradients = master = communication = parameters
    if hasattr(engine, "zero_optimization_stage"):
        communication = name_of(engine.communication_data_type)
        gradients = name_of(engine.get_data_types()[1])
        if engine.zero_optimization_stage() == 3:
            master = _types(optimizer.fp32_partitioned_groups_flat)
            gradients = name_of(optimizer.grad_partitions_flat_buffer.dtype)
            communication = name_of(optimizer.communication_data_type)
        elif engine.zero_optimization_stage() in (1, 2):
            master = _types(optimizer.single_partition_of_fp32_groups)
        elif hasattr(optimizer, "fp32_groups_flat"):
            master = _types(optimizer.fp32_groups_flat)
        communication = communication if engine.dp_world_size > 1 else None
        inner = getattr(optimizer, "optimizer", optimizer)
    else:
        products = trainer.config.train.precision if trainer.accelerator.mixed_precision != "no" else parameters
        communication = parameters if trainer.args.world_size > 1 else None
        inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if hasattr(inner, "masters"):  # HostAdamW
            gradients, master, products, inner = "fp32", _types(inner.masters), parameters, inner.inner
    states = [t for state in inner.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.numel() > 1]
    found = {
        "parameters": parameters,
        "frozen": _types(frozen),
        "buffers": _types(b for b in trainer.model.buffers() if b.is_floating_point()),
        "products": products,
        "gradients": gradients,
        "master": master,
        "states": _types(states),
        "communication": communication,
    }
    return found


def _types(tensors: Iterable[torch.Tensor]) -> str | None:
    """`fp32`, or `bf16 and fp32` where there are several; the most frequent first."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        name = name_of(tensor.dtype)
        size = getattr(tensor, "ds_numel", tensor.numel())
        counts[name] = counts.get(name, 0) + size
    return " and ".join(sorted(counts, key=lambda name: -counts[name])) or None


def describe_types(types: dict[str, str | None]) -> str:
    """One line; what there is none of is left out. Torch's AdamW makes its states at the first update, in the type of
    what it updates."""
    told = dict(types)
    told["states"] = types["states"] or types["master"]
    return " | ".join(f"{name} {kind}" for name, kind in told.items() if kind is not None)


def check_types(types: dict[str, str | None], optimizer: Optimizer, strategy: Strategy) -> list[str]:
    """What differs from the plan: updates would be lost in a type that is too short.

    Single weights may be wider than planned: transformers keeps V3's routers in fp32 in a model of bf16.
    """
    allowed = {"bf16": ("bf16", "bf16 and fp32"), "fp32": ("fp32",)}
    wanted = {"master": "bf16" if optimizer.bf16_weights or strategy.master_bytes == 2 else "fp32"}
    if optimizer.name in ("adamw", "adamw_bf16"):  # the others' states are of a type of their own, or of several
        wanted["states"] = "bf16" if optimizer.bf16_weights or strategy.moment_bytes == 4 else "fp32"
    return [f"{name} is {types[name]}, planned {kind}" for name, kind in wanted.items() if types[name] not in (None, *allowed[kind])]
