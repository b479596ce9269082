"""Adapters without a run: what gets one, what is counted, what is refused, and files that are not what they should be."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import corpus_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import CheckpointError, ConfigError, PlanError, RunError, adapters, list_recipes, load_config, plan_run
from deepseek_ft.hardware import GIB, Hardware, described
from deepseek_ft.models import load_dtype, load_model, load_tokenizer, model_source, tokenizer_source
from deepseek_ft.recipe import find_recipe
from deepseek_ft.shapes import PRESETS, find_shape, shape_from_config
from deepseek_ft.strategies import STRATEGIES
from deepseek_ft.workload import (
    Workload,
    adapted_modules,
    adapter_of,
    adapter_parameters,
    frozen_of,
    matches,
    trained_parameters,
    trained_sizes,
)

CPU = Hardware(gpus=(), cores=2, host_memory_bytes=8 << 30)
FIVE = ("tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-v2", "tiny-v3")


def config_of(name: str = "tiny-llama", **changes):
    given = {"model.path": name if "/" in name else f"preset:{name}", "strategy": "single", "method.kind": "lora", "train.precision": "fp32"}
    return load_config("quickstart", given | {k.replace("__", "."): v for k, v in changes.items()})


def base_of(name: str, dtype=torch.float32):
    shape = dict(PRESETS[name]) | {"vocab_size": 256}
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape), dtype=dtype)


def adapted(name: str, dtype=torch.float32, **changes):
    config = config_of(name, **changes)
    return adapters.attach(base_of(name, dtype), config, plan_run(config, CPU, force=True), "."), config


def trained(model) -> dict[str, torch.Tensor]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


# --------------------------------------------------------------------------------------- what gets an adapter


@pytest.mark.parametrize("name", FIVE)
def test_names_and_shapes_are_transformers_own(name):
    model = base_of(name)
    shape = shape_from_config(model.config.to_dict())
    assert dict(shape.names()) == {n: tuple(p.shape) for n, p in model.named_parameters()}


CHANGES = {
    "usual": {},
    "rank and alpha": {"method.rank": 5, "method.alpha": 7.5},
    "rslora": {"method.variant": "rslora"},
    "dora": {"method.variant": "dora"},
    "some targets": {"method.targets": ["o_proj", "down_proj"]},
    "experts": {"method.experts": True},
    "experts only": {"method.experts": True, "method.targets": []},
    "whole": {"method.train_also": ["embed_tokens", "lm_head"]},
    "one whole": {"method.train_also": ["lm_head"]},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FIVE)
def test_planned_parameters_and_modules_are_the_real_ones(name, change):
    changes = dict(CHANGES[change])
    mixture = name in ("tiny-v2", "tiny-v3")
    if changes.get("method.experts") and not mixture:
        pytest.skip("has no experts")
    if change == "some targets" and mixture:
        changes["method.targets"] = ["o_proj", "kv_b_proj", "down_proj"]
    model, config = adapted(name, **changes)
    shape = shape_from_config(model.config.to_dict())
    adapter = adapter_of(config, shape)
    found = trained(model)
    assert sum(p.numel() for p in found.values()) == adapter_parameters(shape, adapter)
    embedding, layers, norm, head = trained_sizes(Workload(shape, STRATEGIES["single"], 1, 1, 64, adapter=adapter))
    assert embedding + sum(layers) + norm + head == adapter_parameters(shape, adapter)
    said = adapters.describe(model, config)
    assert said["parameters"] == adapter_parameters(shape, adapter) and said["modules"] == adapted_modules(shape, adapter)
    line = " ".join(adapters.lines(said, config))
    assert all(f"{kind} x {count}" in line for kind, count in said["modules"].items())
    assert not any(".mlp.gate." in n or "router" in n for n in found)


def test_the_usual_targets_of_each_architecture():
    feed_forward = {"gate_proj", "up_proj", "down_proj"}
    for name, attention in (
        ("tiny-llama", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("tiny-qwen2", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("tiny-qwen3", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("tiny-v2", {"q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ("tiny-v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
    ):
        shape = find_shape(f"preset:{name}")
        counts = adapted_modules(shape, adapter_of(config_of(name), shape))
        assert counts == dict.fromkeys(attention | feed_forward, 3)
    # 27 layers of V2-Lite: one dense, 26 with shared experts
    lite = find_shape("deepseek-ai/DeepSeek-V2-Lite")
    counts = adapted_modules(lite, adapter_of(config_of("deepseek-ai/DeepSeek-V2-Lite", method__experts=True), lite))
    assert counts["gate_proj"] == 27 and counts["experts.gate_up_proj"] == 26


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [("tiny-v2", {"method.targets": ["q_proj", "v_proj"]}, "v_proj is no linear layer of preset:tiny-v2; it has down_proj, gate_proj, kv_a"),
     ("tiny-llama", {"method.experts": True}, "has no routed experts"),
     ("tiny-v3", {"method.variant": "dora", "method.targets": ["o_proj", "gate_proj"]}, "cannot load a DoRA on gate_proj"),
     ("mini-v3", {"method.train_also": ["lm_head"]}, "are one weight"),
     ("tiny-llama", {"method.kind": "full", "method.freeze": ["layers.0-1", "emb_tokens"]}, "emb_tokens means no weight of preset:tiny-llama; it has layers.0-2"),
     ("tiny-llama", {"method.kind": "full", "method.freeze": ["layers.7"]}, "layers.7 means no weight"),
     ("tiny-llama", {"method.kind": "full", "method.freeze": ["*"]}, "nothing is left to train")],
)  # fmt: skip
def test_what_the_model_does_not_have_is_said_before_weights_are_loaded(name, changes, said):
    """Casebook LORA-5: peft adapts q_proj alone where q_proj and v_proj were asked for, in silence."""
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        plan_run(config_of(name, **changes), CPU)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"method.dropout": 1.0}, "method.dropout: got 1.0"),
     ({"method.rank": 0}, "method.rank: got 0; it must be above 0"),
     ({"method.alpha": -1}, "method.alpha: got -1"),
     ({"method.variant": "doraa"}, "Did you mean dora?"),
     ({"method.train_also": ["norm"]}, "method.train_also: got norm; known: embed_tokens, lm_head"),
     ({"method.targets": []}, "method.targets: got an empty list"),
     ({"method.freeze": ["embed_tokens"]}, "it belongs to method.kind=full"),
     ({"method.kind": "full", "method.dropout": 0.1}, "method.dropout is set, and method.kind=full has no adapter"),
     ({"method.kind": "qlora", "method.experts": True}, "not quantised"),
     ({"method.experts": True, "method.variant": "dora"}, "know no DoRA"),
     ({"method.experts": True, "method.dropout": 0.1}, "know no dropout"),
     ({"lora_r": 8}, "Here it is called method.rank"),
     ({"method.modules_to_save": ["lm_head"]}, "Here it is called method.train_also"),
     ({"finetuning_type": "lora"}, "Here it is called method.kind")],
)  # fmt: skip
def test_settings_that_cannot_be(changes, said):
    with pytest.raises(ConfigError) as caught:
        config_of(**changes)
    assert said in str(caught.value)


@pytest.mark.parametrize("changes", [{"method.kind": "qlora"}, {"method.variant": "dora"}, {"method.experts": True}])
def test_what_needs_whole_weights_is_refused_under_zero3(changes):
    with pytest.raises(PlanError, match="4-bit base|in parts when"):
        plan_run(config_of("tiny-v3", strategy="zero3", **changes), CPU)
    assert plan_run(config_of("tiny-v3", strategy="auto", **changes), CPU, can_build_ops=True).strategy.name == "zero2"


def test_qlora_without_its_package_is_refused_with_the_command(monkeypatch):
    from deepseek_ft import run

    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    config = config_of(method__kind="qlora")
    with pytest.raises(ConfigError, match="pip install"):
        run.can_train(config, plan_run(config, CPU))


# -------------------------------------------------------------------------------------------- what is trained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_without_deepspeed_trained_weights_are_fp32_beside_a_16_bit_base(dtype):
    """Casebook FP-5."""
    model, _ = adapted("tiny-v2", dtype, method__train_also=["lm_head"])
    assert {p.dtype for p in trained(model).values()} == {torch.float32}
    frozen = {p.dtype for n, p in model.named_parameters() if not p.requires_grad and ".mlp.gate." not in n}  # routers are kept in fp32
    assert frozen == {dtype}
    for precision, expected in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        config = config_of(strategy="ddp", train__precision=precision)
        plan = plan_run(config, described(Hardware((), 32, 64 * GIB), gpu="rtx4090", gpus=3))
        assert load_dtype(config, plan) is expected


def test_an_adapter_begins_the_same_whatever_was_drawn_before():
    first, _ = adapted("tiny-v3")
    torch.rand(5)
    second, _ = adapted("tiny-v3")
    other, _ = adapted("tiny-v3", seed=8)
    pairs = zip(trained(first).items(), trained(second).values(), trained(other).values(), strict=True)
    for (name, a), b, c in pairs:
        assert torch.equal(a, b)
        assert torch.equal(a, c) == ("lora_B" in name)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("embed_tokens", {"model.embed_tokens.weight"}),
     ("layers.0-1.mlp.down_proj", {f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)}),
     ("layers.*.self_attn.q_proj.bias", {f"model.layers.{i}.self_attn.q_proj.bias" for i in (0, 1, 2)}),
     ("layers.1-2.*norm", {f"model.layers.{i}.{n}.weight" for i in (1, 2) for n in ("input_layernorm", "post_attention_layernorm")}),
     ("model.norm", {"model.norm.weight"}),
     ("layer", set()), ("proj", set()), ("layers.3-9", set())],
)  # fmt: skip
def test_patterns_of_what_is_frozen(pattern, names):
    assert {name for name, _ in find_shape("preset:tiny-qwen2").names() if matches(pattern, name)} == names


@pytest.mark.parametrize("name", FIVE)
def test_freezing_trains_the_rest_and_is_planned_so(name):
    patterns = ["embed_tokens", "layers.0-1", "layers.2.self_attn"]
    config = config_of(name, method__kind="full", method__freeze=patterns)
    model = adapters.freeze(base_of(name), config)
    shape = shape_from_config(model.config.to_dict())
    left = trained(model)
    assert left and all(n.startswith(("model.layers.2.", "model.norm", "lm_head")) and "self_attn" not in n for n in left)
    load = Workload(shape, STRATEGIES["zero2"], 3, 1, 64, frozen=frozen_of(config, shape))
    assert trained_parameters(load) == sum(p.numel() for p in left.values())
    full, part = (plan_run(dataclasses.replace(config, method=m, strategy="zero2"), CPU, can_build_ops=True).memory
                  for m in (dataclasses.replace(config.method, freeze=[]), config.method))  # fmt: skip
    assert part.tensor_bytes < full.tensor_bytes and part.disk["model folder"] == full.disk["model folder"]


def one_step(model, check: bool = True, recompute: dict | None = None):
    """Forward, backward and the callback, as Trainer calls it."""
    watch = adapters.GradientCheck(model)
    if recompute is not None:
        model.get_base_model().gradient_checkpointing_enable(recompute)
    model.train()
    watch.on_train_begin(None, None, None)
    ids = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    watch.on_step_end(type("Args", (), {"device": torch.device("cpu")}), None, None)
    return watch


@pytest.mark.parametrize("name", FIVE)
def test_every_trained_tensor_has_a_gradient_with_recomputed_layers(name):
    """Casebook LORA-1."""
    model, _ = adapted(name)
    watch = one_step(model, recompute={"use_reentrant": False})
    assert watch.handles == [] and watch.seen == {}  # nothing is left that later steps would pay for
    assert all(p.grad.any() for n, p in trained(model).items() if "lora_B" in n)


def test_a_tensor_that_gets_no_gradient_stops_the_run():
    model, _ = adapted("tiny-llama")
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    layer.lora_A["default"].weight.data.zero_()
    with pytest.raises(RunError, match=r"layers.1.self_attn.v_proj.lora_B.*only zeros"):
        one_step(model)
    model, _ = adapted("tiny-llama")
    forward = model.get_base_model().model.layers[0].forward
    model.get_base_model().model.layers[0].forward = torch.no_grad()(forward)
    with pytest.raises(RunError, match=r"14 of 42 trained tensors.*(?s:.)*layers.0.*none came"):
        one_step(model)


# ---------------------------------------------------------------------------------------------- on the disk


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders with weights of the five architectures."""
    root = tmp_path_factory.mktemp("bases")
    for name in FIVE:
        base_of(name).save_pretrained(root / name)
    return root


