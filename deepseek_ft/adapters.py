"""Adapters: put one beside a frozen base, prove that it is trained, save it small and whole, load it, merge it."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from .checkpoints import read_json, write_json
from .config import Config, is_hub_id
from .errors import CheckpointError, RunError, listing
from .planner import Plan
from .ranks import whole
from .shapes import ModelShape, find_shape, shape_from_config
from .tokens import compute_rows_apart, is_tied, resize, tables_at_hand, wrapped
from .workload import adapted_modules, adapter_of, frozen_of, matches

log = logging.getLogger(__name__)

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
TRAINING = "adapter_training.json"
"""Beside them: what peft's settings do not say, but who loads or merges the adapter must know."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def is_adapter(of: nn.Module | Path) -> bool:
    """Of a model or a folder."""
    return (of / SETTINGS).is_file() if isinstance(of, Path) else hasattr(of, "peft_config")


def check(config: Config, source: str) -> None:
    """What the plan has checked, for a model whose numbers were not known before its download.

    Raises:
        ConfigError: a target, or a pattern of what is frozen, that the model does not have.
    """
    shape = find_shape(source)
    adapter_of(config, shape)
    frozen_of(config, shape)


def _numel(parameter: nn.Parameter) -> int:
    """Under ZeRO-3 a parameter is empty, and knows what it would be."""
    return getattr(parameter, "ds_numel", parameter.numel())


def _shape(model: nn.Module) -> ModelShape:
    return shape_from_config(model.config.to_dict(), "the loaded model")


# -------------------------------------------------------------------------------------------- what is trained


def freeze(model: nn.Module, config: Config) -> nn.Module:
    """Leave out of the training what `method.freeze` names."""
    patterns = frozen_of(config, _shape(model))
    for name, parameter in model.named_parameters():
        if any(matches(pattern, name) for pattern in patterns):
            parameter.requires_grad_(False)
    return model


def quantisation(config: Config, plan: Plan) -> dict[str, Any]:
    """The arguments by which transformers loads a base in 4 bits: nf4, its scales quantised again (arXiv:2305.14314 §3)."""
    if config.method.kind != "qlora":
        return {}
    return _in_four_bits(config.train.precision, plan.device)


def _in_four_bits(precision: str, device: str) -> dict[str, Any]:
    from transformers import BitsAndBytesConfig

    settings = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=DTYPES[precision],
    )
    return {"quantization_config": settings, "device_map": {"": torch.cuda.current_device() if device == "cuda" else "cpu"}}


def _keep_unpacked(model: nn.Module) -> None:
    """On the CPU bitsandbytes 0.50 repacks a 4-bit weight at its first evaluation, and after that the gradients that pass
    through it are zero: an evaluation before the first step would end the training."""
    for module in model.modules():
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def attach(
    model: nn.Module, config: Config, plan: Plan, source: str, new_ids: range = range(0), layers: range | None = None
) -> nn.Module:
    """The model with the recipe's adapter beside it, and everything else frozen.

    Without DeepSpeed what is trained is fp32, beside a base in the recipe's precision. DeepSpeed keeps fp32 masters itself
    and wants one type. The adapter begins the same under every strategy: from the recipe's seed, on every rank.

    Args:
        new_ids: of tokens that were added, whose rows are trained too.
        layers: those that are here, of a model cut into stages.
    """
    from peft import LoraConfig, get_peft_model

    _keep_unpacked(model)
    method, shape = config.method, _shape(model)
    adapter = adapter_of(config, shape)
    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=method.rank,
        lora_alpha=2 * method.rank if method.alpha is None else method.alpha,
        lora_dropout=method.dropout,
        use_rslora=method.variant == "rslora",
        use_dora=adapter.dora,
        target_modules=sorted(adapter.targets),
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if adapter.experts else None,
        modules_to_save=list(adapter.whole) or None,
        trainable_token_indices={table: list(new_ids) for table in adapter.tables} or None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        with _names_as_they_are(), tables_at_hand(model) if adapter.tables else contextlib.nullcontext():
            model = get_peft_model(model, settings, autocast_adapter_dtype=False)
        _begin_alike(model, config.seed)
    compute_rows_apart(model)
    # peft puts the folder there that the weights were read from, which for a hub's model is a cache.
    model.peft_config["default"].base_model_name_or_path = _base_name(config, source)
    if not plan.strategy.deepspeed:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    found = _adapted(model)
    expected = adapted_modules(shape if layers is None else shape.only(layers), adapter)
    if found != expected:
        raise RunError(f"the adapter was planned on {expected}, and peft has put it on {found}")
    return model


