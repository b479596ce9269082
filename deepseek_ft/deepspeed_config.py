"""DeepSpeed files: read one, hold it against the recipe, and fill in what it leaves out.

The recipe is the one source of every value that both could state. A file may leave such a value "auto" or repeat
it; anything else is reported, all of it at once, before anything heavy is imported.
"""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config, resource_dir
from .errors import ConfigError

# Keys that DeepSpeed 0.19 reads. It ignores any other without a word, so a misspelt one is an error here.
_TOP = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer scheduler
    fp16 bf16 bfloat16 zero_optimization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print
    wall_clock_breakdown memory_breakdown dump_state communication_data_type seq_parallel_communication_data_type
    prescale_gradients gradient_predivide_factor gradient_allreduce_op disable_allgather activation_checkpointing aio
    flops_profiler comms_logger autotuning elasticity checkpoint data_types data_efficiency sparse_attention
    sparse_gradients torch_autocast tensor_parallel sequence_parallel_size compile compression_training
    dataloader_drop_last log_level managed_gradient_accumulation disable_python_gc nebula
    use_data_before_expert_parallelism zero_quantized_gradients pipeline hybrid_engine timers
    """.split()
_MONITORS = ("tensorboard", "wandb", "comet", "csv_monitor")
_ZERO = """
    stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
    allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint offload_param
    offload_optimizer zenflow sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
    ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_hpz_partition_size
    zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
    pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module
    save_muon_momentum_buffer_in_memory cpu_offload cpu_offload_param cpu_offload_use_pin_memory
    """.split()
_KNOWN = {
    "": _TOP,
    "zero_optimization": _ZERO,
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc".split(),
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory".split(),
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads".split(),
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
    "bf16_optimizer_states".split(),
    "optimizer": ["type", "params", "legacy_fusion"],
    "scheduler": ["type", "params"],
}
_TEXT = {"device", "nvme_path", "type", "warmup_type", "communication_data_type", "gradient_allreduce_op", "log_level"}
# What Trainer fills in (transformers 5.24, integrations/deepspeed.py); "auto" anywhere else stays a word.
_FILLED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    micro_batch_size: int
    grad_accum_steps: int
    world_size: int


def read(path_or_name: str) -> dict:
    """A DeepSpeed file, or a shipped one by its name from any directory.

    Raises:
        ConfigError: not there, not JSON, or a key given twice.
    """
    shipped = resource_dir("ds_configs")
    candidates = [Path(path_or_name), shipped / Path(path_or_name).name, shipped / f"{path_or_name}.json"]
    path = next((p for p in candidates if p.is_file()), None)
    if path is None:
        names = ", ".join(sorted(p.stem for p in shipped.glob("*.json")))
        raise ConfigError(f"deepspeed: there is no file {path_or_name!r}; shipped ones: {names}")

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict:
        keys = [k for k, _ in pairs]
        twice = sorted({k for k in keys if keys.count(k) > 1})
        if twice:
            raise ConfigError(f"{path}: {', '.join(twice)} given twice; keep one")
        return dict(pairs)

    try:
        ds = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno} is not valid JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(ds, dict):
        raise ConfigError(f"{path} holds a {type(ds).__name__}; a DeepSpeed file is one JSON object")
    return ds


def _number(text: str) -> int | float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() and "." not in text and "e" not in text.lower() else value


def _walk(node: Any, prefix: str = "") -> Iterator[tuple[dict, str, str, Any]]:
    for key, value in list(node.items()):
        yield node, key, f"{prefix}{key}", value
        if isinstance(value, dict):
            yield from _walk(value, f"{prefix}{key}.")


def _get(ds: dict, dotted: str) -> Any:
    node: Any = ds
    for part in dotted.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _owned_by_recipe(config: Config, batch: Batch) -> dict[str, tuple[Any, str]]:
    """DeepSpeed key -> (the recipe's value, what the recipe calls it)."""
    optim = config.optim
    return {
        "train_micro_batch_size_per_gpu": (batch.micro_batch_size, "train.micro_batch_size"),
        "gradient_accumulation_steps": (batch.grad_accum_steps, "train.grad_accum_steps"),
        "train_batch_size": (batch.micro_batch_size * batch.grad_accum_steps * batch.world_size,
                             f"micro batch x accumulation x {batch.world_size} ranks"),
        "gradient_clipping": (optim.max_grad_norm, "optim.max_grad_norm"),
        "fp16.enabled": (config.train.precision == "fp16", f"train.precision={config.train.precision}"),
        "bf16.enabled": (config.train.precision == "bf16", f"train.precision={config.train.precision}"),
        "optimizer.params.lr": (optim.lr, "optim.lr"),
        "optimizer.params.betas": (list(optim.betas), "optim.betas"),
        "optimizer.params.eps": (optim.eps, "optim.eps"),
        "optimizer.params.weight_decay": (optim.weight_decay, "optim.weight_decay"),
        "scheduler.params.warmup_max_lr": (optim.lr, "optim.lr"),
        "scheduler.params.warmup_min_lr": (0, "warm-up starts at 0"),
        "scheduler.params.warmup_num_steps": (max(1, optim.warmup_steps or 0) if optim.warmup_ratio is None else None,
                                              "optim.warmup_steps" if optim.warmup_ratio is None else
                                              f"optim.warmup_ratio={optim.warmup_ratio}"),
        "scheduler.params.total_num_steps": (None, "the planned number of steps"),
    }  # fmt: skip


def _curve_conflict(ds: dict, config: Config) -> str | None:
    """A scheduler block replaces the recipe's curve in silence, so it may only say the same thing."""
    block = ds.get("scheduler")
    if not isinstance(block, dict):
        return None
    kind, params = block.get("type"), block.get("params") or {}
    ramp = params.get("warmup_type", "log")
    optim = config.optim
    same = {
        "WarmupLR": optim.schedule == "warmup" and ramp == optim.warmup_type,
        "WarmupDecayLR": optim.schedule == "linear" and ramp == optim.warmup_type and optim.min_lr_ratio == 0,
    }
    if same.get(kind):
        return None
    means = {
        "WarmupLR": f"a {ramp} warm-up, then flat for good",
        "WarmupDecayLR": f"a {ramp} warm-up, then linear to 0",
    }.get(kind, "a curve of its own")
    warm = f" with a {optim.warmup_type} warm-up" if optim.warmup_steps or optim.warmup_ratio else ""
    return (f"scheduler: the file's {kind} ({means}) would replace the recipe's optim.schedule={optim.schedule}{warm}; "
            "drop the scheduler block, or say the same in the recipe")  # fmt: skip


def check(ds: dict, origin: str, config: Config, batch: Batch) -> tuple[dict, list[str], list[str]]:
    """Hold a DeepSpeed dict against a recipe.

    Returns:
        The completed dict (a copy), the problems that must stop the run, and notes on what was added or is odd.
    """
    ds = copy.deepcopy(ds)
    problems: list[str] = []
    notes: list[str] = []

    for holder, key, dotted, value in _walk(ds):
        section = dotted.rpartition(".")[0]
        if section in _KNOWN and key not in _KNOWN[section]:
            if section == "" and key in _MONITORS:
                problems.append(f"{dotted}: DeepSpeed's monitors log the last micro-batch only, which is not the step's "
                                "loss; drop the block, metrics.jsonl has every number")  # fmt: skip
                continue
            near = difflib.get_close_matches(key, _KNOWN[section], n=1)
            hint = f"did you mean {near[0]}?" if near else "drop it."
            problems.append(f"{dotted}: DeepSpeed has no such key and would ignore it; {hint}")
        elif value == "auto" and dotted not in _FILLED:
            problems.append(f'{dotted}: "auto" is filled in by nothing; give a value or drop the key')
        elif isinstance(value, str) and key not in _TEXT and value != "auto":
            number = _number(value)
            if number is not None:
                holder[key] = number
                notes.append(f"{origin}: {dotted} is the text {value!r}; read as the number {number}")
            elif value.lower() in ("true", "false"):
                holder[key] = value.lower() == "true"
                notes.append(f"{origin}: {dotted} is the text {value!r}; read as {holder[key]}")

    for section in ("zero_optimization", "fp16", "bf16", "optimizer", "scheduler"):
        if section in ds and not isinstance(ds[section], dict):
            problems.append(f"{section}: expects a JSON object, got {ds[section]!r}")
            ds.pop(section)

    for dotted, (wanted, name) in _owned_by_recipe(config, batch).items():
        found = _get(ds, dotted)
        if found is None or found == "auto":
            continue
        if wanted is None:
            problems.append(f'{dotted}: {found} is fixed in the file, but follows from {name}; write "auto"')
            continue
        if isinstance(wanted, bool) or isinstance(found, bool):
            equal = found is wanted
        elif isinstance(wanted, list):
            equal = isinstance(found, list) and [float(x) for x in found] == [float(x) for x in wanted]
        else:
            equal = isinstance(found, (int, float)) and float(found) == float(wanted)
        if not equal:
            problems.append(f'{dotted}: {found!r} in the file, but {wanted} in the recipe ({name}); write "auto"')

    kind = _get(ds, "optimizer.type")
    if kind is not None and str(kind).lower() not in ("adam", "adamw"):
        problems.append(f"optimizer.type: {kind!r} in the file, but the recipe trains with AdamW")
    conflict = _curve_conflict(ds, config)
    if conflict:
        problems.append(conflict)

    stage = _get(ds, "zero_optimization.stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage: got {stage!r}; ZeRO has stages 0 to 3")
    scale = _get(ds, "fp16.loss_scale")
    if scale not in (None, 0) and config.train.precision == "fp16":
        notes.append(f"{origin}: fp16.loss_scale {scale} is static: it does not adapt when gradients overflow; 0 does")

    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        ds.setdefault(key, "auto")
    if "gradient_clipping" not in ds:  # absent means DeepSpeed's own 1.0, whatever the recipe says
        ds["gradient_clipping"] = "auto"
        notes.append(f"{origin}: has no gradient_clipping; the recipe's optim.max_grad_norm={config.optim.max_grad_norm} "
                     "is put in")  # fmt: skip
    for section in ("fp16", "bf16"):
        if config.train.precision == section and isinstance(ds.setdefault(section, {}), dict):
            ds[section].setdefault("enabled", "auto")
    if stage == 3 and not _get(ds, "zero_optimization.stage3_gather_16bit_weights_on_model_save"):
        ds["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        notes.append(f"{origin}: stage3_gather_16bit_weights_on_model_save is switched on; without it the model folder "
                     "would hold no model")  # fmt: skip
    return ds, [f"{p}  [{os.path.basename(origin)}]" for p in problems], notes
