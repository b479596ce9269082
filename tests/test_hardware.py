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


@pytest.mark.parametrize(
    ("name", "row"),
    [("NVIDIA GeForce RTX 4090", "GeForce RTX 4090"), ("4090", "GeForce RTX 4090"), ("rtx4090", "GeForce RTX 4090"),
     ("NVIDIA GeForce RTX 4090 D", "GeForce RTX 4090 D"), ("NVIDIA GeForce RTX 3090 Ti", "GeForce RTX 3090 Ti"), ("3090ti", "GeForce RTX 3090 Ti"),
     ("NVIDIA A100-SXM4-40GB", "A100 SXM4 40GB"), ("NVIDIA A100 80GB PCIe", "A100"), ("NVIDIA H100 80GB HBM3", "H100"),
     ("Tesla V100-SXM2-32GB", "V100 SXM2"), ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"), ("NVIDIA L4", "L4"),
     ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA L40", None), ("NVIDIA A10G-24Q", None), ("NVIDIA H100 NVL", None),
     ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA GeForce GTX 1080", None)],
)  # fmt: skip
def test_cards_are_found_in_the_table(name, row):
    model = hardware.gpu_model(name)
    assert (model and model.name) == row


def test_the_table_is_plausible():
    for model in hardware.GPUS.values():
        assert model.source and 8 <= model.memory_bytes / hardware.GIB <= 160
        assert 3 < model.tensor_flops / 1e12 < 1000 and model.fp32_flops < model.tensor_flops
        assert 100e9 < model.memory_bytes_per_second < 10e12
        assert hardware.Gpu("0", f"NVIDIA {model.name}", 1).has_bf16 == (model.compute_capability >= (8, 0))
    assert hardware.gpu_model("rtx4090").tensor_flops == 165.2e12


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA GeForce RTX 4090", True), ("NVIDIA RTX 4000 Ada Generation", False)])
def test_which_cards_have_no_peer_to_peer(name, expected):
    assert hardware.Gpu("0", name, 1).has_no_p2p == expected


def test_a_containers_limit_is_the_hosts_memory(monkeypatch):
    """Docker's --memory, which psutil does not see."""
    real = hardware.Path.read_text
    limit = {"text": str(3 << 30)}

    def read(self, *args, **kwargs):
        return limit["text"] if str(self) == "/sys/fs/cgroup/memory.max" else real(self, *args, **kwargs)

    monkeypatch.setattr(hardware.Path, "read_text", read)
    assert hardware.host_memory_bytes() == 3 << 30
    limit["text"] = "max\n"
    assert hardware.host_memory_bytes() > 3 << 30


def test_another_machine_is_described_by_flags(three_cards, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here = hardware.probe()
    other = hardware.described(here, gpus=2, host_ram_gib=64, cores=8, pcie=["x8"])
    assert len(other.gpus) == 2 and other.cores == 8 and other.host_memory_bytes == 64 << 30
    assert {g.pcie_bytes_per_second for g in other.gpus} == {12.5e9}
    assert hardware.described(here, gpus=0).device == "cpu"
    assert len(hardware.described(here, gpu="rtx3090").gpus) == 3


def test_measured_constants_belong_to_their_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSEEK_FT_CACHE", str(tmp_path))
    hardware.save_measured((), {"dram_bytes_per_second": 5e10})
    assert hardware.probe().measured == {"dram_bytes_per_second": 5e10}
    assert hardware.read_measured([hardware.Gpu("0", "NVIDIA GeForce RTX 4090", 1)]) == {}  # cards were added since
    card = hardware.described(hardware.probe(), gpu="rtx4090", constants={"cpu_adam_core_seconds_per_parameter": 1e-9})
    assert set(card.measured) == {"dram_bytes_per_second", "cpu_adam_core_seconds_per_parameter"}
    for broken in ("", "[]", '{"host": 1}', '{"constants": {"dram_bytes_per_second": "fast"}}'):
        hardware.measured_file().write_text(broken)
        assert hardware.read_measured(()) == {}
