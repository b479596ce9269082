"""How weights are updated: one row per choice of `optim.name`. The mathematics are those of torch and the packages named.

The table is arithmetic and reasons, which the planner needs without torch; `build` makes the optimizer itself.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError
from .strategies import Strategy

if TYPE_CHECKING:
    import torch

    from .config import OptimConfig

log = logging.getLogger(__name__)

ROUNDINGS = ("none", "stochastic", "plain")
"""What becomes of an update that is smaller than half a step of the weight's type, from the least harm to the most."""
BLOCK = 256
"""Elements that share a scale in bitsandbytes' 8-bit states (bitsandbytes/optim/optimizer.py)."""
SMALL = 4096
"""bitsandbytes keeps the states of smaller tensors in fp32 (min_8bit_size)."""
MUON_MOMENTUM = 0.95

States = Callable[[tuple[int, ...], bool, int, int], float]
"""(shape, whether it is a linear layer of the body, bytes of a moment's element, rank) -> bytes of a weight's states."""


# ------------------------------------------------------------------------------- bytes of one weight's states


def _two_moments(shape: tuple[int, ...], linear: bool, element: int, rank: int) -> float:
    return 2 * element * math.prod(shape)


def _eight_bits(shape: tuple[int, ...], linear: bool, element: int, rank: int) -> float:
    """Two moments of a byte each, an fp32 scale per block, and a table of 256 fp32 values each (arXiv:2110.02861 §2)."""
    numel = math.prod(shape)
    if numel < SMALL:
        return 8 * numel
    return 2 * (numel + 4 * math.ceil(numel / BLOCK) + 4 * 256)


def _one_momentum(shape: tuple[int, ...], linear: bool, element: int, rank: int) -> float:
    """Muon: one momentum for a matrix; AdamW's two moments for all else."""
    return (1 if linear else 2) * element * math.prod(shape)


def _factored(shape: tuple[int, ...], linear: bool, element: int, rank: int) -> float:
    """Adafactor: sums over rows and over columns instead of the second moment, and no first (arXiv:1804.04235 §3)."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])


def _low_rank(shape: tuple[int, ...], linear: bool, element: int, rank: int) -> float:
    """GaLore and APOLLO: moments of the projected gradient, and the projection (arXiv:2403.03507 §4, arXiv:2412.05270 §3)."""
    if not linear:
        return 2 * element * math.prod(shape)
    rank = min(rank, *shape)
    return element * rank * (2 * max(shape) + min(shape))


# ------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Optimizer:
    name: str
    summary: str
    states: States
    runs_as: str
    """The class that does it, after the package that it comes from."""
    package: str | None = None
    """What must be installed beside the library's own requirements, as it is imported; `pip` is what pip calls it."""
    pip: str | None = None
    options: tuple[str, ...] = ("betas", "eps")
    """Keys of `optim` that it knows beside lr, weight decay and clipping."""
    bf16_weights: bool = False
    """Writes bf16 weights and knows how to: a small update moves a weight with the probability that is its share of a step
    (stochastic rounding). The weights are then their own master."""
    by_matrix: bool = False
    """Looks at a weight as a matrix, which ZeRO's flat pieces are not."""
    on_host: bool = False
    """DeepSpeed has it for the CPU (DeepSpeedCPUAdam)."""
    depends_on_shapes: bool = False
    """Bytes per parameter are no constant."""
    temporary_bytes: int = 0
    """What the update works in beside states and gradients, per element of the largest tensor updated at once."""
    temporary_bytes_cpu: int | None = None
    """The same on the CPU, where it differs: what a card compiles into one kernel runs there operation by operation."""