def moved(model, seed: int = 3):
    """As after some training: no matrix is zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trained(model).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def saved_adapter(bases: Path, folder: Path, name: str, **changes):
    config = config_of(str(bases / name), **changes)
    base = AutoModelForCausalLM.from_pretrained(bases / name)
    model = moved(adapters.attach(base, config, plan_run(config, CPU), str(bases / name)))
    adapters.save(model, folder, config)
    adapters.check_saved(model, folder)
    return model.eval()


IDS = torch.arange(48)[None]


@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {}) for name in FIVE]
    + [("tiny-v3", {"method.experts": True, "method.variant": "rslora"}), ("tiny-v2", {"method.experts": True, "method.targets": []}),
       ("tiny-v2", {"method.variant": "dora"}), ("tiny-v3", {"method.dropout": 0.2}),
       ("tiny-qwen3", {"method.variant": "dora", "method.dropout": 0.2}), ("tiny-qwen2", {"method.train_also": ["embed_tokens", "lm_head"]})],
)  # fmt: skip
def test_a_plain_peft_loads_what_was_saved(bases, tmp_path, name, changes):
    """Also where peft's own reading of the targets would put the adapter somewhere else (V2 and V3)."""
    from peft import PeftModel

    model = saved_adapter(bases, tmp_path / "model", name, **changes)
    base = AutoModelForCausalLM.from_pretrained(bases / name).eval()
    with torch.no_grad():
        expected, bare = model(input_ids=IDS).logits, base(input_ids=IDS).logits
        found = PeftModel.from_pretrained(base, str(tmp_path / "model")).eval()(input_ids=IDS).logits
        ours, info = adapters.load_with_base(tmp_path / "model")
        again = ours.eval()(input_ids=IDS).logits
    assert (expected - bare).abs().max() > 1e-4  # casebook LORA-2
    assert torch.allclose(found, expected, atol=1e-5) and torch.allclose(again, expected, atol=1e-5)
    assert not info["missing_keys"] and json.loads((tmp_path / "model/adapter_config.json").read_text())["inference_mode"]


