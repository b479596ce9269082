"""The memory model against torch's own count, case by case, beside the estimates of DeepSpeed and accelerate.

    python benchmarks/memory.py            every case: some ten minutes on two cores
    python benchmarks/memory.py --fast     the whole-size models only: a minute
    python benchmarks/memory.py --json     rows for a program

Two kinds of cases. Whole-size models run a forward and a backward pass on fake tensors (shapes without storage), so
that a 33 B model can be counted on a laptop. Small models train for real: three optimizer steps with Trainer and
DeepSpeed on CPU ranks, as `deepseek-ft train` would. In both, every storage is counted from the operation that makes
it to the moment it is freed, as `torch.distributed._tools.mem_tracker` does (a test holds the two counts equal). What
only a GPU has, the CUDA context and the allocator's slack, is left out on both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from deepseek_ft.memory import _offloaded, estimate  # noqa: E402
from deepseek_ft.shapes import EXPERTS, PRESETS, PUBLISHED, shape_from_config  # noqa: E402
from deepseek_ft.strategies import STRATEGIES, Strategy  # noqa: E402
from deepseek_ft.workload import Adapter, Workload, matches  # noqa: E402

# A step without an optimizer, all in one type: what fake tensors can run of any model.
BARE = Strategy("forward and backward", "", deepspeed=True, stage=0, master_bytes=0, moment_bytes=0)


@dataclass(frozen=True)
class Case:
    model: str
    strategy: str = "bare"
    change: dict = field(default_factory=dict)
    """Numbers of the model's config that differ."""
    ranks: int = 1
    micro_batch_size: int = 1
    seq_len: int = 1024
    accumulation: int = 1
    precision: str = "bf16"
    checkpointing: bool = True
    loss: str = "naive"
    checkpoint_every: int = 1
    tiled_mlp: int = 1
    lora: tuple[str, ...] = ()
    dora: bool = False
    experts: bool = False
    """Routed experts have adapters too."""
    nf4: bool = False
    """QLoRA: the base in 4 bits."""
    frozen: tuple[str, ...] = ()

    @property
    def config(self) -> dict:
        return dict((PUBLISHED | PRESETS)[self.model]) | self.change

    def workload(self, deepspeed: dict | None = None) -> Workload:
        return Workload(
            shape=shape_from_config(self.config),
            strategy=BARE if self.strategy == "bare" else STRATEGIES[self.strategy],
            world_size=self.ranks,
            micro_batch_size=self.micro_batch_size,
            seq_len=self.seq_len,
            grad_accum_steps=self.accumulation,
            precision=self.precision,
            checkpointing=self.checkpointing,
            loss=self.loss,
            checkpoint_every=self.checkpoint_every,
            tiled_mlp=self.tiled_mlp,
            adapter=Adapter(16, self.lora, self.nf4, self.dora, self.experts) if self.lora else None,
            frozen=self.frozen,
            # What fake tensors stand for is a card; on real CPU ranks torch's attention is the CPU's.
            device="cuda" if self.strategy == "bare" else "cpu",
            deepspeed=deepspeed,
        )

    def label(self) -> str:
        loss = f"{self.loss} loss"
        return (f"{self.model.removeprefix('deepseek-ai/')} | {self.strategy} x{self.ranks} | {self.micro_batch_size} x {self.seq_len} | "
                f"{self.precision}{' checkpointed' if self.checkpointing else ''}"
                f"{f' every {self.checkpoint_every}' if self.checkpoint_every > 1 else ''}{f', {self.tiled_mlp} tiles' if self.tiled_mlp > 1 else ''} | {loss}{self._method()}"
                f"{f' | accumulated {self.accumulation}' if self.accumulation > 1 else ''}")  # fmt: skip

    def _method(self) -> str:
        if not self.lora:
            return " | half frozen" if self.frozen else ""
        return f" | {'Q' if self.nf4 else ''}{'DoRA' if self.dora else 'LoRA'}{' on experts' if self.experts else ''}"


_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LATENT = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "vocab_size": 16384,
}
_GQA = _SMALL | {"num_key_value_heads": 2, "head_dim": 64}
_MHA = _SMALL | {"num_key_value_heads": 8}
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 8192,
}
_MOE = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 5,
    "vocab_size": 16384,
}

