"""Mixtures of experts in one process: which block is one, what its router chose, the loss and the bias that spread it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import BIN, ROOT, clean_environment
from ranks_of_experts import Layered, alone
from safetensors.torch import load_file
from test_run_experts import published
from test_trainer import CPU, rows, tiny
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepseek_ft import ConfigError, RunError, load_config, plan_run
from deepseek_ft.callbacks import RunLog
from deepseek_ft.experts import (
    Routers,
    check_sharded,
    choices,
    counted_tokens,
    find_blocks,
    freeze_routers,
    keep_whole,
    router_scores,
    sequence_balance,
)
from deepseek_ft.report import read_metrics
from deepseek_ft.trainer import FineTuneTrainer, build_training_args

PAD = 0


def moe(kind: str, layers: int = 2, dense: int = 0):
    """A V2- or V3-type model of four experts, two for each token."""
    from transformers import AutoModelForCausalLM

    config = tiny(f"deepseek_{kind}").config
    config.num_hidden_layers, config.first_k_dense_replace = layers, dense
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(config)


def padded(**more) -> list[dict]:
    """Rows of unequal ends: two of them, a prompt with answer, are followed by padding."""
    made = rows(**more)
    for row, end in ((made[2], 11), (made[5], 4)):
        row["input_ids"][end:], row["labels"][end:] = PAD, -100
    return made


def trained(folder, model, *, micro=8, accumulation=1, steps=2, data=None, chunked=False, **overrides):
    from deepseek_ft.losses import Head

    words = {"strategy": "single", "train.micro_batch_size": micro, "train.grad_accum_steps": accumulation, "train.log_steps": 1,
             "optim.max_grad_norm": 1e9, "optim.lr": 1e-2, "data.seq_len": 16, "train.save_steps": None, "optim.warmup_steps": 0,
             "model.gradient_checkpointing": False}  # fmt: skip
    config = load_config("quickstart", words | overrides)
    plan = plan_run(config, CPU)
    args = build_training_args(config, plan, folder, steps)
    if chunked:
        Head(model).use_for_training()
    routers = Routers(model, PAD, config.experts.balance_loss, config.experts.bias_update_speed)
    trainer = FineTuneTrainer(config=config, plan=plan, bytes_of_token=np.ones(64), eval_blocks=None, model=model, args=args,
                              train_dataset=data or padded(), routers=routers if routers.blocks else None)  # fmt: skip
    log = RunLog(trainer, folder / "metrics.jsonl")
    trainer.add_callback(log)
    trainer.train()
    return trainer, log.history


# ------------------------------------------------------------------------------------------------ blocks


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_blocks_are_those_with_experts_and_not_the_dense_layer(kind):
    model = moe(kind, layers=3, dense=1)
    blocks = find_blocks(model)
    assert [(b.name, b.kind) for b in blocks] == [("model.layers.1.mlp", "fused"), ("model.layers.2.mlp", "fused")]
    assert {type(b.module).__name__ for b in blocks} == {{"v2": "DeepseekV2Moe", "v3": "DeepseekV3MoE"}[kind]}
    assert type(model.model.layers[0].mlp) is not type(blocks[0].module)
    assert keep_whole(model) == []
    check_sharded(model)
    check_sharded(moe(kind, layers=2, dense=2))
    assert find_blocks(tiny("llama")) == []
    check_sharded(tiny("llama"))


def test_experts_in_a_list_become_leaves_and_nothing_else_does():
    from deepspeed.utils import get_z3_leaf_modules

    model = Layered()
    with pytest.raises(RunError, match="Listed: its experts are neither fused"):
        check_sharded(model)
    assert keep_whole(model) == ["Listed"]
    assert get_z3_leaf_modules(model) == [model.layers[1], model.layers[2]]
    check_sharded(model)


def test_a_block_that_is_not_understood_is_refused_under_zero3():
    model = Layered()
    keep_whole(model)
    model.layers[1].experts = nn.Linear(8, 8)
    model.layers[1]._z3_leaf = False
    with pytest.raises(RunError, match=r"Listed.*strategy=zero2"):
        check_sharded(model)
    model.layers = nn.ModuleList([nn.Linear(8, 8)])
    with pytest.raises(RunError, match="speaks of 6 routed experts"):
        check_sharded(model)


# --------------------------------------------------------------------------------------------- arithmetic


def test_padding_is_what_has_no_target_at_the_end():
    ids = torch.tensor([[5, 0, 7, 0, 0, 0], [0, 0, 3, 4, 5, 6], [5, 6, 7, 0, 0, 0]])
    labels = torch.tensor([[-100, -100, 7, 0, -100, -100], [-100] * 6, [-100, 6, 7, -100, -100, -100]])
    counted = counted_tokens(ids, labels, PAD)
    assert counted.sum(dim=1).tolist() == [4, 6, 3] and counted[0].tolist() == [True] * 4 + [False] * 2


def test_choices_are_counted_row_by_row():
    index = torch.tensor([[0, 1], [1, 3], [2, 1], [0, 2], [0, 4], [4, 4]])  # 4 is no expert's
    counted = torch.tensor([[True, True, False], [True, True, True]])
    assert choices(index, counted, 4).tolist() == [[1, 2, 0, 1], [2, 0, 1, 0]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_balance_loss_is_the_papers_sum(scoring):
    """Against the formula, term by term in Python."""
    torch.manual_seed(0)
    rows_, length, experts, k = 3, 5, 6, 2
    logits = torch.randn(rows_ * length, experts)
    counted = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()
    index = logits.topk(k).indices
    expected = 0.0
    for r in range(rows_):
        tokens = [r * length + t for t in range(length) if counted[r, t]]
        for i in range(experts):
            if not tokens:
                continue
            f = experts / (k * len(tokens)) * sum(i in index[t].tolist() for t in tokens)
            s = [logits[t].softmax(0) if scoring == "softmax" else logits[t].sigmoid() / logits[t].sigmoid().sum() for t in tokens]
            expected += len(tokens) * f * sum(float(x[i]) for x in s) / len(tokens)
    found = sequence_balance(logits, choices(index, counted, experts), counted, k, scoring)
    assert float(found) == pytest.approx(expected, rel=1e-6)
    even = torch.zeros(8, 4)  # every expert alike: a row gives its tokens, once for each
    spread = torch.arange(16).reshape(8, 2) % 4
    rows_of = torch.ones(2, 4, dtype=torch.bool)
    assert float(sequence_balance(even, choices(spread, rows_of, 4), rows_of, 2, scoring)) == pytest.approx(8)


@pytest.mark.parametrize("kind", ["v2", "v3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_sum_of_both_losses(kind, checkpointing, tmp_path):
    """Against transformers' own record of the router logits, and autograd; also where layers are computed twice."""
    model = moe(kind)
    data = padded()
    ids, labels = (torch.from_numpy(np.stack([r[n] for r in data])) for n in ("input_ids", "labels"))
    counted = counted_tokens(ids, labels, PAD)
    model.train()
    out = model(input_ids=ids, labels=labels, output_router_logits=True, use_cache=False)
    total = out.loss
    for logits in out.router_logits:
        scores = router_scores(logits, "softmax" if kind == "v2" else "sigmoid")
        chosen = choices(scores.topk(2).indices, counted, 4)
        total = total + 0.5 * sequence_balance(logits, chosen, counted, 2, "softmax" if kind == "v2" else "sigmoid") / counted.sum()
    total.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    seen = {}

    class Stop(Exception):
        pass

    def before_update(optimizer, *_):
        seen.update({n: p.grad.clone() for n, p in model.named_parameters()})
        raise Stop

    handle = register_optimizer_step_pre_hook(before_update)
    try:
        with pytest.raises(Stop):
            trained(tmp_path, model, data=data, steps=1, **{"experts.balance_loss": 0.5, "model.gradient_checkpointing": checkpointing})
    finally:
        handle.remove()
    for name, grad in expected.items():
        assert torch.allclose(seen[name], grad, rtol=1e-4, atol=1e-7), name
    assert seen["model.layers.0.mlp.gate.weight"].abs().max() > 0


