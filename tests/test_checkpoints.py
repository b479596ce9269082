from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from deepseek_ft import CheckpointError, ConfigError, PlanError, load_config
from deepseek_ft.checkpoints import (
    as_begun,
    check_offload_dir,
    choose_run_dir,
    hold,
    incomplete,
    is_trained,
    newest_complete,
    offload_folder,
    offloaded_states,
    saved_ranks,
    size_bytes,
    write_json,
)


def checkpoint(run_dir, step: int, ranks: int = 3):
    folder = run_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file({"w": torch.zeros(100), "v": torch.ones(3)}, folder / "model.safetensors")
    states = folder / f"global_step{step}"
    states.mkdir()
    (folder / "latest").write_text(states.name)
    for rank in range(ranks):
        (states / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x")
    return folder


def damage_cut(c):
    file = c / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_empty(c):
    for path in sorted(c.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGES = {
    "no state": lambda c: (c / "trainer_state.json").unlink(),
    "half a state": lambda c: (c / "trainer_state.json").write_text('{"global'),
    "empty folder": damage_empty,
    "cut weights": damage_cut,
    "longer weights": lambda c: open(c / "model.safetensors", "ab").write(b"junk"),
    "empty weights": lambda c: (c / "model.safetensors").write_bytes(b""),
    "no weights": lambda c: (c / "model.safetensors").unlink(),
    "empty state file": lambda c: next(c.glob("global_step*/*")).write_bytes(b""),
    "one rank missing": lambda c: next(c.glob("global_step*/*rank_1*")).unlink(),
    "last rank missing": lambda c: next(c.glob("global_step*/*rank_2*")).unlink(),
    "no latest": lambda c: (c / "latest").unlink(),
    "binary latest": lambda c: (c / "latest").write_bytes(b"\xff\x00"),
    "state of another step": lambda c: (c / "trainer_state.json").write_text('{"global_step": 3}'),
    "header of nulls": lambda c: (c / "model.safetensors").write_bytes(
        (10).to_bytes(8, "little") + b'{"a":null}' + b"x"
    ),
    "shard missing": lambda c: (c / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    ),
    "no states": lambda c: [p.unlink() for p in c.glob("global_step*/*")],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_passed_over(tmp_path, damage):
    """Casebook CKP-3 and neighbours: whatever a crash leaves, resume goes to the newest one that is whole."""
    good, bad = checkpoint(tmp_path, 10), checkpoint(tmp_path, 20)
    write_json(tmp_path / "run.json", {"status": "running", "plan": {"world_size": 3, "deepspeed": {}}})
    assert incomplete(bad) is None
    DAMAGES[damage](bad)
    assert incomplete(bad, ranks=3)
    found, skipped = newest_complete(tmp_path)
    assert found == good and "checkpoint-20" in skipped[0]


def test_without_deepspeed_the_optimizer_must_be_there(tmp_path):
    plain = checkpoint(tmp_path, 10)
    for path in [*plain.glob("global_step*/*"), plain / "latest"]:
        path.unlink()
    (plain / "global_step10").rmdir()
    assert "optimizer.pt" in incomplete(plain)
    (plain / "optimizer.pt").write_bytes(b"x")
    assert "scheduler.pt" in incomplete(plain)
    (plain / "scheduler.pt").write_bytes(b"x")
    assert incomplete(plain) is None and saved_ranks(plain) is None


def test_unusable_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    for name in ("file/x", "/proc/1/x/y", "/"):
        with pytest.raises(CheckpointError, match="output_dir"):
            choose_run_dir(name, False, False)
    assert choose_run_dir(".", False, False)[0] == tmp_path.with_name(tmp_path.name + "-2")


def test_newest_is_by_number(tmp_path):
    checkpoint(tmp_path, 9)
    checkpoint(tmp_path, 100)
    assert newest_complete(tmp_path)[0].name == "checkpoint-100"
    assert saved_ranks(tmp_path / "checkpoint-100") == 3


def finish(run_dir, status="finished"):
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "run.json", {"status": status})


def test_a_new_run_never_goes_where_one_is(tmp_path):
    base = tmp_path / "runs" / "x"
    assert choose_run_dir(str(base), False, False) == (base, None, [])
    finish(base)
    assert choose_run_dir(str(base), False, False)[0].name == "x-2"
    finish(tmp_path / "runs" / "x-2", "running")  # died before its first checkpoint: nothing to continue
    folder, checkpoint_, notes = choose_run_dir(str(base), False, False)
    assert folder.name == "x-3" and checkpoint_ is None and "taken" in notes[0]
    (tmp_path / "runs" / "x-3").mkdir()  # an empty folder is free
    assert choose_run_dir(str(base), False, False)[0].name == "x-3"


def test_an_unfinished_run_asks(tmp_path):
    base = tmp_path / "x"
    finish(base, "running")
    checkpoint(base, 10)
    with pytest.raises(CheckpointError, match="--resume.*--new"):
        choose_run_dir(str(base), False, False)
    assert choose_run_dir(str(base), False, True)[0].name == "x-2"
    folder, found, notes = choose_run_dir(str(base), True, False)
    assert folder == base and found.name == "checkpoint-10" and "resuming" in notes[-1]


def test_a_folder_is_held_while_its_run_goes(tmp_path):
    base = tmp_path / "runs" / "x"
    with hold(base):
        assert choose_run_dir(str(base), False, False)[0].name == "x-2"
        assert choose_run_dir(str(base), False, False, launched=True)[0] == base  # the ranks of the run that holds it
        with pytest.raises(CheckpointError, match="still going"), hold(base):
            pass
        assert base.is_dir()
    assert not (tmp_path / "runs").exists()  # nothing began, nothing is left
    with hold(base):
        finish(base)
    assert (base / "run.json").is_file() and not (base / ".lock").exists()


def test_a_trained_run_without_its_check_is_taken_up(tmp_path):
    base = tmp_path / "x"
    finish(base, "trained")
    (base / "model").mkdir()
    with pytest.raises(CheckpointError, match="was not checked"):
        choose_run_dir(str(base), False, False)
    assert is_trained(base) and choose_run_dir(str(base), True, False)[:2] == (base, None)
    finish(base, "running")  # a model folder of which nobody wrote that it is whole
    assert not is_trained(base)


def test_each_runs_offloaded_states_have_a_folder_of_their_own(tmp_path):
    config = load_config("quickstart", [f"offload_dir={tmp_path / 'disk'}", "strategy=zero3_nvme"])
    one, two = (offload_folder(config, tmp_path / name) for name in ("a/run", "b/run"))
    assert one != two and one.parent == two.parent == tmp_path / "disk"
    assert offload_folder(load_config("quickstart"), tmp_path / "run") == tmp_path / "run/offloaded"


def test_offloaded_states_go_however_a_run_ends(tmp_path):
    config = load_config("quickstart", [f"offload_dir={tmp_path / 'disk'}"])
    folder = offload_folder(config, tmp_path / "run")
    for used in (True, False):
        folder.mkdir(parents=True)
        with pytest.raises(KeyboardInterrupt), offloaded_states(config, tmp_path / "run", used):
            raise KeyboardInterrupt
        assert folder.exists() != used


def test_a_disk_that_has_no_room_or_cannot_be_written_is_said_before_the_run(tmp_path):
    config = load_config("quickstart", [f"offload_dir={tmp_path / 'disk/deeper'}"])
    check_offload_dir(config, 10)
    with pytest.raises(PlanError, match=r"offload_dir: zero3_nvme needs 931322574615.5 GiB in .*deeper, and .* are free"):
        check_offload_dir(config, 10**21)
    (tmp_path / "disk").write_text("a file")
    with pytest.raises(ConfigError, match="is a file"):
        check_offload_dir(config, 10)


def test_resume_and_new_exclude_each_other(tmp_path):
    with pytest.raises(CheckpointError, match="exclude"):
        choose_run_dir(str(tmp_path / "x"), True, True)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match="there is no"):
        choose_run_dir(str(tmp_path / "x"), True, False)
    finish(tmp_path / "x")
    with pytest.raises(CheckpointError, match="is finished"):
        choose_run_dir(str(tmp_path / "x"), True, False)
    finish(tmp_path / "y", "running")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        choose_run_dir(str(tmp_path / "y"), True, False)
    DAMAGES["no state"](checkpoint(tmp_path / "y", 5))
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        choose_run_dir(str(tmp_path / "y"), True, False)
    (tmp_path / "z").write_text("a file")
    with pytest.raises(CheckpointError, match="is a file"):
        choose_run_dir(str(tmp_path / "z"), False, False)


def test_auto_is_resumed_as_it_was_decided(tmp_path):
    """Free disk and measured constants change between two starts; the strategy of a run does not."""
    config = load_config("quickstart", ["strategy=auto"])
    assert as_begun(tmp_path, config) == config
    (tmp_path / "run.json").write_text(json.dumps({"plan": {"strategy": "zero2"}}))
    assert as_begun(tmp_path, config).strategy == "zero2"
    named = load_config("quickstart", ["strategy=zero3"])
    assert as_begun(tmp_path, named) == named
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "weights").write_bytes(b"x" * 1000)
    assert size_bytes(tmp_path / "checkpoint-3") == 1000
