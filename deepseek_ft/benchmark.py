"""One recipe under every strategy, one table: measured on this machine, or planned for another. Never both in one column."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import planner, run
from .candidates import Candidate, usable_gpu_bytes
from .checkpoints import free_folder, write_json
from .config import Config, DataConfig, SourceConfig, to_dict
from .errors import ConfigError, DeepSeekFTError, PlanError
from .hardware import GIB, Hardware, probe
from .planner import Plan, plan_run
from .report import duration, plot_speeds
from .shapes import PRESETS, find_shape
from .strategies import STRATEGIES
from .workload import accumulation_of

SMALL_PARAMETERS = 50_000_000
"""Of a model that CPU ranks can train in seconds a step."""
log = logging.getLogger(__name__)


@dataclass
class Row:
    """A strategy: what was measured in each of its runs, or why there is nothing, beside what was planned."""

    strategy: str
    ranks: int
    cards: int
    """As many as ranks, but under `layer_split`."""
    micro_batch_size: int
    grad_accum_steps: int
    global_batch_size: int
    planned: Candidate | None
    reason: str | None = None
    """Why it was not run, or how it ended."""
    runs: list[dict] = field(default_factory=list)
    """Of each repeat: tokens_per_second, step_seconds, memory_bytes (the fullest rank), host_bytes (all ranks), first_loss,
    last_loss."""

    def median(self, name: str) -> float | None:
        found = [one[name] for one in self.runs if one[name] is not None]
        return statistics.median(found) if found else None

    def planned_bytes(self, on_cards: bool) -> int | None:
        """What is measured as `memory_bytes`: the allocator's peak of a card, or all that a CPU rank has resident."""
        memory = self.planned.memory if self.planned else None
        return None if memory is None else memory.tensor_bytes if on_cards else memory.host_bytes // self.ranks

    def off_by(self, single: Row | None) -> float | None:
        """The largest difference of a step's loss to single's, relative."""
        if not self.runs or single is None or not single.runs:
            return None
        return max((abs(a / b - 1) for a, b in zip(self.runs[0]["losses"], single.runs[0]["losses"], strict=False)), default=None)

    def efficiency(self, single: float | None, planned: bool = False) -> float | None:
        """tokens/s over as many times a single card's as there are cards."""
        timing = self.planned.timing if self.planned else None
        speed = (timing.tokens_per_second if timing else None) if planned else self.median("tokens_per_second")
        return speed / (self.cards * single) if speed and single else None


