"""Loss and gradient norm do not know how the global batch is cut, whatever the loss and the strategy (casebook ACC-1, 2, 4)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conftest import newest_run, train
from test_trainer import tiny, trained

from deepseek_ft.losses import Head, use_smoothed_loss

CUTS = ((8, 1), (2, 4), (1, 8))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("loss", ["naive", "chunked"])
@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_every_loss_is_of_the_whole_batch(tmp_path, model_type, loss, smoothing):
    """Rows with 1 to 15 targets; a mean of means would be off by a fifth, and a loss that forgets the division eight-fold."""
    found = []
    for micro, accumulation in CUTS:
        model = tiny(model_type)
        if loss == "chunked":
            Head(model).use_for_training(smoothing)
        elif smoothing:
            use_smoothed_loss(model, smoothing)
        _, log = trained(tmp_path, micro, accumulation, model=model, **{"train.precision": "fp32"})
        found.append((log.history[0]["loss"], log.history[0]["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=2e-6) and found[2] == pytest.approx(found[0], rel=2e-6)


def test_smoothing_changes_the_loss_in_the_same_way_for_both_losses(tmp_path):
    found = {}
    for smoothing in (0.0, 0.1):
        for loss in ("naive", "chunked"):
            model = tiny()
            if loss == "chunked":
                Head(model).use_for_training(smoothing)
            elif smoothing:
                use_smoothed_loss(model, smoothing)
            _, log = trained(tmp_path, 2, 4, model=model, **{"train.precision": "fp32"})
            found[loss, smoothing] = (log.history[0]["loss"], log.history[0]["grad_norm"])
    for smoothing in (0.0, 0.1):
        assert found["naive", smoothing] == pytest.approx(found["chunked", smoothing], rel=2e-6)
    assert found["naive", 0.1][1] < 0.95 * found["naive", 0.0][1]  # a smoothed target pulls less


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Path:
    """Prompts of many lengths with answers of one to forty words, a row each."""
    source = random.Random(5)
    file = tmp_path_factory.mktemp("uneven") / "rows.jsonl"
    words = "def return value index list of the for in range sum import open read write close".split()
    with open(file, "w", encoding="utf-8") as out:
        for _ in range(400):
            row = {"prompt": " ".join(source.choices(words, k=source.randint(10, 14))),
                   "completion": " " + " ".join(source.choices(words, k=source.choice((1, 2, 18))))}  # fmt: skip
            out.write(json.dumps(row) + "\n")
    return file


STRATEGIES = [("zero2", 2), ("single", 1), ("ddp", 2), ("ddp", 3), ("zero2", 3), ("zero3", 2), ("zero3", 3)]


@pytest.mark.parametrize(
    "loss, smoothing", [("chunked", 0.1), ("naive", 0.1), ("naive", 0.0), ("chunked", 0.0)]
)
@pytest.mark.parametrize("strategy, ranks", STRATEGIES)
@pytest.mark.slow
def test_ranks_and_accumulation_cut_the_same_batch(tmp_path, tiny_recipe, uneven, strategy, ranks, loss, smoothing):
    """24 rows in one step; the logged loss is the step's, not the last micro-batch's."""
    found = []
    each = 24 // ranks
    for i, micro in enumerate((each, 2, 1)):
        (folder := tmp_path / str(i)).mkdir()
        train(tiny_recipe, "model.path=preset:tiny-llama", f"strategy={strategy}", f"ranks={ranks}", f"train.loss={loss}",
              f"train.label_smoothing={smoothing}", f"data.train=[{{source: jsonl, path: {uneven}, format: prompt_completion}}]",
              "data.eval=[]", "data.seq_len=48", f"train.micro_batch_size={micro}", "train.global_batch_size=24", "train.max_steps=2",
              "optim.warmup_steps=0", cwd=folder)  # fmt: skip
        rows = [json.loads(line) for line in (newest_run(folder)["folder"] / "metrics.jsonl").read_text().splitlines()]
        found.append([(row["loss"], row["grad_norm"], row["target_tokens"]) for row in rows])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert b == pytest.approx(a, rel=1e-5)
