"""A model in stages: which layers a rank holds, a model cut down to them, and its files.

A stage is the model's own class with the modules that other ranks hold taken out. What is left keeps its name, so each rank
reads its own tensors out of the files of the whole model, and what the ranks write together is such files again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

TABLE, NORM, HEAD, LAYERS = "model.embed_tokens", "model.norm", "lm_head", "model.layers"
"""Where llama, qwen and deepseek models keep what."""


@dataclass(frozen=True)
class Stage:
    """A rank's place: ranks 0 to p - 1 are the stages of the first replica, the next p those of the second."""

    rank: int
    sizes: tuple[int, ...]
    """Layers of each stage."""
    replicas: int = 1

    @property
    def count(self) -> int:
        return len(self.sizes)

    @property
    def index(self) -> int:
        return self.rank % self.count

    @property
    def replica(self) -> int:
        return self.rank // self.count

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    @property
    def layers(self) -> range:
        begin = sum(self.sizes[: self.index])
        return range(begin, begin + self.sizes[self.index])


def device_map(sizes: Sequence[int], devices: Sequence[int | str], tied: bool) -> dict[str, int | str]:
    """Where `layer_split` puts what: a module's name -> its device, as transformers and accelerate read it.

    Args:
        devices: of each run of layers.
        tied: embedding and head are one weight, which lies on one device: the head is computed there, after the last layer.
    """
    runs = [device for size, device in zip(sizes, devices, strict=True) for _ in range(size)]
    last = devices[0] if tied else devices[-1]
    return {TABLE: devices[0], "model.rotary_emb": devices[0], **{f"{LAYERS}.{i}": device for i, device in enumerate(runs)},
            NORM: last, HEAD: last}  # fmt: skip


# ------------------------------------------------------------------------------------------------ a model cut down


class _Elsewhere(nn.Module):
    """In the place of a module that another rank holds: what comes in goes on."""

    def forward(self, hidden, *args, **kwargs):
        return hidden


def load_cut(source: str, stage: Stage, **options) -> tuple[PreTrainedModel, dict]:
    """This stage's part of a model folder; of the files only its tensors are read.

    Args:
        options: of `from_pretrained`.

    Returns:
        The model, and transformers' report on what it found.
    """
    whole = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(source))]
    return cut(whole, stage).from_pretrained(source, **options)


def cut(whole: type[PreTrainedModel], stage: Stage) -> type[PreTrainedModel]:
    """The class of a model of which only a stage is there. It is called like the whole one, and so written into config.json."""

    class Cut(whole):
        def __init__(self, config, *args, **kwargs):
            super().__init__(config, *args, **kwargs)
            tied = config.tie_word_embeddings
            layers = self.model.layers
            for i in range(len(layers)):
                if i not in stage.layers:
                    layers[i] = _Elsewhere()
            if not stage.first and not (stage.last and tied):  # a tied head is the table, and the last stage needs it
                self.model.embed_tokens = _Elsewhere()
            if not stage.last:
                self.model.norm = self.lm_head = _Elsewhere()
                self.all_tied_weights_keys = {}

        def should_save_on_this_rank(self, is_main_process: bool) -> bool:
            return is_main_process  # transformers would leave all writing to rank 0

        _keys_to_ignore_on_load_unexpected = [*(whole._keys_to_ignore_on_load_unexpected or ()), *_held_elsewhere(stage)]

    Cut.__name__, Cut.__qualname__, Cut.__module__ = whole.__name__, whole.__qualname__, whole.__module__
    return Cut


def _held_elsewhere(stage: Stage) -> list[str]:
    """Patterns of the names, in files, of what other ranks hold."""
    mine = "|".join(map(str, stage.layers))
    patterns = [rf"^{re.escape(LAYERS)}\.(?!(?:{mine})\.)\d+\."]
    if not stage.first:
        patterns.append(rf"^{re.escape(TABLE)}\.")
    if not stage.last:
        patterns += [rf"^{re.escape(NORM)}\.", rf"^{HEAD}\."]
    return patterns


def shared_table(model: nn.Module, stage: Stage) -> nn.Parameter | None:
    """The table that first and last stage both hold, where embedding and head are one weight."""
    if stage.count == 1 or not model.config.tie_word_embeddings or not (stage.first or stage.last):
        return None
    return model.get_input_embeddings().weight


# ------------------------------------------------------------------------------------------------------- its files


def save(model: PreTrainedModel, folder: Path, stage: Stage) -> None:
    """The stages' weights as one sharded model folder. Collective: the ranks of the first replica write."""
    parts = [folder / f".stage-{i}" for i in range(stage.count)]
    if stage.replica == 0:
        state = model.state_dict()
        if stage.last and not stage.first and model.config.tie_word_embeddings:  # the first stage writes the table
            state = {name: tensor for name, tensor in state.items() if not name.startswith((TABLE, HEAD))}
        shutil.rmtree(parts[stage.index], ignore_errors=True)  # of a save that was cut off
        model.save_pretrained(parts[stage.index], state_dict=state)
    dist.barrier()
    if stage.rank == 0:
        _join(parts, folder)
    dist.barrier()


def _join(parts: Sequence[Path], folder: Path) -> None:
    """The stages' folders into one, with an index of which file holds what."""
    shards = [file for part in parts for file in sorted(part.glob("*.safetensors"))]
    index: dict[str, str] = {}
    size = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        with open(shard, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        index |= dict.fromkeys(header, name)
        size += sum(end - begin for begin, end in (tensor["data_offsets"] for tensor in header.values()))
        shard.replace(folder / name)
    if len(shards) > 1:
        told = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    for file in parts[0].glob("*.json"):
        if not file.name.endswith(".index.json"):
            file.replace(folder / file.name)
    for part in parts:
        shutil.rmtree(part)