@dataclass
class Bench:
    """A table, and what it is of."""

    config: Config
    hardware: Hardware
    ranks: int
    measured: bool
    """False: planned, nothing was run."""
    rows: list[Row]
    steps: int = 0
    warmup_steps: int = 0
    repeats: int = 0
    note: str | None = None
    """What stands in for what was asked."""

    @property
    def single(self) -> Row | None:
        """What efficiency and losses are held against."""
        return next((row for row in self.rows if row.strategy == "single"), None)

    # ------------------------------------------------------------------------------------------------ for people

    def title(self) -> str:
        config = self.config
        what = f"{config.name}: {config.model.path}, {config.method.kind}, blocks of {config.data.seq_len:,} tokens, {config.train.precision}"
        if self.measured:
            return f"{what}; measured on this machine: {self.hardware.describe()}"
        return f"{what}; planned for {self.hardware.describe()}, nothing was run"

    def markdown(self) -> str:
        """The table, with what it says of itself above it."""
        lines = [self.title(), ""]
        if self.note:
            lines += [self.note, ""]
        if self.measured:
            lines += [f"Medians of {self.repeats} run{'s' * (self.repeats > 1)} of {self.steps} steps after {self.warmup_steps} of warm-up, runs of "
                      "the strategies in turn, each in processes of its own. Efficiency: tokens/s over as many times single's as there are ranks or cards. "
                      "Off by: the largest difference of a step's loss to single's, relative. Planned figures are estimates (docs/planner.md).", ""]  # fmt: skip
        else:
            lines += ["Estimates (docs/planner.md). In brackets: does not fit, and would be so fast if it did. Efficiency: tokens/s over as many "
                      "times a single card's as there are cards" + self._of_what_card() + ".", ""]  # fmt: skip
        head, body = self._head(), [self._cells(row) for row in self.rows]
        return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *body])])

    def _of_what_card(self) -> str:
        single = self.single
        return ", of one that is large enough" if single is not None and single.planned and not single.planned.fits else ""

    def _head(self) -> list[str]:
        rank = "card" if self.hardware.gpus else "rank"
        if not self.measured:
            return ["strategy", "batch", "tokens/s", "range", f"GiB per {rank}", "host GiB", "efficiency", "limited by, or short of"]
        head = ["strategy", "batch", "tokens/s", "from - to", f"GiB per {rank}", "planned", "host GiB", "planned", "efficiency", "loss", "off by", "remark"]
        return [*head[:4], "planned", *head[4:]] if self.hardware.gpus else head

    def _cells(self, row: Row) -> list[str]:
        single = self.single
        batch = f"{row.global_batch_size} = {row.micro_batch_size} x {row.grad_accum_steps} x {row.ranks}"
        memory, timing = (row.planned.memory, row.planned.timing) if row.planned else (None, None)
        host = _gib(memory.host_bytes if memory else None)
        if not self.measured:
            alone = single.planned.timing.tokens_per_second if single and single.planned and single.planned.timing else None
            share = row.efficiency(alone, planned=True)
            speed = [f"{timing.tokens_per_second:,.0f}", "{:,.0f} - {:,.0f}".format(*timing.tokens_per_second_range)] if timing else ["-", "-"]
            if row.reason and timing:
                speed, share = [f"({speed[0]})", "-"], None
            why = _brief(row.reason) if row.reason else timing.bottleneck if timing else ""
            return [row.strategy, batch, *speed, _gib(memory.gpu_bytes if memory else None), host, _percent(share), why]
        speeds = [one["tokens_per_second"] for one in row.runs if one["tokens_per_second"]]
        speed = [f"{statistics.median(speeds):,.0f}", f"{min(speeds):,.0f} - {max(speeds):,.0f}"] if speeds else ["-", "-"]
        planned_speed = [f"{timing.tokens_per_second:,.0f}" if timing else "-"] if self.hardware.gpus else []
        used = [_gib(row.median("memory_bytes")), _gib(row.planned_bytes(bool(self.hardware.gpus))), _gib(row.median("host_bytes")), host]
        off = row.off_by(single)
        share = row.efficiency(single.median("tokens_per_second") if single else None)
        losses = f"{row.runs[0]['first_loss']:.4f} -> {row.runs[0]['last_loss']:.4f}" if row.runs and row.runs[0]["first_loss"] is not None else "-"
        return [row.strategy, batch, *speed, *planned_speed, *used, _percent(share), losses, "-" if off is None else f"{off:.0e}",
                _brief(row.reason or "")]  # fmt: skip

    # ---------------------------------------------------------------------------------------------- for programs

    def as_json(self) -> dict:
        single = self.single
        return {
            "kind": "measured" if self.measured else "planned",
            "machine": self.hardware.describe(),
            "device": self.hardware.device,
            "config": to_dict(self.config),
            "ranks": self.ranks,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "repeats": self.repeats,
            "note": self.note,
            "rows": [
                {
                    "strategy": row.strategy, "ranks": row.ranks, "micro_batch_size": row.micro_batch_size,
                    "grad_accum_steps": row.grad_accum_steps, "global_batch_size": row.global_batch_size, "reason": row.reason,
                    "runs": row.runs, "efficiency": row.efficiency(single.median("tokens_per_second") if single else None),
                    "off_by": row.off_by(single),
                    "planned": {
                        "tokens_per_second": row.planned.timing.tokens_per_second if row.planned.timing else None,
                        "memory_bytes": (row.planned_bytes(bool(self.hardware.gpus)) if self.measured else
                                         row.planned.memory.gpu_bytes if row.planned.memory else None),
                        "host_bytes": row.planned.memory.host_bytes if row.planned.memory else None,
                    } if row.planned else None,
                }
                for row in self.rows
            ],
        }  # fmt: skip

    def save(self, output: str) -> Path:
        """In a new folder; where it is taken, the next free name.

        Raises:
            ConfigError: it cannot be made.
        """
        folder = free_folder(Path(output))
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"--output: {folder} cannot be made: {error.strerror}; name a folder that can be written") from None
        self.write(folder)
        return folder

    def write(self, folder: Path) -> None:
        """table.md, table.json and tokens_per_second.png."""
        write_json(folder / "table.json", self.as_json())
        (folder / "table.md").write_text(self.markdown() + "\n", encoding="utf-8")
        bars = []
        for row in self.rows:
            timing = row.planned.timing if row.planned and not (row.reason and not row.runs) else None
            bars.append((row.strategy, row.median("tokens_per_second"), timing.tokens_per_second if timing else None))
        plot_speeds(bars, folder / "tokens_per_second.png", self.title())


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"