# ------------------------------------------------------------------------------------------ in training


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_nothing_depends_on_how_a_step_is_cut(kind, tmp_path):
    """Micro-batches, gradient checkpointing and the way of the language-model loss: the same losses, norms, loads, biases."""
    words = {"experts.balance_loss": 0.3} | ({"experts.bias_update_speed": 0.01} if kind == "v3" else {})
    found = []
    for n, (micro, accumulation, checkpointing, chunked) in enumerate(
        [(8, 1, False, False), (1, 8, False, False), (1, 8, True, False), (2, 4, True, True)]
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        _, history = trained(folder, moe(kind), micro=micro, accumulation=accumulation, chunked=chunked,
                             **words, **{"model.gradient_checkpointing": checkpointing})  # fmt: skip
        layers = read_metrics(folder / "experts.jsonl")
        found.append(([[h[k] for h in history] for k in ("loss", "balance_loss", "grad_norm")],
                      [(row["load"], row.get("bias")) for row in layers]))  # fmt: skip
    for numbers, exact in found[1:]:
        for mine, first in zip(numbers, found[0][0], strict=True):
            assert mine == pytest.approx(first, rel=1e-5)
        assert exact == found[0][1]
    assert found[0][0][1][0] > 0.3 * 2 * 0.9  # coefficient x layers x about 1


def test_the_reported_loss_is_the_language_models_alone(tmp_path):
    plain, with_balance = tmp_path / "plain", tmp_path / "balance"
    plain.mkdir()
    with_balance.mkdir()
    _, expected = trained(plain, moe("v2"), steps=1)
    _, found = trained(with_balance, moe("v2"), steps=1, **{"experts.balance_loss": 3.0})
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-6) and "balance_loss" not in expected[0]
    assert found[0]["balance_loss"] > 5 and found[0]["grad_norm"] != pytest.approx(expected[0]["grad_norm"], rel=1e-3)


