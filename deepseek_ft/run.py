"""One run is one straight line: config -> plan -> data -> model -> training -> a model folder that loads."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints, launch, ops, planner
from .config import Config, load_config, to_dict, to_yaml
from .errors import CheckpointError, ConfigError, DataError, RunError, listing
from .hardware import GIB
from .planner import Plan, plan_run

if TYPE_CHECKING:
    from .data.blocks import Blocks

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------- the door


@dataclass(frozen=True)
class RunResult:
    """What a finished run left behind; everything is also in its folder."""

    output_dir: Path
    run: dict = field(repr=False)
    """run.json."""
    history: list[dict] = field(repr=False)
    """The rows of metrics.jsonl."""

    @classmethod
    def load(cls, run_dir: str | os.PathLike) -> RunResult:
        from .report import read_metrics

        folder = Path(run_dir)
        return cls(folder, checkpoints.read_json(folder / "run.json"), read_metrics(folder / "metrics.jsonl"))

    @property
    def status(self) -> str:
        return self.run.get("status", "unknown")

    @property
    def model_dir(self) -> Path:
        return self.output_dir / "model"

    @property
    def metrics(self) -> dict:
        """Held-out figures after training, with first and last loss and tokens/s."""
        keys = ("first_loss", "last_loss", "tokens_per_second", "steps", "tokens", "wall_seconds")
        return {**(self.run.get("after") or {}), **{k: self.run.get(k) for k in keys}}

    @property
    def perplexity_before(self) -> float | None:
        return (self.run.get("before") or {}).get("perplexity")

    @property
    def perplexity_after(self) -> float | None:
        return (self.run.get("after") or {}).get("perplexity")

    def __str__(self) -> str:
        r = self.run
        lines = [f"{r.get('name')}: {self.status} after {r.get('steps')} steps, {r.get('tokens', 0):,} tokens, "
                 f"{r.get('wall_seconds', 0):.0f} s"]  # fmt: skip
        facts = r.get("engine_facts", {})
        stage = f" stage {facts['zero_stage']}" if facts.get("zero_stage") is not None else ""
        lines.append(
            f"  ran        {facts.get('engine')}{stage}, {facts.get('world_size')} x {r.get('plan', {}).get('device')}"
        )
        if r.get("first_loss") is not None:
            lines.append(f"  loss       {r['first_loss']:.4f} -> {r['last_loss']:.4f}")
        if self.perplexity_after is not None:
            before = f"{self.perplexity_before:,.2f} -> " if self.perplexity_before else ""
            after = r["after"]
            more = [f"{after['bits_per_byte']:.3f} bits per byte"] if "bits_per_byte" in after else []
            more += [f"word perplexity {after['word_perplexity']:,.2f}"] if "word_perplexity" in after else []
            lines.append(f"  perplexity {before}{self.perplexity_after:,.2f} on {after['tokens']:,} held-out tokens"
                         + (f" ({', '.join(more)})" if more else ""))  # fmt: skip
        if r.get("tokens_per_second"):
            lines.append(f"  speed      {r['tokens_per_second']:,.0f} tokens/s, peak memory "
                         f"{max(r.get('peak_memory_bytes', [0])) / GIB:.2f} GiB per rank")  # fmt: skip
        if r.get("sample"):
            lines.append(f"  sample     {r['sample']['prompt']!r} ->\n             {r['sample']['text']!r}")
        if (self.output_dir / "loss.png").is_file():
            lines.append(f"  plot       {self.output_dir / 'loss.png'}")
        lines.append(f"  model      {self.model_dir}")
        return "\n".join(lines)


def finetune(
    recipe: str | os.PathLike | Mapping | Config,
    overrides: Sequence[str] | Mapping | None = None,
    *,
    resume: bool = False,
    new: bool = False,
    hostfile: str | None = None,
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

    Raises:
        ConfigError, PlanError, DataError, CheckpointError: before anything is trained.
        RunError: a rank died, or what was saved does not load.
    """
    config = load_config(recipe, overrides, **sections)
    launched = launch.launched_ranks()
    on_hosts = launch.hostfile_ranks(hostfile) if hostfile is not None else None
    plan = plan_run(config, launched_ranks=launched if launched is not None else on_hosts)
    run_dir, checkpoint, notes = checkpoints.choose_run_dir(config.output_dir, resume, new)
    if checkpoint is not None:
        _check_resume(config, plan, run_dir, checkpoint)
    _look_for_data(config)
    task = _Task(asked=config, config=_decided(config, plan), run_dir=run_dir, checkpoint=checkpoint)

    if launched is not None:
        launch.adopt_rank_environment(config, plan)
        if launch.is_main_rank():
            _announce(config, plan, run_dir, [*plan.notes, *notes])
        prepare(task, plan)
        train(task, plan)
        if launch.is_main_rank():
            environment, _ = launch.child_environment(config, plan, 1)
            launch.run_worker(["worker", "verify", task.to_json()], environment)
        return RunResult.load(run_dir)

    environment, launch_notes = launch.child_environment(config, plan, 1)
    _announce(config, plan, run_dir, [*plan.notes, *notes, *launch_notes])
    if not (checkpoint is not None and (run_dir / "model").is_dir()):  # else it was only its check that was cut off
        launch.run_worker(["worker", "prepare", task.to_json()], environment)
        environment, _ = launch.child_environment(config, plan, plan.world_size)
        launch.start_ranks(plan, ["worker", "train", task.to_json()], environment, hostfile)
    environment, _ = launch.child_environment(config, plan, 1)
    launch.run_worker(["worker", "verify", task.to_json()], environment)
    return RunResult.load(run_dir)


