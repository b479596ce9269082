"""DeepSpeed files: read one, hold it against the recipe, and fill in what it leaves out.

The recipe is the one source of every value that both could state. A file may leave such a value "auto" or repeat
it; anything else is reported, all of it at once, before anything heavy is imported.
"""

from __future__ import annotations

import copy
import difflib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import Config
from .errors import ConfigError
from .recipe import resource_dir

# Keys that DeepSpeed 0.19 reads and that make sense under Trainer, with the kind of value each takes. DeepSpeed ignores
# any other key without a word, so a misspelt one is an error here. "count" is a whole number of at least 0.
_KEYS: dict[str, dict[str, str]] = {
    "": {
        "count": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print",
        "number": "gradient_clipping gradient_predivide_factor",
        "switch": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown dump_state "
        "prescale_gradients disable_allgather sparse_gradients dataloader_drop_last disable_python_gc",
        "text": "communication_data_type seq_parallel_communication_data_type log_level",
        "object": "optimizer scheduler fp16 bf16 zero_optimization activation_checkpointing aio flops_profiler comms_logger "
        "checkpoint data_types compile timers",
    },
    "zero_optimization": {
        "count": "stage reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_module_granularity_threshold zero_hpz_partition_size",
        "switch": "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm "
        "compute_grad_norm load_from_fp32_weights elastic_checkpoint stage3_gather_16bit_weights_on_model_save "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory",
        "object": "offload_param offload_optimizer zenflow leaf_module",
        "any": "parameter_alignment",
    },
    "zero_optimization.offload_optimizer": {
        "device": "device",
        "text": "nvme_path",
        "count": "buffer_count",
        "number": "ratio cpuadam_cores_perc",
        "switch": "pin_memory pipeline_read pipeline_write fast_init super_offload",
    },
    "zero_optimization.offload_param": {
        "device": "device",
        "text": "nvme_path",
        "count": "buffer_count buffer_size max_in_cpu",
        "switch": "pin_memory",
    },
    "fp16": {
        "switch": "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        "count": "initial_scale_power loss_scale_window hysteresis",
        "number": "loss_scale min_loss_scale",
    },
    "bf16": {"switch": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"},
    "optimizer": {"text": "type", "object": "params", "switch": "legacy_fusion"},
    "optimizer.params": {"number": "lr eps weight_decay", "any": "betas", "switch": "torch_adam adam_w_mode bias_correction"},
    "scheduler": {"text": "type", "object": "params"},
    "scheduler.params": {"number": "warmup_min_lr warmup_max_lr", "count": "warmup_num_steps total_num_steps", "text": "warmup_type"},
}  # fmt: skip
_KINDS = {
    section: {key: kind for kind, keys in kinds.items() for key in keys.split()} for section, kinds in _KEYS.items()
}
_EXPECTED = {
    "count": "a whole number of at least 0", "number": "a number of at least 0", "switch": "true or false", "text": "text",
    "object": "a JSON object", "device": "one of none, cpu, nvme",
}  # fmt: skip
# Keys that exist, but that would quietly train something else than the recipe says.
_REFUSED = {
    "tensorboard": "DeepSpeed's monitors log the last micro-batch only, which is not the step's loss; metrics.jsonl has every number",
    "torch_autocast": "it would set a precision beside the recipe's train.precision",
    "amp": "it would set a precision beside the recipe's train.precision",
    "gradient_allreduce_op": "gradients are averaged over target tokens; another reduction scales them by the number of ranks",
    "elasticity": "it would change the batch behind the recipe's back",
    "tensor_parallel": "ranks would no longer be what the batch arithmetic counts; strategy=tensor is told what these models need",
    "sequence_parallel_size": "ranks would no longer be what the batch arithmetic counts; strategy=sequence does it",
    "zero_optimization.cpu_offload": 'it is the old name of offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'it is the old name of offload_param: {"device": "cpu"}',
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "its name is stage3_gather_16bit_weights_on_model_save now",
}
_REFUSED |= dict.fromkeys(("wandb", "comet", "csv_monitor"), _REFUSED["tensorboard"])
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
    candidates = [Path(path_or_name)]
    if Path(path_or_name).parent.as_posix() in (
        ".",
        "ds_configs",
    ):  # no other folder: a mistyped path is not a shipped file
        candidates += [shipped / Path(path_or_name).name, shipped / f"{Path(path_or_name).name}.json"]
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
        ds = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=no_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno} is not valid JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply to be a DeepSpeed file") from None
    if not isinstance(ds, dict):
        raise ConfigError(f"{path} holds a {type(ds).__name__}; a DeepSpeed file is one JSON object")
    return ds