def test_each_token_is_counted_once(tmp_path):
    """Not again where checkpointing computes a layer twice, not in padding, not in evaluation."""
    trainer, history = trained(tmp_path, moe("v3"), micro=2, accumulation=4, **{"model.gradient_checkpointing": True})
    tokens = 8 * 16 - (16 - 11) - (16 - 4)
    for row in read_metrics(tmp_path / "experts.jsonl"):
        assert [sum(load) for load in row["load"]] == [2 * tokens, 2 * tokens]
    assert [h["expert_tokens_dropped"] for h in history if "loss" in h] == [0, 0]
    trainer.model.eval()
    trainer.model(torch.zeros(1, 16, dtype=torch.long))
    assert trainer.routers.figures() is None


def test_figures_of_a_router_that_always_chooses_the_same(tmp_path):
    model = moe("v3", layers=1)
    gate = model.model.layers[0].mlp.gate
    gate.weight.data.zero_()
    gate.e_score_correction_bias.copy_(torch.tensor([1.0, 1.0, 0.0, 0.0]))
    _, history = trained(tmp_path, model, steps=1)
    first = history[0]
    assert (first["expert_load_max"], first["expert_load_min"], first["experts_idle"]) == (2.0, 0.0, 0.5)
    assert first["router_entropy"] == pytest.approx(1.0) and first["experts_idle_on_a_rank"] == 0.5  # its scores are even
    assert read_metrics(tmp_path / "experts.jsonl")[0]["load"][0][2:] == [0, 0]


def test_every_figure_is_explained_and_shown(tmp_path, caplog):
    caplog.set_level("INFO", logger="deepseek_ft")
    _, history = trained(tmp_path, moe("v3"), steps=1, **{"experts.balance_loss": 0.1, "experts.bias_update_speed": 0.01})
    text = (ROOT / "docs" / "experts.md").read_text(encoding="utf-8")
    named = {name for line in re.findall(r"^\| (`.*?) \|", text, re.M) for name in re.findall(r"`(\w+)`", line)}
    assert named == {k for k in history[0] if k.startswith(("expert", "router", "balance"))}
    assert re.search(r"\| experts 0\.\d-1\.\dx \| mem", caplog.text)


def test_a_token_that_no_expert_gets_is_seen(tmp_path):
    """What is dropped is counted, not taken for granted."""
    model = moe("v2", layers=1)
    model.set_experts_implementation("eager")  # which leaves out an index that is no expert's

    def lose_one(module, args, output):
        logits, weights, index = output
        index = index.clone()
        index[0, 0] = 4
        return logits, weights, index

    model.model.layers[0].mlp.gate.register_forward_hook(lose_one)
    _, history = trained(tmp_path, model, steps=1)
    assert history[0]["expert_tokens_dropped"] == 1


def test_a_router_that_is_not_known_is_refused_where_something_is_asked_of_it():
    assert Routers(Layered(), PAD).blocks == []
    with pytest.raises(RunError, match="Layered has no router of a kind that is known"):
        Routers(Layered(), PAD, balance=0.1)