def _begin_alike(model: nn.Module, seed: int) -> None:
    """Draw each adapter anew, from numbers that follow from the seed and its name: a stage of a model begins as the whole one."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            module.reset_lora_parameters("default", True)


_FUSED = ("gate_proj", "up_proj", "down_proj")
"""Names under which peft looks for the routed experts of V2 and V3."""


@contextlib.contextmanager
def _names_as_they_are() -> Iterator[None]:
    """In V2 and V3 models the dense layers and the shared experts have a gate_proj. peft 0.21 takes that name for the routed
    experts of older files, and would put the adapter on those, and on nothing of what was named."""
    from peft.utils import transformers_weight_conversion as conversion

    usual = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = usual


def _for_files(settings: Any, shape: ModelShape) -> Any:
    """The same settings, read by a plain peft as what they are: those layers as parameters, whose names it leaves alone.

    The tensors have the same names and shapes and mean the same either way.
    """
    settings = copy.copy(settings)
    settings.inference_mode = True
    fused = set(settings.target_modules) & set(_FUSED)
    if shape.model_type.startswith("deepseek") and fused:
        settings.target_modules = set(settings.target_modules) - fused
        names = {name for kind in shape.kinds for name in kind.weights if name.split(".")[-2] in fused}
        settings.target_parameters = sorted({*(settings.target_parameters or ()), *names})
        settings.lora_dropout = 0.0  # of no use to who loads it, and not known for parameters
    return settings


def _as_trained(settings: Any) -> Any:
    """Back again."""
    settings = copy.copy(settings)
    layers = {name for name in settings.target_parameters or () if name.endswith(".weight")}
    settings.target_modules = set(settings.target_modules) | {name.split(".")[-2] for name in layers}
    settings.target_parameters = sorted(set(settings.target_parameters or ()) - layers) or None
    return settings


def _base_name(config: Config, source: str) -> str:
    """How a user finds the base again: a hub's id as it was given, or a whole path."""
    path = config.model.path
    return str(Path(source).resolve()) if path.startswith("preset:") or Path(path).is_dir() else path


def _adapted(model: nn.Module) -> dict[str, int]:
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            own = getattr(module, "parameter_name", None)
            end = f"experts.{own}" if own else name.rsplit(".", 1)[-1]
            counts[end] = counts.get(end, 0) + 1
        elif isinstance(module, ModulesToSaveWrapper):
            counts[name.rsplit(".", 1)[-1]] = 1
    for name, module in wrapped(model).items():
        if not is_tied(module):
            counts[name.rsplit(".", 1)[-1]] = 1
    return counts


def describe(model: nn.Module, config: Config) -> dict[str, Any]:
    """For run.json: how many parameters are trained, and on which modules the adapter is."""
    trained = sum(_numel(p) for p in model.parameters() if p.requires_grad)
    # By the config's numbers: 4-bit weights are packed, and count less than they are.
    every = _shape(model).parameters + (trained if is_adapter(model) else 0)
    found = {"kind": config.method.kind, "parameters": trained, "all_parameters": every}
    if is_adapter(model):
        settings = model.peft_config["default"]
        found |= {"variant": config.method.variant, "rank": settings.r, "alpha": settings.lora_alpha,
                  "modules": _adapted(model), "base": settings.base_model_name_or_path}  # fmt: skip
    return found


def together(stages: Sequence[dict[str, Any]], twice: int = 0) -> dict[str, Any]:
    """What the stages of a model describe, as of the whole.

    Args:
        twice: trained parameters that two of them hold.
    """
    found = dict(stages[0])
    found["parameters"] = sum(stage["parameters"] for stage in stages) - twice
    found["all_parameters"] += sum(stage["parameters"] for stage in stages[1:]) if "modules" in found else 0
    if "modules" in found:
        names = [name for stage in stages for name in stage["modules"]]
        found["modules"] = {name: sum(stage["modules"].get(name, 0) for stage in stages) for name in dict.fromkeys(names)}
    return found


