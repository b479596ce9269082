"""What a training step costs beside its mathematics: a bare loop, transformers' Trainer, ours as a run uses it.

    python benchmarks/trainer.py                                    some six minutes
    python benchmarks/trainer.py --only llama-5m --rounds 400
    python benchmarks/trainer.py --only llama-5m --profile

One process, one thread at work, no evaluation and no checkpoints. All train the same weights on the same batches of real code, with
the same fused AdamW, curve and clipping, and the benchmark ends if their losses differ. The Trainers have the same arguments, data
set and collator; ours also has what `run.py` gives it: the head that can do without logits, the routers' figures, what is counted
and checked in every step, `metrics.jsonl` and its line in the log. The bare loop logs nothing.

They take turns after every step, in another order each round, so that whatever else the machine does falls on all of them. CPU-seconds
are the process's, without the first ten steps. A ratio is of ten steps to the ten of the same rounds; the table has the median, and
the quartiles in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import gc
import logging
import os
import platform
import pstats
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# What the C library gives back to the system after one step it asks for in the next, page by page: up to a tenth of a small step, and
# which of those that are compared it falls on is chance. Threads share one heap, as one run would have.
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_ARENA_MAX": "1"}
if __name__ == "__main__" and not KEEP_MEMORY.keys() <= os.environ.keys():
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_MEMORY)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, get_cosine_schedule_with_warmup  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.data import cpu_seconds, installed  # noqa: E402
from deepseek_ft import load_config, plan_run  # noqa: E402
from deepseek_ft.callbacks import RunLog  # noqa: E402
from deepseek_ft.data.blocks import collate  # noqa: E402
from deepseek_ft.hardware import Hardware  # noqa: E402
from deepseek_ft.models import token_bytes  # noqa: E402
from deepseek_ft.planner import warmup_steps  # noqa: E402
from deepseek_ft.run import _head, _routers, cache_dir, load_data  # noqa: E402
from deepseek_ft.shapes import PRESETS  # noqa: E402
from deepseek_ft.trainer import FineTuneTrainer, build_training_args  # noqa: E402

CPU = Hardware(gpus=(), cores=1, host_memory_bytes=16 << 30)
LLAMA = PRESETS["tiny-llama"]
FIRST, TARGET = 10, 1.02


@dataclass(frozen=True)
class Case:
    """What is trained, and in steps of which size."""

    model: dict
    rows: int
    seq_len: int
    rounds: int
    """Steps of each that are timed."""
    log_steps: int = 10


CASES = {
    "tiny-llama": Case(LLAMA, 2, 64, 400),
    "tiny-llama, every step logged": Case(LLAMA, 2, 64, 400, log_steps=1),
    "llama-5m": Case(LLAMA | {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
                              "num_key_value_heads": 8}, 4, 256, 200),
    "tiny-v3": Case(PRESETS["tiny-v3"], 8, 128, 200),
}  # fmt: skip


class Setting:
    """A case with its data and weights, from which each turn begins anew."""

    def __init__(self, case: Case, folder: Path):
        self.case, self.folder = case, folder
        self.last = FIRST + case.rounds
        self.total = self.last + 1  # one more, for what a run does at its end
        words = {"train.micro_batch_size": case.rows, "train.grad_accum_steps": 1, "train.log_steps": case.log_steps, "strategy": "single",
                 "train.save_steps": None, "train.max_steps": self.total, "data.seq_len": case.seq_len, "optim.min_lr_ratio": 0.0}  # fmt: skip
        self.config = load_config("quickstart", words)
        self.plan = plan_run(self.config, CPU)
        encoder, blocks = load_data(self.config, cache_dir(None), ["train"])
        self.tokenizer, self.blocks = encoder.tokenizer, blocks["train"]
        vocabulary = -(-len(self.tokenizer) // 64) * 64
        shape = case.model | {"vocab_size": vocabulary}
        self.model_config = AutoConfig.for_model(**shape)
        torch.manual_seed(0)
        self.weights = AutoModelForCausalLM.from_config(self.model_config).state_dict()
        self.parameters = sum(w.numel() for name, w in self.weights.items() if not name.endswith("bias"))

    def model(self):
        model = AutoModelForCausalLM.from_config(self.model_config)
        model.load_state_dict(self.weights)
        return model.train()

    def arguments(self):
        args = build_training_args(self.config, self.plan, self.folder, self.total)
        args.train_sampling_strategy = "sequential"
        args.lr_scheduler_type = "cosine"  # ours has the recipe's curve, which is the same
        return args


class Turn(threading.Thread):
    """One that is compared: it trains in a thread of its own, which waits after every step until it is its turn again."""

    def __init__(self, way: str, setting: Setting, profile: cProfile.Profile | None = None):
        super().__init__(daemon=True)
        self.way, self.setting, self.profile = way, setting, profile
        self.seconds: list[float] = []
        """Of each step, with its line in the log; the first has the preparation."""
        self.loss: float | None = None
        self.error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def run(self) -> None:
        self._go.acquire()
        try:
            self.loss = WAYS[self.way](self.setting, self.stepped)
        except BaseException as error:
            self.error = error
        self._done.release()

    def stepped(self) -> None:
        """After each step, in this thread. The log's line is counted with the next one."""
        if self.profile is not None and len(self.seconds) >= FIRST:
            self.profile.disable()
        self._done.release()
        self._go.acquire()
        if self.profile is not None and FIRST <= len(self.seconds) < self.setting.last:
            self.profile.enable()

    def take(self) -> None:
        """One step, from outside."""
        began = cpu_seconds()
        self._go.release()
        self._done.acquire()
        self.seconds.append(cpu_seconds() - began)
        if self.error is not None:
            raise self.error