# Temporaries are counted in tests/test_optimizers.py.
_ROWS = [
    Optimizer("adamw", "AdamW as published (arXiv:1711.05101); its states are kept as the master weights are: fp32, or bf16 under the "
              "*_bf16 strategies, where updates are then rounded to the nearest and the small ones lost",
              _two_moments, "torch.AdamW", on_host=True),
    Optimizer("adamw_bf16", "AdamW with bf16 states on bf16 weights, stochastic rounding: 4 B of states, no fp32 master weights",
              _two_moments, "torchao._AdamW", package="torchao", pip="torchao", bf16_weights=True, temporary_bytes_cpu=42),
    Optimizer("adamw_8bit", "AdamW with states of 8 bits in blocks of 256 (arXiv:2110.02861): 2 B of states",
              _eight_bits, "bitsandbytes.AdamW8bit", package="bitsandbytes", pip="bitsandbytes", temporary_bytes_cpu=36),
    Optimizer("paged_adamw_8bit", "as adamw_8bit, in memory that the driver moves to the host when the card is full",
              _eight_bits, "bitsandbytes.PagedAdamW8bit", package="bitsandbytes", pip="bitsandbytes", temporary_bytes_cpu=36),
    Optimizer("muon", "orthogonalised momentum for the linear layers, AdamW for all else (arXiv:2502.16982): 4 B of states",
              _one_momentum, "deepspeed.SingleDeviceMuonWithAuxAdam", by_matrix=True, depends_on_shapes=True, temporary_bytes=24),
    Optimizer("galore", "AdamW on gradients projected to a low rank by their singular vectors (arXiv:2403.03507)",
              _low_rank, "galore_torch.AdamW", package="galore_torch", pip="galore-torch",
              options=("betas", "eps", "rank", "update_proj_gap"), by_matrix=True, depends_on_shapes=True, temporary_bytes=16),
    Optimizer("apollo", "learning rates of channels from moments of randomly projected gradients (arXiv:2412.05270)",
              _low_rank, "apollo_torch.AdamW", package="apollo_torch", pip="apollo-torch",
              options=("betas", "eps", "rank", "update_proj_gap"), by_matrix=True, depends_on_shapes=True, temporary_bytes=16),
    Optimizer("adafactor", "second moments as row and column sums, no first moment (arXiv:1804.04235): hardly any states",
              _factored, "transformers.Adafactor", options=(), by_matrix=True, depends_on_shapes=True, temporary_bytes=8),
]  # fmt: skip

OPTIMIZERS: dict[str, Optimizer] = {row.name: row for row in _ROWS}


def resolve(name: str, strategy: Strategy) -> Optimizer:
    """`auto` is AdamW: with stochastic rounding where the strategy keeps bf16 master weights on the card, which would otherwise
    lose their small updates, and as published everywhere else."""
    if name == "auto":
        name = "adamw_bf16" if strategy.master_bytes == 2 and not strategy.offload_optimizer else "adamw"
    return OPTIMIZERS[name]


def keeps_bf16_weights(optimizer: Optimizer, strategy: Strategy) -> bool:
    """Plain PyTorch with bf16 weights and nothing beside them; otherwise it keeps fp32 weights and casts on the way."""
    return optimizer.bf16_weights and not strategy.deepspeed


def masters_apart(strategy: Strategy) -> bool:
    """The weights that the model computes with have masters elsewhere, and are of the recipe's precision."""
    return strategy.deepspeed or strategy.offload_optimizer


def rounding(optimizer: Optimizer, strategy: Strategy) -> str:
    """What becomes of small updates, one of `ROUNDINGS`."""
    if optimizer.bf16_weights:
        return "stochastic"
    return "plain" if strategy.master_bytes == 2 else "none"


def states_bytes(optimizer: Optimizer, weights: Mapping[str, tuple[tuple[int, ...], int]], element: int, rank: int) -> float:
    """Bytes of the states of all weights.

    Args:
        weights: name -> (shape, how many there are of it).
        element: bytes of an element of a moment, where the optimizer takes the weights' type.
    """
    return sum(count * optimizer.states(shape, is_linear(name, shape), element, rank) for name, (shape, count) in weights.items())


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is the matrix of a linear layer of the body, by transformers' names; `build` asks the module."""
    return len(shape) == 2 and name.endswith(("_proj.weight", "_mqa.weight"))


def refused(optimizer: Optimizer, strategy: Strategy, precision: str, method: str) -> Iterator[str]:
    """Why the two do not go together, each with what does."""
    said = f"optim.name={optimizer.name}"
    if optimizer.by_matrix and strategy.deepspeed:
        yield (f"{said} looks at whole matrices, and DeepSpeed updates flat pieces of them: strategy=ddp or single, or an "
               "AdamW (optim.name=adamw_8bit has the smallest states)")  # fmt: skip
    elif strategy.offload_optimizer and not optimizer.on_host:
        rounds = ", and rounds bf16 weights to the nearest" if optimizer.bf16_weights else ""
        yield (f"{said} does not run on the host, where DeepSpeedCPUAdam updates{rounds}: optim.name=adamw, or a strategy that "
               "keeps the optimizer on the card, such as zero3 or zero3_bf16")  # fmt: skip
    elif optimizer.bf16_weights:
        if precision != "bf16":
            yield f"{said} writes bf16 weights, got train.precision={precision}: optim.name=adamw, or train.precision=bf16"
        elif strategy.deepspeed and strategy.master_bytes != 2:
            yield (f"{said} writes bf16 weights, and {strategy.name} keeps fp32 master weights: strategy=zero3_bf16, ddp or "
                   "single, or optim.name=adamw")  # fmt: skip
        elif not strategy.deepspeed and method != "full":
            yield f"{said} writes bf16 weights, and adapters are trained in fp32: optim.name=adamw"
    elif strategy.master_bytes == 2 and optimizer.name != "adamw":
        yield (f"{said} rounds to the nearest, which loses small updates of the bf16 master weights of {strategy.name}: "
               "optim.name=adamw_bf16, or a strategy with fp32 master weights, such as zero3")  # fmt: skip
    if "rank" in optimizer.options and method != "full":
        yield f"{said} projects gradients to a low rank, which adapters have already: optim.name=adamw"