def _announce(config: Config, plan: Plan, run_dir: Path, notes: Sequence[str]) -> None:
    log.info("%s -> %s", config.name, run_dir)
    log.info("machine: %s", plan.hardware.describe())
    log.info("plan: %s", plan.describe())
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

    def to_json(self) -> str:
        return json.dumps({"asked": to_dict(self.asked), "config": to_dict(self.config), "run_dir": str(self.run_dir),
                           "checkpoint": str(self.checkpoint) if self.checkpoint else None})  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> _Task:
        raw = json.loads(text)
        checkpoint = Path(raw["checkpoint"]) if raw["checkpoint"] else None
        return cls(load_config(raw["asked"]), load_config(raw["config"]), Path(raw["run_dir"]), checkpoint)


def _decided(config: Config, plan: Plan) -> Config:
    train = dataclasses.replace(config.train, grad_accum_steps=plan.grad_accum_steps, global_batch_size=None)
    own_file = config.deepspeed is not None and plan.strategy.deepspeed
    return dataclasses.replace(
        config,
        train=train,
        ranks=plan.world_size,
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


_MAY_CHANGE = {"train.epochs", "train.max_steps", "train.log_steps", "train.eval_steps", "train.save_steps",
               "train.save_total_limit", "output_dir", "name", "strategy", "deepspeed", "data.cache_dir", "ranks"}  # fmt: skip


def _check_resume(config: Config, plan: Plan, run_dir: Path, checkpoint: Path) -> None:
    """A resumed run continues this run: what shapes its curve must be what it was."""
    before = checkpoints.read_json(run_dir / "run.json").get("plan") or {}
    ranks = checkpoints.saved_ranks(checkpoint) or before.get("world_size", plan.world_size)
    if ranks != plan.world_size:
        raise CheckpointError(
            f"{checkpoint} was written by {ranks} rank{'s' * (ranks > 1)}, and this run would have {plan.world_size}.\n"
            f"  Resume with ranks={ranks}, or start anew from its weights with model.path={checkpoint} --new "
            "(optimizer states and the place in the data are then lost)."
        )
    now = {"strategy": plan.strategy.name, "global_batch_size": plan.global_batch_size}
    different = [f"{k}: {before[k]} then, {v} now" for k, v in now.items() if before.get(k, v) != v]
    if different:
        raise CheckpointError(listing(f"{checkpoint} cannot be continued in another way than it was begun", different))
    saved = run_dir / "config.yaml"
    if not saved.is_file():
        return
    then, now = _flat(to_dict(load_config(saved))), _flat(to_dict(config))
    changed = [f"{k}: {then[k]} then, {now.get(k)} now" for k in then if k not in _MAY_CHANGE and then[k] != now.get(k)]
    if changed:
        raise ConfigError(listing(f"this is not the run in {run_dir}; resume it as it was, or start a new one with --new",
                                  changed))  # fmt: skip


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, node in tree.items() for k, v in _flat(node, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}


# ---------------------------------------------------------------------------------- the line, one process each


def cache_dir(config: Config) -> Path:
    """Where tokens and presets are kept; made on the spot.

    Raises:
        DataError: it cannot be written.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "deepseek_ft")
    folder = Path(config.data.cache_dir or os.environ.get("DEEPSEEK_FT_CACHE") or default).expanduser()
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
    train: Blocks
    eval: Blocks | None


def _load_materials(config: Config) -> _Materials:
    """Tokenizer, blocks and the folder of the weights: made on the first call, found in the caches on the others."""
    from .data.blocks import build_blocks
    from .data.sources import open_source
    from .models import load_tokenizer, model_source, tokenizer_id, tokenizer_source

    cache = cache_dir(config)
    train_corpora = [open_source(s, config.data, cache, f"data.train.{i}") for i, s in enumerate(config.data.train)]
    eval_corpora = [open_source(s, config.data, cache, f"data.eval.{i}") for i, s in enumerate(config.data.eval)]
    tokenizer = load_tokenizer(tokenizer_source(config, train_corpora, cache))
    identity, eos = tokenizer_id(tokenizer), tokenizer.eos_token_id

    def blocks(corpora):
        return build_blocks(corpora, tokenizer.backend_tokenizer, identity, eos, config.data.seq_len, cache)

    train = blocks(train_corpora)
    return _Materials(
        tokenizer, model_source(config, tokenizer, cache), train, blocks(eval_corpora) if eval_corpora else None
    )


def prepare(task: _Task, plan: Plan) -> None:
    """Everything that must be there before the ranks start: C++ ops, tokenizer, blocks, weights."""
    ops.build(plan.ops)
    _load_materials(task.config)


def train(task: _Task, plan: Plan) -> None:
    """One rank's part of the run, from the prepared materials to the saved model folder."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from transformers import set_seed
    from transformers.utils.logging import disable_progress_bar

    from .callbacks import RunLog, peak_memory_bytes
    from .models import load_model, token_bytes
    from .report import plot_loss, read_metrics
    from .trainer import FineTuneTrainer, build_training_args

    started = time.time()
    disable_progress_bar()  # transformers' own: one per rank, for files that load in a moment
    config, run_dir = task.config, task.run_dir
    quiet = logging.getLogger("deepseek_ft.data"), logging.getLogger("deepseek_ft.models")
    for logger in quiet:  # the preparation has said it
        logger.setLevel(logging.WARNING)
    materials = _load_materials(config)
    total_steps = plan.total_steps(config, len(materials.train))
    if plan.strategy.deepspeed and plan.device == "cpu":
        import deepspeed

        with contextlib.redirect_stdout(io.StringIO()):  # every rank would print that it found the op that was built
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    args = build_training_args(config, plan, run_dir, total_steps)
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
            "recipe": to_dict(task.asked),
            "plan": planner.to_dict(plan),
            "versions": _versions(),
            "data": {"train": dataclasses.asdict(materials.train.stats),
                     "eval": dataclasses.asdict(materials.eval.stats) if materials.eval else None},
        }  # fmt: skip
        checkpoints.write_json(run_file, run)
        log.info("training: %d steps, %.2f epochs of %s blocks", total_steps,
                 total_steps / plan.steps_per_epoch(len(materials.train)), f"{len(materials.train):,}")  # fmt: skip

    set_seed(config.seed)
    model = load_model(materials.model_source, config, plan, materials.tokenizer)
    if plan.strategy.stage == 3 and not all(hasattr(p, "ds_id") for p in model.parameters()):
        raise RunError("ZeRO-3 was planned, but the weights were loaded whole on every rank")
    load_peak = _gathered(peak_memory_bytes("cpu"))
    if main:
        log.info("weights loaded: at most %.2f GiB of host memory per rank", max(load_peak) / GIB)
    bytes_of_token = np.array(token_bytes(materials.tokenizer, model.config.vocab_size))
    trainer = FineTuneTrainer(
        config=config, plan=plan, model=model, args=args, train_dataset=materials.train, eval_blocks=materials.eval,
        bytes_of_token=bytes_of_token, processing_class=materials.tokenizer,
    )  # fmt: skip
    if materials.eval is not None and task.checkpoint is None:
        args.eval_on_start = True
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    run_log = RunLog(trainer, run_dir / "metrics.jsonl", resumed_from=task.checkpoint)
    trainer.add_callback(run_log)

    trainer.train(resume_from_checkpoint=str(task.checkpoint) if task.checkpoint else None)

    _export(trainer, materials.tokenizer, run_dir, main)
    peak = _gathered(peak_memory_bytes(plan.device))
    host_peak = _gathered(peak_memory_bytes("cpu"))
    if main:
        metrics = read_metrics(run_dir / "metrics.jsonl")
        losses = [m["loss"] for m in metrics if "loss" in m]
        evals = [m for m in metrics if "eval_loss" in m]
        tokens = float(trainer.target_tokens)
        seq_len = config.data.seq_len
        trained = tokens * seq_len / (seq_len - 1)
        run |= {
            "status": "trained",
            "engine_facts": trainer.engine_facts(),
            "steps": trainer.state.global_step,
            "global_batch_size": plan.global_batch_size,
            "tokens": round(trained),
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "before": _eval_figures(evals[0]) if evals and evals[0]["step"] == 0 else run.get("before"),
            "after": _eval_figures(evals[-1]) if evals and evals[-1]["step"] == trainer.state.global_step else None,
            "tokens_per_second": trained / run_log.step_seconds if run_log.step_seconds else None,
            "peak_memory_bytes": peak,
            "host_peak_memory_bytes": host_peak,
            "host_peak_after_loading_bytes": load_peak,
            "wall_seconds": round(time.time() - started, 1),
            "check": {"block_nll": trainer.last_block_nll[:_CHECKED_BLOCKS].tolist()}
            if materials.eval is not None
            else None,
        }
        checkpoints.write_json(run_file, run)
        plot_loss(metrics, run_dir / "loss.png", config.name)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    del trainer, model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