def test_a_dense_model_has_no_routers(tmp_path):
    _, history = trained(tmp_path, tiny("llama"), steps=1)
    assert not any(k.startswith(("expert", "router")) for k in history[0]) and not (tmp_path / "experts.jsonl").exists()


def test_the_bias_moves_against_the_load_and_is_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    model = moe("v3")
    trainer, _ = trained(tmp_path, model, steps=3, **{"experts.bias_update_speed": 0.01})
    rows_ = read_metrics(tmp_path / "experts.jsonl")
    expected = torch.zeros(2, 4)
    for row in rows_:
        load = torch.tensor(row["load"], dtype=torch.float64)
        expected += 0.01 * torch.sign(load.mean(dim=1, keepdim=True) - load).float()
        assert torch.equal(torch.tensor(row["bias"]), expected)
    assert expected.abs().max() > 0.005
    trainer.save_model(str(tmp_path / "model"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    for bias, block in zip(expected, find_blocks(again), strict=True):
        assert block.gate.e_score_correction_bias.dtype is torch.float32
        assert torch.equal(block.gate.e_score_correction_bias, bias)


def test_a_step_that_the_optimizer_left_out_moves_no_bias():
    model, ids = moe("v3"), torch.arange(1, 33).reshape(2, 16)
    routers = Routers(model, PAD, speed=0.5)
    for updated, moved in ((False, False), (True, True)):
        with routers.watching({"input_ids": ids, "labels": ids}):
            model(ids)
        routers.end_step(updated=updated)
        assert any(bias.abs().max() > 0 for bias in routers.biases) is moved
    assert [sum(load) for load in routers.figures().layers["load"]] == [2 * 32 * 2] * 2  # and both steps are counted


def test_a_bias_that_would_lose_small_steps_is_refused(tmp_path):
    model = moe("v3")
    gate = model.model.layers[1].mlp.gate
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    with pytest.raises(RunError, match=r"model\.layers\.1\.mlp is a buffer of bfloat16"):
        trained(tmp_path, model, **{"experts.bias_update_speed": 0.01})


def test_frozen_routers_stay_as_they_are(tmp_path):
    model = moe("v3")
    freeze_routers(model)
    before = {n: p.clone() for n, p in model.named_parameters()}
    trained(tmp_path, model, steps=1)
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert "model.layers.0.mlp.experts.down_proj" in moved
    assert before.keys() - moved == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["model.path=preset:tiny-v2", "experts.bias_update_speed=0.001"], "only V3's add a bias"),
     (["model.path=preset:tiny-v2", "experts.balance_loss=config"], "aux_loss_alpha"),
     (["model.path=preset:tiny-llama", "experts.balance_loss=0.01"], "is a dense model"),
     (["model.path=preset:tiny-llama", "experts.train_router=false", "experts.bias_update_speed=0.1"], "2 problems")],
)  # fmt: skip
def test_what_a_model_has_no_use_for_is_refused_before_it_is_loaded(words, expected):
    with pytest.raises(ConfigError, match=expected):
        plan_run(load_config("quickstart", [*words, "strategy=single"]), CPU)


def test_config_is_the_coefficient_of_the_models_own_file(tmp_path):
    from deepseek_ft.shapes import PRESETS, find_shape
    from deepseek_ft.workload import balance_coefficient

    (tmp_path / "config.json").write_text(json.dumps(PRESETS["tiny-v2"] | {"aux_loss_alpha": 0.003}))
    config = load_config("quickstart", [f"model.path={tmp_path}", "experts.balance_loss=config"])
    assert balance_coefficient(config, find_shape(str(tmp_path))) == 0.003
    assert find_shape("deepseek-ai/DeepSeek-V2-Lite").balance_loss == 0.001


