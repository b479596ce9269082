"""Parameters and FLOPs from the numbers of a config alone, against what transformers builds from the same config."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import SHARED, needs_shared
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import ConfigError
from deepseek_ft.shapes import PRESETS, PUBLISHED, find_shape, shape_from_config

# One name of each published shape, and its parameters as the meta device counts them.
COUNTS = {
    "deepseek-coder-1.3b-base": 1_346_471_936,
    "deepseek-coder-6.7b-instruct": 6_740_512_768,
    "deepseek-coder-33b-base": 33_342_991_360,
    "deepseek-coder-7b-base-v1.5": 6_910_365_696,
    "deepseek-llm-7b-base": 6_910_365_696,
    "DeepSeek-V2-Lite": 15_706_484_224,
    "DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "DeepSeek-R1-Distill-Qwen-14B": 14_770_033_664,
    "DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "DeepSeek-R1-0528-Qwen3-8B": 8_190_735_360,
}


def on_the_meta_device(config: dict):
    shape = {k: v for k, v in config.items() if k not in ("model_type", "torch_dtype")}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **shape))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_counted_as_on_the_meta_device(name):
    model = on_the_meta_device(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == find_shape(f"preset:{name}").parameters


@pytest.mark.parametrize("name", COUNTS)
def test_published_models_are_counted_as_on_the_meta_device(name):
    model = on_the_meta_device(PUBLISHED[f"deepseek-ai/{name}"])
    assert sum(p.numel() for p in model.parameters()) == find_shape(f"deepseek-ai/{name}").parameters == COUNTS[name]


@pytest.mark.parametrize("config", [*PRESETS.values(), *(PUBLISHED[f"deepseek-ai/{n}"] for n in ("deepseek-llm-7b-base", "DeepSeek-V2-Lite",
                                    "DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-0528-Qwen3-8B")),
                                    {**PRESETS["tiny-llama"], "attention_bias": True, "mlp_bias": True}])  # fmt: skip
def test_layers_are_transformers_parameter_for_parameter(config):
    """Names and shapes, which the memory model and adapters build on."""
    model, shape = on_the_meta_device(config), shape_from_config(config)
    theirs = {n.removeprefix("model.layers."): tuple(p.shape) for n, p in model.named_parameters() if ".layers." in n}
    ours, start = {}, 0
    for kind in shape.kinds:
        for i in range(start, start + kind.count):
            ours |= {f"{i}.{name}": weight for name, weight in kind.weights.items()}
        start += kind.count
    assert ours == theirs and shape.layers == config["num_hidden_layers"]


def test_a_hub_model_in_the_local_cache_is_planned_from_there(tmp_path, monkeypatch):
    """Its own config, also for an id that the table knows; nothing is downloaded."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for owner, name in (("somebody", "mine"), ("deepseek-ai", "deepseek-llm-7b-base")):
        repository = tmp_path / f"models--{owner}--{name}"
        snapshot = repository / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
        assert find_shape(f"{owner}/{name}") == (find_shape("deepseek-ai/deepseek-llm-7b-chat") if owner == "deepseek-ai" else None)
        (snapshot / "config.json").write_text(json.dumps(PRESETS["tiny-qwen3"]))
        assert find_shape(f"{owner}/{name}") == find_shape("preset:tiny-qwen3")


def test_pipeline_stages():
    seven = find_shape("deepseek-ai/deepseek-llm-7b-base")
    assert seven.stages(3, 1024) == [10, 11, 9] and seven.stages(1, 1024) == [30] and seven.stages(31, 1024) == []
    for stages in range(2, 9):
        assert sum(seven.stages(stages, 1024)) == 30 and min(seven.stages(stages, 1024)) >= 1


def test_the_671_billion():
    shape = find_shape("deepseek-ai/DeepSeek-R1")
    assert shape.parameters == pytest.approx(671e9, rel=1e-3) and shape.active_parameters == pytest.approx(
        37e9, rel=0.02
    )


