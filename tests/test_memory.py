"""The memory model against torch's own count. The whole table is benchmarks/memory.py; here are its fast rows."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseek_ft.memory import _Step, checkpoint_bytes, estimate, export_bytes
from deepseek_ft.shapes import EXPERTS, PRESETS, PUBLISHED, find_shape, shape_from_config
from deepseek_ft.strategies import STRATEGIES
from deepseek_ft.tape import layer_tape
from deepseek_ft.workload import Adapter, Workload, adapter_parameters

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory as bench

SEVEN = find_shape("deepseek-ai/deepseek-llm-7b-base")
LITE = find_shape("deepseek-ai/DeepSeek-V2-Lite")
GIB = 1024**3


def load(strategy="zero3", shape=SEVEN, **more) -> Workload:
    defaults = {"world_size": 3, "micro_batch_size": 1, "seq_len": 1024, "grad_accum_steps": 4}
    return Workload(shape, STRATEGIES[strategy], **(defaults | more))


SHALLOW = {"num_hidden_layers": 3, "vocab_size": 8192}
FAST = [
    bench.Case("deepseek-ai/deepseek-llm-7b-base", seq_len=1024, checkpointing=False, change={"num_hidden_layers": 8}),
    bench.Case("deepseek-ai/deepseek-llm-7b-base", seq_len=2048, loss="chunked", change={"num_hidden_layers": 8}),
    bench.Case(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", seq_len=2048, change={"num_hidden_layers": 8}, lora=bench._ALL
    ),
    bench.Case(
        "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", seq_len=4096, change={"num_hidden_layers": 8, "vocab_size": 32000}
    ),
    bench.Case("deepseek-ai/DeepSeek-V2-Lite", seq_len=2048, change={"num_hidden_layers": 6}),
    bench.Case("mini-v3", seq_len=1024, micro_batch_size=4, checkpointing=False, loss="chunked"),
    bench.Case(
        "deepseek-ai/deepseek-llm-7b-base", seq_len=4096, loss="chunked", checkpoint_every=2,
        change={"num_hidden_layers": 8, "vocab_size": 8192},
    ),
    bench.Case(
        "deepseek-ai/DeepSeek-V2-Lite", seq_len=4096, micro_batch_size=2, loss="chunked", checkpoint_every=3,
        change={"num_hidden_layers": 5, "vocab_size": 8192},
    ),
    bench.Case(
        "deepseek-ai/deepseek-llm-7b-base", seq_len=16384, loss="chunked", tiled_mlp=8,
        change={"num_hidden_layers": 4, "vocab_size": 8192},
    ),
    bench.Case("deepseek-ai/deepseek-llm-7b-base", seq_len=1024, loss="chunked", lora=bench._ALL, dora=True, change=SHALLOW),
    bench.Case("deepseek-ai/deepseek-coder-6.7b-base", seq_len=2048, loss="chunked", lora=bench._ALL, nf4=True, change={"num_hidden_layers": 8}),
    bench.Case("deepseek-ai/DeepSeek-V2-Lite", seq_len=2048, loss="chunked", lora=bench._LATENT, experts=True, change=SHALLOW),
    bench.Case("deepseek-ai/deepseek-llm-7b-base", seq_len=2048, loss="chunked", frozen=("embed_tokens", "layers.0-4"),
               change={"num_hidden_layers": 8}),
]  # fmt: skip


@pytest.mark.parametrize("case", FAST, ids=bench.Case.label)
def test_whole_size_models_on_fake_tensors(case):
    assert estimate(case.workload()).tensor_bytes == pytest.approx(bench.count_fake(case), rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_each_layer_saves_a_mask_of_its_own_where_documents_are_apart(name, precision):
    """Against what autograd really keeps in a forward pass, with documents in one block and without."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = dict(PRESETS[name])
    shape, dtype = shape_from_config(config, name), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config), dtype=dtype)
    rows, length = 2, 512
    ids = torch.zeros(rows, length, dtype=torch.long)
    positions = (torch.arange(length) % 200).expand(rows, length).contiguous()

    def saved(**more) -> int:
        sizes, held = {}, []

        def pack(tensor):
            held.append(tensor)  # so that no address is used twice
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(input_ids=ids, labels=ids, use_cache=False, **more)
        return sum(sizes.values())

    def told(isolated: bool) -> float:
        given = load(
            "single",
            shape,
            precision=precision,
            seq_len=length,
            micro_batch_size=rows,
            isolated=isolated,
            checkpointing=False,
            device="cpu",
        )
        return given.tokens * sum(op.saves * kind.count for kind in shape.kinds for op in layer_tape(given, kind))

    assert told(True) - told(False) == pytest.approx(saved(position_ids=positions) - saved(), rel=0.03)


def test_the_count_is_torchs():
    """`torch.distributed._tools.MemTracker` sees the same peak as the benchmark's own count."""
    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    class Torchs(MemTracker):
        @property
        def peak(self):
            return self.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    case = dataclasses.replace(FAST[0], change={"num_hidden_layers": 2}, checkpointing=False)
    assert bench.count_fake(case, Torchs()) == pytest.approx(bench.count_fake(case), rel=1e-4)


