"""One run is one straight line: config -> plan -> data -> model -> training -> a model folder that loads."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib.util
import io
import json
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints, launch, ops, plan_view, planner, workload
from .config import Config, to_dict, to_yaml
from .errors import CheckpointError, ConfigError, DataError, PlanError, RunError
from .hardware import GIB, probe
from .optimizers import check_installed
from .planner import Plan, plan_run
from .recipe import load_config
from .report import RunResult
from .shapes import fetch_config, find_shape, shape_from_config

if TYPE_CHECKING:
    import torch

    from .data.blocks import Blocks
    from .data.chat import ChatForm
    from .data.sources import Corpus
    from .data.stream import StreamedBlocks
    from .data.tokenise import Encoder
    from .experts import Routers
    from .losses import Head

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- the door


def finetune(
    recipe: str | os.PathLike | Mapping | Config,
    overrides: Sequence[str] | Mapping | None = None,
    *,
    resume: bool = False,
    new: bool = False,
    hostfile: str | None = None,
    force: bool = False,
    **sections: Any,
) -> RunResult:
    """Train a recipe and return what came out. The same in a script, under a launcher and in a notebook.

    In a process that `deepspeed` or `torchrun` started, this is one of the ranks. Anywhere else the ranks are started
    as child processes: this process loads no torch, and neither its environment nor sys.argv is touched.

    Args:
        recipe, overrides, sections: as in `load_config`.
        resume: continue the unfinished run in `output_dir` from its newest complete checkpoint.
        new: start beside an unfinished run.
        hostfile: DeepSpeed's hostfile, to start ranks on several hosts.
        force: start even if the plan says that memory or disk is short.

    Raises:
        ConfigError, PlanError, DataError, CheckpointError: before anything is trained.
        RunError: a rank died, or what was saved does not load.
    """
    config = load_config(recipe, overrides, **sections)
    launched = launch.launched_ranks()
    on_hosts, here = launch.read_hostfile(hostfile) if hostfile is not None else (None, True)
    run_dir, checkpoint, notes = checkpoints.choose_run_dir(config.output_dir, resume, new, launched is not None)
    if find_shape(config.model.path) is None and launch.hub_answers():
        fetch_config(config.model.path)  # what is not known cannot be planned, nor refused
    hardware, planned = probe(config.output_dir), config
    if resume:  # as it was begun; and the checkpoints that lie there are part of what it needs
        planned = checkpoints.as_begun(run_dir, config)
        free = hardware.disk_free_bytes
        hardware = dataclasses.replace(hardware, disk_free_bytes=free and free + checkpoints.size_bytes(run_dir))
    plan = plan_run(planned, hardware, launched_ranks=launched if launched is not None else on_hosts, force=force)
    can_train(config, plan)
    if checkpoint is not None:
        notes += checkpoints.check_resume(run_dir, checkpoint, config, plan)
    _look_for_data(config)
    task = _Task(asked=config, config=_decided(config, plan), run_dir=run_dir, checkpoint=checkpoint)
    only_check = checkpoints.is_trained(run_dir)

    if launched is not None:
        launch.adopt_rank_environment(config, plan)
        main = launch.is_main_rank()
        with checkpoints.hold(run_dir) if main else contextlib.nullcontext(), \
             checkpoints.offloaded_states(config, run_dir, main and plan.strategy.nvme):
            if main:
                _announce(config, plan, run_dir, [*plan.notes, *notes])
            if not only_check:
                prepare(task, plan)
                train(task, plan)
            if main:
                environment, _ = launch.child_environment(config, plan, 1)
                launch.run_worker(["worker", "verify", task.to_json()], environment)
        return RunResult.load(run_dir)

    with checkpoints.hold(run_dir), checkpoints.offloaded_states(config, run_dir, plan.strategy.nvme):
        _, launch_notes = launch.child_environment(config, plan, 1)
        _announce(config, plan, run_dir, [*plan.notes, *notes, *launch_notes])
        stages = ["verify"] if only_check else ["prepare", "train", "verify"]
        launch.run_stages(config, plan, stages, task.to_json(), None if here else hostfile)
    return RunResult.load(run_dir)


def can_train(config: Config, plan: Plan) -> None:
    """What even --force does not start.

    Raises:
        ConfigError, PlanError: a package or a card that it needs is not there.
    """
    if config.train.loss == "liger":
        if importlib.util.find_spec("liger_kernel") is None:
            raise ConfigError("train.loss=liger needs the package liger-kernel, which is not installed: it runs on a GPU only. "
                              "Install it (`pip install 'deepseek_ft[liger]'`), or use train.loss=chunked")  # fmt: skip
        if plan.device != "cuda":
            raise PlanError(
                "train.loss=liger runs on a GPU only, and there is none; train.loss=chunked gives the same loss"
            )
        if config.train.precision == "fp16":
            raise ConfigError("train.loss=liger sums the head's gradient before the loss scale is known, which fp16 cannot hold; use "
                              "train.precision=bf16 or train.loss=chunked")  # fmt: skip
    if config.model.attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError("model.attention=flash_attention_2 needs the package flash-attn, which is not installed: it runs on a GPU "
                          "only. Install it (`pip install flash-attn --no-build-isolation`), or use model.attention=sdpa")  # fmt: skip
    check_installed(plan.optimizer)
    if plan.strategy.nvme and plan.shape is not None:
        checkpoints.check_offload_dir(config, 16 * plan.shape.parameters)
    if plan.chosen.forbidden:
        raise PlanError(f"strategy {plan.strategy.name} {'; '.join(plan.chosen.reasons)}")
    if config.method.kind == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("method.kind=qlora needs the package bitsandbytes, which is not installed: `pip install bitsandbytes`, or "
                          "use method.kind=lora")  # fmt: skip


def rehearse(config: Config, run_dir: Path, log_file: Path) -> RunResult:
    """Train a recipe in processes of its own and keep its figures, not its model; what they print goes into `log_file`.

    Raises:
        DeepSeekFTError: as `finetune`.
    """
    plan = plan_run(config)
    can_train(config, plan)
    _look_for_data(config)
    task = _Task(asked=config, config=_decided(config, plan), run_dir=run_dir, checkpoint=None, keep_model=False)
    with checkpoints.offloaded_states(config, run_dir, plan.strategy.nvme):
        launch.run_stages(config, plan, ["prepare", "train"], task.to_json(), log_file=log_file)
    return RunResult.load(run_dir)


def _announce(config: Config, plan: Plan, run_dir: Path, notes: Sequence[str]) -> None:
    from .data.sources import guess_tokens

    guesses = [guess_tokens(s, config.data, f"data.train.{i}") for i, s in enumerate(config.data.train)]
    schedule = planner.schedule_run(plan, config, None if None in guesses else sum(guesses))
    log.info("%s -> %s", config.name, run_dir)
    log.info("machine: %s", plan.hardware.describe())
    for line in plan_view.summary(plan, config, schedule):
        log.info("%s", line)
    log.info("plan: %s", plan.describe())
    for reason in plan.misfits:
        log.warning("warning: it does not fit: %s %s; started by --force", plan.strategy.name, reason)
    for note in notes:
        log.info("note: %s", note)


@dataclass(frozen=True)
class _Task:
    """What the processes of one run are told."""

    asked: Config
    """As the user resolved it; saved beside the run, and reproduces it."""
    config: Config
    """With the plan's decisions put in, so that every process plans the same."""
    run_dir: Path
    checkpoint: Path | None
    keep_model: bool = True
    """False: only its figures are wanted."""

    def to_json(self) -> str:
        return json.dumps({"asked": to_dict(self.asked), "config": to_dict(self.config), "run_dir": str(self.run_dir),
                           "checkpoint": str(self.checkpoint) if self.checkpoint else None, "keep_model": self.keep_model})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> _Task:
        raw = json.loads(text)
        checkpoint = Path(raw["checkpoint"]) if raw["checkpoint"] else None
        return cls(load_config(raw["asked"]), load_config(raw["config"]), Path(raw["run_dir"]), checkpoint, raw["keep_model"])


