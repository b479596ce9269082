"""One recipe under every strategy: what is run, what is planned, and what is said of what can be neither."""

from __future__ import annotations

import dataclasses
import json

import pytest
from conftest import cli

from deepseek_ft import ConfigError, benchmark, load_config, plan_run
from deepseek_ft import run as run_module
from deepseek_ft.errors import RunError
from deepseek_ft.hardware import described, probe
from deepseek_ft.report import RunResult
from deepseek_ft.strategies import STRATEGIES

CARDS = ("--gpu", "rtx4090", "--host-ram-gib", "256", "--disk-gib", "2000", "--cores", "16")


def three_cards(config):
    return described(probe(config.output_dir), gpu="rtx4090", gpus=3, host_ram_gib=256, disk_gib=2000, cores=16)


def test_the_planned_table_is_the_plan():
    config = load_config("deepseek-llm-7b/wikitext103_full", ["train.precision=bf16"])
    hardware = three_cards(config)
    table = benchmark.predict(config, hardware, list(STRATEGIES))
    assert not table.measured and [row.strategy for row in table.rows] == list(STRATEGIES)
    for row in table.rows:
        if row.planned is None:
            assert row.reason
            continue
        asked = dataclasses.replace(config, strategy=row.strategy)
        if row.strategy not in ("single", "layer_split"):  # whose batch is one process's
            planned = plan_run(asked, hardware, can_build_ops=True, force=True).chosen
            assert (planned.memory.gpu_bytes, planned.timing.tokens_per_second) == (
                row.planned.memory.gpu_bytes, row.planned.timing.tokens_per_second)  # fmt: skip
        assert row.global_batch_size == config.train.micro_batch_size * config.train.grad_accum_steps * 3
    single = table.rows[0]
    assert (single.ranks, single.grad_accum_steps) == (1, 3 * config.train.grad_accum_steps)
    best = next(row for row in table.rows if row.strategy == "pipeline_bf16")
    alone = single.planned.timing.tokens_per_second
    assert best.efficiency(alone, planned=True) == pytest.approx(best.planned.timing.tokens_per_second / 3 / alone)
    text = table.markdown()
    assert "nothing was run" in text and "of one that is large enough" in text and "measured" not in text
    assert "32 heads do not divide by 3 ranks" in text


def test_planned_rows_that_do_not_fit_stay_with_the_reason():
    config = load_config("deepseek-llm-7b/wikitext103_full", ["train.precision=bf16", "train.micro_batch_size=1"])
    rows = {row.strategy: row for row in benchmark.predict(config, three_cards(config), ["ddp", "zero3_offload", "zeropp"]).rows}
    assert rows["ddp"].reason.startswith("card ") and rows["ddp"].reason.endswith("of 23.5 GiB")
    assert rows["zero3_offload"].reason is None
    assert "quantises pieces of a multiple of 8 elements" in rows["zeropp"].reason