# ----------------------------------------------------------------------------------- what is saved, and memory


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_every_way_of_storing_experts_holds_the_same_model(kind, tmp_path):
    """DeepSeek's names, an expert's matrices apart, and what save_pretrained writes: bit-equal, and back."""
    from transformers import AutoModelForCausalLM

    source = published(kind, tmp_path / "published")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    assert model.model.layers[1].mlp.experts.gate_up_proj.shape == (32, 64, 96)
    model.save_pretrained(tmp_path / "again")
    there, back = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "again"))
    assert "model.layers.1.mlp.experts.31.down_proj.weight" in there and there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) and there[name].dtype == back[name].dtype for name in there)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_plan_knows_what_the_balance_loss_holds(checkpointing):
    """What is alive after the forward pass, with the loss and without it, in the same model."""
    from deepseek_ft.memory import _Step
    from deepseek_ft.shapes import shape_from_config
    from deepseek_ft.strategies import STRATEGIES
    from deepseek_ft.workload import Workload

    model = moe("v2", layers=4)
    sizes = {"micro_batch_size": 4, "seq_len": 64, "world_size": 1}
    shape = shape_from_config(model.config.to_dict())

    def told(balance: bool) -> float:
        load = Workload(shape, STRATEGIES["single"], precision="fp32", checkpointing=checkpointing, balance_loss=balance, **sizes)
        return _Step(load).activations

    routers = Routers(model, PAD, 0.1)
    routers._step_tokens = torch.tensor(256)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = torch.ones(4, 64, dtype=torch.long)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = {"input_ids": ids, "labels": ids}
    with routers.watching(batch):
        model(input_ids=ids, labels=ids, use_cache=False)
    logits = sum(t.untyped_storage().nbytes() for t, _ in routers._kept)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        routers.balance_loss()
    assert not routers._kept and sum(kept.values()) >= logits  # the scores of each layer, in the logits' place
    assert told(True) - told(False) == logits == 4 * 4 * 4 * 256  # fp32 x layers x experts x tokens




# ----------------------------------------------------------------------------------- experts in a list, on ranks


def on_three_ranks(how: str) -> list[subprocess.CompletedProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(3):
        environment = clean_environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT),
            PATH=os.pathsep.join([str(BIN), os.environ["PATH"]]),
        )  # fmt: skip
        processes.append(subprocess.Popen([sys.executable, str(ROOT / "tests" / "ranks_of_experts.py"), how], env=environment,
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))  # fmt: skip
    done = []
    for process in processes:
        try:
            out, _ = process.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        done.append(subprocess.CompletedProcess(how, process.returncode, out))
    return done


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["leaf", *(pytest.param(h, marks=pytest.mark.slow) for h in ("eager", "grouped_mm", "batched_mm"))])
def test_ranks_that_use_other_experts_train_as_one_process(how):
    """With a list as a leaf, and with each implementation of the fused experts, which need none: the losses of plain PyTorch."""
    answers = []
    for done in on_three_ranks(how):
        assert done.returncode == 0, done.stdout[-3000:]
        answers.append(json.loads(next(line[5:] for line in done.stdout.splitlines() if line.startswith("RANK "))))
    used = [[tuple(layer) for layer in answer["used"]] for answer in answers]
    assert len({ranks[0] for ranks in used}) > 1 and len({ranks[1] for ranks in used}) > 1, used
    for answer in answers:
        assert answer["losses"] == pytest.approx(alone(how), rel=1e-5)


@pytest.mark.slow
@pytest.mark.ranks
def test_without_the_leaf_ranks_that_route_differently_do_not_get_through():
    """Why the block is a leaf: ranks gather different experts in the same collective. Gloo notices a difference of size and
    ends the ranks, or they wait for each other until the time is up; NCCL only waits."""
    assert any(done.returncode != 0 for done in on_three_ranks("bare"))


def test_a_collective_that_is_waited_for_in_vain_ends_with_a_hint(tmp_path):
    """Gloo's own message, as two ranks get it when one of them does not come; in a worker of ours it becomes a RunError."""
    code = f"""
import datetime, os, sys, threading
import torch, torch.distributed as dist
from deepseek_ft import cli, launch, run
rank = int(sys.argv[1])
store = dist.FileStore({str(tmp_path / "store")!r}, 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=2))
dist.barrier()
if rank == 1:
    store.wait(["given up"], datetime.timedelta(seconds=60))
    os._exit(0)
run.worker = lambda *_: dist.all_reduce(torch.ones(1))
code = cli.main(["worker", "train", "{{}}"])
store.set("given up", "yes")
os._exit(code)
"""
    environment = clean_environment(PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo")
    ranks = [subprocess.Popen([sys.executable, "-c", code, str(r)], env=environment, stderr=subprocess.PIPE, text=True) for r in (0, 1)]
    said = ranks[0].communicate(timeout=120)[1]
    ranks[1].communicate(timeout=120)
    assert ranks[0].returncode == 1 and "RunError: a collective operation timed out" in said and "Timed out waiting 2000ms" in said, said