def _number(text: str) -> int | float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return (
        int(value)
        if math.isfinite(value) and value.is_integer() and "." not in text and "e" not in text.lower()
        else value
    )


def _fits(value: Any, kind: str) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    return {
        "count": number and float(value).is_integer() if number else False,
        "number": number,
        "switch": isinstance(value, bool),
        "text": isinstance(value, str),
        "object": isinstance(value, dict),
        "device": value in ("none", "cpu", "nvme") if isinstance(value, str) else False,
    }.get(kind, True)


def _check_keys(section: dict, path: str, problems: list[str], notes: list[str]) -> None:
    """Names and kinds of values, section by section; clean numbers and switches given as text become what they mean."""
    known = _KINDS.get(path)
    for key, value in list(section.items()):
        dotted = f"{path}.{key}" if path else key
        if dotted in _REFUSED:
            problems.append(f"{dotted}: {_REFUSED[dotted]}; drop it")
            del section[key]
            continue
        if known is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "drop it."
            problems.append(f"{dotted}: DeepSpeed has no such key and would ignore it; {hint}")
            del section[key]
            continue
        kind = (known or {}).get(key, "any")
        if value is None and dotted in _FILLED:
            section[key] = "auto"
            notes.append(f"{dotted} is null; read as auto")
        elif value == "auto":
            if dotted not in _FILLED:
                problems.append(f'{dotted}: "auto" is filled in by nothing; give a value or drop the key')
                del section[key]
        else:
            if isinstance(value, str) and kind in ("count", "number", "any") and (number := _number(value)) is not None:
                section[key] = number
                notes.append(f"{dotted} is the text {value!r}; read as the number {number}")
            elif isinstance(value, str) and kind == "switch" and value.lower() in ("true", "false"):
                section[key] = value.lower() == "true"
                notes.append(f"{dotted} is the text {value!r}; read as {str(section[key]).lower()}")
            if not _fits(section[key], kind):
                problems.append(f"{dotted}: expects {_EXPECTED[kind]}, got {json.dumps(value)[:60]}")
                del section[key]
            elif kind == "count":
                section[key] = int(section[key])
        if isinstance(section.get(key), dict):
            _check_keys(section[key], dotted, problems, notes)


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


def _curve_conflict(ds: dict, config: Config, shipped: bool) -> str | None:
    """A scheduler block replaces the recipe's curve in silence, so it may only say the same thing."""
    if "scheduler" not in ds:
        return None
    kind, params = ds["scheduler"].get("type"), ds["scheduler"]["params"]
    ramp = params.get("warmup_type", "log")
    optim = config.optim
    same = {
        "WarmupLR": optim.schedule == "warmup" and ramp == optim.warmup_type,
        "WarmupDecayLR": optim.schedule == "linear" and ramp == optim.warmup_type and optim.min_lr_ratio == 0,
    }
    warm_up = optim.warmup_ratio or (optim.warmup_steps or 0) >= 2
    if same.get(kind) and warm_up:
        return None
    if same.get(kind):
        return (f"scheduler: DeepSpeed's {kind} warms up over at least 2 steps, but the recipe says optim.warmup_steps="
                f"{optim.warmup_steps or 0}; drop the scheduler block, or warm up longer")  # fmt: skip
    means = {
        "WarmupLR": f"a {ramp} warm-up, then flat for good",
        "WarmupDecayLR": f"a {ramp} warm-up, then linear to 0",
    }.get(kind, "a curve of its own")
    warm = f" with a {optim.warmup_type} warm-up" if optim.warmup_steps or optim.warmup_ratio else ""
    return (f"scheduler: the file's {kind} ({means}) would replace the recipe's optim.schedule={optim.schedule}{warm}; "
            f"say the same in the recipe, or use {'strategy=zero3' if shipped else 'the file without its scheduler block'}")  # fmt: skip


def _scale_problems(ds: dict) -> list[str]:
    """Loss scales that cannot be meant; the section is looked at whatever the precision, for a file outlives a recipe."""
    fp16 = ds.get("fp16") or {}
    found = []
    if fp16.get("enabled") is True and (ds.get("bf16") or {}).get("enabled") is True:
        found.append('fp16.enabled and bf16.enabled are both true, and there is one precision; write "auto" in both')
    power, smallest = fp16.get("initial_scale_power", 16), fp16.get("min_loss_scale", 1)
    if power > 32:
        found.append(f"fp16.initial_scale_power: got {power}; the first loss scale would be 2^{power}, and each step that it is too high "
                     "for is lost: 16 is usual, 32 the most")  # fmt: skip
    elif smallest > 2**power:
        found.append(f"fp16.min_loss_scale: got {smallest}, above the first loss scale 2^{power} = {2**power}: it could never go down")
    if "min_loss_scale" in fp16 and smallest == 0:
        found.append("fp16.min_loss_scale: got 0; the scale would fall to 0, and all gradients with it: 1 is usual")
    for key in ("loss_scale_window", "hysteresis"):
        if fp16.get(key) == 0:
            found.append(f"fp16.{key}: got 0; it must be at least 1 ({'1000' if key == 'loss_scale_window' else '2'} is usual)")
    return found


