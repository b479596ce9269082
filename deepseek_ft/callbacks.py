"""What a run says while it trains: every number to metrics.jsonl, a line or a bar to the person."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from .checkpoints import read_json, write_json
from .errors import RunError
from .hardware import GIB
from .precision import describe_types
from .report import duration

GUESSING = 0.9
"""Share of ln(ids) from which on a loss is no better than guessing."""
_COUNTS = "deepseek_ft.json"  # in a checkpoint: what has been counted so far
log = logging.getLogger(__name__)


def peak_memory_bytes(device: str) -> int:
    """Of this rank so far: allocated on its fullest GPU, or resident in the host's memory where there is none."""
    if device == "cuda":
        return max(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))  # a process may have several
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class RunLog(TrainerCallback):
    """Times the steps, asks for the last evaluation, writes metrics.jsonl and shows progress (rank 0)."""

    def __init__(self, trainer, metrics_file: Path, resumed_from: Path | None = None):
        self.trainer = trainer
        self.metrics_file = metrics_file
        self.resumed_from = resumed_from
        self.history: list[dict] = []
        self.step_seconds = 0.0
        """Time inside optimizer steps, without evaluation and checkpoints."""
        self._began = self._marked_seconds = self._marked_tokens = 0.0
        self._marked_step = self._first_step = 0
        self._learning_rate = self._first_seconds = 0.0
        self._bar = None
        self._starts = resumed_from is None
        """The first loss is still to come."""

    def on_train_begin(self, args, state, control, **kwargs):
        facts = self.trainer.assert_planned()
        if state.is_world_process_zero:
            log.info("%s", describe_types(facts["precision"]))
        self.trainer.start_curve()
        self.trainer.numbers.begin()
        self._first_step = self._marked_step = state.global_step
        if self.resumed_from is not None:
            counted = read_json(self.resumed_from / _COUNTS)
            self.trainer.target_tokens += counted.get("target_tokens", 0.0)
            self.trainer.tokens += counted.get("tokens", 0.0)
            self.trainer.numbers.skipped = counted.get("skipped", 0)
            self.step_seconds = self._marked_seconds = counted.get("step_seconds", 0.0)
            self._marked_tokens = self.trainer.tokens
        self._first_seconds = self.step_seconds
        if state.is_world_process_zero and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.perf_counter()
        # What this update will really use: a scheduler inside DeepSpeed has moved on by the time Trainer logs.
        self._learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, args, state, control, **kwargs):
        if self.trainer.routers is not None:
            self.trainer.routers.end_step(updated=not self.trainer.accelerator.optimizer_step_was_skipped)
        self.step_seconds += time.perf_counter() - self._began
        if self._bar is not None:
            self._bar.update(1)
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = self.trainer.eval_blocks is not None
        return control

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            counts = {"target_tokens": float(self.trainer.target_tokens), "tokens": self.trainer.tokens,
                      "skipped": self.trainer.numbers.skipped, "step_seconds": self.step_seconds}  # fmt: skip
            write_json(Path(args.output_dir, f"checkpoint-{state.global_step}", _COUNTS), counts)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not logs or "train_runtime" in logs:
            return
        entry = {"step": state.global_step, "epoch": round(state.epoch or 0.0, 4), "time": round(time.time(), 3)}
        if "learning_rate" in logs:
            tokens = self.trainer.tokens
            steps, seconds = state.global_step - self._marked_step, self.step_seconds - self._marked_seconds
            rate = (tokens - self._marked_tokens) / seconds if seconds else None
            done = state.global_step - self._first_step
            entry |= {"loss": logs["loss"]} if "loss" in logs else {}  # of the updates; where there was none, there is none
            entry |= {
                "learning_rate": self._learning_rate,
                "grad_norm": logs.get("grad_norm"),
                "tokens_per_second": rate,
                "tokens": int(tokens),
                "target_tokens": int(self.trainer.target_tokens),  # waits for the device, as reading the loss already did
                "skipped": self.trainer.numbers.skipped,
                "loss_scale": self.trainer.numbers.loss_scale,
                "step_seconds": seconds / max(1, steps),
                "peak_memory_bytes": peak_memory_bytes(self.trainer.plan.device),
                "eta_seconds": (self.step_seconds - self._first_seconds)
                / max(1, done)
                * (state.max_steps - state.global_step),
            }
            self._marked_step, self._marked_seconds, self._marked_tokens = state.global_step, self.step_seconds, tokens
            if self.trainer.routers is not None and (figures := self.trainer.routers.figures()) is not None:
                entry |= figures.numbers
                if state.is_world_process_zero:
                    with open(self.metrics_file.with_name("experts.jsonl"), "a", encoding="utf-8") as file:
                        file.write(json.dumps({"step": state.global_step} | figures.layers) + "\n")
        else:
            entry |= {k: v for k, v in logs.items() if k != "epoch"}
        self.history.append(entry)
        if state.is_world_process_zero:
            with open(self.metrics_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            self._show(entry, state.max_steps)
        self._check_start(entry)
        if not math.isfinite(entry.get("loss", 0.0)):
            optim, precision = self.trainer.config.optim, self.trainer.config.train.precision
            raise RunError(
                f"the loss is {entry['loss']} at step {state.global_step}: nothing after this would be training.\n"
                f"  Lower optim.lr ({optim.lr:g}), warm up longer, keep optim.max_grad_norm ({optim.max_grad_norm:g}) at 1"
                + (", or use train.precision=bf16, which has the range that fp16 lacks" if precision == "fp16" else "")
            )

    def _check_start(self, entry: dict) -> None:
        """Weights that were mixed up on the way in, or another model's tokenizer, start where guessing does, and train.

        Raises:
            RunError: before the first update, or at the first loss that is logged.
        """
        config, loss = self.trainer.config, entry.get("eval_loss", entry.get("loss"))
        if not self._starts or loss is None or config.model.untrained or config.model.path.startswith("preset:"):
            return
        self._starts = False
        ids = self.trainer.model.config.vocab_size
        if loss > GUESSING * math.log(ids):
            raise RunError(
                f"the loss starts at {loss:.2f}, and guessing among {ids:,} ids gives {math.log(ids):.2f}: {config.model.path} does not "
                "know this text at all.\n  Either its weights or its tokenizer are not what it was trained with, or the text is not "
                "what it should be (`deepseek-ft data show` shows it). If it was never trained: model.untrained=true"
            )

    def _show(self, e: dict, total: int) -> None:
        if "learning_rate" in e:
            loss = f"loss {e['loss']:.4f}" if "loss" in e else "loss none: no update"
            parts = [f"step {e['step']}/{total}", loss, f"lr {e['learning_rate']:.1e}"]
            if e["grad_norm"] is not None:
                parts.append(f"grad {e['grad_norm']:.2f}")
            if e["skipped"]:
                parts.append(f"skipped {e['skipped']}, scale {e['loss_scale'] or 1:g}")
            if e["tokens_per_second"]:
                parts.append(f"{e['tokens_per_second']:,.0f} tok/s")
            if "expert_load_max" in e:
                idle = f" idle {e['experts_idle']:.0%}" if e["experts_idle"] else ""
                parts.append(f"experts {e['expert_load_min']:.1f}-{e['expert_load_max']:.1f}x{idle}")
            parts += [f"mem {e['peak_memory_bytes'] / GIB:.1f} GiB", f"eta {duration(e['eta_seconds'])}"]
            line = " | ".join(parts)
            if self._bar is not None:
                shown = [
                    p for p in parts if p.startswith(("loss", "lr")) or p.endswith("tok/s")
                ]  # a bar is one narrow line
                self._bar.set_postfix_str(" | ".join(shown), refresh=False)
                return
        elif "eval_loss" in e:
            line = f"step {e['step']}/{total} | held-out loss {e['eval_loss']:.4f} | perplexity {e['eval_perplexity']:,.2f}"
            if "eval_bits_per_byte" in e:
                line += f" | {e['eval_bits_per_byte']:.4f} bits per byte"
        else:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            log.info("%s", line)

    def on_train_end(self, args, state, control, **kwargs):
        if self._bar is not None:
            self._bar.close()