RANKS = [
    bench.Case("tiny-llama", "zero2", bench._MHA, ranks=2, micro_batch_size=4, seq_len=256),
    bench.Case("tiny-v3", "zero3", bench._MOE, ranks=3, micro_batch_size=4, seq_len=256),
    bench.Case("tiny-llama", "zero3_bf16", bench._MHA, ranks=2, micro_batch_size=1, seq_len=128),  # weights that are their own master
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", RANKS, ids=bench.Case.label)
def test_real_training_steps_on_cpu_ranks(case):
    (row,) = bench.measure([case])
    assert -0.02 <= row["error"] <= 0.06


@pytest.mark.slow
@pytest.mark.ranks
def test_the_whole_table():
    rows = bench.measure(bench.FAKE + bench.REAL)
    errors = [row["error"] for row in rows]
    assert len(rows) >= 24 and min(errors) >= -0.02 and max(errors) <= 0.06
    assert statistics.median(map(abs, errors)) <= 0.02


# ------------------------------------------------------------------------------------------- figures by hand


def test_model_states_by_hand():
    """16 B per parameter under ZeRO with fp32 states, and what DeepSpeed 0.19 adds to them; 8 with bf16 ones."""
    n = SEVEN.parameters
    zero3 = estimate(load("zero3", deepspeed={"zero_optimization": {"stage": 3, "sub_group_size": 100_000_000}}))
    assert zero3.moments["optimizer step"] > 16 * n / 3
    bf16 = estimate(load("zero3_bf16"))
    assert sum(bf16.gpu[k] for k in ("weights", "gradients", "optimizer states")) == pytest.approx(8 * n / 3, rel=1e-6)
    assert "master weights" not in bf16.gpu  # the weights themselves (`optimizers.share_master_weights`)


def test_host_memory_by_hand():
    """20 B per parameter with ZeRO-2 and accumulation, 18 with ZeRO-3, 20 with the weights there too; half with bf16."""
    n = SEVEN.parameters

    def states(strategy: str) -> float:
        host = estimate(load(strategy)).host
        return sum(v for k, v in host.items() if k not in ("processes", "pinned-memory rounding", "copy buffers"))

    assert states("zero2_offload") == pytest.approx(18 * n, rel=1e-6)  # and 2 B of copy buffers
    assert states("zero3_offload") == pytest.approx(18 * n, rel=1e-6)
    assert states("zero3_offload_all") == pytest.approx(20 * n, rel=1e-6)
    assert states("zero3_offload_bf16") == pytest.approx(10 * n, rel=1e-6)


def test_loading_is_whole_on_every_rank_but_under_zero3():
    assert estimate(load("zero2")).host["loading the weights"] == 3 * 2 * SEVEN.parameters
    assert estimate(load("zero3")).host["loading the weights"] == 2 * SEVEN.parameters


def test_the_naive_loss_is_twelve_bytes_a_logit():
    naive, chunked = (estimate(load("zero3", seq_len=4096, loss=name)) for name in ("naive", "chunked"))
    assert naive.gpu["logits and loss"] == 12 * 4096 * 102_400
    assert chunked.moments["loss, forward"] < naive.moments["loss, backward"] - 3 * GIB


def test_adapters():
    attention = Adapter(16, ("q_proj", "v_proj"))
    assert adapter_parameters(SEVEN, attention) == 30 * 2 * 16 * (4096 + 4096)
    latent = Adapter(8, ("kv_a_proj_with_mqa",))
    assert adapter_parameters(LITE, latent) == 27 * 8 * (2048 + 576)
    full, lora, qlora = (
        estimate(load("ddp", adapter=a)) for a in (None, attention, dataclasses.replace(attention, quantized=True))
    )
    assert qlora.gpu["weights"] < 0.45 * lora.gpu["weights"] < full.gpu["weights"] / 4
    assert lora.gpu["optimizer states"] < 0.01 * full.gpu["optimizer states"]


def test_disk_by_hand():
    n = SEVEN.parameters
    assert checkpoint_bytes(load("zero3")) == 14 * n and checkpoint_bytes(load("zero2")) == 16 * n
    assert checkpoint_bytes(load("zero3_bf16")) == 8 * n and export_bytes(load("zero3")) == 2 * n
    assert estimate(load("zero3"), checkpoints=3).disk_bytes == 3 * 14 * n + 2 * n


def test_every_component_is_counted_once():
    for name in STRATEGIES:
        memory = estimate(load(name, world_size=2))
        assert memory.tensor_bytes == pytest.approx(
            sum(v for k, v in memory.gpu.items() if k not in ("CUDA context and NCCL", "allocator slack")), abs=100
        )
        assert min(memory.gpu.values()) >= 0 and memory.moment in memory.moments


def test_tensor_and_sequence_parallel_by_hand():
    """Matrices in two halves, embedding and head whole; or weights as zero3 and half the tokens."""
    halves = SEVEN.part(2)
    assert halves.parameters - halves.embedding_parameters == pytest.approx(
        (SEVEN.parameters - SEVEN.embedding_parameters) / 2, rel=1e-4
    )
    experts = sum(k.count * math.prod(s) for k in LITE.kinds for n, s in k.weights.items() if n in EXPERTS)  # AutoTP leaves them whole
    assert LITE.part(2).parameters - experts < 0.7 * (LITE.parameters - experts)
    tensor = estimate(load("tensor", world_size=2, grad_accum_steps=1))
    assert tensor.gpu["optimizer states"] == 8 * halves.parameters
    whole, parts = (estimate(load(name, world_size=2, seq_len=4096)) for name in ("zero3", "sequence"))
    assert parts.gpu["optimizer states"] == whole.gpu["optimizer states"] and parts.gpu_bytes < whole.gpu_bytes


# ---------------------------------------------------------------------------------------------------- laws

SHAPES = [SEVEN, LITE] + [shape_from_config(PRESETS[p]) for p in PRESETS] + [
    shape_from_config(c) for c in {id(c): c for c in PUBLISHED.values()}.values()
]  # fmt: skip
workloads = st.builds(
    Workload,
    shape=st.sampled_from(SHAPES),
    strategy=st.sampled_from([s for s in STRATEGIES.values() if not (s.staged or s.shared)]),
    world_size=st.integers(1, 8),
    micro_batch_size=st.integers(1, 16),
    seq_len=st.integers(16, 8192),
    grad_accum_steps=st.integers(1, 8),
    precision=st.sampled_from(["bf16", "fp16", "fp32"]),
    checkpointing=st.booleans(),
    loss=st.sampled_from(["naive", "chunked", "liger"]),
    checkpoint_every=st.integers(1, 5),
    offload_activations=st.booleans(),
    tiled_mlp=st.sampled_from([1, 4]),
    adapter=st.sampled_from([None, Adapter(16, ("q_proj", "o_proj"))]),
)
law = settings(max_examples=60, deadline=None)


@law
@given(workloads)
def test_longer_sequences_and_larger_batches_never_need_less(load):
    memory = estimate(load)
    assert estimate(dataclasses.replace(load, seq_len=load.seq_len + 64)).gpu_bytes >= memory.gpu_bytes
    assert estimate(dataclasses.replace(load, micro_batch_size=load.micro_batch_size + 1)).gpu_bytes >= memory.gpu_bytes


@law
@given(workloads)
def test_checkpointing_never_needs_more(load):
    """But for the input of one layer that is kept and computed again."""
    with_, without = (estimate(dataclasses.replace(load, checkpointing=c)).gpu_bytes for c in (True, False))
    assert with_ <= without + 2 * 4 * load.shape.hidden_size * load.tokens


@law
@given(workloads)
def test_more_offload_never_needs_more_on_the_card(load):
    def on_card(name: str) -> int:
        return estimate(dataclasses.replace(load, strategy=STRATEGIES[name])).gpu_bytes

    # Its buffers for the largest gradient and its fp64 norm are what offload adds; a model smaller than those gains nothing.
    largest = max(
        [load.shape.vocab_size * load.shape.hidden_size]
        + [max(map(_numel, k.weights.values())) for k in load.shape.kinds]
    )
    added = 1.04 * 12 * largest
    assert on_card("zero2_offload") <= on_card("zero2") + added
    assert on_card("zero3_offload") <= on_card("zero3") + added
    assert on_card("zero3_offload_all") <= on_card("zero3_offload")


def _numel(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


@law
@given(workloads)
def test_more_cards_never_hold_more_states_each(load):
    if load.strategy.stage >= 1 and load.world_size > 1:
        fewer = dataclasses.replace(load, world_size=load.world_size - 1)
        states = ("master weights", "optimizer states")
        assert sum(estimate(load).gpu.get(k, 0) for k in states) <= sum(estimate(fewer).gpu.get(k, 0) for k in states)


@law
@given(workloads)
def test_bf16_states_never_need_more(load):
    if load.precision == "bf16":
        for name in ("zero3", "zero2_offload", "zero3_offload"):
            exact, rounded = (
                estimate(dataclasses.replace(load, strategy=STRATEGIES[n])) for n in (name, f"{name}_bf16")
            )
            assert rounded.gpu_bytes <= exact.gpu_bytes and rounded.host_bytes <= exact.host_bytes


@law
@given(workloads)
def test_every_op_counts_something_real(load):
    for kind in load.shape.kinds:
        tape = layer_tape(load, kind)
        assert all(op.saves >= 0 and op.work > 0 for op in tape)
        made = [name for op in tape for name in op.weights]
        assert sorted(made) == sorted(kind.weights)  # every parameter's gradient appears once


@law
@given(workloads)
def test_no_layer_that_is_left_out_is_fuller(load):
    """`_telling_layers` spares most layers; none of those may hold the fullest moment."""
    step = _Step(load)
    every = [(i, kind, tape) for i, (kind, tape) in enumerate((k, t) for k, t in step.tapes for _ in range(k.count))]
    told = max(sum(parts.values()) for _, parts in step.layers())
    step._telling_layers = lambda: every
    assert max(sum(parts.values()) for _, parts in step.layers()) <= told * 1.0005
