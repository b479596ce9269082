"""Layers in stages: a model cut down, torch's schedule as it runs, and runs that are the runs of one process."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from conftest import cli, train
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from deepseek_ft import PlanError, load_config, plan_run
from deepseek_ft.hardware import described, probe
from deepseek_ft.pipeline import idle_share
from deepseek_ft.report import read_metrics
from deepseek_ft.shapes import preset_config, shape_from_config
from deepseek_ft.stages import Stage, load_cut

MODELS = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-v2", "tiny-v3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made: dict[tuple, tuple] = {}

    def make(name: str, tied: bool = False):
        if (name, tied) not in made:
            config = preset_config(name, 300) | {"tie_word_embeddings": tied}
            kind = config.pop("model_type")
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name, tied] = model, path
        return made[name, tied]

    return make


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", MODELS)
def test_each_stage_holds_its_own_weights_and_no_others(name, tied, folder):
    """Together they are the model; a tied table is with the first and the last."""
    whole, path = folder(name, tied)
    layers = whole.config.num_hidden_layers
    sizes = (1, layers - 2, 1) if layers > 2 else (1, 1)
    found: dict[str, int] = {}
    for rank in range(len(sizes)):
        stage = Stage(rank, sizes)
        part, info = load_cut(str(path), stage, dtype=torch.float32, output_loading_info=True)
        assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert type(part).__name__ == type(whole).__name__
        for parameter, tensor in part.named_parameters():
            assert torch.equal(tensor, whole.get_parameter(parameter)), parameter
            found[parameter] = found.get(parameter, 0) + 1
        mine = {int(n.split(".")[2]) for n, _ in part.named_parameters() if n.startswith("model.layers.")}
        assert mine == set(stage.layers)
    assert found.keys() == dict(whole.named_parameters()).keys()
    twice = [n for n, count in found.items() if count > 1]
    assert twice == (["model.embed_tokens.weight"] if tied else [])


def orders_of_1f1b(stages: int, micro_batches: int) -> list[list[tuple[str, int]]]:
    """As it is published (arXiv:2104.04473 figure 4)."""
    orders = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        order = [("F", i) for i in range(ahead)]
        for i in range(micro_batches):
            order.append(("B", i))
            if ahead + i < micro_batches:
                order.append(("F", ahead + i))
        orders.append(order)
    return orders


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (2, 7), (3, 3), (3, 12), (3, 96), (4, 8), (1, 5)])
def test_equal_stages_idle_as_the_formula_says(stages, micro_batches):
    equal = [{"F": 1.0, "B": 2.0}] * stages
    expected = (stages - 1) / (micro_batches + stages - 1)
    assert idle_share(orders_of_1f1b(stages, micro_batches), equal) == pytest.approx(expected, abs=1e-12)


def test_a_slow_stage_lets_the_others_wait():
    seconds = [{"F": 1.0, "B": 2.0}, {"F": 2.0, "B": 4.0}]
    assert idle_share(orders_of_1f1b(2, 100), seconds) == pytest.approx(0.25, abs=0.01)
    with pytest.raises(ValueError, match="circle"):
        idle_share([[("B", 0), ("F", 0)]], [{"F": 1.0, "B": 1.0}])


# ------------------------------------------------------------------------------------------------------------ runs


def rows_of(run: dict) -> list[dict]:
    return [row for row in read_metrics(run["folder"] / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def single(tiny_recipe, tmp_path_factory):
    """A run of one process."""
    done: dict[tuple, dict] = {}

    def run(*words: str) -> dict:
        if words not in done:
            one = (w.replace("pipeline_bf16", "single") for w in words)
            done[words] = train(tiny_recipe, "strategy=single", *one, cwd=tmp_path_factory.mktemp("single"))
        return done[words]

    return run


def same_curve(run: dict, reference: dict, loss: float = 1e-5, norm: float = 1e-4) -> None:
    found, expected = rows_of(run), rows_of(reference)
    assert len(found) == len(expected) > 1 and expected[-1]["loss"] < expected[0]["loss"] - 0.1
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=loss) and a["grad_norm"] == pytest.approx(b["grad_norm"], rel=norm), a["step"]
        assert a["learning_rate"] == b["learning_rate"]
    for moment in ("before", "after"):
        assert run[moment]["loss"] == pytest.approx(reference[moment]["loss"], rel=loss)
    assert run["trained"]["parameters"] == reference["trained"]["parameters"]


def slow(*values, id: str):
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


CASES = [
    pytest.param("tiny-v3", 3, (), id="v3"),
    slow("tiny-llama", 3, (), id="llama"),
    slow("tiny-llama", 2, ("stages=[2,1]", "train.micro_batch_size=1"), id="llama-two-stages"),
    slow("tiny-qwen2", 3, (), id="qwen2"),
    slow("tiny-qwen3", 3, ("train.loss=chunked", "model.gradient_checkpointing=true"), id="qwen3-chunked-checkpointed"),
    slow("tiny-v2", 3, ("train.loss=chunked",), id="v2-chunked"),
    slow("tiny-v3", 3, ("optim.name=adamw_8bit",), id="v3-8bit-states"),
    slow("tiny-llama", 3, ("optim.name=muon",), id="llama-muon"),
    slow("tiny-llama", 3, ("optim.name=adafactor",), id="llama-adafactor"),
    slow("tiny-v3", 3, ("optim.max_grad_norm=0",), id="v3-not-clipped"),
    slow("tiny-v3", 3, ("method.freeze=[embed_tokens,layers.0-1]",), id="v3-first-stages-frozen"),
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize(("model", "ranks", "words"), CASES)
def test_a_pipelines_run_is_the_run_of_one_process(model, ranks, words, single, tiny_recipe, tmp_path):
    words = (f"model.path=preset:{model}", *words)
    reference = single(*(w for w in words if not w.startswith("stages")))
    run = train(tiny_recipe, *words, "strategy=pipeline", f"ranks={ranks}", cwd=tmp_path)
    rounds = "optim.name=muon" in words  # Newton and Schulz's steps are in bf16
    same_curve(run, reference, loss=1e-4 if rounds else 1e-5, norm=1e-3 if rounds else 1e-4)
    facts, shape = run["engine_facts"], shape_from_config(json.loads((run["folder"] / "model/config.json").read_text()))
    assert (facts["engine"], facts["world_size"], len(facts["stages"])) == ("Pipeline", ranks, ranks) and sum(facts["stages"]) == shape.layers
    held = [stage["parameters"] for stage in run["pipeline"]["stages"]]
    assert sum(held) == shape.parameters + (shape.vocab_size * shape.hidden_size if shape.tied else 0)
    assert max(held) < shape.parameters and 0 < run["pipeline"]["idle_share"] < 1
    index = json.loads((run["folder"] / "model/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == ranks and not list(run["folder"].glob("model/.stage*"))


LORA = ("method.kind=lora", "method.rank=4", "optim.lr=2e-2", "train.max_steps=5")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("model", "words"),
    [pytest.param("tiny-v3", ("model.gradient_checkpointing=true",), id="v3"),
     slow("tiny-qwen2", ("train.precision=bf16", "optim.lr=1e-2"), id="qwen2-bf16"),
     slow("tiny-v2", ("method.experts=true", "method.variant=rslora", "optim.lr=5e-3"), id="v2-experts-rslora"),
     slow("tiny-llama", ("method.variant=dora", "ranks=2", "stages=[1,2]", "train.micro_batch_size=1"), id="llama-dora"),
     slow("tiny-qwen3", ("method.kind=qlora", "train.precision=bf16"), id="qwen3-qlora")],
)  # fmt: skip
def test_an_adapter_in_stages_is_the_one_of_one_process(model, words, tiny_recipe, tmp_path):
    given = {word.split("=")[0] for word in words}
    words = (f"model.path=preset:{model}", *words, *(w for w in LORA if w.split("=")[0] not in given))
    (one := tmp_path / "one").mkdir()
    reference = train(tiny_recipe, "strategy=single", *(w for w in words if not w.startswith(("stages", "ranks"))), cwd=one)
    run = train(tiny_recipe, "strategy=pipeline", *words, cwd=tmp_path)
    wide = "train.precision=bf16" in words
    found, expected = rows_of(run), rows_of(reference)
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], rel=5e-3 if wide else 2e-5)
    assert run["after"]["loss"] < run["before"]["loss"]
    assert run["trained"] == reference["trained"]
    first, second = (load_file(r["folder"] / "model/adapter_model.safetensors") for r in (run, reference))
    assert first.keys() == second.keys()
    if not wide:
        for name, tensor in first.items():
            assert torch.allclose(tensor, second[name], atol=2e-3, rtol=2e-2), name
    done = cli("merge", run["folder"], cwd=tmp_path)
    assert done.returncode == 0 and "differ by at most" in done.stdout, done.stdout[-2000:]


@pytest.mark.ranks
def test_two_pipelines_of_two_stages(single, tiny_recipe, tmp_path):
    """Four ranks; each pipeline has half of every micro-batch's rows, and an epoch's last step is short."""
    words = ("model.path=preset:tiny-llama", "train.max_steps=8")
    reference = single(*words, "train.global_batch_size=8")
    run = train(tiny_recipe, *words, "strategy=pipeline", "ranks=4", "stages=[1,2]", "train.global_batch_size=8", cwd=tmp_path)
    same_curve(run, reference)
    assert run["engine_facts"]["replicas"] == 2 and len(run["pipeline"]["stages"]) == 2 and run["tokens"] == reference["tokens"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "words",
    [("strategy=pipeline",), slow(("strategy=pipeline", "method.kind=lora", "train.max_steps=8"), id="lora"),
     slow(("strategy=pipeline_offload", "train.precision=bf16"), id="states on the host")],
)  # fmt: skip
def test_a_resumed_pipeline_goes_on_as_if_it_had_not_stopped(words, tiny_recipe, tmp_path):
    words = ("train.save_steps=4", "train.save_total_limit=2", *words)
    straight = train(tiny_recipe, *words, cwd=tmp_path)
    folder = straight["folder"]
    checkpoint = folder / "checkpoint-4"
    assert len(list(checkpoint.glob("optimizer-*-of-00003.pt"))) == 3 and len(list(checkpoint.glob("rng_state_*.pth"))) == 3
    shutil.rmtree(folder / "checkpoint-8")
    shutil.rmtree(folder / "model")
    record = {k: v for k, v in straight.items() if k != "folder"} | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(record))
    resumed = train(tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert [r["loss"] for r in rows_of(resumed)] == [r["loss"] for r in rows_of(straight)]
    assert resumed["after"]["loss"] == straight["after"]["loss"]
    if not words[3:]:  # what the stages wrote is a model for every strategy
        (elsewhere := tmp_path / "elsewhere").mkdir()
        other = train(tiny_recipe, "strategy=zero2", f"model.path={checkpoint}", f"model.tokenizer={checkpoint}", "train.max_steps=2",
                      "model.untrained=true", cwd=elsewhere)  # fmt: skip
        assert other["before"]["loss"] < straight["before"]["loss"] - 0.1
    cut = record | {"plan": record["plan"] | {"stages": [2, 1]}}  # the same states would go to other layers
    (folder / "run.json").write_text(json.dumps(cut))
    other_cut = cli("train", tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert other_cut.returncode == 2 and "stages: [2, 1] then, [1, 1, 1] now" in other_cut.stdout, other_cut.stdout[-1500:]
    (checkpoint / "optimizer-00002-of-00003.pt").unlink()
    (folder / "run.json").write_text(json.dumps(record))
    shutil.rmtree(folder / "checkpoint-8")
    broken = cli("train", tiny_recipe, *words, "--resume", cwd=tmp_path)
    assert broken.returncode == 2 and "optimizer-00002-of-00003.pt is missing" in broken.stdout, broken.stdout[-1500:]


class Weights:
    """Of a card, as `HostAdamW` sees them: two groups, one weight without a gradient."""

    def __init__(self, dtype):
        torch.manual_seed(0)
        self.all = [torch.nn.Parameter(torch.randn(n, 8).to(dtype)) for n in (16, 4, 3)]
        self.groups = [{"params": self.all[:2], "weight_decay": 0.1}, {"params": self.all[2:], "weight_decay": 0.0}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_on_the_host_is_torchs_adamw_in_fp32(dtype):
    from deepseek_ft import ops
    from deepseek_ft.host_adam import HostAdamW

    if not ops.available(["cpu_adam"]):
        pytest.skip("DeepSpeed's cpu_adam op cannot be built here")
    ops.build(["cpu_adam"])
    mine, plain = Weights(dtype), Weights(torch.float32)
    for a, b in zip(plain.all, mine.all, strict=True):
        a.data.copy_(b)
    host = HostAdamW(mine.groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    usual = torch.optim.AdamW(plain.groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        for group in (host.param_groups, usual.param_groups):
            group[0]["lr"] = group[1]["lr"] = 1e-2 / (step + 1)  # as a schedule does
        for a, b in zip(plain.all[:2], mine.all[:2], strict=True):
            halves = [torch.randn_like(a).to(dtype) for _ in range(2)]
            for half in halves:  # two micro-batches, added up in fp32
                (b * half).sum().backward()
            a.grad = sum(half.float() for half in halves)
            assert b.grad.dtype == torch.float32 and torch.allclose(b.grad, a.grad)
        host.step()
        usual.step()
        host.zero_grad()
        usual.zero_grad()
    for a, b, master in zip(plain.all, mine.all, host.masters, strict=True):
        assert torch.allclose(master, a, atol=1e-6) and torch.equal(b, master.to(dtype))
    assert torch.equal(mine.all[2], Weights(dtype).all[2])  # no gradient, no update

    again = Weights(dtype)
    other = HostAdamW(again.groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    other.whole.load_state_dict(copy.deepcopy(host.whole.state_dict()))  # as it comes from a file
    for weights, optimizer in ((mine, host), (again, other)):
        torch.manual_seed(1)
        for p in weights.all:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    # DeepSpeed keeps the powers of the betas as products, and begins a resumed run with powers.
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(host.masters, other.masters, strict=True))


def test_states_on_the_host_are_for_weights_that_are_all_trained():
    config = load_config("deepseek-llm-7b/wikitext103_lora", ["strategy=pipeline_offload"])
    with pytest.raises(PlanError, match="an adapter's are next to nothing: strategy=pipeline"):
        plan_run(config, described(probe("."), gpu="rtx4090", gpus=3, host_ram_gib=128, disk_gib=2000))
    full = load_config("deepseek-llm-7b/wikitext103_full", ["train.precision=bf16", "train.micro_batch_size=4"])
    plan = plan_run(full, described(probe("."), gpu="rtx4090", gpus=3, host_ram_gib=96, disk_gib=2000, cores=16), can_build_ops=True)
    assert plan.strategy.name == "pipeline_offload"  # the only exact one that fits
    n = plan.shape.parameters
    assert plan.memory.host["optimizer states"] + plan.memory.host["master weights"] == pytest.approx(12 * n, rel=1e-6)
    assert plan.memory.gpu["weights"] + plan.memory.gpu["gradients"] == pytest.approx(6 * n / 3, rel=0.12)  # of the fullest stage


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["pipeline_bf16", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_in_bf16(strategy, single, tiny_recipe, tmp_path):
    """Under `pipeline_bf16` weights are bf16 and updates rounded stochastically, with other numbers than in one process."""
    words = ("train.precision=bf16", "optim.lr=1e-3", f"optim.name={'adamw_bf16' if strategy == 'pipeline_bf16' else 'adamw'}")
    reference = single(*words, "train.global_batch_size=6")
    run = train(tiny_recipe, *words, f"strategy={strategy}", cwd=tmp_path)
    same_curve(run, reference, loss=2e-3, norm=5e-2)
    assert run["precision"]["parameters"] == ("bf16" if strategy == "pipeline_bf16" else "fp32")


@pytest.mark.parametrize(
    ("words", "said"),
    [(("stages=[2,2]",), "stages=[2, 2] is not a cut of 3 layers"),
     (("stages=[2,1]",), "needs a number of ranks that 2 divides, and there are 3"),
     (("ranks=5",), "3 layers, 5 ranks"),
     (("model.new_tokens=['<a>']",), "cannot add tokens"),
     (("train.precision=fp16",), "runs in bf16 or fp32 only, got train.precision=fp16"),
     (("method.kind=lora", "method.train_also=[lm_head]"), "beside an adapter")],
)  # fmt: skip
def test_what_a_pipeline_cannot_do_is_said_at_once(words, said, tiny_recipe, tmp_path):
    done = cli("train", tiny_recipe, "strategy=pipeline", "train.global_batch_size=null", *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert not (tmp_path / "runs").exists()