def test_without_a_gpu_a_tiny_model_of_the_same_kind_stands_in():
    for recipe, preset in (("deepseek-llm-7b/wikitext103_full", "preset:tiny-llama"), ("deepseek-v2-lite/chat_lora", "preset:tiny-v2"),
                           ("r1-distill-qwen-7b/chat_lora", "preset:tiny-qwen2")):  # fmt: skip
        config, note = benchmark.in_miniature(load_config(recipe))
        assert config.model.path == preset and preset in note and config.train.precision == "fp32" and config.data.seq_len == 128
    config = load_config("quickstart")
    assert benchmark.in_miniature(config) == (config, None)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A bench whose runs are told what they measured: strategy -> tokens a second, or an error."""

    def measured(speeds: dict, repeats=3):
        order, given = [], {name: list(values) for name, values in speeds.items()}

        def rehearse(config, run_dir, log_file):
            order.append(config.strategy)
            speed = given[config.strategy].pop(0)
            if isinstance(speed, Exception):
                raise speed
            rows = [{"step": i, "tokens": 600 * i, "step_seconds": (9.0 if i < 3 else 600 / speed), "loss": 5.0 - i / 10} for i in range(1, 6)]
            found = {"peak_memory_bytes": [2**30, 2**29], "host_peak_memory_bytes": [2**30, 2**30], "first_loss": 4.9, "last_loss": 4.5}
            return RunResult(run_dir, found, rows)

        monkeypatch.setattr(run_module, "rehearse", rehearse)
        table, folder = benchmark.bench(load_config("quickstart"), list(speeds), str(tmp_path / "bench"), steps=3, warmup_steps=2,
                                        repeats=repeats)  # fmt: skip
        return table, folder, order

    return measured


def test_medians_of_interleaved_runs_without_the_warm_up(measured):
    table, folder, order = measured({"single": [100, 300, 200], "ddp": [450, 300, 240]})
    assert order == ["single", "ddp"] * 3
    single, ddp = table.rows
    assert single.median("tokens_per_second") == pytest.approx(200) and ddp.median("tokens_per_second") == pytest.approx(300)
    assert ddp.ranks == 3 and ddp.efficiency(200) == pytest.approx(0.5) and ddp.off_by(single) == 0
    assert ddp.median("host_bytes") == 2**31 and ddp.median("memory_bytes") == 2**30
    saved = json.loads((folder / "table.json").read_text())
    assert saved["kind"] == "measured" and saved["rows"][1]["efficiency"] == pytest.approx(0.5)
    assert (folder / "tokens_per_second.png").stat().st_size > 5000
    assert "| ddp | 24 = 8 x 1 x 3 | 300 | 240 - 450 |" in (folder / "table.md").read_text()


def test_what_fails_is_a_row_and_the_others_go_on(measured):
    table, folder, order = measured({"single": [100, 100], "ddp": [RunError("rank 1 was killed")], "zero2": [90, 90]}, repeats=2)
    assert order == ["single", "ddp", "zero2", "single", "zero2"]
    assert table.rows[1].reason == "rank 1 was killed (ddp-1.log)" and len(table.rows[2].runs) == 2
    assert "rank 1 was killed" in (folder / "table.md").read_text()


def test_a_table_is_never_written_over_another(measured):
    _, first, _ = measured({"single": [100]}, repeats=1)
    _, second, _ = measured({"single": [100]}, repeats=1)
    assert first != second and second.name == "bench-2"


def test_bad_words_end_at_once(tmp_path):
    with pytest.raises(ConfigError, match="zero4 is none; known: single"):
        benchmark.chosen_strategies("single,zero4")
    for words, says in ((["--strategies", "zero4"], "zero4 is none"), (["--gpu", "rtx4090"], "add --predict"), (["--steps", "0"], "at least 1")):
        done = cli("bench", *words, cwd=tmp_path)
        assert done.returncode == 2 and says in done.stdout and "Traceback" not in done.stdout, done.stdout


def test_predict_prints_a_table_and_writes_nothing(tmp_path):
    done = cli("bench", "deepseek-v2-lite/chat_lora", "--predict", *CARDS, "--strategies", "ddp,pipeline", cwd=tmp_path)
    assert done.returncode == 0 and "| pipeline |" in done.stdout and not list(tmp_path.iterdir())
    found = cli("bench", "deepseek-v2-lite/chat_lora", "--predict", *CARDS, "--json", cwd=tmp_path).stdout
    assert json.loads(found)["kind"] == "planned"


def test_a_planned_table_is_kept_where_it_is_said(tmp_path):
    (tmp_path / "taken").write_text("a file")
    done = cli("bench", "--predict", *CARDS, "--output", "tables", cwd=tmp_path)
    assert done.returncode == 0 and {p.name for p in (tmp_path / "tables").iterdir()} == {"table.md", "table.json", "tokens_per_second.png"}
    assert "nothing was run" in (tmp_path / "tables/table.md").read_text()
    wrong = cli("bench", "--predict", *CARDS, "--output", "taken/deeper", cwd=tmp_path)
    assert wrong.returncode == 2 and "--output: taken/deeper cannot be made" in wrong.stdout and "Traceback" not in wrong.stdout


@pytest.mark.ranks
def test_strategies_that_run_learn_the_same_and_one_that_cannot_says_why(tmp_path):
    done = cli("bench", "--strategies", "single,zero2,pipeline,layer_split,zero3_bf16", "--repeats", "1", "--steps", "3", "--warmup", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    folder = tmp_path / "runs/bench-quickstart"
    table = json.loads((folder / "table.json").read_text())
    rows = {row["strategy"]: row for row in table["rows"]}
    assert all(len(rows[name]["runs"]) == 1 and rows[name]["off_by"] < 1e-5 for name in ("single", "zero2", "pipeline", "layer_split"))
    assert rows["pipeline"]["runs"][0]["tokens_per_second"] > 0 and "bf16 only" in rows["zero3_bf16"]["reason"]
    assert not list(folder.rglob("*.safetensors"))  # figures, no models
    assert "training: 4 steps" in (folder / "zero2-1.log").read_text()