FAKE = [
    Case("deepseek-ai/deepseek-llm-7b-base", seq_len=2048),
    Case("deepseek-ai/deepseek-llm-7b-base", seq_len=4096, micro_batch_size=2, lora=_ALL),
    Case("deepseek-ai/deepseek-llm-7b-base", seq_len=1024, checkpointing=False),
    Case("deepseek-ai/deepseek-coder-1.3b-base", seq_len=4096, checkpointing=False, precision="fp32"),
    Case("deepseek-ai/deepseek-coder-33b-base", seq_len=2048, lora=("q_proj", "v_proj")),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", seq_len=4096),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", seq_len=2048, checkpointing=False, lora=_ALL),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", seq_len=2048, micro_batch_size=4),
    Case("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", seq_len=2048, micro_batch_size=2),
    Case("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", seq_len=8192, lora=_ALL),
    Case("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", seq_len=1024, checkpointing=False),
    Case("deepseek-ai/deepseek-llm-7b-base", seq_len=2048, micro_batch_size=8, loss="chunked"),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", seq_len=4096, micro_batch_size=2, loss="chunked", lora=_ALL),
    Case("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", seq_len=2048, micro_batch_size=16, loss="chunked"),
    Case("mini-v3", seq_len=2048, micro_batch_size=8, loss="chunked"),
    Case("deepseek-ai/deepseek-llm-7b-base", seq_len=2048, lora=_ALL, dora=True, loss="chunked"),
    Case("deepseek-ai/deepseek-coder-6.7b-base", seq_len=4096, lora=_ALL, nf4=True, loss="chunked"),
    Case("deepseek-ai/deepseek-coder-6.7b-base", seq_len=1024, lora=_ALL, nf4=True, loss="chunked", checkpointing=False),
    Case("deepseek-ai/deepseek-llm-7b-base", seq_len=2048, frozen=("layers.0-14", "embed_tokens"), loss="chunked"),
    Case("deepseek-ai/DeepSeek-V2-Lite", seq_len=2048, lora=_LATENT, experts=True, loss="chunked"),
    Case("deepseek-ai/DeepSeek-V2-Lite", seq_len=4096),
    Case("deepseek-ai/DeepSeek-V2-Lite", seq_len=1024, micro_batch_size=4, checkpointing=False),
    Case("deepseek-ai/DeepSeek-V2-Lite", seq_len=8192, micro_batch_size=2, change={"num_hidden_layers": 6}),
    Case("mini-v3", seq_len=2048, micro_batch_size=8),
    Case("mini-v3", seq_len=2048, micro_batch_size=4, checkpointing=False),
]
REAL = [
    Case("tiny-llama", "zero2", _MHA, ranks=2, micro_batch_size=4, seq_len=512, checkpointing=False),
    Case("tiny-llama", "zero2", _MHA, ranks=2, micro_batch_size=8, seq_len=512),
    Case("tiny-llama", "zero3", _MHA, ranks=3, micro_batch_size=4, seq_len=512, checkpointing=False),
    Case("tiny-llama", "zero3", _MHA, ranks=2, micro_batch_size=8, seq_len=512),
    Case("tiny-llama", "zero3", _MHA, ranks=2, micro_batch_size=2, seq_len=256, precision="fp32"),
    Case("tiny-llama", "zero3", _MHA | {"vocab_size": 65536}, ranks=2, micro_batch_size=8, seq_len=512, loss="chunked"),
    Case("tiny-llama", "zero2", _MHA | {"vocab_size": 65536}, ranks=2, micro_batch_size=8, seq_len=512, loss="chunked"),
    Case("tiny-qwen2", "zero2", _GQA, ranks=3, micro_batch_size=4, seq_len=256, accumulation=2),
    Case("tiny-qwen3", "zero3", _GQA, ranks=2, micro_batch_size=4, seq_len=512),
    Case("tiny-v2", "zero3", _MOE, ranks=2, micro_batch_size=4, seq_len=256),
    Case("tiny-v3", "zero2", _MOE, ranks=2, micro_batch_size=4, seq_len=256, checkpointing=False),
    Case("tiny-llama", "zero2", _WIDE, ranks=2, micro_batch_size=1, seq_len=128),
    Case("tiny-llama", "zero3", _WIDE, ranks=2, micro_batch_size=1, seq_len=128),
    Case("tiny-llama", "zero2_offload", _WIDE, ranks=2, micro_batch_size=1, seq_len=128),
    Case("tiny-llama", "zero3_offload", _WIDE, ranks=2, micro_batch_size=1, seq_len=128, accumulation=2),
    Case("tiny-llama", "zero3_bf16", _MHA, ranks=2, micro_batch_size=1, seq_len=128),
    Case("tiny-llama", "zero1", _MHA, ranks=2, micro_batch_size=4, seq_len=256),
    Case("tiny-llama", "ddp", _MHA, ranks=2, micro_batch_size=4, seq_len=256),
    Case("tiny-llama", "single", _MHA, ranks=1, micro_batch_size=8, seq_len=256, checkpointing=False),
]


