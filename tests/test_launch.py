from __future__ import annotations

import os
import socket
import sys

import pytest

from deepseek_ft import ConfigError, PlanError, RunError, launch, load_config, plan_run
from deepseek_ft.hardware import Gpu, Hardware

CPU = Hardware(gpus=(), cores=6, host_memory_bytes=8 << 30)
THREE_4090 = Hardware(tuple(Gpu(str(i), "NVIDIA GeForce RTX 4090", 24 << 30) for i in (2, 0, 1)), 32, 128 << 30)


def planned(hardware=CPU, **more):
    config = load_config("quickstart", more)
    return config, plan_run(config, hardware, can_build_ops=True)


def test_cpu_ranks_get_their_share_of_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    environment, _ = launch.child_environment(*planned(), 3)
    assert (environment["OMP_NUM_THREADS"], environment["DS_ACCELERATOR"], environment["GLOO_SOCKET_IFNAME"]) == (
        "2",
        "cpu",
        "lo",
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch.child_environment(*planned(), 3)[0]["OMP_NUM_THREADS"] == "5"


def test_text_is_tokenised_on_all_cores():
    assert launch.child_environment(*planned(), 1)[0]["TOKENIZERS_PARALLELISM"] == "true"


def test_no_peer_to_peer_is_told_to_the_ranks(monkeypatch):
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    environment, notes = launch.child_environment(*planned(THREE_4090), 3)
    assert environment["NCCL_P2P_DISABLE"] == environment["NCCL_IB_DISABLE"] == "1" and any(
        "peer-to-peer" in n for n in notes
    )
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    environment, notes = launch.child_environment(*planned(THREE_4090), 3)
    assert environment["NCCL_P2P_DISABLE"] == "0" and not notes
    assert "NCCL_P2P_DISABLE" not in os.environ or os.environ["NCCL_P2P_DISABLE"] == "0"


def test_the_cards_that_are_used_are_named():
    environment, notes = launch.child_environment(*planned(THREE_4090, ranks=2), 2)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,0" and any("2 of 3 visible GPUs used: 2, 0" in n for n in notes)


def test_leftovers_that_would_override_the_recipe_do_not_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WORLD_SIZE", "2")  # a notebook user's attempt at several cards
    environment, notes = launch.child_environment(*planned(), 3)
    assert "ACCELERATE_USE_CPU" not in environment and "WORLD_SIZE" not in environment
    assert any("ACCELERATE_USE_CPU" in n for n in notes)
    assert launch.launched_ranks() is None


def as_rank(monkeypatch, port=29_500, **more):
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_in_a_launched_rank_they_are_refused(monkeypatch):
    as_rank(monkeypatch)
    assert launch.launched_ranks() == 3
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ConfigError, match="unset ACCELERATE_USE_CPU"):
        launch.adopt_rank_environment(*planned())


def test_a_taken_port_is_named_with_its_holder(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))  # whatever is filled in goes with the test
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pytest.raises(PlanError, match=rf"port {port} is taken by .*{os.getpid()}.*--master_port={port + 1}"):
            launch.adopt_rank_environment(*planned())
    launch.adopt_rank_environment(*planned())


def test_when_the_hub_is_asked(tmp_path):
    def needs(recipe="quickstart", **more):
        return launch._needs_hub(load_config(recipe, more))

    assert not needs() and not needs(**{"model.path": str(tmp_path)})
    assert needs("deepseek-llm-7b/wikitext103_full")
    assert needs("deepseek-llm-7b/wikitext103_full", **{"model.path": str(tmp_path)})
    assert not needs("deepseek-llm-7b/wikitext103_full", **{"model.path": str(tmp_path), "data.path": "x"})


def test_an_unreachable_hub_is_known_in_seconds(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    config = load_config("deepseek-llm-7b/wikitext103_full", ["train.precision=bf16"])
    environment, notes = launch.child_environment(config, plan_run(config, THREE_4090, can_build_ops=True), 1)
    assert environment["HF_HUB_OFFLINE"] == "1" and any("does not answer" in n for n in notes)


def test_a_childs_error_is_raised_as_the_parents_own():
    code = "from deepseek_ft import DataError, launch; launch.report_error(DataError('no such file: x')); raise SystemExit(2)"
    with pytest.raises(Exception, match="no such file: x") as caught:
        launch._run([sys.executable, "-c", code], dict(os.environ), "prepare")
    assert type(caught.value).__name__ == "DataError"


@pytest.mark.parametrize(
    ("code", "said"), [("raise SystemExit(3)", "exit code 3"), ("import os; os.kill(os.getpid(), 9)", "SIGKILL")]
)
def test_a_death_is_a_run_error(code, said):
    with pytest.raises(RunError, match=said):
        launch._run([sys.executable, "-c", code], dict(os.environ), "training")


def test_hostfiles(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# two machines\nworker-1 slots=3\n\nworker-2 slots=2  # the small one\n")
    assert launch.read_hostfile(str(file)) == (5, False)
    file.write_text("localhost slots=3\n")
    assert launch.read_hostfile(str(file)) == (3, True)
    for text, said in (("worker-1 3\n", ":1"), ("", "no slots")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            launch.read_hostfile(str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        launch.read_hostfile(str(tmp_path / "none"))
