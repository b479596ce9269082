"""What is kept for the backward pass changes memory and time, and nothing that is learnt."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from conftest import newest_run, train
from test_trainer import rows, trained
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import PlanError, activations, load_config, plan_run
from deepseek_ft.config import ModelConfig
from deepseek_ft.hardware import GIB, Hardware, described
from deepseek_ft.memory import estimate
from deepseek_ft.shapes import find_shape
from deepseek_ft.strategies import STRATEGIES
from deepseek_ft.timing import estimate_time
from deepseek_ft.workload import Workload

SEVEN = find_shape("deepseek-ai/deepseek-llm-7b-base")
LAYERS = 4


def deep(model_type="llama", seed=0):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
             "num_key_value_heads": 4}  # fmt: skip
    if model_type == "deepseek_v3":
        shape |= {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
                  "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
                  "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape), dtype=torch.float32)
    model.config.use_cache = False
    return model


WAYS = {
    "off": {"model.gradient_checkpointing": False},
    "every layer": {"model.gradient_checkpointing": True},
    "every second": {"model.gradient_checkpointing": True, "model.checkpoint_every": 2},
    "on the host": {"model.gradient_checkpointing": True, "model.offload_activations": True},
    "every third, on the host": {"model.gradient_checkpointing": True, "model.checkpoint_every": 3, "model.offload_activations": True},
}


def curve(folder, model, **words) -> list[tuple[float, float]]:
    _, log = trained(folder, 4, 2, steps=3, model=model, **({"train.precision": "fp32", "optim.lr": 1e-2} | words))
    return [(row["loss"], row["grad_norm"]) for row in log.history]


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_the_curve_is_the_same_bit_for_bit(tmp_path, model_type):
    curves = {name: curve(tmp_path / name.replace(" ", "_"), deep(model_type), **words) for name, words in WAYS.items()}
    assert len(curves["off"]) == 3 and curves["off"][2][0] < curves["off"][0][0]
    assert {name: c == curves["off"] for name, c in curves.items()} == dict.fromkeys(WAYS, True)


@pytest.mark.parametrize("name", WAYS)
def test_as_many_layers_are_computed_again_as_the_recipe_says(tmp_path, name, monkeypatch):
    """Counted in a real step: a recomputed layer's feed-forward runs twice; what waits on the host is copied once for each."""
    model, calls, copies = deep(), [0] * LAYERS, []
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    plain = activations.save_on_cpu
    monkeypatch.setattr(activations, "save_on_cpu", lambda **how: copies.append(how) or plain(**how))
    trained(tmp_path, 8, 1, model=model, **WAYS[name])
    every = WAYS[name].get("model.checkpoint_every", 1)
    again = [WAYS[name]["model.gradient_checkpointing"] and i % every == 0 for i in range(LAYERS)]
    assert calls == [1 + a for a in again]
    assert copies == [{"pin_memory": torch.cuda.is_available()}] * (sum(again) if "model.offload_activations" in WAYS[name] else 0)


@pytest.mark.parametrize("recomputed", [False, True])
def test_nothing_is_computed_again_below_what_is_trained(tmp_path, recomputed):
    """transformers lets the embedding's output need a gradient where layers are recomputed: frozen layers would be passed backward."""
    model, calls = deep(), [0] * LAYERS
    for part in (model.model.embed_tokens, *model.model.layers[:2]):
        part.requires_grad_(False)
    for i, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
    before = {name: p.clone() for name, p in model.named_parameters()}
    trained(tmp_path, 8, 1, model=model, **{"model.gradient_checkpointing": recomputed})
    assert calls == [1, 1, 1 + recomputed, 1 + recomputed]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("every", [1, 2])
def test_adapters_above_a_frozen_base_all_learn(every):
    """Casebook LORA-1: with every kind of recomputation each trained weight has a gradient."""
    model = deep()
    model.requires_grad_(False)
    trainable = [layer.self_attn.o_proj.weight.requires_grad_(True) for layer in model.model.layers]
    activations.recompute_layers(model, every, offload=True)
    model.train()
    ids = torch.randint(0, 64, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in trainable)