def lines(trained: dict[str, Any], config: Config) -> Iterator[str]:
    """The same for the log."""
    share = f"{trained['parameters']:,} of {trained['all_parameters']:,} parameters are trained"
    if "modules" in trained:
        modules = ", ".join(f"{name} x {count}" for name, count in trained["modules"].items())
        yield (f"adapter: {trained['variant']}, rank {trained['rank']}, alpha {trained['alpha']:g} on {trained['base']} | {share} | "
               f"{modules}")  # fmt: skip
    elif config.method.freeze:
        yield f"frozen: {', '.join(config.method.freeze)} | {share}"


_MAY_REST = (".lora_A.", ".trainable_tokens_delta.")
"""Parts of the names of what may have a gradient of zero in the first step: there may be no new token in it."""


class GradientCheck(TrainerCallback):
    """Whether each trained tensor got a gradient in the first step; a hook on each, gone after it.

    A frozen base is where gradients get lost in silence: recomputed layers whose input needs none, weights that are frozen
    by mistake. `lora_A` has a gradient of zero as long as its `lora_B` is zero, so of it only that one came is asked.
    """

    def __init__(self, model: nn.Module, ranks: Any = None, alone: bool = False):
        """
        Args:
            ranks: the group of those that train the same tensors; all of them when not given.
            alone: there is no other.
        """
        self.model, self.ranks, self.alone = model, ranks, alone
        self.handles: list[Any] = []
        self.seen: dict[str, torch.Tensor] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                self.handles.append(parameter.register_hook(self._hook(name)))

    def _hook(self, name: str):
        def look(gradient: torch.Tensor) -> None:
            found = (gradient != 0).any()
            self.seen[name] = self.seen[name] | found if name in self.seen else found

        return look

    def on_step_end(self, args, state, control, **kwargs):
        if not self.handles:
            return
        for handle in self.handles:
            handle.remove()
        self.handles = []
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        counts = torch.zeros(len(names), dtype=torch.int32, device=args.device)  # 0: none came, 1: zeros, 2: a gradient
        for i, name in enumerate(names):
            if name in self.seen:
                counts[i] = 1 + self.seen[name].int()
        self.seen = {}
        if torch.distributed.is_initialized() and not self.alone:  # an expert's tokens may all be on another rank
            torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=self.ranks)
        lost = [
            f"{name}: {'only zeros' if count else 'none came'}"
            for name, count in zip(names, counts.tolist(), strict=True)
            if count == 0 or (count == 1 and not any(part in name for part in _MAY_REST))
        ]
        if lost:
            more = [f"and {len(lost) - 5} more"] if len(lost) > 5 else []
            raise RunError(listing(f"after the first step {len(lost)} of {len(names)} trained tensors have had no gradient: they would "
                                   "stay as they are", lost[:5] + more))  # fmt: skip


# ---------------------------------------------------------------------------------------------- on the disk


