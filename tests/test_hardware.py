from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from deepseek_ft import hardware


@pytest.fixture
def three_cards(monkeypatch, tmp_path):
    """NVML as it answers on three 4090s; this machine has no card."""
    uuids = ["GPU-aaa1", "GPU-bbb2", "GPU-ccc3"]
    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda i: "NVIDIA GeForce RTX 4090",
        nvmlDeviceGetUUID=lambda i: uuids[i], nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=24 << 30),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(hardware.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return fake


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, "0 1 2"),
        ("", ""),
        ("-1", ""),
        ("2", "2"),
        ("2,0", "2 0"),
        ("GPU-bbb", "1"),
        ("0,7,1", "0"),
        (" 1 , 2 ", "1 2"),
    ],
)
def test_visible_cards_are_cudas(three_cards, monkeypatch, visible, expected):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert " ".join(g.index for g in hardware.probe().gpus) == expected


def test_a_broken_driver_is_no_gpu(three_cards, monkeypatch):
    def broken():
        raise RuntimeError("Driver/library version mismatch")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    three_cards.nvmlInit = broken
    assert hardware.probe().gpus == () and hardware.probe().device == "cpu"


def test_4090s_have_no_peer_to_peer(three_cards, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = hardware.probe()
    assert machine.needs_no_p2p and "3 x NVIDIA GeForce RTX 4090 [0, 1, 2], 24.0 GiB each" in machine.describe()


def test_this_machine():
    machine = hardware.probe()
    assert machine.cores >= 1 and machine.host_memory_bytes > 1 << 30