def _decided(config: Config, plan: Plan) -> Config:
    train = dataclasses.replace(
        config.train, grad_accum_steps=plan.grad_accum_steps, global_batch_size=None, loss=plan.loss
    )
    own_file = config.deepspeed is not None and plan.strategy.deepspeed
    return dataclasses.replace(
        config,
        train=train,
        optim=dataclasses.replace(config.optim, name=plan.optimizer.name),
        ranks=plan.world_size,
        stages=list(plan.stages) or None,
        strategy="auto" if own_file else plan.strategy.name,
        deepspeed=config.deepspeed if own_file else None,
    )


def _look_for_data(config: Config) -> None:
    """A mistyped path is said at once, not after the preparation of everything before it."""
    from .data.sources import locate

    for name, sources in (("train", config.data.train), ("eval", config.data.eval)):
        for i, source in enumerate(sources):
            locate(source, config.data, f"data.{name}.{i}")
    cache_dir(config)


# ---------------------------------------------------------------------------------- the line, one process each


def cache_dir(config: Config | None) -> Path:
    """Where tokens and presets are kept; made on the spot. None: where it is unless a recipe says otherwise.

    Raises:
        DataError: it cannot be written.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek_ft")
    folder = Path((config and config.data.cache_dir) or os.environ.get("DEEPSEEK_FT_CACHE") or default).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, "it is not writable")
    except OSError as error:
        raise DataError(f"the cache {folder} cannot be used: {error.strerror}; set data.cache_dir or $DEEPSEEK_FT_CACHE to a "
                        "folder that can be written") from None  # fmt: skip
    return folder


@dataclass
class _Materials:
    tokenizer: Any
    model_source: str
    train: Blocks | StreamedBlocks
    eval: Blocks | None
    form: ChatForm | None
    """How conversations were written, if there were any."""


def open_data(config: Config, cache: Path, parts: Sequence[str]) -> tuple[Encoder, dict[str, list[Corpus]]]:
    """The tokenizer with its prompt form, and the sources of `train`, `eval` or both; nothing is tokenised yet.

    Raises:
        ConfigError, DataError: what is wrong with the tokenizer, or a source that is not there.
    """
    from .data.blocks import needs_form
    from .data.chat import choose_form
    from .data.sources import open_source
    from .data.tokenise import Encoder
    from .models import load_tokenizer, tokenizer_source

    data = config.data
    corpora = {
        part: [open_source(s, data, cache, f"data.{part}.{i}") for i, s in enumerate(getattr(data, part))]
        for part in dict.fromkeys(("train", *parts))  # a tokenizer may be trained on the training text
    }
    tokenizer = load_tokenizer(tokenizer_source(config, corpora["train"], cache), config.model.new_tokens)
    said = config.model.new_tokens if data.special_tokens != "text" else []  # tokens wherever they stand
    form = None
    if any(needs_form(corpora[part]) for part in parts):
        form = choose_form(
            tokenizer, data.chat.form, config.model.path, data.chat.reasoning == "keep", data.chat.system, said
        )
        log.info("conversations are written in the form %s, %s turns are learnt", form.name, data.chat.learn)
    encoder = Encoder(tokenizer, form, data.special_tokens, data.code.fim_rate, data.code.spm_rate, config.seed, said)
    return encoder, corpora


def load_data(
    config: Config, cache: Path, parts: Sequence[str] = ("train", "eval")
) -> tuple[Encoder, dict[str, Blocks | StreamedBlocks]]:
    """The same, and the blocks; what is not in the cache is tokenised now."""
    from .data.blocks import load_blocks
    from .data.stream import StreamedBlocks

    encoder, corpora = open_data(config, cache, parts)
    data, tokenizer = config.data, encoder.tokenizer
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    blocks: dict[str, Blocks | StreamedBlocks] = {}
    for part in parts:
        weights = [source.weight for source in getattr(data, part)]
        if not corpora[part]:
            continue
        if part == "train" and data.streaming:
            blocks[part] = StreamedBlocks(corpora[part], weights, encoder, data, config.seed, pad, cache)
        else:
            blocks[part] = load_blocks(
                corpora[part], weights, encoder, data.seq_len, cache, data.isolate, data.overlong, pad
            )
    return encoder, blocks


def _load_materials(config: Config) -> _Materials:
    """Tokenizer, blocks and the folder of the weights: made on the first call, found in the caches on the others."""
    from .models import model_source

    cache = cache_dir(config)
    encoder, blocks = load_data(config, cache)
    source = model_source(config, encoder.tokenizer, cache)
    return _Materials(encoder.tokenizer, source, blocks["train"], blocks.get("eval"), encoder.form)


def prepare(task: _Task, plan: Plan) -> None:
    """Everything that must be there before the ranks start: C++ ops, tokenizer, blocks, weights."""
    from .tokens import unseen

    ops.build(plan.ops)
    materials = _load_materials(task.config)
    if task.config.data.streaming:
        materials.train[0]  # whether there is something in it
        return
    new_tokens = task.config.model.new_tokens
    if new_tokens and (absent := unseen(materials.train.stores, materials.tokenizer, new_tokens)):
        log.warning("note: in data.train there is no %s of model.new_tokens: nothing is learnt of what it means", ", ".join(absent))
    blocks = len(materials.train)
    at_once = plan.micro_batch_size * plan.world_size
    if blocks < at_once:
        raise DataError(
            f"data.train has {blocks} block{'s' * (blocks > 1)} of {task.config.data.seq_len} tokens, and {plan.world_size} "
            f"ranks x micro-batch {plan.micro_batch_size} take {at_once} at once: some would be trained on twice in one step. "
            "Use more text, a shorter data.seq_len, a smaller train.micro_batch_size or fewer ranks"
        )
    if blocks < plan.global_batch_size:
        log.warning(
            "note: %d blocks are less than one step of %d: every step is the whole data", blocks, plan.global_batch_size
        )


def _head(model: Any, config: Config, plan: Plan, device: torch.device) -> Head | None:
    """The model's head, set to the plan's loss; None where its logits cannot be done without."""
    import torch

    from .losses import Head, Softening, check_liger, use_smoothed_loss

    smoothing, head = config.train.label_smoothing, None
    try:
        head = Head(model)
        if plan.loss != "naive":
            head.use_for_training(smoothing, liger=plan.loss == "liger")
    except ValueError as error:
        if plan.loss != "naive":
            raise PlanError(
                f"train.loss={plan.loss}: {error}; use train.loss={'chunked' if head else 'naive'}"
            ) from None
        log.info("evaluation holds all logits: %s", error)
    if plan.loss == "liger":
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[config.train.precision]
        check_liger(model.config.vocab_size, dtype, device, Softening(smoothing, head.cap))
    elif plan.loss == "naive" and smoothing:
        use_smoothed_loss(model, smoothing)
    return head


def _routers(model: Any, config: Config, plan: Plan, tokenizer: Any) -> Routers | None:
    """The routers of a mixture of experts, set to the recipe's options; None for a dense model."""
    from .experts import Routers, freeze_routers

    shape = plan.shape or shape_from_config(model.config.to_dict())
    workload.check_experts(config, shape)  # of a model that was not known before its download
    if not shape.experts:
        return None
    if not config.experts.train_router:
        freeze_routers(model)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    routers = Routers(model, pad, workload.balance_coefficient(config, shape), config.experts.bias_update_speed)
    return routers if routers.blocks else None