def _brief(reason: str) -> str:
    """Of a reason, what; the cure is said when the strategy is asked for."""
    return reason.split("; ")[0].split(": ")[0]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


# ------------------------------------------------------------------------------------------------ what is compared


def chosen_strategies(words: str | None) -> list[str]:
    """
    Raises:
        ConfigError: one of them is none.
    """
    if words in (None, "all"):
        return list(STRATEGIES)
    names = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names:
        raise ConfigError(f"--strategies: {', '.join(unknown) or repr(words)} is none; known: {', '.join(STRATEGIES)}")
    return list(dict.fromkeys(names))


def in_miniature(config: Config) -> tuple[Config, str | None]:
    """What CPU ranks can run of a recipe: its tiny stand-in of the same architecture on Python's own source, and a note."""
    shape = find_shape(config.model.path, config.model.tokenizer, len(config.model.new_tokens))
    if shape is not None and shape.parameters <= SMALL_PARAMETERS:
        return config, None
    kind = shape.model_type if shape is not None else "llama"
    preset = next((name for name, numbers in PRESETS.items() if numbers["model_type"] == kind), "tiny-llama")
    model = dataclasses.replace(config.model, path=f"preset:{preset}", tokenizer=None, new_tokens=[], attention="sdpa")
    seq_len = min(config.data.seq_len, 128)
    data = DataConfig(train=[SourceConfig(source="python-stdlib")], eval=[], seq_len=seq_len)
    train = dataclasses.replace(config.train, precision="fp32", micro_batch_size=min(4, config.train.micro_batch_size), loss="auto")
    return (
        dataclasses.replace(config, model=model, data=data, train=train),
        f"No GPU here: preset:{preset} on Python's standard library, in fp32 and blocks of {seq_len} tokens, stands in for {config.model.path}. It "
        "shows that the strategies run and learn alike, not how fast cards would be.",
    )


def _said(error: DeepSeekFTError, name: str) -> str:
    return " ".join(str(error).split()).removeprefix(f"strategy {name} ")


def _laid_out(config: Config, name: str, ranks: int, batch: int, steps: int | None) -> Config:
    """The recipe under one strategy: the same batches, only trained, and every step told."""
    train = dataclasses.replace(
        config.train, max_steps=steps, global_batch_size=batch, grad_accum_steps=None, log_steps=1, eval_steps=None, save_steps=None
    )
    row = STRATEGIES[name]
    own = ranks if row.many_ranks or row.split else 1
    return dataclasses.replace(config, strategy=name, deepspeed=None, ranks=own, train=train, data=dataclasses.replace(config.data, eval=[]),
                               stages=config.stages if row.staged else None)  # fmt: skip