_CHECKED_BLOCKS = 4


def _eval_figures(row: dict) -> dict:
    return {k.removeprefix("eval_"): v for k, v in row.items() if k.startswith("eval_")}


def _gathered(value: int) -> list[int]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return [value]
    values: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _export(trainer, tokenizer, run_dir: Path, main: bool) -> None:
    """The model folder, written beside and renamed when it is whole."""
    folder = run_dir / "model"
    partial = run_dir / "model.partial"
    trainer.model.config.use_cache = True
    trainer.save_model(str(partial))
    if main:
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody needs to load the model
        tokenizer.save_pretrained(str(partial))
        if folder.exists():
            raise RunError(f"{folder} is there already; the model is in {partial}")
        partial.replace(folder)


def verify(task: _Task) -> None:
    """In a fresh process: load the model folder as a user would, score it as the run did, and let it write.

    Raises:
        CheckpointError: a weight is missing, or the loaded model does not give the run's loss.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from .evaluation import block_nll
    from .models import check_loading_info

    disable_progress_bar()
    config, run_dir = task.config, task.run_dir
    folder, run_file = run_dir / "model", run_dir / "run.json"
    run = checkpoints.read_json(run_file)
    weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    room = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    device = torch.device("cuda" if room > 1.3 * weights else "cpu")
    logging.getLogger("deepseek_ft.data").setLevel(logging.WARNING)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"{folder} does not load: {type(error).__name__}: {error}") from error
    check_loading_info(info, str(folder))
    model.to(device).eval()
    if (run.get("check") or {}).get("block_nll"):
        logging.getLogger("deepseek_ft.models").setLevel(logging.WARNING)
        materials = _load_materials(config)
        expected = sum(run["check"]["block_nll"])
        rows = [materials.eval[i] for i in range(len(run["check"]["block_nll"]))]
        found = float(block_nll(model, rows, 1, device).sum())
        tokens = sum(len(row["labels"]) - 1 for row in rows)
        # 16-bit sums differ between devices and batch shapes; a wrong or missing weight shows in whole nats.
        tolerance = 1e-3 if config.train.precision == "fp32" else 2e-2
        run["check"] |= {"loss": expected / tokens, "reloaded_loss": found / tokens, "tokens": tokens}
        if not abs(found - expected) <= tolerance * tokens:
            run["status"] = "failed"
            checkpoints.write_json(run_file, run)
            raise CheckpointError(f"{folder} loads, but gives loss {found / tokens:.4f} on {tokens:,} held-out tokens where the run "
                                  f"measured {expected / tokens:.4f}: it is not the model that was trained")  # fmt: skip
        log.info("%s loaded in a fresh process: loss %.4f on %s held-out tokens, the run measured %.4f",
                 folder, found / tokens, f"{tokens:,}", expected / tokens)  # fmt: skip
        run["sample"] = _write_sample(model, tokenizer, rows[0]["input_ids"], config.seed)
    run["status"] = "finished"
    checkpoints.write_json(run_file, run)


def _write_sample(model, tokenizer, ids, seed: int) -> dict:
    import torch

    prompt = torch.from_numpy(ids[:16].copy())[None].to(model.device)
    torch.manual_seed(seed)
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=True, temperature=0.8, top_k=50,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )  # fmt: skip
    return {"prompt": tokenizer.decode(prompt[0]), "text": tokenizer.decode(out[0, prompt.shape[1] :])}


def _versions() -> dict[str, str]:
    names = (
        "deepseek_ft",
        "torch",
        "transformers",
        "deepspeed",
        "accelerate",
        "datasets",
        "peft",
        "tokenizers",
        "numpy",
    )
    found = {"python": platform.python_version()}
    for name in names:
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
    plan = plan_run(task.config, launched_ranks=ranks, can_build_ops=True)
    if stage == "prepare":
        return prepare(task, plan)
    if launched is not None:  # on another host nobody has set this rank's environment yet
        launch.adopt_rank_environment(task.config, plan)
    return train(task, plan)
