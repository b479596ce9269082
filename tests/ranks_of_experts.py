"""Mixtures of experts under plain DeepSpeed and ZeRO-3, on three ranks whose tokens go to experts of their own.

`python ranks_of_experts.py leaf|bare|eager|grouped_mm|batched_mm` is one rank; tests/test_experts.py starts them. The first two
are a toy whose experts are modules in a list, as in the remote code of V2 and V3, gathered as a whole or not; the others
are transformers' own V3 with that implementation of its fused experts.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from types import SimpleNamespace

import torch
from torch import nn

EXPERTS, WIDTH, STEPS = 6, 8, 5


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        self.used: set[int] = set()

    def forward(self, x):
        score, index = self.gate(x).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(x)
        for i in index.unique().tolist():  # only those that some token chose
            self.used.add(i)
            out[index == i] = self.experts[i](x[index == i])
        return x + out * score[..., None]


class Layered(nn.Module):
    """Its first layer is dense, as DeepSeek's are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Listed(), Listed()])
        self.config = SimpleNamespace(n_routed_experts=EXPERTS)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Fused(nn.Module):
    """transformers' V3, with a loss like the toy's."""

    def __init__(self, implementation: str):
        super().__init__()
        from transformers import AutoConfig, AutoModel

        from deepseek_ft.shapes import PRESETS

        config = AutoConfig.for_model(**PRESETS["tiny-v3"] | {"n_routed_experts": 16, "num_hidden_layers": 3, "vocab_size": 64})
        self.model = AutoModel.from_config(config, experts_implementation=implementation)
        self.config = config
        self.layers = [layer.mlp for layer in self.model.layers]
        for mlp in self.layers[1:]:
            mlp.used = set()
            mlp.gate.register_forward_hook(lambda gate, args, out, used=mlp.used: used.update(out[2].unique().tolist()))

    def forward(self, x):
        kind = (x.mean(dim=1) @ KINDS[:, 0].t()).argmax(dim=1)
        ids = (20 * kind + 1)[:, None].expand(-1, 8)  # a token of its own for each kind of row, repeated
        return self.model(input_ids=ids, use_cache=False).last_hidden_state[..., :5]


KINDS = torch.randn(3, 1, WIDTH, generator=torch.Generator().manual_seed(99)) * 4


def made(how: str) -> nn.Module:
    torch.manual_seed(0)
    return Layered() if how in ("leaf", "bare") else Fused(how)


def rows(step: int) -> torch.Tensor:
    """One row for each of three ranks, (3, 4, h): the tokens of a row are alike, those of two rows are not."""
    source = torch.Generator().manual_seed(step)
    return KINDS + 0.1 * torch.randn(3, 4, WIDTH, generator=source)


def curve(backward_and_step, model, rank: int, ranks: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = model(rows(step)[rank::ranks]).square().mean()
        backward_and_step(loss)
        losses.append(loss.detach())
    return losses


def alone(how: str) -> list[float]:
    """By plain PyTorch."""
    model = made(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def backward_and_step(loss):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return [float(x) for x in curve(backward_and_step, model, 0, 1)]


def main() -> None:
    import deepspeed
    import torch.distributed as dist

    from deepseek_ft.experts import check_sharded, keep_whole

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    patience = datetime.timedelta(seconds=20 if sys.argv[1] == "bare" else 600)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, timeout=patience)
    model = made(sys.argv[1])
    if sys.argv[1] != "bare":
        assert bool(keep_whole(model)) == (sys.argv[1] == "leaf")
        check_sharded(model)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # else so small a weight is never cut up
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False,
              "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), config=config)

    def backward_and_step(loss):
        engine.backward(loss)
        engine.step()

    losses = torch.stack(curve(backward_and_step, engine, rank, ranks))
    dist.all_reduce(losses)
    used = [sorted(layer.used) for layer in model.layers[1:]]
    print("RANK " + json.dumps({"losses": (losses / ranks).tolist(), "used": used}), flush=True)
    dist.barrier()
    dist.destroy_process_group()  # gloo's threads, alive at Python's end, abort it now and then


if __name__ == "__main__":
    main()