# ------------------------------------------------------------------------------------------------ counting


def counter():
    """A dispatch mode whose `now` and `peak` are the bytes of all live storages."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Live(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.now = self.peak = 0
            self.seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

        def _add(self, tensor: torch.Tensor) -> None:
            storage = tensor.untyped_storage()
            if tensor.device.type == "meta" or storage in self.seen:
                return
            size = storage.nbytes()
            self.seen[storage] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, size)

        def _free(self, size: int) -> None:
            self.now -= size

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self._add(leaf)
            return out

    return Live()


@contextlib.contextmanager
def as_on_a_gpu():
    """Under fake tensors transformers builds masks that it leaves out in a real run; and latent attention's kernel
    on a GPU is the memory-efficient one, which takes values of another width than the keys."""
    import torch
    import transformers.masking_utils as masks

    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if q.shape[-1] == v.shape[-1]:
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, dropout_p, is_causal, scale=scale
        )[0]

    before = masks.is_tracing, masks.find_packed_sequence_indices
    masks.is_tracing = lambda *_: False
    masks.find_packed_sequence_indices = lambda *_, **__: None
    torch.nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        masks.is_tracing, masks.find_packed_sequence_indices = before
        torch.nn.functional.scaled_dot_product_attention = plain


def in_four_bits(model, dtype) -> None:
    """The layers that bitsandbytes would quantise, replaced by its own with weights of the right shapes and no content."""
    import bitsandbytes as bnb
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def state(numel: int, block: int, kind: str, codes: int, of, scale, inner=None, **more):
        return bnb.functional.QuantState(
            absmax=torch.empty(-(-numel // block), dtype=scale),
            blocksize=block,
            quant_type=kind,
            code=torch.empty(codes),
            dtype=of,
            state2=inner,
            **more,
        )

    for name, module in list(model.named_modules()):
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        numel, bias = module.weight.numel(), module.bias is not None
        inner = state(-(-numel // 64), 256, None, 256, torch.float32, torch.float32)
        packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8)
        with unset_fake_temporarily(), torch.device("meta"):  # its own class of parameter takes no fake tensor
            quantised = bnb.nn.Linear4bit(module.in_features, module.out_features, bias, dtype, True, "nf4")
        quantised.weight = torch.nn.Parameter(packed, requires_grad=False)
        quantised.weight.quant_state = quantised.quant_state = state(
            numel, 64, "nf4", 16, dtype, torch.uint8, inner, shape=module.weight.shape, offset=torch.empty(())
        )
        quantised.weight.quant_type, quantised.weight.compress_statistics = "nf4", True
        quantised.bias, quantised.support_avx512bf16_for_cpu = module.bias, False
        model.set_submodule(name, quantised)
    model.is_loaded_in_4bit = True  # for peft


def count_fake(case: Case, mode=None) -> int:
    """Peak bytes of one forward and backward pass of a whole-size model, on fake tensors."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from deepseek_ft.activations import recompute_layers, tile_feed_forward
    from deepseek_ft.adapters import _names_as_they_are
    from deepseek_ft.losses import Head

    config = {k: v for k, v in case.config.items() if k != "torch_dtype"}
    kind = config.pop("model_type")
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.precision]
    live = mode or counter()
    with as_on_a_gpu(), FakeTensorMode(allow_non_fake_inputs=True), live:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=dtype)
        model.config.use_cache = False
        if case.nf4:
            in_four_bits(model, dtype)
        for name, parameter in model.named_parameters():
            if any(matches(pattern, name) for pattern in case.frozen):
                parameter.requires_grad_(False)
        if case.lora:
            from peft import LoraConfig, get_peft_model

            move, torch.nn.Module.to = torch.nn.Module.to, lambda self, *_, **__: self  # fake weights cannot be moved
            torch.set_default_dtype(dtype)  # adapters in the base's type, as DeepSpeed casts them
            settings = LoraConfig(
                r=16,
                target_modules=list(case.lora),
                target_parameters=list(EXPERTS) if case.experts else None,
                use_dora=case.dora,
            )
            with _names_as_they_are():
                model = get_peft_model(model, settings, autocast_adapter_dtype=False)
            torch.nn.Module.to = move
            torch.set_default_dtype(torch.float32)
        model.train()
        if case.loss == "chunked":
            Head(model).use_for_training()
        if case.tiled_mlp > 1:
            tile_feed_forward(model, case.tiled_mlp)
        if case.checkpointing:
            recompute_layers(model, case.checkpoint_every)
        ids = torch.zeros(case.micro_batch_size, case.seq_len, dtype=torch.long)
        if case.nf4:  # which was a whole model before
            gc.collect()
            live.peak = live.now
        out = model(input_ids=ids, labels=ids, num_items_in_batch=torch.tensor(ids.numel()))
        loss = out.loss
        del out
        loss.backward()
        return live.peak


