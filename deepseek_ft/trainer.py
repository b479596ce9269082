"""Trainer and its arguments. Hugging Face owns the loop; here it learns the plan and proves that it follows it."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Trainer, TrainingArguments

from . import activations, adapters, checkpoints, evaluation, experts, optimizers
from .config import Config
from .data.blocks import Blocks, collate
from .errors import RunError
from .losses import Head
from .models import check_loading_info
from .optimizers import keeps_bf16_weights, masters_apart
from .planner import Plan, warmup_steps
from .precision import Numbers, check_types, types_in_use
from .schedules import build_scheduler


def build_training_args(
    config: Config, plan: Plan, run_dir: Path, total_steps: int, kind: type[TrainingArguments] = TrainingArguments
) -> TrainingArguments:
    """TrainingArguments of a planned run.

    Building them starts the process group and, under ZeRO-3, makes every later `from_pretrained` load shards only,
    for as long as the returned object lives (transformers' `HfDeepSpeedConfig`): build them before the model.
    """
    deepspeed = copy.deepcopy(plan.deepspeed)
    if deepspeed is not None:
        # The recipe's optimizer is built here under every strategy, with the same parameter groups; the block's
        # values are the recipe's (checked) and serve those who use the file with a plain Trainer.
        deepspeed.pop("optimizer", None)
        if plan.strategy.offload_optimizer:
            # Otherwise accelerate rebuilds the optimizer that we pass, and its DeepSpeedCPUAdam is Adam with L2, not AdamW.
            deepspeed["zero_force_ds_cpu_optimizer"] = False
        if plan.strategy.tensor:
            from .tensor import SPLIT

            deepspeed["tensor_parallel"] = {"autotp_size": plan.world_size, "partition_config": SPLIT}
            deepspeed["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # whole matrices, at any stage
        if plan.strategy.nvme and config.deepspeed is None:
            deepspeed["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(checkpoints.offload_folder(config, run_dir))
    optim, train = config.optim, config.train
    return kind(
        output_dir=str(run_dir),
        use_cpu=plan.device == "cpu",  # without it Trainer sees one rank where DeepSpeed sees all
        deepspeed=deepspeed,
        seed=config.seed,
        data_seed=config.seed,
        max_steps=total_steps,
        per_device_train_batch_size=plan.rows_at_once,
        per_device_eval_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.micro_batches,
        average_tokens_across_devices=True,
        learning_rate=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        max_grad_norm=optim.max_grad_norm,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",  # create_scheduler has the curve
        warmup_steps=warmup_steps(config, total_steps),
        # No autocast over bf16 weights: what it would cast is bf16 already.
        bf16=train.precision == "bf16" and not keeps_bf16_weights(plan.optimizer, plan.strategy)
        and (plan.strategy.deepspeed or not masters_apart(plan.strategy)),
        fp16=train.precision == "fp16",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=plan.device == "cuda",
        remove_unused_columns=False,
        logging_steps=train.log_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # a NaN loss is shown, not averaged away
        eval_strategy="steps" if train.eval_steps and config.data.eval else "no",
        eval_steps=train.eval_steps if config.data.eval else None,
        save_strategy="steps" if train.save_steps else "no",
        save_steps=train.save_steps or 500,
        save_total_limit=train.save_total_limit,
        report_to=[],
        disable_tqdm=True,  # callbacks.py shows the progress
        log_level="warning",
    )


class FineTuneTrainer(Trainer):
    """`Trainer` with the recipe's learning-rate curve and a perplexity that does not depend on the batch size."""

    copies = 1
    """Ranks that have the figures of the same rows."""
    is_stage = False
    """This rank has a part of the model, and others have the rest."""

    def __init__(self, *, config: Config, plan: Plan, bytes_of_token: np.ndarray, eval_blocks: Blocks | None,
                 head: Head | None = None, routers: experts.Routers | None = None, **kwargs):  # fmt: skip
        collator = functools.partial(collate, lengths=evaluation.needs_lengths(kwargs["model"]))
        super().__init__(data_collator=collator, eval_dataset=eval_blocks, **kwargs)
        self.config, self.plan, self.head = config, plan, head
        self.routers = routers
        """None for a dense model."""
        activations.apply(self.model, config.model)
        self.eval_blocks, self.bytes_of_token = eval_blocks, bytes_of_token
        self.replica, self.replicas = self.args.process_index, self.args.world_size
        """Which part of each batch is this rank's, and of how many."""
        self.last_block_nll: np.ndarray | None = None
        self._rounded_step: int | None = None
        self.target_tokens = torch.zeros((), dtype=torch.float64, device=self.args.device)
        """Targets trained on so far, over all ranks; on the device, so that counting does not wait for it."""
        self.tokens = 0.0
        """Tokens trained on so far, over all ranks: what is only read and padding too, for they cost the same."""
        self.step_batches: list[dict] = []
        """Of the step at work, this rank's micro-batches; with what they add to the two counts."""
        self.step_tokens, self.step_targets = 0, 0
        self.numbers = Numbers(self)

    def create_optimizer(self, model=None):
        """The plan's optimizer: Trainer's fused AdamW on the card, all else from `optimizers.build`."""
        plan = self.plan
        if self.optimizer is None and (plan.optimizer.name != "adamw" or plan.strategy.offload_optimizer):
            decayed = set(self.get_decay_parameter_names(self.model))
            self.optimizer = optimizers.build(
                plan.optimizer, self.model, decayed, self.config.optim, plan.strategy, plan.device
            )
            if plan.optimizer.bf16_weights:
                self.optimizer.register_step_pre_hook(self._seed_rounding)
        return super().create_optimizer(model)

    def _seed_rounding(self, *_) -> None:
        """The random numbers of stochastic rounding follow from the seed and the step.

        So replicas of the model round alike, and a resumed run as the uninterrupted one. ZeRO-3 updates one sub-group after
        another in a step: they share its numbers, and ranks that hold other shards have others.
        """
        if self._rounded_step != self.state.global_step:
            self._rounded_step = self.state.global_step
            rank = self.args.process_index if self.plan.strategy.stage else 0
            torch.manual_seed((self.config.seed * 1_000_003 + self.state.global_step) * 1_009 + rank)

    def _prepare_for_training(self, *args, **kwargs):
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.plan.strategy.stage == 3:
            optimizers.share_master_weights(self.model_wrapped.optimizer)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.plan.strategy.nvme and self.model_wrapped.optimizer.swap_optimizer:
            tag = Path(checkpoint, "latest").read_text(encoding="utf-8").strip()
            optimizers.resume_from_disk(self.model_wrapped.optimizer, Path(checkpoint, tag), self.args.process_index)

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """The recipe's curve, unless the DeepSpeed file has a scheduler (which was checked to say the same)."""
        if self.lr_scheduler is None:
            warmup = warmup_steps(self.config, num_training_steps)
            self.lr_scheduler = build_scheduler(
                optimizer or self.optimizer, self.config.optim, num_training_steps, warmup
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, train_dataset=None):
        """In order, where the data is a stream that shuffles itself."""
        if self.config.data.streaming:
            return torch.utils.data.SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(train_dataset)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """The weights of a checkpoint without DeepSpeed, by the loader that reads models.

        Trainer's own puts a file's tensors into the modules by name and leaves out, without an error, what is called
        otherwise in files than in memory: the experts of V2 and V3 would go on from where the run had begun.

        Raises:
            CheckpointError: a weight of the model is not in it, or one that is not the model's.
        """
        if model is None and adapters.is_adapter(self.model):
            return adapters.load_weights(self.model, Path(resume_from_checkpoint), self.is_stage)
        if model is not None or not isinstance(self.model, PreTrainedModel):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        saved, info = type(self.model).from_pretrained(
            resume_from_checkpoint, dtype=self.model.dtype, output_loading_info=True
        )
        check_loading_info(info, str(resume_from_checkpoint))
        self.model.load_state_dict(saved.state_dict())

    def save_model(self, output_dir=None, _internal_call=False):
        """Of an adapter only itself: what Trainer gathers, and what it asks a hub about the base, is not needed."""
        if not adapters.is_adapter(self.model):
            return super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or self.args.output_dir)
        if self.plan.strategy.stage == 3:  # a weight that was fetched ahead in an evaluation is on its way, and cannot be gathered
            self.model_wrapped.empty_partition_cache()
        adapters.save(self.model, folder, self.config, write=self.args.should_save)
        if self.args.should_save:
            self.processing_class.save_pretrained(str(folder))

    def _run_epoch(self, **kwargs):
        """Nothing, when the run is resumed from its very last checkpoint: Trainer would train one step too many."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(**kwargs)

    def start_curve(self) -> None:
        """Line up a scheduler that DeepSpeed owns with the step count.

        DeepSpeed's WarmupLR has no value for iteration 0 until it is stepped once, and its engine steps it after each
        update: left alone, the first two updates would both have learning rate 0 and all others lag by one.
        """
        scheduler = getattr(self.model_wrapped, "lr_scheduler", None)
        if self.plan.deepspeed and "scheduler" in self.plan.deepspeed and self.state.global_step == 0:
            scheduler.step()

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        samples, targets = super().get_batch_samples(epoch_iterator, num_batches, device)
        samples = self.own_part(samples)
        self.step_batches, self.step_targets = samples, 0 if targets is None else targets
        self.step_tokens = sum(batch["input_ids"].numel() for batch in samples) * self.replicas
        self.target_tokens += self.step_targets
        self.tokens += self.step_tokens
        self.numbers.begin_step()
        if self.routers is not None:
            self.routers.begin_step(samples, self.args.device)
        return samples, targets

    def own_part(self, samples: list[dict]) -> list[dict]:
        """Of micro-batches whose targets have been counted, what this rank computes."""
        return samples

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """With the routers' balance loss, where the recipe asks for one."""
        routers = self.routers
        if routers is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with routers.watching(inputs):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if routers.balance is not None:
            loss = loss + routers.balance_loss() * self.replicas  # gradients are averaged over the ranks
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args, **kwargs):
        """The language-model loss, as it is reported; the balance loss is reported apart."""
        loss = super().training_step(*args, **kwargs)
        return loss if self.routers is None else self.routers.taken_off(loss, self.replicas)

    def _get_grad_norm(self, model, grad_norm=None):
        """Trainer asks once per step, when the gradients of all ranks are together: the place to look at them."""
        norm = super()._get_grad_norm(model, grad_norm)
        self.numbers.check(None if norm is None else float(norm))
        return norm

    def log(self, logs, start_time=None):
        super().log(self.numbers.logged(logs) if "loss" in logs else logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Token-weighted loss, perplexity and bits per byte of the held-out blocks; see `evaluation.summarise`."""
        with self.autocast_smart_context_manager():
            self.last_block_nll = evaluation.block_nll(
                self.model_wrapped, self.eval_blocks, self.args.per_device_eval_batch_size, self.args.device,
                self.replica, self.replicas, self.head, self.copies,
            )  # fmt: skip
        figures = evaluation.summarise(self.last_block_nll, self.eval_blocks, self.bytes_of_token)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def engine_facts(self) -> dict:
        """What really runs, read off the wrapped model."""
        engine = self.model_wrapped
        zero = hasattr(engine, "zero_optimization_stage")
        wrapped = engine.optimizer if zero else self.optimizer
        inner = getattr(wrapped, "optimizer", wrapped)  # ZeRO and accelerate wrap the real one
        facts = {"engine": type(engine).__name__, "zero_stage": None, "world_size": self.args.world_size,
                 "optimizer": type(inner).__name__, "optimizer_package": type(inner).__module__.partition(".")[0]}  # fmt: skip
        if zero:
            facts |= {
                "zero_stage": int(engine.zero_optimization_stage()),
                "engine_world_size": int(engine.dp_world_size),
                "tensor_parallel": max(1, int(engine.autotp_size())),
                "grad_accum_steps": int(engine.gradient_accumulation_steps()),
                "gradient_clipping": float(engine.gradient_clipping()),
                "fp16": bool(engine.fp16_enabled()),
                "bf16": bool(engine.bfloat16_enabled()),
                "decoupled_decay": bool(getattr(inner, "adam_w_mode", True)),
            }
        return facts | {"precision": types_in_use(self)}

    def of_all_stages(self, mine: dict) -> dict:
        """What this rank has of the model, or all stages of it have together. Collective."""
        return mine

    def gradient_check(self) -> adapters.GradientCheck:
        return adapters.GradientCheck(self.model)

    def gathered_facts(self) -> dict:
        """What no rank knows alone, for run.json. Collective."""
        return {}

    def assert_planned(self) -> dict:
        """Compare what runs with the plan, once everything is wrapped and before the first step.

        Raises:
            RunError: DeepSpeed is not in use, or stage, ranks, accumulation, clipping or precision are others. All of
                these have happened in silence: an environment variable is enough. Or a mixture of experts would hang.
        """
        facts, plan, config = self.engine_facts(), self.plan, self.config
        on_host = "deepspeed.DeepSpeedCPUAdam" if plan.strategy.deepspeed else "deepseek_ft.HostAdamW"
        runs_as = on_host if plan.strategy.offload_optimizer else plan.optimizer.runs_as
        package, _, name = runs_as.partition(".")
        expected = {"world_size": plan.world_size, "optimizer": name, "optimizer_package": package}
        if plan.strategy.deepspeed:
            expected |= {
                "engine": "DeepSpeedEngine",
                "zero_stage": plan.strategy.stage,
                "engine_world_size": plan.replicas if plan.strategy.tensor else plan.world_size,
                "tensor_parallel": plan.world_size if plan.strategy.tensor else 1,
                "grad_accum_steps": plan.micro_batches,
                "gradient_clipping": config.optim.max_grad_norm,
                "fp16": config.train.precision == "fp16",
                "bf16": config.train.precision == "bf16",
                "decoupled_decay": True,
            }
            if plan.strategy.sequence:
                expected["row_parts"] = plan.world_size
        elif plan.strategy.pipeline:
            expected |= {"engine": "Pipeline", "stages": list(plan.stages)}
        elif plan.world_size > 1:
            expected["engine"] = "DistributedDataParallel"
        else:
            expected["engine"] = type(self.model).__name__
        wrong = [f"{k} is {facts.get(k)}, planned {v}" for k, v in expected.items() if facts.get(k) != v]
        wrong += check_types(facts["precision"], plan.optimizer, plan.strategy)
        if wrong:
            raise RunError("what runs is not what was planned: " + "; ".join(wrong))
        if plan.strategy.stage == 3:
            experts.check_sharded(self.model)
        if self.routers is not None:
            self.routers.check()
        return facts
