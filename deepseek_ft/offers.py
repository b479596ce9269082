"""What would fit, or be faster: the recipe changed as little as will do."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from .candidates import Candidate, assess, fastest, figures, short_of_disk, states_fit
from .config import Config
from .hardware import Hardware
from .shapes import ModelShape
from .strategies import STRATEGIES
from .workload import accumulation_of


@dataclass(frozen=True)
class Offer:
    """A change of the recipe under which something fits."""

    overrides: tuple[str, ...]
    candidate: Candidate


def _changes(config: Config, accumulation: int) -> Iterator[tuple[tuple[str, ...], Config]]:
    """The recipe changed in one way, from the mildest to the most drastic; the global batch stays."""
    train, data = config.train, config.data
    if train.loss == "naive":
        yield ("train.loss=chunked",), dataclasses.replace(config, train=dataclasses.replace(train, loss="chunked"))
    if not config.model.gradient_checkpointing:
        yield (("model.gradient_checkpointing=true",),
               dataclasses.replace(config, model=dataclasses.replace(config.model, gradient_checkpointing=True)))  # fmt: skip
    elif config.model.checkpoint_every > 1:
        yield (("model.checkpoint_every=1",),
               dataclasses.replace(config, model=dataclasses.replace(config.model, checkpoint_every=1)))  # fmt: skip
    micro = train.micro_batch_size
    while micro > 1:
        micro //= 2
        if train.micro_batch_size % micro:
            continue
        steps = accumulation * train.micro_batch_size // micro
        changed = dataclasses.replace(
            train, micro_batch_size=micro, grad_accum_steps=None if train.global_batch_size else steps
        )
        words = (
            f"train.micro_batch_size={micro}",
            *(() if train.global_batch_size else (f"train.grad_accum_steps={steps}",)),
        )
        yield words, dataclasses.replace(config, train=changed)
    if train.precision == "bf16":  # on cards that have none
        yield ("train.precision=fp16",), dataclasses.replace(config, train=dataclasses.replace(train, precision="fp16"))
    if train.precision in ("fp32", "fp16"):
        yield ("train.precision=bf16",), dataclasses.replace(config, train=dataclasses.replace(train, precision="bf16"))
    if train.save_steps:
        if train.save_total_limit > 1:
            yield (("train.save_total_limit=1",),
                   dataclasses.replace(config, train=dataclasses.replace(train, save_total_limit=1)))  # fmt: skip
        yield ("train.save_steps=null",), dataclasses.replace(config, train=dataclasses.replace(train, save_steps=None))
    seq_len = data.seq_len
    while seq_len > 512:
        seq_len //= 2
        yield (f"data.seq_len={seq_len}",), dataclasses.replace(config, data=dataclasses.replace(data, seq_len=seq_len))
    for kind in ("lora", "qlora"):
        if config.method.kind == "full":
            yield (
                (f"method.kind={kind}",),
                dataclasses.replace(config, method=dataclasses.replace(config.method, kind=kind)),
            )


def nearest(config: Config, shape: ModelShape, names: list[str], world_size: int, accumulation: int, hardware: Hardware,
            limit: int = 4) -> tuple[Offer, ...]:  # fmt: skip
    """The mildest changes under which a strategy fits; two changes at once where one is not enough."""

    def fitting(changed: Config) -> Candidate | None:
        steps = accumulation_of(changed, world_size)
        possible = [n for n in names if states_fit(changed, shape, STRATEGIES[n], world_size, steps, hardware)]
        best = fastest(
            [assess(changed, shape, STRATEGIES[n], world_size, steps, hardware) for n in possible], world_size
        )
        return best if best is not None and not short_of_disk(best, hardware) else None

    found: list[Offer] = []
    kinds: set[str] = set()  # one offer of each kind is enough: the largest micro-batch, the longest sequence

    def consider(words: tuple[str, ...], changed: Config) -> None:
        keys = {
            w if w.startswith("method") else w.split("=")[0].replace("grad_accum_steps", "micro_batch_size")
            for w in words
        }
        kind = "+".join(sorted(keys))
        if kind in kinds:
            return
        if len(found) < limit and (candidate := fitting(changed)) is not None:
            kinds.add(kind)
            found.append(Offer(words, candidate))

    singles = list(_changes(config, accumulation))
    for words, changed in singles:
        consider(words, changed)
    # Nothing keeps full fine-tuning yet: two changes at once, and only then adapters with another change.
    for with_adapter in (False, True):
        if any(not o.overrides[0].startswith("method") for o in found) or (with_adapter and found):
            break
        for words, changed in singles:
            if words[0].startswith("method") != with_adapter:
                continue
            for more, twice in _changes(changed, accumulation_of(changed, world_size)):
                if more[0].split("=")[0] != words[0].split("=")[0] and not more[0].startswith("method"):
                    consider(tuple(dict.fromkeys((*words, *more))), twice)
    return tuple(found)


def better_batch(config: Config, shape: ModelShape, chosen: Candidate, world_size: int, accumulation: int,
                  hardware: Hardware) -> Iterator[str]:  # fmt: skip
    """The same batch in larger micro-batches, where what is gathered and launched for each of them is paid less often; or in smaller
    ones, where stages wait less for each other."""
    train = config.train
    allowed = list(STRATEGIES) if config.strategy == "auto" else [chosen.strategy.name]
    best = None
    larger = [(train.micro_batch_size * 2**i, accumulation // 2**i) for i in range(1, 20) if accumulation % 2**i == 0]
    smaller = [(train.micro_batch_size // 2**i, accumulation * 2**i) for i in range(1, 20) if train.micro_batch_size % 2**i == 0]
    for direction in (larger, smaller if chosen.strategy.pipeline else []):
        for micro, steps in direction:
            changed = dataclasses.replace(
                config,
                train=dataclasses.replace(train, micro_batch_size=micro, grad_accum_steps=steps, global_batch_size=None),
            )
            possible = [n for n in allowed if states_fit(changed, shape, STRATEGIES[n], world_size, steps, hardware)]
            other = fastest(
                [assess(changed, shape, STRATEGIES[n], world_size, steps, hardware) for n in possible], world_size
            )
            if other is None or (other.rounding != "none" and chosen.rounding == "none"):
                break
            if other.timing and (best is None or other.timing.tokens_per_second > best[2].timing.tokens_per_second):
                best = micro, steps, other
    if best is not None and best[2].timing.tokens_per_second > 1.15 * chosen.timing.tokens_per_second:
        micro, steps, other = best
        words = f"train.micro_batch_size={micro}" + (
            "" if train.global_batch_size else f" train.grad_accum_steps={steps}"
        )
        yield (f"{words} is the same batch, about {other.timing.tokens_per_second / chosen.timing.tokens_per_second:.1f}x as fast "
               f"({other.strategy.name}, {figures(other)})")  # fmt: skip


def offer_lines(offers: tuple[Offer, ...]) -> list[str]:
    if not offers:
        return [
            "  No change of sequence length, micro-batch, precision or adapters fits: more or larger cards, or a smaller model."
        ]
    return ["  Nearest that fits:"] + [
        f"    {' '.join(o.overrides)}  ({o.candidate.strategy.name}, {figures(o.candidate)})"
        for o in offers
    ]
