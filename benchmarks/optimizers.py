"""What rounding costs: one small model, trained on with each optimizer from the same weights, on real text.

    python benchmarks/optimizers.py path/to/wikitext-103 [--only NAME ...] [--seeds 3] [--steps 120]

A llama of about 5 M parameters is pretrained for some hundred steps and stored in bf16. From there each row trains with the
recipes' small learning rates: how much the held-out loss falls, and how many of the bf16 weights move. The forward pass is in
bf16, as under DeepSpeed. `fp32 master weights` is what zero1 to zero3 do; `bf16, nearest` is torch's AdamW on bf16 weights, and
`bf16, stochastic` is optim.name=adamw_bf16. All other rows keep fp32 master weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch

from deepseek_ft import load_config, optimizers
from deepseek_ft.run import cache_dir, load_data
from deepseek_ft.strategies import STRATEGIES

SHAPE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 4, "vocab_size": 4096, "tie_word_embeddings": False}  # fmt: skip
CENTRAL = ("fp32 master weights", "bf16, nearest", "bf16, stochastic")
ROWS = {"fp32 master weights": "adamw", "bf16, nearest": "adamw", "bf16, stochastic": "adamw_bf16"} | {
    name: name for name in ("adamw_8bit", "muon", "galore", "apollo", "adafactor")
}
BATCH, SEQ_LEN = 4, 128


def prepared(folder: str, steps: int):
    """(bf16 model, training blocks, held-out blocks)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = load_config({
        "name": "optimizers", "model": {"path": "preset:tiny-llama", "tokenizer": f"train:{SHAPE['vocab_size']}"},
        "data": {"path": folder, "seq_len": SEQ_LEN, "isolate": False,
                 "train": [{"source": "wikitext-103", "split": "validation"}],
                 "eval": [{"source": "wikitext-103", "split": "test"}]},
    })  # fmt: skip
    _, blocks = load_data(config, cache_dir(config))
    train, held_out = (torch.stack([torch.as_tensor(blocks[k][i]["input_ids"]).long() for i in range(n)])
                       for k, n in (("train", len(blocks["train"])), ("eval", 128)))  # fmt: skip
    file = cache_dir(config) / f"optimizers-{steps}.pt"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    if not file.is_file():
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        for step in range(steps):
            for group in adam.param_groups:
                group["lr"] = 1e-3 * min(1, step / 50) * max(0.1, 1 - step / steps)
            batch = train[torch.randint(len(train), (2 * BATCH,))]
            model(input_ids=batch, labels=batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
        torch.save(model.state_dict(), file)
    model.load_state_dict(torch.load(file))
    return model.to(torch.bfloat16), train, held_out


@torch.no_grad()
def loss_of(model, blocks) -> float:
    return statistics.fmean(model(input_ids=b, labels=b).loss.item() for b in blocks.split(16))


def train_on(start, name: str, train, held_out, lr: float, seed: int, steps: int) -> dict:
    """One run; the forward pass on bf16 weights, the update on those weights or on fp32 masters of them."""
    config = load_config({"name": "x", "model": {"path": "preset:tiny-llama"}, "data": {"train": [{"source": "code"}]},
                          "optim": {"name": ROWS[name], "lr": lr}})  # fmt: skip
    model = copy.deepcopy(start)
    masters = model if name.startswith("bf16") else copy.deepcopy(start).float()
    decayed = {n for n, p in masters.named_parameters() if p.dim() > 1}
    optimizer = build(ROWS[name], masters, decayed, config.optim)
    weights = list(zip(model.parameters(), masters.parameters(), strict=True))
    torch.manual_seed(seed)
    order = torch.randperm(len(train))
    first = [p.detach().clone() for p in model.parameters()]
    total, moved, began = sum(p.numel() for p in first), [], time.time()
    for step in range(steps):
        batch = train[order[step * BATCH % (len(train) - BATCH) :][:BATCH]]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = [p.detach().clone() for p in model.parameters()] if step % 10 == 0 else None
        for bf16, master in weights:
            if master is not bf16:
                master.grad, bf16.grad = bf16.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for bf16, master in weights:
                if master is not bf16:
                    bf16.copy_(master)
        if before is not None:
            moved.append(sum((p != q).sum().item() for p, q in zip(model.parameters(), before, strict=True)) / total)
    over_run = sum((p != q).sum().item() for p, q in zip(model.parameters(), first, strict=True)) / total
    return {"row": name, "lr": lr, "seed": seed, "steps": steps, "loss": loss_of(model, held_out),
            "moved_per_step": statistics.fmean(moved), "moved": over_run, "seconds": time.time() - began}  # fmt: skip


def build(name: str, model, decayed, optim):
    if name == "adamw":  # Trainer's own in a run, with these groups
        groups = [{"params": [p for n, p in model.named_parameters() if (n in decayed) == yes], "weight_decay": decay}
                  for yes, decay in ((True, optim.weight_decay), (False, 0.0))]  # fmt: skip
        return torch.optim.AdamW(groups, lr=optim.lr, betas=tuple(optim.betas), eps=optim.eps, fused=True)
    return optimizers.build(optimizers.OPTIMIZERS[name], model, decayed, optim, STRATEGIES["single"], "cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wikitext", help="folder with wiki.valid.tokens and wiki.test.tokens")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=3, help="for the three central rows; the others have one, and one learning rate")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--pretrain", type=int, default=400)
    parser.add_argument("--lr", type=float, nargs="*", default=[5e-5, 1e-5])
    parser.add_argument("--out", type=Path, default=Path("optimizers.jsonl"))
    arguments = parser.parse_args()
    start, train, held_out = prepared(arguments.wikitext, arguments.pretrain)
    print(f"{sum(p.numel() for p in start.parameters()):,} parameters, held-out loss before: {loss_of(start, held_out):.4f}")
    results: dict[tuple[str, float], list[dict]] = {}
    for seed in range(arguments.seeds):
        for lr in arguments.lr:
            for name in arguments.only:
                if name not in CENTRAL and (seed or lr != arguments.lr[0]):
                    continue
                result = train_on(start, name, train, held_out, lr, seed, arguments.steps)
                results.setdefault((name, lr), []).append(result)
                with open(arguments.out, "a", encoding="utf-8") as out:
                    out.write(json.dumps(result) + "\n")
                print(result, flush=True)
    print("\n| | lr | seeds | held-out loss | spread | moved per step | moved over the run |\n|---|---|---|---|---|---|---|")
    for (name, lr), rows in sorted(results.items(), key=lambda item: -item[0][1]):
        losses = [r["loss"] for r in rows]
        print(f"| {name} | {lr:g} | {len(rows)} | {statistics.fmean(losses):.4f} | {max(losses) - min(losses):.4f} | "
              f"{statistics.fmean(r['moved_per_step'] for r in rows):.1%} | {statistics.fmean(r['moved'] for r in rows):.1%} |")  # fmt: skip


if __name__ == "__main__":
    main()