DAMAGES = {
    "empty": (lambda k, v: {k: v[:0]}, "not"),
    "missing": (lambda k, v: {}, "is missing"),
    "zero": (lambda k, v: {k: v * 0}, "all zero"),
    "not a number": (lambda k, v: {k: v * float("nan")}, "not a number"),
    "somebody else's": (lambda k, v: {k: v, k.replace("o_proj", "p_proj"): v}, "is not the adapter's"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_the_adapter_is_found_after_saving(bases, tmp_path, damage):
    """Casebook Z3-2 and LORA-2: an adapter of 40 bytes, and one that is still zero."""
    model = saved_adapter(bases, tmp_path, "tiny-v3")
    change, said = DAMAGES[damage]
    tensors = load_file(tmp_path / adapters.WEIGHTS)
    victim = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
    kept = {k: v for k, v in tensors.items() if k != victim}
    save_file(kept | {k: v.contiguous().clone() for k, v in change(victim, tensors[victim]).items()}, tmp_path / adapters.WEIGHTS)
    with pytest.raises(CheckpointError, match=said):
        adapters.check_saved(model, tmp_path)
    (tmp_path / adapters.WEIGHTS).write_bytes(b"40 bytes")
    with pytest.raises(CheckpointError, match="cannot be read"):
        adapters.check_saved(model, tmp_path)


def test_weights_of_another_adapter_are_not_taken(bases, tmp_path):
    saved_adapter(bases, tmp_path, "tiny-llama", method__rank=8)
    model, _ = adapted("tiny-llama")
    before = {n: p.clone() for n, p in trained(model).items()}
    with pytest.raises(CheckpointError, match="does not fit"):
        adapters.load_weights(model, tmp_path)
    assert all(torch.equal(p, before[n]) for n, p in trained(model).items())


def test_the_base_is_named_as_it_was_asked_for():
    assert adapters._base_name(config_of("deepseek-ai/deepseek-llm-7b-base"), "/hub/snapshots/1") == "deepseek-ai/deepseek-llm-7b-base"
    config = config_of("deepseek-ai/deepseek-llm-7b-base")
    model = base_of("tiny-llama")
    model.name_or_path = "/hub/snapshots/1"
    model = adapters.attach(model, config, plan_run(config, CPU, force=True), "/hub/snapshots/1")
    assert adapters.describe(model, config)["base"] == "deepseek-ai/deepseek-llm-7b-base"
    assert adapters._base_name(config_of("tiny-v3"), "cache/presets/tiny-v3-1") == str(Path("cache/presets/tiny-v3-1").resolve())


# --------------------------------------------------------------------------------------------------- merged


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    config = config_of(model__tokenizer="train:400")
    text = Path(adapters.__file__).read_text(encoding="utf-8")
    return load_tokenizer(tokenizer_source(config, [corpus_of([text], "adapters")], tmp_path_factory.mktemp("tokenizers")))


def trained_folder(cache: Path, folder: Path, tokenizer, name: str, **changes) -> Path:
    """An adapter's folder as a run leaves it, of a preset's weights."""
    config = config_of(name, model__tokenizer="train:400", **changes)
    model = load_model(model_source(config, tokenizer, cache), config, plan_run(config, CPU, force=True), tokenizer)
    adapters.save(moved(model), folder, config)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {}) for name in FIVE]
    + [("tiny-v2", {"train.precision": "bf16"}), ("tiny-v3", {"method.experts": True}), ("tiny-llama", {"method.variant": "dora"}),
       ("tiny-v3", {"method.experts": True, "train.precision": "bf16"}), ("tiny-qwen2", {"method.train_also": ["embed_tokens", "lm_head"]})],
)  # fmt: skip
def test_merged_is_base_and_adapter(tmp_path, cache, tokenizer, name, changes):
    """Casebook LORA-4."""
    folder = trained_folder(cache, tmp_path / "model", tokenizer, name, **changes)
    done = adapters.merge(folder)
    assert done["folder"] == str(tmp_path / "merged") and done[f"{done['judged']}_difference"] <= done["tolerance"]
    if "train.precision" not in changes:
        assert done["largest_difference"] < 1e-5
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not hasattr(merged, "peft_config")
    assert merged.dtype == {"bf16": torch.bfloat16}.get(changes.get("train.precision"), torch.float32)
    apart, _ = adapters.load_with_base(folder)
    with torch.no_grad():
        bare, own = apart.get_base_model().get_input_embeddings(), merged.get_input_embeddings()
        assert bare.weight.shape == own.weight.shape
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "merged").iterdir()}
    with pytest.raises(CheckpointError, match="nothing is overwritten"):
        adapters.merge(folder)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "merged").iterdir()}