def _named(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Under the names that peft's files have."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state_dict=tensors, save_embedding_layers=False)


def _expected(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name in the file -> shape of everything that is trained."""
    trained = {n: torch.empty(getattr(p, "ds_shape", p.shape), device="meta") for n, p in model.named_parameters() if p.requires_grad}
    return {name: tuple(tensor.shape) for name, tensor in _named(model, trained).items()}


Gather = Callable[[dict], dict]
"""What each stage of a model has, as what the whole one has."""


def save(model: nn.Module, folder: Path, config: Config, write: bool = True, gather: Gather | None = None) -> None:
    """Weights and settings of the adapter alone. Collective under ZeRO-3 and of stages: every rank calls it, one writes."""
    from safetensors.torch import save_file

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = {}
    with whole(list(trained.values())):
        if write or gather is not None:
            tensors = _named(model, {name: p.detach().cpu().clone().contiguous() for name, p in trained.items()})
    tensors = tensors if gather is None else gather(tensors)
    if not write:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    _for_files(model.peft_config["default"], _shape(model)).save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))
    write_json(folder / TRAINING, {"precision": config.train.precision, "quantized_base": config.method.kind == "qlora",
                                   "vocab_size": model.config.vocab_size})  # fmt: skip


def _differences(folder: Path, expected: dict[str, tuple[int, ...]]) -> list[str]:
    """What is wrong with the tensors of a folder, by their names and shapes."""
    from safetensors import safe_open

    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    except Exception as error:
        return [f"{WEIGHTS} cannot be read: {error}"]
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    problems += [f"{name} is not the adapter's" for name in shapes if name not in expected]
    problems += [f"{name} is {shapes[name]}, not {shape}" for name, shape in expected.items() if shapes.get(name, shape) != shape]
    return problems


def check_saved(model: nn.Module, folder: Path, main: bool = True, gather: Gather | None = None) -> None:
    """Open again what was just saved. Collective of stages.

    Raises:
        CheckpointError: a tensor is missing, empty, of another shape or not a number, or an adapter that never moved.
    """
    if not is_adapter(model):
        return
    expected = _expected(model)
    expected = expected if gather is None else gather(expected)
    if not main:
        return
    problems = _differences(folder, expected)
    if not problems:
        from safetensors import safe_open

        with safe_open(folder / WEIGHTS, framework="pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if not torch.isfinite(tensor).all():
                    problems.append(f"{name} holds what is not a number")
                elif "lora_B" in name and not tensor.any():
                    problems.append(f"{name} is all zero, as before the training")
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise CheckpointError(listing(f"the adapter in {folder} is not what was trained", problems[:5] + more))


def load_weights(model: nn.Module, folder: Path, is_stage: bool = False) -> None:
    """Put the saved weights of a folder into a model's adapter.

    Args:
        is_stage: the model is a part, and what other parts have is theirs.

    Raises:
        CheckpointError: they are not this adapter's, all of them.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    expected = _expected(model)
    problems = [p for p in _differences(folder, expected) if not (is_stage and p.endswith(" is not the adapter's"))]
    if problems:
        raise CheckpointError(listing(f"the adapter in {folder} does not fit this model", problems[:5]))
    set_peft_model_state_dict(model, {name: tensor for name, tensor in load_file(folder / WEIGHTS).items() if name in expected})


def _settings(folder: Path, kind: type) -> Any:
    """adapter_config.json, once everything that can be seen without the base's weights is as it must be.

    Raises:
        CheckpointError: a file is broken, or the base is not where it says.
    """
    try:
        settings = kind.from_pretrained(str(folder))
    except Exception as error:
        raise CheckpointError(f"{folder / SETTINGS} cannot be read: {error}") from None
    base = str(settings.base_model_name_or_path)
    if "/" in base and not Path(base).is_dir() and not is_hub_id(base):
        raise CheckpointError(f"{folder / SETTINGS} names {base} as the adapter's base, and there is no such folder; put its new place "
                              "there (base_model_name_or_path)")  # fmt: skip
    if unreadable := [line for line in _differences(folder, {}) if "cannot be read" in line]:
        raise CheckpointError(f"the adapter in {folder} is broken: {unreadable[0]}")
    return settings


def load_with_base(folder: Path, whole: bool = False) -> tuple[nn.Module, dict]:
    """Base and adapter of a folder, as they were trained together; and transformers' report on the base.

    Args:
        whole: the base in 16 bits (or 32) although the adapter was trained beside one in 4.

    Raises:
        CheckpointError: the adapter does not fit the base.
    """
    from peft import LoraConfig, get_peft_model

    training, settings = read_json(folder / TRAINING), _settings(folder, LoraConfig)
    name = settings.base_model_name_or_path
    dtype = DTYPES.get(training.get("precision"), "auto")
    more = {}
    if training.get("quantized_base") and not whole:
        more = _in_four_bits(training["precision"], "cuda" if torch.cuda.is_available() else "cpu")
    base, info = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True, **more)
    _keep_unpacked(base)
    resize(base, training.get("vocab_size", 0))  # what the run has put on for new tokens is in the adapter
    settings.inference_mode = False  # so that what the file must hold is what is trained
    as_parameters = not more  # which 4-bit weights cannot be
    with contextlib.nullcontext() if as_parameters else _names_as_they_are():
        model = get_peft_model(base, settings if as_parameters else _as_trained(settings), autocast_adapter_dtype=False)
    compute_rows_apart(model)
    model.peft_config["default"].base_model_name_or_path = name
    if (folder / "generation_config.json").exists():
        from transformers import GenerationConfig

        base.generation_config = GenerationConfig.from_pretrained(str(folder))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    load_weights(model, folder)
    return model.requires_grad_(False), info


# ---------------------------------------------------------------------------------------------------- merged

TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
"""Of the largest logit: a merged weight is rounded once more to the base's precision, 8 or 11 bits of it in 16. With routed
experts in 16 bits a fifth of it for the mean difference: rounding sends a token to another expert here and there, and that
token's logits are others."""
_TOKENS, _ROWS = 64, 4


def merge(given: Path, output: Path | None = None) -> dict[str, Any]:
    """Write the base with the adapter added to its weights: a model folder like any other.

    Args:
        given: a run's folder, or an adapter's.
        output: where to; `merged` beside the adapter's folder when not given.

    Returns:
        What was done: folder, base, precision, the largest difference of logits on a few rows, and the tolerance.

    Raises:
        CheckpointError: there is no adapter, something is in the way, or the merged model is another.
    """
    from transformers.utils.logging import disable_progress_bar

    from .models import check_loading_info, load_tokenizer

    disable_progress_bar()
    folder = given if is_adapter(given) else given / "model"
    if not is_adapter(folder):
        raise CheckpointError(f"{given} is neither an adapter's folder nor a run's that trained one: there is no {SETTINGS} in it or in "
                              f"{given / 'model'}")  # fmt: skip
    output = output or folder.parent / "merged"
    if output.exists():
        raise CheckpointError(f"{output} is there already, and nothing is overwritten; --output DIR goes elsewhere")
    training = read_json(folder / TRAINING)
    precision = training.get("precision", "bf16")
    try:
        model, info = load_with_base(folder, whole=True)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder} and its base do not load: {type(error).__name__}: {error}") from error
    base = model.peft_config["default"].base_model_name_or_path
    check_loading_info(info, base)
    model.eval()
    tokenizer = load_tokenizer(str(folder))
    tables = model.peft_config["default"].trainable_token_indices or {}
    rows = _rows(tokenizer, sorted({i for ids in tables.values() for i in ids}))
    apart = _logits(model, rows)
    merged = model.merge_and_unload(safe_merge=True)
    merged.config.use_cache = True
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt
    partial.parent.mkdir(parents=True, exist_ok=True)
    merged.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    del model, merged
    again, info = AutoModelForCausalLM.from_pretrained(partial, dtype="auto", output_loading_info=True)
    check_loading_info(info, str(partial))
    together = _logits(again.eval(), rows)
    difference, mean = float((apart - together).abs().max()), float((apart - together).abs().mean())
    routed = _shape(again).experts > 0 and precision != "fp32"
    allowed = TOLERANCE[precision] * max(1.0, float(apart.abs().max())) * (0.2 if routed else 1)
    judged, what = (mean, "on average") if routed else (difference, "by up to")
    if not judged <= allowed:
        raise CheckpointError(f"the merged model in {partial} gives logits that differ {what} {judged:.2g} from those of base and adapter, "
                              f"where rounding to {precision} explains {allowed:.2g}: it is not the model that was trained")  # fmt: skip
    partial.rename(output)
    return {"folder": str(output), "adapter": str(folder), "base": base, "precision": precision, "rows": len(rows), "largest_difference": difference,
            "mean_difference": mean, "judged": "mean" if routed else "largest", "tolerance": allowed, "quantized_base": bool(training.get("quantized_base"))}  # fmt: skip


def _rows(tokenizer: Any, new_ids: list[int]) -> torch.Tensor:
    """(4, 64) tokens: those that were added, half of them at most, and real text that is always there: this file."""
    ids = new_ids[: _ROWS * _TOKENS // 2] + tokenizer.encode(Path(__file__).read_text(encoding="utf-8"), add_special_tokens=False)
    return torch.tensor(ids[: _ROWS * _TOKENS]).view(_ROWS, _TOKENS)


@torch.no_grad()
def _logits(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(input_ids=row[None].to(model.device), use_cache=False).logits.float().cpu() for row in rows])