class Stepped(TrainerCallback):
    def __init__(self, stepped: Callable[[], None]):
        self.stepped = stepped

    def on_step_end(self, args, state, control, **kwargs):
        self.stepped()


def bare(setting: Setting, stepped: Callable[[], None]) -> float:
    """No sampler, no loader, no log: the floor."""
    model, optim = setting.model(), setting.config.optim
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    groups = [{"params": [p for n, p in model.named_parameters() if (n in decayed) == is_decayed], "weight_decay": decay}
              for is_decayed, decay in ((True, optim.weight_decay), (False, 0.0))]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    curve = get_cosine_schedule_with_warmup(optimizer, warmup_steps(setting.config, setting.total), setting.total)
    size, losses = setting.case.rows, []
    for step in range(setting.total):
        batch = collate(setting.blocks.__getitems__(range(step * size, (step + 1) * size)))
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.max_grad_norm)
        optimizer.step()
        curve.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # a tensor that is kept would lie where the next logits could: memory would grow by those
        stepped()
    logged = losses[: setting.last][-setting.case.log_steps :]
    return sum(logged) / len(logged)


def stock(setting: Setting, stepped: Callable[[], None]) -> float:
    trainer = Trainer(model=setting.model(), args=setting.arguments(), train_dataset=setting.blocks, data_collator=collate,
                      processing_class=setting.tokenizer, callbacks=[Stepped(stepped)])  # fmt: skip
    trainer.train()
    return next(row["loss"] for row in trainer.state.log_history if row["step"] == setting.last)


def ours(setting: Setting, stepped: Callable[[], None], watch_routers: bool = True) -> float:
    """As `run.train` sets it up."""
    model, args = setting.model(), setting.arguments()
    head = _head(model, setting.config, setting.plan, args.device)
    routers = _routers(model, setting.config, setting.plan, setting.tokenizer) if watch_routers else None
    trainer = FineTuneTrainer(
        config=setting.config, plan=setting.plan, model=model, args=args, train_dataset=setting.blocks, eval_blocks=None, head=head,
        routers=routers, bytes_of_token=np.array(token_bytes(setting.tokenizer, model.config.vocab_size)),
        processing_class=setting.tokenizer,
    )  # fmt: skip
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ in ("PrinterCallback", "ProgressCallback"):
            trainer.remove_callback(callback)
    log = RunLog(trainer, setting.folder / "metrics.jsonl")
    trainer.add_callback(log)
    trainer.add_callback(Stepped(stepped))
    trainer.train()
    return next(row["loss"] for row in log.history if row["step"] == setting.last)