def check_installed(optimizer: Optimizer) -> None:
    """Raises:
    ConfigError: the package that it is in is not installed.
    """
    if optimizer.package is not None and importlib.util.find_spec(optimizer.package) is None:
        raise ConfigError(f"optim.name={optimizer.name} needs the package {optimizer.pip}, which is not installed: "
                          f"pip install {optimizer.pip}, or use optim.name=adamw")  # fmt: skip


def unknown_options(optim: OptimConfig) -> Iterator[str]:
    """Settings that the choice would ignore."""
    if optim.name not in OPTIMIZERS:  # auto is an AdamW; a wrong name is said elsewhere
        known = OPTIMIZERS["adamw"].options
    else:
        known = OPTIMIZERS[optim.name].options
    for key in ("betas", "eps", "rank", "update_proj_gap"):
        usual = getattr(type(optim)(), key)
        if key not in known and getattr(optim, key) != usual:
            who = [row.name for row in OPTIMIZERS.values() if key in row.options]
            yield (f"optim.{key}: {getattr(optim, key)} is nothing that optim.name={optim.name} knows (but {', '.join(who)} do); "
                   "leave it out")  # fmt: skip


# ------------------------------------------------------------------------------------------------- with torch


def share_master_weights(zero: Any) -> None:
    """Let ZeRO-3 update its shard of the weights themselves, where the master weights are of the same type and on the same device.

    DeepSpeed 0.19 means to do so (deepspeed/runtime/zero/stage3.py, _create_fp32_partitions), but compares a tensor's device
    with a device's name, which is never equal, and keeps a copy: 2 bytes per parameter in bf16. For before the first step.

    Args:
        zero: the engine's optimizer.
    """
    import torch

    for weights, master in zip(zero.fp16_partitioned_groups_flat, zero.fp32_partitioned_groups_flat, strict=True):
        if weights is None or (weights.dtype, weights.device, weights.numel()) != (master.dtype, master.device, master.numel()):
            continue  # of another type, or on the host or a disk
        # Bit by bit: a shard's padding was never written to, and a NaN in it would not be equal to itself.
        if not torch.equal(weights.view(torch.uint8), master.data.view(torch.uint8)):
            log.warning("note: ZeRO-3's master weights are not the weights before the first step; both are kept, which takes more memory "
                        "than was planned")  # fmt: skip
            return
        master.data = weights.data


def resume_from_disk(zero: Any, checkpoint: Path, rank: int) -> None:
    """Of `zero3_nvme`, what DeepSpeed 0.19 leaves out of a resumed run.

    It copies the files of master weights and moments back (runtime/engine.py, load_checkpoint) but not what says that they are
    there: the next step would begin with moments of zero, step 1 and another learning rate. What is too small for a file, weights and
    states, it does not read at all.

    Args:
        zero: the engine's optimizer.
        checkpoint: DeepSpeed's folder in it, `global_step<n>`.
    """
    import numpy as np
    import torch

    file = checkpoint / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    saved = torch.load(file, map_location="cpu", weights_only=False)["optimizer_state_dict"]
    zero.loss_scaler, zero.overflow = saved["loss_scaler"], saved["overflow"]
    inner = saved["optimizer_state_dict"]
    zero.checkpoint_event_prologue()  # no weight is whole anywhere, until the end
    for group, was in zip(zero.optimizer.param_groups, inner["param_groups"], strict=True):
        group.update({k: v for k, v in was.items() if k != "params"})  # the learning rate of the next step
    for i, master in enumerate(zero.fp32_partitioned_groups_flat):
        state = dict(inner["state"][i])
        on_disk = zero._swappable_optimizer_subgroup(i)
        if on_disk:
            zero._optimizer_states_and_gradient_swap_in(i, set())
            for name in ("exp_avg", "exp_avg_sq"):
                swapped = Path(zero.optimizer_swapper.swap_folder, f"{name}-{master.ds_id}.tensor.swp")
                state[name] = torch.from_numpy(np.fromfile(swapped, np.float32, master.numel()))  # a file is longer: whole blocks
        else:
            master.data.copy_(saved["fp32_flat_groups"][i])
        zero.optimizer.state[master] = state
        zero._reassign_or_swap_out_partitioned_parameters(i)  # the weights follow their master
        if on_disk:
            zero._optimizer_states_and_gradient_swap_out(i, set())
    zero.checkpoint_event_epilogue()  # those that every rank keeps whole