# -------------------------------------------------------------------------------------------------------- tiles


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("tiles", [1, 3, 5, 16, 40])
@pytest.mark.parametrize("recomputed", [False, True])
def test_a_feed_forward_in_tiles_has_the_same_loss_and_gradients(model_type, tiles, recomputed):
    """Also where the tiles do not divide the sequence of 16, and where there are more of them than tokens."""
    found = []
    for cut in (None, tiles):
        model = deep(model_type)
        activations.apply(model, ModelConfig(gradient_checkpointing=recomputed, tiled_mlp=cut))
        model.train()
        batch = torch.stack([torch.from_numpy(row["input_ids"]) for row in rows()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6 * float(one.abs().max()))


def test_one_tile_at_a_time_is_what_exists():
    """Rows that the widest tensors of a feed-forward have, forward and backward."""
    model, seen = deep(), []
    activations.apply(model, ModelConfig(gradient_checkpointing=True, tiled_mlp=4))
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    ids = torch.randint(0, 64, (2, 16))
    model.train()(input_ids=ids, labels=ids).loss.backward()
    assert set(seen) == {(2, 4, 64)} and len(seen) == LAYERS * (4 + 3 + 4)
    # Forward; the layer again, up to the last tile's input; and each tile for itself.


def test_layers_of_experts_are_left_alone_and_said(caplog):
    caplog.set_level("INFO", "deepseek_ft")
    activations.apply(deep("deepseek_v3"), ModelConfig(tiled_mlp=2))
    assert f"the feed-forward of 1 of {LAYERS} layers is in 2 tiles" in caplog.text
    moe = deep("deepseek_v3")
    del moe.model.layers[0]
    with pytest.raises(PlanError, match="no dense feed-forward"):
        activations.apply(moe, ModelConfig(tiled_mlp=2))


# ---------------------------------------------------------------------------------------------- under DeepSpeed

REAL = {
    "off": [],
    "every second, on the host": ["model.gradient_checkpointing=true", "model.checkpoint_every=2", "model.offload_activations=true"],
    "every layer": ["model.gradient_checkpointing=true"],
    "tiles": ["model.gradient_checkpointing=true", "model.tiled_mlp=3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "ddp", "zero2", "zero3_offload_all"])
def test_ranks_learn_the_same_however_activations_are_kept(tmp_path, tiny_recipe, strategy, request):
    slow = request.node.get_closest_marker("slow") is not None
    curves = {}
    for i, (name, words) in enumerate(REAL.items()):
        if not slow and name == "every layer":
            continue
        (folder := tmp_path / str(i)).mkdir()
        train(tiny_recipe, "model.path=preset:tiny-llama", f"strategy={strategy}", "train.max_steps=4", "data.eval=[]", *words, cwd=folder)
        rows = [json.loads(line) for line in (newest_run(folder)["folder"] / "metrics.jsonl").read_text().splitlines()]
        curves[name] = [(row["loss"], row["grad_norm"]) for row in rows]
    assert len(curves["off"]) == 4
    for name, found in curves.items():
        assert np.allclose(found, curves["off"], rtol=1e-6) if name == "tiles" else found == curves["off"], name


# -------------------------------------------------------------------------------------------------- in the plan


def load(**more) -> Workload:
    return Workload(SEVEN, STRATEGIES["zero3"], **({"world_size": 3, "micro_batch_size": 2, "seq_len": 4096} | more))


CARDS = described(Hardware((), 16, 256 * GIB), gpus=3, gpu="rtx4090", host_ram_gib=256, disk_gib=2000)


def test_what_waits_on_the_host_is_told_to_the_plan():
    """30 layers keep 8 x 4096 x 4096 bf16 numbers each: 256 MiB a layer, off the card and onto the host, and over the bus twice."""
    here, there = (estimate(load(micro_batch_size=8, offload_activations=o)) for o in (False, True))
    entering = 8 * 4096 * 4096 * 2
    assert here.gpu["activations"] - there.gpu["activations"] in (30 * entering, 29 * entering)
    assert there.host["activations"] == 3 * 30 * entering and "activations" not in here.host
    times = [estimate_time(load(micro_batch_size=8, offload_activations=o), CARDS).parts.get("copies", 0.0) for o in (False, True)]
    rate = 2 * 30 * entering / (times[1] - times[0])
    assert 15e9 < rate < 35e9


def test_recomputing_fewer_layers_takes_more_memory_and_less_time():
    memory = [estimate(load(checkpoint_every=n)).tensor_bytes for n in (1, 2, 3, 30)]
    time = [estimate_time(load(checkpoint_every=n), CARDS).step_seconds for n in (1, 2, 3, 30)]
    assert memory == sorted(memory) and len(set(memory)) == 4
    assert time == sorted(time, reverse=True) and len(set(time)) == 4
    off = load(checkpointing=False)
    assert memory[-1] < estimate(off).tensor_bytes and time[-1] > estimate_time(off, CARDS).step_seconds


def test_tiles_take_less_memory_and_more_time():
    long = {"seq_len": 32768, "micro_batch_size": 1, "loss": "chunked"}
    memory = [estimate(load(tiled_mlp=n, **long)).tensor_bytes for n in (1, 4, 16)]
    time = [estimate_time(load(tiled_mlp=n, **long), CARDS).step_seconds for n in (1, 4)]
    assert memory[0] > memory[1] >= memory[2] and time[1] > time[0]


def test_the_recipe_reaches_the_plan():
    words = {"strategy": "zero3", "train.micro_batch_size": 16, "data.seq_len": 4096, "model.gradient_checkpointing": True}
    more = {"model.checkpoint_every": 2, "model.offload_activations": True, "model.tiled_mlp": 8}
    plain, changed = (plan_run(load_config("deepseek-coder-6.7b/code_full", words | w), CARDS, force=True) for w in ({}, more))
    assert changed.memory.host["activations"] > 0 and plain.memory.tensor_bytes != changed.memory.tensor_bytes