@needs_shared
@pytest.mark.parametrize("name", ["DeepSeek-V2-Lite", "DeepSeek-R1-0528-Qwen3-8B", "DeepSeek-R1-Distill-Qwen-7B"])
def test_the_table_is_the_published_config(name):
    config = json.loads((SHARED / f"configs/{name}.config.json").read_text())
    assert shape_from_config(config) == find_shape(f"deepseek-ai/{name}")


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_flops_are_those_that_torch_counts(kind):
    """A forward pass under torch's FLOP counter, with every expert chosen so that what is computed is what is counted."""
    from torch.utils.flop_counter import FlopCounterMode

    config = dict(PRESETS["tiny-llama" if kind == "llama" else "tiny-v3"], vocab_size=512)
    if kind == "deepseek_v3":
        config |= {"num_experts_per_tok": config["n_routed_experts"]}
    shape, seq_len = shape_from_config(config), 64
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config),
        attn_implementation="eager",
        **({"experts_implementation": "eager"} if kind == "deepseek_v3" else {}),  # its matrix products are counted
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, seq_len, dtype=torch.long))
    # The counter sees full attention; ours counts what a causal mask leaves, which is half of it.
    ours = shape.flops_per_token(seq_len, checkpointing=False) / 3
    attention = 2 * shape.layers * shape.attention_width * seq_len
    assert counter.get_total_flops() == pytest.approx((ours + attention) * seq_len, rel=0.03)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_frozen_layers_below_what_is_trained_are_computed_once(checkpointed):
    """Forward and backward pass under torch's counter, embedding and six of eight layers frozen."""
    from torch.utils.flop_counter import FlopCounterMode

    from deepseek_ft.activations import recompute_layers

    config = dict(PRESETS["tiny-llama"], vocab_size=512, num_hidden_layers=8)
    shape, seq_len, below = shape_from_config(config), 64, 6 / 8
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), attn_implementation="eager")
    model.train().config.use_cache = False
    for part in (model.model.embed_tokens, *model.model.layers[:6]):
        part.requires_grad_(False)
    if checkpointed:
        recompute_layers(model)
    ids = torch.zeros(1, seq_len, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    ours = shape.flops_per_token(seq_len, checkpointed, trained=2 / 8, untouched=below)
    passes = 3 - 2 * below + checkpointed * (1 - below)
    attention = 2 * shape.layers * shape.attention_width * seq_len * passes  # the half that a causal mask would leave out
    head = 2 * shape.vocab_size * shape.hidden_size * 6 / 8  # whose gradient is computed whole
    # What is computed again ends with the last product that a gradient needs: the input of the last matrix.
    last = checkpointed * 2 * 2 * shape.hidden_size * config["intermediate_size"]
    assert counter.get_total_flops() == pytest.approx((ours + attention + head - last) * seq_len, rel=0.01)


def test_flops_of_deepseek_llm_7b_by_hand():
    """F = 4 (2 N_layers + 2 L h s) + 6 N_head with checkpointing; 3 (...) without."""
    shape = find_shape("deepseek-ai/deepseek-llm-7b-base")
    head = 102_400 * 4096
    forward = 2 * (6_910_365_696 - 2 * head) + 2 * 30 * 4096 * 1024
    assert shape.flops_per_token(1024, True) == 4 * forward + 6 * head
    assert shape.flops_per_token(1024, False) == 3 * forward + 6 * head


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model_type": "gpt2"}, "known: llama"), ({"hidden_size": None}, "hidden_size"), ({"hidden_size": "64"}, "whole number"),
     ({"num_attention_heads": 0}, "whole number"), ({"max_position_embeddings": "2048"}, "whole number"), ({"vocab_size": True}, "whole number")],
)  # fmt: skip
def test_unusable_configs(change, said):
    config = {k: v for k, v in (PRESETS["tiny-llama"] | change).items() if v is not None}
    with pytest.raises(ConfigError, match=said):
        shape_from_config(config)


@pytest.mark.parametrize("text", ["[]", "null", "{", '{"model_type": []}'])
def test_unusable_files(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "expected"),
    [("preset:tinny", "no preset"), ("./nowhere", "no folder"), ("a/b/c", "no folder"), ("/tmp", "config.json")],
)
def test_model_paths(path, expected):
    with pytest.raises(ConfigError, match=expected):
        find_shape(path)


def test_other_hub_ids_are_not_guessed():
    assert find_shape("somebody/a-model") is None