def train(task: _Task, plan: Plan) -> None:
    """One rank's part of the run, from the prepared materials to the saved model folder."""
    if plan.strategy.pipeline and plan.device == "cuda":
        launch.own_card()
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import TrainingArguments, set_seed
    from transformers.utils.logging import disable_progress_bar

    from . import adapters, experts
    from .callbacks import RunLog, peak_memory_bytes
    from .export import CHECKED_BLOCKS, learn_to_stop, save_model_folder
    from .models import load_model, token_bytes
    from .precision import check_weights
    from .ranks import from_all
    from .report import plot_loss, read_metrics
    from .trainer import FineTuneTrainer, build_training_args

    started = time.time()
    disable_progress_bar()  # transformers' own: one per rank, for files that load in a moment
    config, run_dir = task.config, task.run_dir
    quiet = logging.getLogger("deepseek_ft.data"), logging.getLogger("deepseek_ft.models")
    for logger in quiet:  # the preparation has said it
        logger.setLevel(logging.WARNING)
    materials = _load_materials(config)
    if config.data.streaming:
        materials.train.length = config.train.max_steps * plan.global_batch_size
    total_steps = plan.total_steps(config, len(materials.train))
    if plan.strategy.deepspeed and plan.device == "cpu":
        import deepspeed

        with contextlib.redirect_stdout(io.StringIO()):  # every rank would print that it found the op that was built
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if plan.strategy.pipeline:
        from .pipeline import HeadElsewhere, PipelineTrainer, RankArguments, meet

        ranks = meet(plan.stages, plan.device)
        hidden = launch.stand_alone()
        stage, arguments, trainer_class, more = ranks.stage, RankArguments, PipelineTrainer, {"ranks": ranks}
    else:
        hidden, stage, arguments, trainer_class, more = {}, None, TrainingArguments, FineTuneTrainer, {}
        if plan.strategy.sequence:
            from .sequence import SequenceTrainer as trainer_class
        if plan.strategy.tensor:
            from .tensor import TensorTrainer as trainer_class
    args = build_training_args(config, plan, run_dir, total_steps, arguments)
    main = args.process_index == 0
    if dist.is_initialized():
        dist.barrier()  # nobody creates the run's folder before everybody has looked for a free one
    run_file = run_dir / "run.json"
    run: dict[str, Any] = checkpoints.read_json(run_file) if task.checkpoint else {}
    if main:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(task.asked), encoding="utf-8")
        run |= {
            "name": config.name,
            "status": "running",
            "started": run.get("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")),
            "config": to_dict(task.asked),
            "plan": planner.to_dict(plan),
            "versions": _versions(),
            "data": {"train": dataclasses.asdict(materials.train.stats),
                     "eval": dataclasses.asdict(materials.eval.stats) if materials.eval else None},
        }  # fmt: skip
        checkpoints.write_json(run_file, run)
        log.info("training: %d steps, %.2f epochs of %s blocks", total_steps,
                 total_steps / plan.steps_per_epoch(len(materials.train)), f"{len(materials.train):,}")  # fmt: skip

    set_seed(config.seed)
    model = load_model(materials.model_source, config, plan, materials.tokenizer, stage)
    base = [p for p in model.parameters() if config.method.kind == "full" or not p.requires_grad]  # adapters are sharded later
    if plan.strategy.stage == 3 and not all(hasattr(p, "ds_id") for p in base):
        raise RunError("ZeRO-3 was planned, but the weights were loaded whole on every rank")
    check_weights(model, config, materials.model_source)
    trained_part = adapters.describe(model, config)
    if stage is not None:
        from .stages import shared_table

        table = shared_table(model, stage)
        twice = table.numel() if table is not None and table.requires_grad else 0  # as rank 0 says, which writes it
        trained_part = adapters.together(from_all(trained_part)[: stage.count], twice)
    head = _head(model, config, plan, args.device) if stage is None or stage.last else HeadElsewhere()
    routers = _routers(model, config, plan, materials.tokenizer) if not plan.strategy.staged else None
    if plan.strategy.stage == 3 and (leaves := experts.keep_whole(model)) and main:
        log.info("ZeRO-3 gathers %s as a whole: its experts are modules in a list", ", ".join(leaves))
    load_peak = from_all(peak_memory_bytes("cpu"))
    if main:
        log.info("weights loaded: at most %.2f GiB of host memory per rank", max(load_peak) / GIB)
        for line in adapters.lines(trained_part, config):
            log.info("%s", line)
    bytes_of_token = np.array(token_bytes(materials.tokenizer, model.config.vocab_size, config.model.new_tokens))
    trainer = trainer_class(
        config=config, plan=plan, model=model, args=args, train_dataset=materials.train, eval_blocks=materials.eval, head=head,
        routers=routers, bytes_of_token=bytes_of_token, processing_class=materials.tokenizer, **more,
    )  # fmt: skip
    if materials.eval is not None and task.checkpoint is None:
        args.eval_on_start = True
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    run_log = RunLog(trainer, run_dir / "metrics.jsonl", resumed_from=task.checkpoint)
    trainer.add_callback(run_log)
    if trained_part["parameters"] < trained_part["all_parameters"]:
        trainer.add_callback(trainer.gradient_check())

    trainer.train(resume_from_checkpoint=str(task.checkpoint) if task.checkpoint else None)

    if materials.eval is not None and trainer.last_block_nll is None:  # resumed after its last step
        trainer.evaluate()
    if task.keep_model:
        learn_to_stop(model, materials.tokenizer, materials.form)
        save_model_folder(trainer, materials.tokenizer, run_dir / "model")
    peak = from_all(peak_memory_bytes(plan.device))
    host_peak = from_all(peak_memory_bytes("cpu"))
    more_facts = trainer.gathered_facts()
    if main:
        metrics = read_metrics(run_dir / "metrics.jsonl")
        losses = [m["loss"] for m in metrics if "loss" in m]
        evals = [m for m in metrics if "eval_loss" in m]
        trained = float(trainer.tokens)
        before = _eval_figures(evals[0]) if evals and evals[0]["step"] == 0 else run.get("before")
        after = _eval_figures(evals[-1]) if evals and evals[-1]["step"] == trainer.state.global_step else None
        facts = trainer.engine_facts()
        if skipped := trainer.numbers.skipped:
            log.info("note: %d of %d steps were left out, for their gradients overflowed: %d updates, and the learning rate followed "
                     "those", skipped, trainer.state.global_step, trainer.state.global_step - skipped)  # fmt: skip
        run |= {
            "status": "trained",
            **{k: facts[k] for k in ("engine", "zero_stage", "world_size")},
            "engine_facts": facts,
            **more_facts,
            "precision": facts["precision"],
            "trained": trained_part,
            "steps": trainer.state.global_step,
            "skipped_steps": trainer.numbers.skipped,
            "updates": trainer.state.global_step - trainer.numbers.skipped,
            "global_batch_size": plan.global_batch_size,
            "tokens": round(trained),
            "target_tokens": round(float(trainer.target_tokens)),
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "before": before,
            "after": after,
            "perplexity_before": (before or {}).get("perplexity"),
            "perplexity_after": (after or {}).get("perplexity"),
            "tokens_per_second": trained / run_log.step_seconds if run_log.step_seconds else None,
            "peak_memory_bytes": peak,
            "host_peak_memory_bytes": host_peak,
            "host_peak_after_loading_bytes": load_peak,
            "step_seconds": run_log.step_seconds / max(1, trainer.state.global_step),
            "prediction": _compared(plan, peak, host_peak, run_log.step_seconds / max(1, trainer.state.global_step)),
            "wall_seconds": round(time.time() - started, 1),
            "check": None
            if materials.eval is None
            else {"block_nll": trainer.last_block_nll[:CHECKED_BLOCKS].tolist()},
        }
        checkpoints.write_json(run_file, run)
        try:
            plot_loss(metrics, run_dir / "loss.png", config.name)
        except OSError as error:
            log.warning("loss.png cannot be written: %s", error)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    launch.stand_as_before(hidden)
    # Under a launcher this process starts the check next: give back the card and the host's memory first.
    del trainer, model, run_log
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compared(plan: Plan, peak: list[int], host_peak: list[int], step_seconds: float) -> dict:
    """What the plan said beside what was seen; each with `error`, predicted / measured - 1."""
    memory, timing = plan.memory, plan.timing
    if memory is None:
        return {}
    # On a card the allocator's peak is compared; a CPU rank's peak is all that is resident, its share of the host.
    rank = memory.tensor_bytes if plan.device == "cuda" else memory.host_bytes // plan.world_size
    pairs = {
        "peak_memory_bytes_per_rank": (rank, max(peak)),
        "host_memory_bytes": (memory.host_bytes, sum(host_peak)),
        "step_seconds": (timing.step_seconds if timing else None, step_seconds),
    }
    compared = {
        name: {
            "predicted": predicted,
            "measured": measured,
            "error": predicted / measured - 1 if predicted and measured else None,
        }
        for name, (predicted, measured) in pairs.items()
    }
    said = [
        f"{name.replace('_', ' ')} {row['error']:+.1%}" for name, row in compared.items() if row["error"] is not None
    ]
    log.info("the plan was off by: %s", ", ".join(said))
    return compared