def check(ds: dict, origin: str, config: Config, batch: Batch) -> tuple[dict, list[str], list[str]]:
    """Hold a DeepSpeed dict against a recipe.

    Returns:
        The completed dict (a copy), the problems that must stop the run, and notes on what was added or is odd.
    """
    ds = copy.deepcopy(ds)
    problems: list[str] = []
    notes: list[str] = []

    if "bfloat16" in ds and "bf16" not in ds:
        ds["bf16"] = ds.pop("bfloat16")
        notes.append("bfloat16 is the old name of bf16")
    _check_keys(ds, "", problems, notes)
    if "scheduler" in ds:
        # What a scheduler is not told it takes from defaults of its own, not from the recipe.
        params = ds["scheduler"].setdefault("params", {})
        keys = ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps"]
        keys += ["total_num_steps"] if ds["scheduler"].get("type") == "WarmupDecayLR" else []
        for key in keys:
            if key not in params:
                params[key] = "auto"
                notes.append(f"scheduler.params has no {key}; the recipe's is put in")

    for dotted, (wanted, name) in _owned_by_recipe(config, batch).items():
        found = _get(ds, dotted)
        if found is None or found == "auto":
            continue
        if wanted is None:
            problems.append(f'{dotted}: {found} is fixed in the file, but follows from {name}; write "auto"')
            continue
        if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
            problems.append(f'{dotted}: {found!r} in the file, but {wanted} in the recipe ({name}); write "auto"')

    kind = _get(ds, "optimizer.type")
    if kind is not None and kind.lower() not in ("adam", "adamw"):
        problems.append(f"optimizer.type: {kind!r} in the file, but the recipe trains with AdamW")
    for key in ("adam_w_mode", "bias_correction"):
        if _get(ds, f"optimizer.params.{key}") is False:
            problems.append(f"optimizer.params.{key}: false in the file, but the recipe trains with AdamW as published")
    conflict = _curve_conflict(ds, config, shipped=config.deepspeed is None)
    if conflict:
        problems.append(conflict)

    stage = ds.setdefault("zero_optimization", {}).setdefault("stage", 0)
    if stage not in (0, 1, 2, 3):
        problems.append(f"zero_optimization.stage: got {stage}; ZeRO has stages 0 to 3")
    scale = _get(ds, "fp16.loss_scale")
    if scale not in (None, 0) and config.train.precision == "fp16":
        notes.append(f"fp16.loss_scale {scale} is static: it does not adapt when gradients overflow; 0 does")

    problems += _scale_problems(ds)
    for key in ("zero_quantized_gradients", "zero_hpz_partition_size"):
        if (_get(ds, f"zero_optimization.{key}") or 0) not in (0, 1, False) or _get(ds, f"zero_optimization.{key}") is True:
            notes.append(f"zero_optimization.{key} is for several hosts; on one it does nothing")

    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        ds.setdefault(key, "auto")
    if "gradient_clipping" not in ds:  # absent means DeepSpeed's own 1.0, whatever the recipe says
        ds["gradient_clipping"] = "auto"
        notes.append(f"there is no gradient_clipping; the recipe's optim.max_grad_norm={config.optim.max_grad_norm} "
                     "is put in")  # fmt: skip
    for section in ("fp16", "bf16"):
        if config.train.precision == section:
            ds.setdefault(section, {}).setdefault("enabled", "auto")
    if config.train.precision == "bf16" and stage in (1, 2):
        # Otherwise these stages add a NaN gradient to the master weights; stage 3 leaves the step out by itself.
        if not ds["bf16"].get("check_grad_overflow"):
            ds["bf16"]["check_grad_overflow"] = True
            notes.append("bf16.check_grad_overflow is switched on; without it a NaN gradient would reach the weights")
    if stage == 3 and not _get(ds, "zero_optimization.stage3_gather_16bit_weights_on_model_save"):
        ds["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        notes.append("stage3_gather_16bit_weights_on_model_save is switched on; without it the model folder "
                     "would hold no model")  # fmt: skip
    name = os.path.basename(origin)
    return ds, [f"{name}: {p}" for p in problems], [f"{name}: {n}" for n in notes]
