"""A plan for people: one screen of text, a table in a notebook, JSON."""

from __future__ import annotations

import html as html_module
import shlex
from collections.abc import Mapping, Sequence

from .candidates import Candidate, usable_gpu_bytes, usable_host_bytes
from .config import Config
from .hardware import GIB, Hardware
from .offers import offer_lines
from .planner import Plan, Schedule, to_dict
from .report import duration
from .schedules import lr_factor
from .timing import LIMITS, used_constants

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """Eight heights, of the largest value."""
    top = max(values, default=0.0)
    return "".join(_BARS[min(7, int(8 * v / top))] if top > 0 else _BARS[0] for v in values)


def learning_rate_curve(config: Config, steps: int, warmup: int, width: int = 48) -> str:
    shown = min(width, max(1, steps))
    at = [round(i * (steps - 1) / max(1, shown - 1)) for i in range(shown)]
    return sparkline([lr_factor(config.optim, step, steps, warmup) for step in at])


def count(number: float) -> str:
    """`6910365696` -> `6.91 B`, `410000` -> `0.41 M`."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 99.95 * GIB else f"{size / GIB:.0f}"


def _machine(plan: Plan) -> str:
    hardware = plan.hardware
    disk = f", {hardware.disk_free_bytes / GIB:.0f} GiB of disk free" if hardware.disk_free_bytes is not None else ""
    return f"{hardware.describe()}{disk}{_links(hardware)}"


def _links(hardware: Hardware) -> str:
    links = [g.pcie_bytes_per_second for g in hardware.gpus]
    if not links or None in links:
        return ""
    shown = [f"{link / 1e9:.3g}" for link in links]
    return f", PCIe {shown[0] if len(set(shown)) == 1 else ' / '.join(shown)} GB/s"


def _verdict(candidate: Candidate) -> str:
    if not candidate.fits:
        return "no"
    return "tight" if candidate.tight else "yes"


def _short_of(plan: Plan, candidate: Candidate) -> str:
    """Why a strategy does not fit, in a few words and numbers."""
    memory, over = candidate.memory, []
    if (
        memory is not None
        and plan.hardware.gpus
        and memory.gpu_bytes > (usable := usable_gpu_bytes(plan.hardware, plan.cards))
    ):
        over.append(f"GPU {gib(memory.gpu_bytes)} > {gib(usable)}")
    if memory is not None and memory.host_bytes > (usable := usable_host_bytes(plan.hardware)):
        over.append(f"host {gib(memory.host_bytes)} > {gib(usable)}")
    why = [reason.split(": ")[0] for reason in candidate.reasons[:1]]  # what would work instead is said when it is asked for
    return "; ".join([*why, *over] if candidate.forbidden else over)


def rows(plan: Plan) -> list[list[str]]:
    """The table of strategies, head first: fits, GPU GiB, host GiB, tokens/s with range, what limits it or is short."""
    on_cards = plan.device == "cuda"
    table = [
        [
            "strategy",
            "fits",
            "GPU GiB" if on_cards else "rank GiB",
            "host GiB",
            "tokens/s",
            "range",
            "limited by, or short of",
        ]
    ]
    for c in plan.candidates:
        if not c.strategy.chosen and c.strategy != plan.strategy:
            continue
        memory, timing = c.memory, c.timing
        speed = (
            [f"{timing.tokens_per_second:,.0f}", "{:,.0f}-{:,.0f}".format(*timing.tokens_per_second_range)]
            if timing
            else ["-", ""]
        )
        if timing and not c.fits:
            speed = [f"({speed[0]})", ""]  # it will never run at that speed
        why = _short_of(plan, c) if not c.fits else timing.bottleneck if timing else ""
        table.append([
            f"{'>' if c.strategy == plan.strategy else ' '} {c.strategy.name}", _verdict(c),
            gib(memory.gpu_bytes) if memory else "?", gib(memory.host_bytes) if memory else "?", *speed, why,
        ])  # fmt: skip
    return table if on_cards else [[*row[:4], row[6]] for row in table]


def _align(table: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def breakdown(
    parts: Mapping[str, int], total: int, usable: int | None = None, word: str = "usable", width: int = 32
) -> list[str]:
    lines = []
    scale = max(total, usable or 0, 1)
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        if size >= 0.005 * GIB or size >= 0.01 * total:
            lines.append(f"  {name:24}{size / GIB:8.2f}  {'█' * round(width * size / scale)}")
    end = f"  of {usable / GIB:.2f} {word}" if usable else ""
    lines.append(f"  {'together':24}{total / GIB:8.2f}{end}")
    return lines


def start_command(recipe: str, overrides: Sequence[str], plan: Plan, config: Config) -> str | None:
    """What starts exactly this plan; None for one that this version cannot start."""
    if config.method.kind != "full" or plan.misfits:
        return None
    words = [o for o in overrides if o.replace(" ", "") != "strategy=auto"]
    fell_back = plan.strategy.name == "single" and plan.world_size == 1 and config.strategy not in ("auto", "single")
    if config.deepspeed is None and config.strategy == "auto" and not fell_back and plan.hardware.gpus:
        words.append(f"strategy={plan.strategy.name}")
    ranks = (
        [f"--gpus {plan.cards}"] if plan.hardware.gpus and not any(o.startswith("ranks=") for o in words) else []
    )
    return " ".join(["deepseek-ft", "train", *(shlex.quote(w) for w in [recipe, *words]), *ranks])


def headline(plan: Plan, config: Config) -> str:
    size = f", {count(plan.shape.parameters)} parameters" if plan.shape else ""
    active = plan.shape and plan.shape.active_parameters < plan.shape.parameters
    active_text = f" ({count(plan.shape.active_parameters)} per token)" if active else ""
    loss = "" if plan.loss == "naive" else f", {plan.loss} loss"
    return (f"{config.name}: {config.model.path}{size}{active_text}, {config.method.kind} fine-tune, {config.train.precision}, "
            f"blocks of {config.data.seq_len:,} tokens{loss}")  # fmt: skip


def schedule_lines(plan: Plan, config: Config, schedule: Schedule | None) -> list[str]:
    lines = [f"batch     {plan.global_batch_size} = {plan.micro_batch_size} micro x {plan.grad_accum_steps} accumulated x {plan.world_size} ranks, "
             f"{plan.tokens_per_step:,} tokens per step"]  # fmt: skip
    timing = plan.timing
    if timing is not None:
        low, high = timing.tokens_per_second_range
        lines.append(f"speed     about {timing.tokens_per_second:,.0f} tokens/s ({low:,.0f} to {high:,.0f}), a step {timing.step_seconds:.1f} s, MFU "
                     f"{timing.mfu:.0%}; limited by {timing.bottleneck}: {LIMITS[timing.bottleneck]}")  # fmt: skip
        spent = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in timing.parts.items() if seconds > 0.005 * timing.step_seconds
        )
        lines.append(f"          of a step: {spent} (an estimate: docs/planner.md)")
    elif plan.device == "cuda":
        lines.append("speed     no estimate: there are no figures for these cards (hardware.GPUS)")
    if schedule is not None:
        about = "about " if schedule.guessed else ""
        lines.append(f"schedule  {about}{schedule.steps:,} steps, {schedule.tokens / 1e6:,.1f} M tokens; warm-up {schedule.warmup_steps:,}, then {config.optim.schedule}"
                     + ("; the data's size is guessed from its bytes" if schedule.guessed else ""))  # fmt: skip
        if schedule.seconds is not None:
            low, high = schedule.seconds_range
            epoch = f"; an epoch {duration(schedule.epoch_seconds)}" if schedule.epoch_seconds else ""
            lines.append(
                f"time      about {duration(schedule.seconds)} ({duration(low)} to {duration(high)}){epoch}, without evaluation and checkpoints"
            )
        lines.append(
            f"lr        {config.optim.lr:g} {learning_rate_curve(config, schedule.steps, schedule.warmup_steps)}"
        )
        saved = (
            next((size for name, size in plan.memory.disk.items() if "checkpoints" in name), 0) if plan.memory else 0
        )
        if saved > GIB and config.train.save_steps and schedule.steps > config.train.save_steps:
            one = saved / (config.train.save_total_limit + 1)
            seconds = one / used_constants(plan.hardware, plan.world_size)["disk_write_bytes_per_second"][0]
            lines.append(
                f"saving    {schedule.steps // config.train.save_steps:,} checkpoints of {gib(one)} GiB, about {duration(max(1, seconds))} each"
            )
    else:
        lines.append("schedule  not known before the data is there: train.max_steps, or a local data.path, would tell")
    return lines


def memory_lines(plan: Plan) -> list[str]:
    memory = plan.memory
    if memory is None:
        return ["memory    not known: the model's config.json is not here (give its folder as model.path)"]
    lines = []
    usable = usable_gpu_bytes(plan.hardware, plan.cards) if plan.hardware.gpus else None
    where = "per GPU" if plan.hardware.gpus else "per CPU rank"
    lines += [f"memory of {plan.strategy.name}, GiB {where}, at its fullest ({memory.moment}):"]
    lines += breakdown(memory.gpu, memory.gpu_bytes, usable)
    lines += [f"host memory, GiB, all ranks, at its fullest ({memory.host_moment}):"]
    lines += breakdown(memory.host, memory.host_bytes, usable_host_bytes(plan.hardware))
    lines += ["disk, GiB:", *breakdown(memory.disk, memory.disk_bytes, plan.hardware.disk_free_bytes, "free")]
    return lines


def problem_lines(plan: Plan) -> list[str]:
    if not plan.misfits:
        return []
    return [f"It does not fit: {plan.strategy.name} " + "; ".join(plan.misfits), *offer_lines(plan.offers)]


def text(plan: Plan, config: Config | None = None, schedule: Schedule | None = None, command: str | None = None) -> str:
    """One screen."""
    parts: list[str] = []
    if config is not None:
        parts += [headline(plan, config)]
    parts += [f"on {_machine(plan)}", "", *_align(rows(plan), {2, 3, 4}), ""]
    parts += [*memory_lines(plan), ""]
    if config is not None:
        parts += schedule_lines(plan, config, schedule)
    measured = [
        name for name, (_, is_measured) in used_constants(plan.hardware, plan.world_size).items() if is_measured
    ]
    if plan.timing is not None:
        parts.append(
            f"constants {', '.join(measured) + ' measured or given; the others' if measured else 'all'} assumed; `deepseek-ft doctor` measures this machine"
        )
    parts += [f"note      {note}" for note in plan.notes]
    if problems := problem_lines(plan):
        parts += ["", *problems]
    if command is not None:
        parts += ["", f"start     {command}"]
    return "\n".join(parts)


def summary(plan: Plan, config: Config, schedule: Schedule | None) -> list[str]:
    """The same plan in the log of a run: what was chosen, what it takes, and what was passed over."""
    lines = [headline(plan, config), *_align(rows(plan), {2, 3, 4})]
    memory = plan.memory
    if memory is not None:
        parts = ", ".join(
            f"{name} {size / GIB:.2f}"
            for name, size in sorted(memory.gpu.items(), key=lambda i: -i[1])
            if size > 0.02 * memory.gpu_bytes
        )
        lines.append(
            f"memory    {memory.gpu_bytes / GIB:.2f} GiB per rank ({parts}), host {memory.host_bytes / GIB:.1f} GiB, disk {memory.disk_bytes / GIB:.1f} GiB"
        )
    return lines + schedule_lines(plan, config, schedule)


def html(plan: Plan) -> str:
    """A table, for notebooks."""
    head, *body = rows(plan)

    def row(cells: Sequence[str], tag: str) -> str:
        bold = cells[0].startswith(">")
        inside = "".join(
            f"<{tag}>{'<b>' if bold else ''}{html_module.escape(c.lstrip('> '))}{'</b>' if bold else ''}</{tag}>"
            for c in cells
        )
        return f"<tr>{inside}</tr>"

    notes = "".join(f"<li>{html_module.escape(n)}</li>" for n in (*plan.misfits, *plan.notes))
    return (f"<p>{html_module.escape(plan.describe())}<br>{html_module.escape(_machine(plan))}</p>"
            f"<table><thead>{row(head, 'th')}</thead><tbody>{''.join(row(r, 'td') for r in body)}</tbody></table><ul>{notes}</ul>")  # fmt: skip


def as_json(plan: Plan, config: Config, schedule: Schedule | None, command: str | None) -> dict:
    constants = {
        name: {"value": value, "measured": measured}
        for name, (value, measured) in used_constants(plan.hardware, plan.world_size).items()
    }
    return to_dict(plan) | {
        "name": config.name,
        "model": config.model.path,
        "fits": not plan.misfits,
        "misfits": list(plan.misfits),
        "schedule": None if schedule is None else vars(schedule) | {"estimate": True},
        "constants": constants,
        "command": command,
    }
