"""Training through stages: one rank holds a run of layers, micro-batches pass through in a row (1F1B, arXiv:2104.04473 §2.2.1).

Each rank runs Trainer as if it were alone, on the same rows as the others of its replica. At the first micro-batch of a step
all of the step's go through the stages, by torch's own schedule (torch.distributed.pipelining). What the ranks then need of each other
is the loss, the norm of all gradients, a tied table's gradient and, with several replicas, the sum of their gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import TrainingArguments

from . import adapters, stages
from .data.blocks import IGNORED
from .models import load_dtype
from .ranks import from_all
from .stages import Stage
from .trainer import FineTuneTrainer


@dataclasses.dataclass(frozen=True)
class Ranks:
    """A rank's place, and the groups that it talks to."""

    stage: Stage
    pipe: dist.ProcessGroup
    """The stages of its replica."""
    twins: dist.ProcessGroup | None
    """The same stage of every replica; None when there is one."""
    ends: dist.ProcessGroup | None
    """First and last stage of its replica, of which it is one; None for those between."""


def meet(sizes: Sequence[int], device: str) -> Ranks:
    """Form the groups. Collective, before anything of Trainer's: the ranks' environment is read here, and then hidden from
    accelerate (`launch.stand_alone`).
    """
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    count, world = len(sizes), dist.get_world_size()
    stage = Stage(dist.get_rank(), tuple(sizes), world // count)
    pipe = twins = ends = None
    for replica in range(stage.replicas):  # every rank takes part in making every group
        members = range(replica * count, (replica + 1) * count)
        made, outer = dist.new_group(list(members)), dist.new_group([members[0], members[-1]]) if count > 1 else None
        if replica == stage.replica:
            pipe, ends = made, outer if stage.first or stage.last else None
    for index in range(count) if stage.replicas > 1 else ():
        made = dist.new_group(list(range(index, world, count)))
        if index == stage.index:
            twins = made
    return Ranks(stage, pipe, twins, ends)


class RankArguments(TrainingArguments):
    """Of a rank that trains as if it were alone, but writes and reports as one of several."""

    @property
    def process_index(self) -> int:
        return dist.get_rank()

    @property
    def local_process_index(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()


# --------------------------------------------------------------------------------------------------------- the engine


@dataclasses.dataclass(frozen=True)
class Pass:
    """Of one micro-batch through one stage: F forward, B backward; begin and end on the clock, or as the card's events."""

    kind: str
    micro_batch: int
    begin: Any
    end: Any

    @property
    def seconds(self) -> float:
        return self.end - self.begin if isinstance(self.end, float) else self.begin.elapsed_time(self.end) / 1e3


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Station(PipelineStage):
    """torch's stage with as many receive buffers as micro-batches are in flight here, not as a step has: for 32 of 4,096 tokens and
    4,096 features that is 2 GiB less on a stage between two others. And with a trace."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trace: list[Pass] = []

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        flying = min(num_microbatches, self.num_stages - self.stage_index)
        super()._setup_forward_recv_info(flying, has_backward)
        self.args_recv_info |= {i: self.args_recv_info[i % flying] for i in range(flying, num_microbatches)}

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self.grad_recv_info |= {i: self.grad_recv_info[0] for i in range(1, num_microbatches)}

    @contextlib.contextmanager
    def _traced(self, kind: str, chunk: int) -> Iterator[None]:
        begun = _now(self.device)
        yield
        self.trace.append(Pass(kind, chunk, begun, _now(self.device)))

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        with self._traced("F", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args, **kwargs):
        with self._traced("B", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class Pipeline(nn.Module):
    """A stage of a model among the others: it is trained by the step, and scored by the batch, as one model."""

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device, dtype: torch.dtype,
                 autocast: Callable[[], contextlib.AbstractContextManager]):  # fmt: skip
        """
        Args:
            dtype: of the hidden states between stages.
        """
        super().__init__()
        self.module = model
        self.ranks, self.stage, self.device, self.autocast = ranks, ranks.stage, device, autocast
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.dtype, self.hidden_size = dtype, self.base.config.hidden_size
        trains = torch.tensor(any(p.requires_grad for p in model.parameters()), dtype=torch.int32, device=device)
        found = [torch.empty_like(trains) for _ in range(self.stage.count)]
        dist.all_gather(found, trains, group=ranks.pipe)
        trained = [bool(x) for x in found]
        self.takes_gradients = any(trained[: self.stage.index])
        """Whether what comes in needs a gradient: a stage before it trains something."""
        self.gives_gradients = any(trained[: self.stage.index + 1])
        self.table = stages.shared_table(self.base, self.stage)
        self.trace: list[Pass] = []
        """Of the last step, in the order in which it ran."""
        self._schedules: dict[tuple[int, ...], tuple[_Station, Schedule1F1B]] = {}
        self._batches: Sequence[dict] = ()
        self._items: torch.Tensor | None = None

    # ---------------------------------------------------------------------------------------------- a training step

    def train_step(self, batches: Sequence[dict], items: torch.Tensor) -> torch.Tensor:
        """Forward and backward of a step's micro-batches; gradients are then those of the whole step.

        Args:
            batches: each with `input_ids` (B, T), `labels` (B, T) and what else the model takes, all of one shape.
            items: target tokens of the step, over all replicas: what the sum of the losses is divided by.

        Returns:
            The loss of the step, the same on every rank.
        """
        batches = list(batches)
        while len(batches) < self.stage.count:  # an epoch's last step may have fewer than 1F1B can do with
            batches.append(batches[0] | {"labels": torch.full_like(batches[0]["labels"], IGNORED)})
        self.module.train()
        self._batches, self._items = batches, items
        shape = tuple(batches[0]["input_ids"].shape)
        station, schedule = self._schedule(len(batches), shape)
        which = torch.arange(len(batches))
        losses: list[torch.Tensor] = []
        try:
            schedule.step(which=which, target=which if self.stage.last else None, losses=losses, return_outputs=False)
        finally:
            self._batches, self._items = (), None
            self.trace, station.trace = station.trace, []
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)
        loss = loss.detach().to(torch.float64)
        dist.all_reduce(loss)
        self._share_gradients()
        return loss.float()

    def _schedule(self, count: int, shape: tuple[int, int]) -> tuple[_Station, Schedule1F1B]:
        key = (count, *shape)
        if key not in self._schedules:
            between = (*shape, self.hidden_size)
            stage = self.stage
            comes = () if stage.first else torch.empty(between, dtype=self.dtype, device="meta", requires_grad=self.takes_gradients)
            goes = torch.empty(() if stage.last else between, dtype=torch.float32 if stage.last else self.dtype, device="meta",
                               requires_grad=self.gives_gradients)  # fmt: skip
            station = _Station(_Body(self), stage.index, stage.count, self.device, input_args=comes, output_args=goes, group=self.ranks.pipe)
            self._schedules[key] = station, Schedule1F1B(station, count, loss_fn=lambda loss, _: loss, scale_grads=False)
        return self._schedules[key]

    def _compute(self, chunk: int, *hidden: torch.Tensor) -> torch.Tensor:
        """What this stage does with a micro-batch: hidden states, or the loss of the last one."""
        inputs = {k: v for k, v in self._batches[chunk].items() if k not in ("input_ids", "labels")}
        inputs["input_ids" if self.stage.first else "inputs_embeds"] = self._batches[chunk]["input_ids"] if self.stage.first else hidden[0]
        with self.autocast():
            if self.stage.last:
                return self.module(**inputs, labels=self._batches[chunk]["labels"], num_items_in_batch=self._items, use_cache=False).loss
            return self.base.model(**inputs, use_cache=False).last_hidden_state.to(self.dtype)  # what the next stage waits for

    def _share_gradients(self) -> None:
        if self.ranks.twins is not None:
            for gradient in self.gradients():
                dist.all_reduce(gradient, group=self.ranks.twins)
        if self.table is not None and self.table.grad is not None:
            dist.all_reduce(self.table.grad, group=self.ranks.ends)

    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.module.parameters() if p.grad is not None]

    def gradient_norm(self) -> torch.Tensor:
        """Of the gradients of all stages together; a tied table's counts once. Collective."""
        twice = self.table if self.stage.last else None
        mine = [p.grad for p in self.module.parameters() if p.grad is not None and p is not twice]
        square = torch.nn.utils.get_total_norm(mine).double().square() if mine else torch.zeros((), dtype=torch.float64)
        square = square.to(self.device)
        dist.all_reduce(square, group=self.ranks.pipe)
        return square.sqrt().float()

    # ----------------------------------------------------------------------------------------------------- scoring

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> SimpleNamespace:
        """A batch through all stages, forward only. The last stage's `logits` are the model's; the others' are zeros (B, T)."""
        stage = self.stage
        if stage.first:
            inputs["input_ids"] = input_ids
        else:
            inputs["inputs_embeds"] = torch.empty(*input_ids.shape, self.hidden_size, dtype=self.dtype, device=self.device)
            dist.recv(inputs["inputs_embeds"], group=self.ranks.pipe, group_src=stage.index - 1)
        with self.autocast():
            if stage.last:
                return self.module(**inputs)
            hidden = self.base.model(**inputs).last_hidden_state
        dist.send(hidden.to(self.dtype).contiguous(), group=self.ranks.pipe, group_dst=stage.index + 1)
        return SimpleNamespace(logits=torch.zeros(input_ids.shape, device=self.device))


class _Body(nn.Module):
    """What torch's stage calls: a micro-batch by its number, and what came in."""

    def __init__(self, pipeline: Pipeline):
        super().__init__()
        self.module = pipeline.module
        self._compute = pipeline._compute

    def forward(self, *hidden: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return self._compute(int(which), *hidden)


class HeadElsewhere:
    """`losses.Head` on a stage without one."""

    @contextlib.contextmanager
    def scoring(self, labels: torch.Tensor) -> Iterator[None]:
        yield


# --------------------------------------------------------------------------------------------------------- the trace


def idle_share(orders: Sequence[Sequence[tuple[str, int]]], seconds: Sequence[Mapping[str, float]]) -> float:
    """The share of a step that stages wait for each other, when nothing but their passes takes time.

    Args:
        orders: of each stage, its passes in the order in which it ran them: (F or B, micro-batch).
        seconds: of each stage, how long a forward and a backward pass take.

    Returns:
        1 - busy / (stages x makespan). For equal stages and 1F1B that is (p - 1) / (m + p - 1) with p stages and m
        micro-batches (arXiv:1811.06965 §2.3).
    """
    done: dict[tuple[int, str, int], float] = {}
    clock, at = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(at, orders, strict=True)):
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, chunk = order[at[stage]]
                before = stage - 1 if kind == "F" else stage + 1
                needs = (before, kind, chunk) if 0 <= before < len(orders) else (stage, "F", chunk) if kind == "B" else None
                if needs is not None and needs not in done:
                    break
                begin = max(clock[stage], done.get(needs, 0.0))
                clock[stage] = done[stage, kind, chunk] = begin + seconds[stage][kind]
                at[stage] += 1
                moved = True
        if not moved:
            raise ValueError("the stages wait for each other in a circle")
    busy = sum(seconds[stage][kind] for stage, order in enumerate(orders) for kind, _ in order)
    return 1 - busy / (len(orders) * max(clock))


# --------------------------------------------------------------------------------------------------------- the trainer


class PipelineTrainer(FineTuneTrainer):
    """`FineTuneTrainer` of one stage."""

    is_stage = True

    def __init__(self, *, ranks: Ranks, **kwargs):
        self.ranks, self.stage = ranks, ranks.stage
        super().__init__(**kwargs)
        self.replica, self.replicas = self.stage.replica, self.stage.replicas
        self.pipeline: Pipeline | None = None
        plain, micro = self.data_collator, self.plan.micro_batch_size

        def own_rows(rows: list[dict]) -> dict:
            """This replica's rows of a micro-batch of all replicas, filled up with rows that do not count."""
            mine = rows[self.replica * micro : (self.replica + 1) * micro]
            filler = rows[0] | {"labels": rows[0]["labels"] * 0 + IGNORED}
            return plain([*mine, *[filler] * (micro - len(mine))])

        self.data_collator = own_rows

    def _prepare_for_training(self, *args, **kwargs):
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.pipeline = self.model_wrapped = Pipeline(
            self.model, self.ranks, self.args.device, load_dtype(self.config, self.plan), self.autocast_smart_context_manager
        )
        return prepared

    def _get_num_items_in_batch(self, batch_samples, device):
        items = super()._get_num_items_in_batch(batch_samples, device)
        if self.ranks.twins is not None:
            items = torch.as_tensor(items, device=device)
            dist.all_reduce(items, group=self.ranks.twins)
        return items

    def training_step(self, model, inputs, num_items_in_batch=None):
        """At a step's first micro-batch the whole step; nothing at the others."""
        if inputs is not self.step_batches[0]:
            return torch.zeros((), device=self.args.device)
        batches = [self._prepare_inputs(batch) for batch in self.step_batches]
        return self.pipeline.train_step(batches, num_items_in_batch)

    def _clip_grad_norm(self, model):
        norm = self.pipeline.gradient_norm()
        torch.nn.utils.clip_grads_with_norm_(list(self.model.parameters()), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model, grad_norm=None):
        return super()._get_grad_norm(model, self.pipeline.gradient_norm() if grad_norm is None else grad_norm)

    # --------------------------------------------------------------------------------------------------- on the disk

    def save_model(self, output_dir=None, _internal_call=False):
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if adapters.is_adapter(self.model):
            adapters.save(self.model, folder, self.config, self.args.should_save, self.of_all_stages)
        else:
            stages.save(self.model, folder, self.stage)
        if self.args.should_save:
            self.processing_class.save_pretrained(str(folder))

    def _save_optimizer_and_scheduler(self, output_dir):
        if self.stage.replica == 0:
            torch.save(self._whole_optimizer().state_dict(), optimizer_file(Path(output_dir), self.stage))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None:
            return
        saved = torch.load(optimizer_file(Path(checkpoint), self.stage), map_location="cpu", weights_only=True)
        self._whole_optimizer().load_state_dict(saved)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), map_location="cpu", weights_only=True))

    def _whole_optimizer(self) -> Any:
        """What has a state_dict of all that a checkpoint must hold."""
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        return inner.whole if hasattr(inner, "whole") else self.optimizer

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        dist.barrier()  # trainer_state.json, which comes next, says that all is there

    # ----------------------------------------------------------------------------------------------------- what ran

    def of_all_stages(self, mine: dict) -> dict:
        return {name: value for part in from_all(mine)[: self.stage.count] for name, value in part.items()}

    def gradient_check(self) -> adapters.GradientCheck:
        return adapters.GradientCheck(self.model, self.ranks.twins, alone=self.ranks.twins is None)

    def engine_facts(self) -> dict:
        return super().engine_facts() | {"stages": list(self.stage.sizes), "replicas": self.stage.replicas}

    def gathered_facts(self) -> dict:
        """The stages of the first replica side by side, and the share of the last step that they waited, by its trace."""
        trace = self.pipeline.trace
        mine = {
            "layers": [self.stage.layers.start, self.stage.layers.stop - 1],
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "order": [(each.kind, each.micro_batch) for each in trace],
            "seconds": {kind: statistics.median([each.seconds for each in trace if each.kind == kind] or [0.0]) for kind in "FB"},
        }
        found = from_all(mine)[: self.stage.count]
        orders, seconds = [each.pop("order") for each in found], [each["seconds"] for each in found]
        return {"pipeline": {"stages": found, "micro_batches": sum(kind == "F" for kind, _ in orders[0]),
                             "idle_share": idle_share(orders, seconds) if all(orders) else None}}  # fmt: skip


def optimizer_file(folder: Path, stage: Stage) -> Path:
    return folder / f"optimizer-{stage.index + 1:05d}-of-{stage.count:05d}.pt"
