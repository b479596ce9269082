from __future__ import annotations

import json

from deepseek_ft.report import plot_loss, read_metrics


def write(path, *rows, end=""):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + end)
    return path


def step(n, loss=1.0):
    return {"step": n, "loss": loss, "learning_rate": 0.1}


def held_out(n, loss=1.0):
    return {"step": n, "eval_loss": loss}


def test_a_resumed_run_replaces_what_it_trained_again(tmp_path):
    path = write(
        tmp_path / "m",
        held_out(0),
        step(1),
        step(2),
        held_out(2),
        step(3, 9.0),
        step(4, 9.0),
        step(3),
        held_out(3),
        step(4),
    )
    assert read_metrics(path) == [held_out(0), step(1), step(2), held_out(2), step(3), held_out(3), step(4)]
    assert read_metrics(write(tmp_path / "m", step(1), step(2, 9.0), step(2))) == [step(1), step(2)]


def test_a_cut_off_line_is_left_out(tmp_path):
    assert read_metrics(write(tmp_path / "m", step(1), end='{"step": 2, "lo')) == [step(1)]
    assert read_metrics(tmp_path / "none") == []


def test_the_plot_is_a_picture(tmp_path):
    path = plot_loss([held_out(0, 3.0), step(1, 2.5), step(2, 2.0), held_out(2, 2.2)], tmp_path / "loss.png", "title")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plot_loss([], tmp_path / "none.png", "title") is None and not (tmp_path / "none.png").exists()