def _eval_figures(row: dict) -> dict:
    return {k.removeprefix("eval_"): v for k, v in row.items() if k.startswith("eval_")}


def verify(task: _Task) -> None:
    """In a fresh process: load the model folder as a user would, score it as the run did, and let it write."""
    from transformers.utils.logging import disable_progress_bar

    from .export import check_model_folder

    disable_progress_bar()
    for room in ("data", "models"):
        logging.getLogger(f"deepseek_ft.{room}").setLevel(logging.WARNING)
    run_file = task.run_dir / "run.json"
    run = checkpoints.read_json(run_file)
    known = (run.get("check") or {}).get("block_nll", [])
    if task.config.data.eval and not known:
        raise RunError(f"{run_file} has no held-out losses to check the model with; resume the run")
    _, blocks = load_data(task.config, cache_dir(task.config), ["eval"] if known else [])
    rows = [blocks["eval"][i] for i in range(len(known))]
    try:
        run |= check_model_folder(task.run_dir / "model", rows, known, task.config.train.precision, task.config.seed)
    except CheckpointError:
        checkpoints.write_json(run_file, run | {"status": "failed"})
        raise
    checkpoints.write_json(run_file, run | {"status": "finished"})


_PACKAGES = "deepseek_ft torch torchao transformers deepspeed accelerate datasets peft tokenizers numpy".split()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def worker(stage: str, task_json: str) -> None:
    """The body of `python -m deepseek_ft worker STAGE TASK`."""
    task = _Task.from_json(task_json)
    if stage == "verify":
        return verify(task)
    launched = launch.launched_ranks()
    ranks = launched if launched is not None else task.config.ranks
    plan = plan_run(task.config, launched_ranks=ranks, can_build_ops=True, force=True)  # the door has refused
    if stage == "prepare":
        return prepare(task, plan)
    if launched is not None:  # on another host nobody has set this rank's environment yet
        launch.adopt_rank_environment(task.config, plan)
    return train(task, plan)