def count_real(case: Case) -> tuple[int, dict | None]:
    """Peak bytes of a rank in the third optimizer step, and the DeepSpeed config it ran with."""
    spec = json.dumps(dataclasses.asdict(case))
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false",
                                "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    if case.ranks == 1:
        launcher = [sys.executable]
    done = subprocess.run([*launcher, __file__, "--rank", spec], env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEAK ")]
    if done.returncode or not lines:
        raise SystemExit(f"{case.label()}: the ranks failed\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    answer = json.loads(lines[0][5:])
    return answer["peak"], answer["deepspeed"]


def rank(spec: str) -> None:
    """One rank of `count_real`: the library's own Trainer, on random tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, set_seed

    from deepseek_ft import load_config, plan_run
    from deepseek_ft.losses import Head
    from deepseek_ft.models import load_dtype
    from deepseek_ft.trainer import FineTuneTrainer, build_training_args

    case = Case(**json.loads(spec))
    ranks, steps = int(os.environ.get("WORLD_SIZE", 1)), 3
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case.config))
        config = load_config({
            "name": "memory", "model": {"path": folder, "gradient_checkpointing": case.checkpointing, "checkpoint_every": case.checkpoint_every,
                                        "tiled_mlp": case.tiled_mlp if case.tiled_mlp > 1 else None},
            "data": {"train": [{"source": "python-stdlib"}], "seq_len": case.seq_len}, "optim": {"name": "adamw", "schedule": "constant"},
            "train": {"max_steps": steps, "micro_batch_size": case.micro_batch_size, "grad_accum_steps": case.accumulation,
                      "precision": case.precision, "save_steps": None, "eval_steps": None},
            "strategy": case.strategy, "ranks": ranks,
        })  # fmt: skip
        plan = plan_run(
            config,
            launched_ranks=ranks,
            can_build_ops=True,
            **({"force": True} if "force" in plan_run.__kwdefaults__ else {}),
        )
        live = counter()
        with live:
            if plan.strategy.deepspeed:
                import deepspeed

                with contextlib.redirect_stdout(io.StringIO()):
                    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            args = build_training_args(config, plan, Path(folder, "run"), steps)
            set_seed(1)
            shape = case.config
            kind = shape.pop("model_type")
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **shape), dtype=load_dtype(config, plan)
            )
            model.config.use_cache = False
            if case.loss == "chunked":
                Head(model).use_for_training()
            tokens = torch.randint(
                0, shape["vocab_size"], (steps * case.accumulation * case.micro_batch_size * ranks, case.seq_len)
            )
            rows = [{"input_ids": row, "labels": row} for row in tokens]
            trainer = FineTuneTrainer(config=config, plan=plan, model=model, args=args, train_dataset=rows, eval_blocks=None,
                                      bytes_of_token=None, processing_class=None)  # fmt: skip

            class LastStep(TrainerCallback):
                def on_step_begin(self, args, state, control, **kwargs):
                    if state.global_step == steps - 1:  # DeepSpeed's prefetching works from its third pass on
                        gc.collect()
                        live.peak = live.now

            trainer.add_callback(LastStep())
            trainer.train()
            if plan.strategy.deepspeed:
                trainer.assert_planned()
            data = tokens.nbytes
    if int(os.environ.get("RANK", 0)) == 0:
        print("PEAK " + json.dumps({"peak": live.peak - data, "deepspeed": plan.deepspeed}), flush=True)
    if torch.distributed.is_initialized():  # ranks that leave while others still talk to them are aborted now and then
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------- the table


def deepspeeds_estimate(case: Case, parameters: int, largest_layer: int) -> int | None:
    """What DeepSpeed's own memory estimator says for a card, in bytes; None for what it does not cover."""
    if not case.strategy.startswith("zero") or case.strategy == "zero1":
        return None
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    if case.strategy.startswith("zero3"):
        _, gpu, _ = stage3.estimate_zero3_model_states_mem_needs(
            parameters, largest_layer, case.ranks, cpu_offload=False, cpu_offload_params=False
        )
    else:
        _, gpu = stage_1_and_2.estimate_zero2_model_states_mem_needs(parameters, case.ranks, cpu_offload=False)
    return int(gpu)


def accelerates_estimate(case: Case, parameters: int) -> int:
    """`accelerate estimate-memory`: the weights in their type times four, for training with Adam."""
    return 4 * parameters * (2 if case.precision != "fp32" else 4)


def measure(cases: list[Case]) -> list[dict]:
    rows = []
    for case in cases:
        measured, deepspeed = (count_fake(case), None) if case.strategy == "bare" else count_real(case)
        load = case.workload(deepspeed)
        if case.strategy != "bare":
            load = dataclasses.replace(load, fused_optimizer=FUSED_ON_CPU)
        memory, shape = estimate(load), load.shape
        # On CPU ranks what is offloaded lies beside what is not.
        ours = memory.tensor_bytes + sum(_offloaded(load).values())
        rows.append({
            "case": case.label(), "measured": measured, "ours": int(ours), "moment": memory.moment,
            "error": ours / measured - 1,
            "deepspeed": deepspeeds_estimate(case, shape.parameters, max(k.parameters for k in shape.kinds)),
            "accelerate": accelerates_estimate(case, shape.parameters),
        })  # fmt: skip
        print(f"{rows[-1]['error']:+7.2%}  {case.label()}  ({memory.moment})", file=sys.stderr, flush=True)
    return rows


FUSED_ON_CPU = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="only the whole-size models on fake tensors")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="only cases whose label contains this")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return rank(arguments.rank)
    cases = FAKE if arguments.fast else FAKE + REAL
    rows = measure([c for c in cases if not arguments.only or arguments.only in c.label()])
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    gib = 1024**3
    print("| case | measured GiB | ours | error | DeepSpeed | accelerate |\n|---|---|---|---|---|---|")
    for row in rows:
        other = [
            f"{row[k] / gib:.2f} ({row[k] / row['measured'] - 1:+.0%})" if row[k] else "-"
            for k in ("deepspeed", "accelerate")
        ]
        print(
            f"| {row['case'].replace(' | ', ', ')} | {row['measured'] / gib:.3f} | {row['ours'] / gib:.3f} | {row['error']:+.1%} | {' | '.join(other)} |"
        )
    errors = [abs(row["error"]) for row in rows]
    print(
        f"\n{len(rows)} cases: median error {statistics.median(errors):.2%}, worst {max(errors):.2%}, lowest {min(r['error'] for r in rows):+.2%}"
    )


if __name__ == "__main__":
    main()