def unwatched(setting: Setting, stepped: Callable[[], None]) -> float:
    return ours(setting, stepped, watch_routers=False)


WAYS: dict[str, Callable[[Setting, Callable[[], None]], float]] = {"bare": bare, "stock": stock, "ours": ours, "unwatched": unwatched}


def train(setting: Setting, ways: list[str], profiles: dict[str, cProfile.Profile]) -> list[Turn]:
    """All of them, step by step."""
    gc.collect()
    turns = [Turn(way, setting, profiles.get(way)) for way in ways]
    order = random.Random(0)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        for each in turns:
            each.start()
            each.take()
        for _ in range(setting.total):
            for each in order.sample(turns, len(turns)):
                each.take()
    for each in turns:
        each.join()
    losses = {each.way: each.loss for each in turns}
    if any(abs(loss / losses["stock"] - 1) > 1e-5 for loss in losses.values()):
        raise SystemExit(f"they did not train the same: {losses}")
    return turns


def rows_of(name: str, setting: Setting, turns: list[Turn]) -> list[str]:
    """Of the table."""
    tens = {each.way: [sum(each.seconds[i : i + 10]) / 10 for i in range(FIRST, setting.last, 10)] for each in turns}

    def ratio(way: str, base: str) -> tuple[float, str]:
        low, middle, high = statistics.quantiles([a / b for a, b in zip(tens[way], tens[base], strict=True)], n=4)
        return middle, f"{middle:.3f} ({low:.3f}-{high:.3f})"

    titles = {"bare": "bare loop", "stock": "Trainer", "ours": "**ours**", "unwatched": "ours, routers not watched"}
    case = f"{name}, {setting.parameters / 1e6:.1f} M, {setting.case.rows} x {setting.case.seq_len}"
    rows = []
    for way, seconds in tens.items():
        against = "" if way == "bare" else ratio(way, "bare")[1]
        middle, beside = ratio(way, "stock") if way in ("ours", "unwatched") else (None, "")
        holds = "" if middle is None else "yes" if middle <= TARGET else "**no**"
        rows.append(f"| {case} | {titles[way]} | {1000 * statistics.median(seconds):.2f} | {against} | {beside} | {holds} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append", help="may be given several times")
    parser.add_argument("--rounds", type=int, help="steps of each that are timed; a multiple of ten, and at least twenty")
    parser.add_argument("--profile", action="store_true", help="where Trainer and ours spend their time, in place of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(stream=open(os.devnull, "w"), level=logging.INFO)  # lines are made, and go nowhere
    for noisy in ("httpx", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not arguments.profile:
        print(f"One thread, Python {platform.python_version()}, {', '.join(map(installed, ('torch', 'transformers', 'accelerate')))}. "
              f"holds: at most {TARGET} of Trainer's CPU-seconds\n")  # fmt: skip
        print(f"| model, rows x tokens | what | CPU ms a step | to the bare loop | to Trainer | holds |\n|{'---|' * 6}", flush=True)
    for name in arguments.only or CASES:
        case = dataclasses.replace(CASES[name], rounds=arguments.rounds or CASES[name].rounds)
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting(case, Path(folder))
            ways = ["bare", "stock", "ours", *(["unwatched"] if setting.model_config.model_type.startswith("deepseek") else [])]
            profiles = {way: cProfile.Profile() for way in ("stock", "ours") if arguments.profile}
            turns = train(setting, ways, profiles)
            if not profiles:
                print("\n".join(rows_of(name, setting, turns)), flush=True)
            for way, profile in profiles.items():
                print(f"{name}, {way}")
                pstats.Stats(profile).sort_stats("cumulative").print_stats("deepseek_ft|transformers/trainer|accelerate", 40)


if __name__ == "__main__":
    main()