def build(optimizer: Optimizer, model: torch.nn.Module, decayed: set[str], optim: OptimConfig, strategy: Strategy,
          device: str) -> torch.optim.Optimizer:  # fmt: skip
    """The optimizer of a model's trainable weights, with weight decay on those named in `decayed` only.

    `adamw` on the card is not made here: it is Trainer's own.
    """
    import torch

    linears = _linears(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]

    def groups(chosen: Callable[[str], bool] = lambda name: True, **more) -> list[dict]:
        both = [
            {"params": [p for n, p in named if chosen(n) and (n in decayed) == decays], "weight_decay": decay, **more}
            for decays, decay in ((True, optim.weight_decay), (False, 0.0))
        ]
        return [group for group in both if group["params"]] or both[:1]  # of a pipeline's stage all may be frozen

    adam = {"lr": optim.lr, "betas": tuple(optim.betas), "eps": optim.eps}
    if optimizer.name == "adamw":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        if not strategy.deepspeed:
            from .host_adam import HostAdamW

            return HostAdamW(groups(), **adam)
        return DeepSpeedCPUAdam(groups(), **adam, adamw_mode=True, fp32_optimizer_states=strategy.moment_bytes == 8)
    if device == "cpu":  # torchao and DeepSpeed's Muon compile their updates: minutes of a core, for nothing
        torch.compiler.set_stance("force_eager")
    if optimizer.name == "adamw_bf16":
        from torchao.optim import _AdamW

        return _AdamW(groups(), **adam, bf16_stochastic_round=True)
    if optimizer.name in ("adamw_8bit", "paged_adamw_8bit"):
        import bitsandbytes

        cls = bitsandbytes.optim.PagedAdamW8bit if optimizer.name.startswith("paged") else bitsandbytes.optim.AdamW8bit
        return cls(groups(), **adam)
    if optimizer.name == "muon":
        from deepspeed.runtime.zero.muon.original_muon import SingleDeviceMuonWithAuxAdam

        shapes = sorted({tuple(p.shape) for n, p in named if n in linears})
        of_shape = {shape: {n for n, p in named if n in linears and tuple(p.shape) == shape} for shape in shapes}
        return SingleDeviceMuonWithAuxAdam([
            *groups(lambda n: n not in linears, use_muon=False, **adam),
            *(group for shape in shapes for group in groups(of_shape[shape].__contains__, use_muon=True, momentum=MUON_MOMENTUM,
                                                            ns_method="standard", lr=optim.lr * _muon_scale(shape)))
        ])  # fmt: skip
    if optimizer.name == "adafactor":
        from transformers import Adafactor

        return Adafactor(groups(), lr=optim.lr, scale_parameter=False, relative_step=False)
    if optimizer.name == "galore":
        from galore_torch import GaLoreAdamW
        from galore_torch.galore_projector import GaLoreProjector as Projector

        cls, more = GaLoreAdamW, {"scale": 0.25, "proj_type": "std"}
        adam["no_deprecation_warning"] = True
    else:
        from apollo_torch import APOLLOAdamW
        from apollo_torch.random_projector import GradientProjector as Projector

        cls, more = APOLLOAdamW, {"scale": 1.0, "scale_type": "channel", "proj": "random", "proj_type": "std"}
        adam["no_deprecation_warning"] = True
    torch.serialization.add_safe_globals([Projector])  # a checkpoint holds them, and is read without running code
    low_rank = {"rank": optim.rank, "update_proj_gap": optim.update_proj_gap, **more}
    return cls([*groups(lambda n: n not in linears), *groups(linears.__contains__, **low_rank)], **adam)


def _linears(model: torch.nn.Module) -> set[str]:
    """Names of the weights of all linear layers but the head."""
    import torch

    head = model.get_output_embeddings()
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head}


def _muon_scale(shape: tuple[int, ...]) -> float:
    """What makes Muon's step as long as AdamW's at the same learning rate, so that recipes keep theirs: 0.2 sqrt(max(rows,
    columns)) (arXiv:2502.16982 §2.2), over the sqrt(max(1, rows / columns)) that DeepSpeed's own applies."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) / math.sqrt(max(1, rows / columns))