def _row(config: Config, plan: Plan | None, name: str, reason: str | None) -> Row:
    cards, micro = config.ranks or 1, config.train.micro_batch_size
    ranks = cards if STRATEGIES[name].many_ranks else 1
    batch = config.train.global_batch_size or micro * ranks
    return Row(name, ranks, cards, micro, batch // (micro * ranks), batch, plan.chosen if plan else None, reason)


def compare(config: Config, hardware: Hardware, names: Sequence[str], ranks: int, steps: int) -> tuple[list[Row], list[Config | None]]:
    """A row for each strategy, with the reason where it cannot be run, and the recipe to run it with (None where it cannot)."""
    micro = config.train.micro_batch_size
    batch = accumulation_of(config, ranks) * micro * ranks
    rows, configs = [], []
    for name in names:
        laid = _laid_out(config, name, ranks, batch, steps)
        plan, reason = None, None
        try:
            plan = plan_run(laid, hardware, force=True)
            if plan.strategy.name != name:  # what it fell back to has a row of its own
                plan, reason = None, next(note for note in plan.notes if "falling back" in note)
            elif plan.chosen.reasons:
                reason = "; ".join(plan.chosen.reasons)
            else:
                run.can_train(laid, plan)
        except DeepSeekFTError as error:
            reason = _said(error, name)
        rows.append(_row(laid, plan, name, reason))
        configs.append(None if reason else laid)
    return rows, configs


def predict(config: Config, hardware: Hardware, names: Sequence[str]) -> Bench:
    """The table as it is planned for a machine; nothing is run, and no model or data need be there."""
    ranks = config.ranks or len(hardware.gpus) or planner.CPU_RANKS
    micro = config.train.micro_batch_size
    batch = accumulation_of(config, ranks) * micro * ranks
    rows = []
    for name in names:
        laid = _laid_out(config, name, ranks, batch, config.train.max_steps)
        try:
            plan = plan_run(laid, hardware, can_build_ops=True, force=True)
            reason = _short(plan) if plan.chosen.reasons else None
        except DeepSeekFTError as error:
            plan, reason = None, _said(error, name)
        rows.append(_row(laid, plan, name, reason))
    return Bench(config, hardware, ranks, measured=False, rows=rows)


def _short(plan: Plan) -> str:
    """Why it does not fit, in numbers; what forbids it in words."""
    memory = plan.chosen.memory
    if not plan.chosen.forbidden and memory is not None and plan.hardware.gpus:
        usable = usable_gpu_bytes(plan.hardware, plan.world_size)
        if memory.gpu_bytes > usable:
            return f"card {_gib(memory.gpu_bytes)} of {_gib(usable)} GiB"
        return f"host {_gib(memory.host_bytes)} of {plan.hardware.host_memory_bytes / GIB:.0f} GiB"
    return plan.chosen.reasons[0].split(": ")[0]


# ----------------------------------------------------------------------------------------------------- the runs


def bench(config: Config, names: Sequence[str], output: str, ranks: int | None = None, steps: int = 10, warmup_steps: int = 3,
          repeats: int = 2) -> tuple[Bench, Path]:  # fmt: skip
    """Run a recipe under each strategy, in turn and as often as said, and write the table after every run.

    Args:
        output: a new folder; where it is taken, the next free name.
        warmup_steps: not counted, before `steps` that are.

    Returns:
        The table and its folder; what failed is a row with the reason.
    """
    hardware = probe(config.output_dir)
    note = None
    if not hardware.gpus:
        config, note = in_miniature(config)
    ranks = ranks or config.ranks or len(hardware.gpus) or planner.CPU_RANKS
    if hardware.gpus and ranks > len(hardware.gpus):
        raise PlanError(f"--gpus {ranks}: there are {len(hardware.gpus)} ({hardware.describe()})")
    rows, configs = compare(config, hardware, names, ranks, warmup_steps + steps)
    table = Bench(config, hardware, ranks, True, rows, steps, warmup_steps, repeats, note)
    folder = table.save(output)
    if note:
        log.info("%s", note)
    able = sum(laid is not None for laid in configs)
    log.info("%d of %d strategies can be run here, %d times each -> %s", able, len(rows), repeats, folder)
    for repeat in range(1, repeats + 1):
        for row, laid in zip(rows, configs, strict=True):
            if laid is None or row.reason:
                continue
            started = time.monotonic()
            name = f"{row.strategy}-{repeat}"
            try:
                found = run.rehearse(laid, folder / name, folder / f"{name}.log")
                row.runs.append(_figures(found.run, found.history, warmup_steps))
                log.info("%s, run %d: %s tokens/s, %s", row.strategy, repeat, f"{row.runs[-1]['tokens_per_second']:,.0f}",
                         duration(time.monotonic() - started))  # fmt: skip
            except DeepSeekFTError as error:
                row.reason = f"{_said(error, row.strategy)} ({name}.log)"
                log.warning("%s, run %d: %s", row.strategy, repeat, row.reason)
            table.write(folder)
    return table, folder


def _figures(found: dict, history: list[dict], warmup_steps: int) -> dict:
    """Of one run, its steps after the warm-up."""
    steps = [row for row in history if "step_seconds" in row]
    timed = [row for row in steps if row["step"] > warmup_steps]
    tokens = {row["step"]: row["tokens"] - before for row, before in zip(steps, [0, *(r["tokens"] for r in steps)], strict=False)}
    return {
        "tokens_per_second": statistics.median(tokens[row["step"]] / row["step_seconds"] for row in timed) if timed else None,
        "step_seconds": statistics.median(row["step_seconds"] for row in timed) if timed else None,
        "memory_bytes": max(found["peak_memory_bytes"]),
        "host_bytes": sum(found["host_peak_memory_bytes"]),
        "first_loss": found["first_loss"],
        "last_loss": found["last_loss"],
        "losses": [row.get("loss", math.nan) for row in steps],
    }


def to_json(table: Bench) -> str:
    return json.dumps(table.as_json(), indent=2)
