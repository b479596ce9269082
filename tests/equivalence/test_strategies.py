"""One recipe, one curve: strategies that differ in layout only give the same losses and gradient norms.

From the same weights, in fp32, with the same global batch of 6 blocks, over 8 steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from conftest import train

pytestmark = pytest.mark.ranks
TOLERANCE = 1e-4  # relative; fp32 sums in another order


@pytest.fixture(scope="module")
def curve(tiny_recipe, tmp_path_factory):
    """(step, loss, gradient norm) of a run, and its run.json."""
    done: dict[tuple, tuple] = {}

    def run(*words: str):
        if words not in done:
            folder = tmp_path_factory.mktemp("run")
            result = train(tiny_recipe, *words, cwd=folder)
            from deepseek_ft.report import read_metrics

            rows = [m for m in read_metrics(result["folder"] / "metrics.jsonl") if "loss" in m]
            done[words] = ([m["loss"] for m in rows], [m["grad_norm"] for m in rows], result)
        return done[words]

    return run


SINGLE = ("strategy=single", "train.micro_batch_size=6")


@pytest.mark.parametrize(
    ("words", "engine", "stage", "ranks"),
    [(("strategy=single", "train.micro_batch_size=1"), None, None, 1),
     (("strategy=ddp",), "DistributedDataParallel", None, 3),
     (("strategy=zero2",), "DeepSpeedEngine", 2, 3),
     (("strategy=zero3",), "DeepSpeedEngine", 3, 3),
     pytest.param(("strategy=zero3", "train.micro_batch_size=1", "ranks=2"), "DeepSpeedEngine", 3, 2, marks=pytest.mark.slow),
     (("strategy=zero3", "train.loss=chunked"), "DeepSpeedEngine", 3, 3),
     pytest.param(("strategy=ddp", "train.loss=chunked"), "DistributedDataParallel", None, 3, marks=pytest.mark.slow),
     pytest.param(("strategy=zero2", "train.loss=chunked", "train.micro_batch_size=1"), "DeepSpeedEngine", 2, 3, marks=pytest.mark.slow)],
    ids=["accumulated", "ddp", "zero2", "zero3", "zero3-two-ranks-accumulated", "zero3-chunked-loss", "ddp-chunked-loss",
         "zero2-chunked-loss-accumulated"],
)  # fmt: skip
def test_same_curve_as_one_process(curve, words, engine, stage, ranks):
    losses, norms, reference = curve(*SINGLE)
    found_losses, found_norms, run = curve(*words)
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.2
    assert found_losses == pytest.approx(losses, rel=TOLERANCE)
    assert found_norms == pytest.approx(norms, rel=1e-3)
    assert run["after"]["loss"] == pytest.approx(reference["after"]["loss"], rel=TOLERANCE)
    assert run["before"]["loss"] == pytest.approx(reference["before"]["loss"], rel=TOLERANCE)
    assert run["tokens"] == reference["tokens"] and run["global_batch_size"] == 6
    facts = run["engine_facts"]
    assert engine is None or facts["engine"] == engine
    assert (facts["zero_stage"], facts["world_size"]) == (stage, ranks)
    assert facts.get("engine_world_size", ranks) == ranks


@pytest.mark.parametrize(
    "strategy",
    [
        "zero3_offload",
        *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero1", "zero2_offload", "zero3_offload_all")),
    ],
)
def test_same_curve_with_deepspeeds_cpu_adam(curve, strategy):
    """With a weight decay that would show if it were not decoupled."""
    losses, norms, _ = curve(*SINGLE, "optim.weight_decay=0.5")
    found_losses, found_norms, run = curve(f"strategy={strategy}", "optim.weight_decay=0.5")
    assert run["engine_facts"]["optimizer"] == ("AdamW" if strategy == "zero1" else "DeepSpeedCPUAdam")
    assert found_losses == pytest.approx(losses, rel=TOLERANCE)
    assert found_norms == pytest.approx(norms, rel=1e-3)