def test_a_merge_that_gives_another_model_leaves_no_folder(tmp_path, cache, tokenizer, monkeypatch):
    from peft.tuners.lora import Linear

    folder = trained_folder(cache, tmp_path / "model", tokenizer, "tiny-llama")
    usual = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda self, adapter: 0.9 * usual(self, adapter))
    with pytest.raises(CheckpointError, match="not the model that was trained"):
        adapters.merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_adapter_is_not_merged(tmp_path, cache, tokenizer):
    with pytest.raises(CheckpointError, match="neither an adapter's folder nor a run's"):
        adapters.merge(tmp_path)
    folder = trained_folder(cache, tmp_path / "model", tokenizer, "tiny-llama")
    settings = json.loads((folder / adapters.SETTINGS).read_text())
    gone = tmp_path / "base"
    shutil.copytree(settings["base_model_name_or_path"], gone)
    (folder / adapters.SETTINGS).write_text(json.dumps(settings | {"base_model_name_or_path": str(gone)}))
    shutil.rmtree(gone)
    with pytest.raises(CheckpointError, match="there is no such folder; put its new place there"):
        adapters.merge(folder)
    weights = folder / adapters.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:900])
    (folder / adapters.SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=f"is broken: {adapters.WEIGHTS} cannot be read"):
        adapters.merge(folder)
    (folder / adapters.SETTINGS).write_text('{"peft_type": "LORA", ')
    with pytest.raises(CheckpointError, match=f"{adapters.SETTINGS} cannot be read"):
        adapters.merge(folder)


# ---------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", [n for n in list_recipes() if n.endswith(("lora", "bf16states"))])
def test_the_recipes_fit_three_cards_and_say_what_they_take(name):
    hardware = described(Hardware((), 32, 64 * GIB, disk_free_bytes=400 * GIB), gpu="rtx4090", gpus=3)
    plan = plan_run(load_config(name, ["output_dir=runs/x"]), hardware, can_build_ops=True)
    text = find_recipe(name).read_text()
    memory = plan.memory
    said = f"{memory.gpu_bytes / GIB:.0f} GiB per card and {memory.host_bytes / GIB:.0f} GiB of host memory ({plan.strategy.name})"
    assert plan.chosen.fits and said in text, said
