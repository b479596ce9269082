"""How long the stages of a pipeline wait for each other: the clock beside the formula, on three CPU ranks.

    torchrun --nproc-per-node 3 benchmarks/pipeline.py

The second table is what an interleaved schedule (arXiv:2104.04473 §2.2.2), with two runs of half as many layers on each rank, would make of it.

Stages that sleep instead of computing, 20 ms forward and 40 ms backward: all else is what a run uses, torch's 1F1B schedule with our
receive buffers over gloo. `clock` is 1 - busy / (stages x time from the first pass to the last), `trace` what `run.json` would say,
`formula` (p - 1) / (m + p - 1). Medians of five steps.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from deepseek_ft.pipeline import _Station, idle_share
from deepseek_ft.ranks import from_all

FORWARD, BACKWARD, STEPS, SHAPE = 0.02, 0.04, 5, (1, 128, 64)
COUNTS = (3, 6, 12, 24, 48)


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        time.sleep(share * FORWARD)
        return x * 1

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.share * BACKWARD)
        return gradient, None


class Sleeper(torch.nn.Module):
    """A stage that takes `share` of a rank's time."""

    def __init__(self, last: bool, share: float = 1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(SHAPE))
        self.last, self.share = last, share

    def forward(self, *hidden: torch.Tensor, which: torch.Tensor | None = None) -> torch.Tensor:
        out = Sleep.apply(hidden[0] * self.weight, self.share) if hidden else Sleep.apply(self.weight * 1, self.share)
        return out.sum() if self.last else out


def interleaved(rank: int, p: int, m: int) -> float:
    """The share of a step that ranks with two stages each wait, by the clock."""
    between = torch.empty(SHAPE, device="meta", requires_grad=True)
    scalar = torch.empty((), device="meta", requires_grad=True)
    stages = [
        PipelineStage(Sleeper(i == 2 * p - 1, 0.5), i, 2 * p, torch.device("cpu"), input_args=() if i == 0 else between,
                      output_args=scalar if i == 2 * p - 1 else between)
        for i in (rank, rank + p)
    ]  # fmt: skip
    schedule = ScheduleInterleaved1F1B(stages, m, loss_fn=lambda loss, _: loss, scale_grads=False)
    clocks = []
    for _ in range(STEPS + 1):
        dist.barrier()
        begun = time.perf_counter()
        schedule.step(which=torch.arange(m), target=torch.arange(m), losses=[], return_outputs=False)
        slowest = max(from_all(time.perf_counter() - begun))
        clocks.append(1 - m * (FORWARD + BACKWARD) / slowest)
    return statistics.median(clocks[1:])


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, p = dist.get_rank(), dist.get_world_size()
    between = torch.empty(SHAPE, device="meta", requires_grad=True)
    scalar = torch.empty((), device="meta", requires_grad=True)
    if rank == 0:
        print(f"| stages | micro-batches | formula | trace | clock |\n|{'---|' * 5}")
    for m in COUNTS:
        station = _Station(Sleeper(rank == p - 1), rank, p, torch.device("cpu"), input_args=() if rank == 0 else between,
                           output_args=scalar if rank == p - 1 else between)  # fmt: skip
        schedule = Schedule1F1B(station, m, loss_fn=lambda loss, _: loss, scale_grads=False)
        clocks, traces = [], []
        for _ in range(STEPS + 1):  # the first one sets things up
            dist.barrier()
            station.trace = []
            schedule.step(which=torch.arange(m), target=torch.arange(m), losses=[], return_outputs=False)
            found = from_all([(each.kind, each.micro_batch, each.begin, each.end) for each in station.trace])
            every = [each for stage in found for each in stage]
            busy = sum(end - begin for *_, begin, end in every)
            clocks.append(1 - busy / (p * (max(e[3] for e in every) - min(e[2] for e in every))))
            seconds = [{kind: statistics.median(e[3] - e[2] for e in stage if e[0] == kind) for kind in "FB"} for stage in found]
            traces.append(idle_share([[(e[0], e[1]) for e in stage] for stage in found], seconds))
        if rank == 0:
            clock, trace = statistics.median(clocks[1:]), statistics.median(traces[1:])
            print(f"| {p} | {m} | {(p - 1) / (m + p - 1):.3f} | {trace:.3f} | {clock:.3f} |", flush=True)
    if rank == 0:
        print(f"\n| stages | micro-batches | formula, interleaved | clock, interleaved |\n|{'---|' * 4}")
    for m in COUNTS:
        clock = interleaved(rank, p, m)
        if rank == 0:
            print(f"| 2 x {p} | {m} | {(p - 1) / (2 * m + p - 1):.3f} | {clock:.3f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
