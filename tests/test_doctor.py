from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT, clean_environment, cli, run

from deepseek_ft import doctor, hardware
from deepseek_ft.doctor import _Card, _Driver, _Seen
from deepseek_ft.hardware import GIB, Gpu

NO_HUB = "http://127.0.0.1:9"


def environment(cache, *before: str, **more: str) -> dict[str, str]:
    path = os.pathsep.join([*before, str(ROOT)])
    return clean_environment(DEEPSEEK_FT_CACHE=str(cache), HF_ENDPOINT=NO_HUB, PYTHONPATH=path, **more)


def only(findings) -> doctor.Finding:
    (finding,) = findings
    return finding


def card(index="0", name="NVIDIA GeForce RTX 4090", capability=(8, 9), **more) -> _Card:
    return _Card(Gpu(index, name, 24 * GIB, compute_capability=capability), **more)


TORCH = {"version": "2.13.0", "cuda": "13.0", "available": True, "why": None, "cards": ["a", "b"],
         "archs": ["sm_80", "sm_86", "sm_90"], "nccl": "2.27.3"}  # fmt: skip


def seen(*cards: _Card, torch=TORCH, version="580.10", cuda=(13, 0), parts=None, **more) -> _Seen:
    """What the checks look at on a machine with these cards."""
    gpus = tuple(c.gpu for c in cards)
    return _Seen(_Driver(bool(cards), version, cuda, cards, **more), gpus, {"torch": torch} | (parts or {}))


# ------------------------------------------------------------------------------------------------ the whole of it


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    cache = tmp_path_factory.mktemp("doctor")
    done = cli("doctor", "--json", cwd=cache, env=environment(cache))
    assert done.returncode == 0, done.stdout
    return SimpleNamespace(cache=cache, **json.loads(done.stdout))


def test_every_line_is_there(examined):
    names = [finding["name"] for finding in examined.findings]
    expected = ["Python", "deepseek_ft", "packages", "tested set", "GPUs", "torch", "nvcc", "compiler", "build locks",
                "shared memory", "CPU", "host memory", "memory speed", "CPU Adam", "pinned memory", "disk", "disk speed",
                "caches", "limits", "port", "hub", "environment", "measured"]  # fmt: skip
    assert [name for name in expected if name not in names] == []
    assert len(names) == len(set(names))
    assert {finding["state"] for finding in examined.findings} <= {"ok", "warn", "fail"}
    assert not [f for f in examined.findings if "could not be checked" in f["says"]]


def test_what_was_measured_is_found_again(examined, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_FT_CACHE", str(examined.cache))
    busy = any("busy" in f["says"] for f in examined.findings if f["name"] == "CPU")  # then nothing is kept
    assert hardware.read_measured(hardware.probe().gpus) == ({} if busy else examined.constants)
    kept = examined.constants
    for name in ("dram_bytes_per_second", "disk_write_bytes_per_second", "cpu_adam_core_seconds_per_parameter",
                 "fp16_scan_core_seconds_per_parameter"):  # fmt: skip
        assert kept[name] > 0
    assert 1e8 < kept["dram_bytes_per_second"] < 1e13
    assert 1e-12 < kept["cpu_adam_core_seconds_per_parameter"] < 1e-6


def test_nothing_is_left_in_the_folder(examined):
    assert {path.name for path in examined.cache.iterdir()} <= {"machine.json"}


@pytest.mark.parametrize("illness", ["raise ImportError('undefined symbol: cudaFoo')", "raise OSError('libcudart.so.13')",
                                     "import os; os.abort()"])  # fmt: skip
def test_a_broken_torch_is_a_line(tmp_path, illness):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(illness)
    done = cli("doctor", "--quick", cwd=tmp_path, env=environment(tmp_path, str(tmp_path)))
    assert done.returncode == 1 and "Traceback" not in done.stdout
    line = only(line for line in done.stdout.splitlines() if line.startswith("fail"))
    reason = "SIGABRT" if "abort" in illness else illness.split("'")[1]
    assert "torch" in line and reason in line and "--force-reinstall torch==" in done.stdout
    assert not (tmp_path / "machine.json").exists(), "nothing was measured"


def test_what_a_broken_check_raises_is_its_line(monkeypatch):
    def broken(seen):
        raise RuntimeError("boom\nand more")
        yield

    for name in doctor._CHECKS:
        monkeypatch.setitem(doctor._CHECKS, name, broken)
    monkeypatch.setattr(doctor, "_ask", lambda parts, seconds: {"torch": TORCH})
    findings = doctor.examine(quick=True)
    assert [(f.name, f.state, f.says) for f in findings] == [
        (name, "warn", "could not be checked: RuntimeError: boom") for name in doctor._CHECKS
    ]


def test_a_check_that_hangs_is_left_behind():
    def slow(seen):
        yield doctor.Finding("first", "ok", "quick")
        time.sleep(5)

    first, second = doctor._guarded("slow", slow, _Seen(), seconds=0.05)
    assert first.name == "first" and "no answer within" in second.says and second.state == "warn"


def test_the_table():
    findings = [
        doctor.Finding("disk", "ok", "word " * 40),
        doctor.Finding("longer name", "fail", "broken", "mend --it"),
    ]
    plain, coloured = doctor.describe(findings), doctor.describe(findings, colour=True)
    assert "\033[" not in plain and "\033[31mfail" in coloured
    lines = plain.splitlines()
    assert all(len(line) <= 118 for line in lines)
    assert (
        lines[0].index("word") == lines[1].index("word") == lines[2].index("broken") == lines[3].index("-> mend --it")
    )
    assert lines[-1] == "1 ok, 0 warn, 1 fail"


def test_nothing_is_remembered_from_a_busy_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSEEK_FT_CACHE", str(tmp_path))
    measured = doctor.Finding("memory speed", "ok", "", measured={"dram_bytes_per_second": 1e10})
    busy = doctor.Finding("CPU", "warn", "2 cores, 90 % busy with other work: too slow")
    assert doctor.remember([busy, measured]).state == "warn" and not list(tmp_path.iterdir())
    assert doctor.remember([measured]).state == "ok" and hardware.read_measured(hardware.probe().gpus) == {"dram_bytes_per_second": 1e10}


def test_remember_keeps_what_was_not_measured_now(monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPSEEK_FT_CACHE", str(tmp_path))
    first = doctor.Finding("a", "ok", "", measured={"disk_write_bytes_per_second": 1e9, "dram_bytes_per_second": 1e10})
    assert doctor.remember([first]).state == "ok"
    doctor.remember([doctor.Finding("a", "ok", "", measured={"dram_bytes_per_second": 2e10})])
    kept = hardware.read_measured(hardware.probe().gpus)
    assert kept == {"disk_write_bytes_per_second": 1e9, "dram_bytes_per_second": 2e10}
    monkeypatch.setenv("DEEPSEEK_FT_CACHE", "/proc/nowhere")
    assert doctor.remember([first]).state == "warn"
    assert "nothing" in doctor.remember([]).says


# ---------------------------------------------------------------------------------------------- Python, packages


@pytest.mark.parametrize(("version", "word"), [("2.1.0", "torch 2.1.0, needed >=2.7"), (None, "torch missing")])
def test_a_package_out_of_range_fails_with_the_command(monkeypatch, version, word):
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch>=2.7", "numpy>=2", 'pytest>=99; extra == "test"'])
    monkeypatch.setattr(doctor, "_installed", {"torch": version, "numpy": "2.4.6"}.get)
    finding = only(doctor._packages(_Seen()))
    assert finding.state == "fail" and word in finding.says and "'torch>=2.7'" in finding.cure
    assert "numpy" not in finding.says and "pytest" not in finding.says


def test_versions_beside_the_tested_set_are_listed(monkeypatch, tmp_path):
    (tmp_path / "constraints.txt").write_text("# tested\ntorch==2.13.0\nnumpy==2.4.6  # too\nruff==1.0\n")
    monkeypatch.setattr(doctor, "_CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(doctor, "_installed", {"torch": "2.13.0+cpu", "numpy": "2.5.0"}.get)
    finding = only(doctor._tested_set(_Seen()))
    assert finding.state == "warn" and "numpy 2.5.0 (tested: 2.4.6)" in finding.says
    assert "torch" not in finding.says and "ruff" not in finding.says
    monkeypatch.setattr(doctor, "_CONSTRAINTS", tmp_path / "absent")
    assert list(doctor._tested_set(_Seen())) == []


def test_a_second_copy_on_the_path_is_said(monkeypatch, tmp_path):
    (tmp_path / "deepseek_ft").mkdir()
    (tmp_path / "deepseek_ft" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    _, finding = doctor._python(_Seen())
    assert finding.state == "warn" and str(tmp_path) in finding.says


# ------------------------------------------------------------------------------------------------ cards, driver


@pytest.fixture
def nvml(monkeypatch):
    """NVML on two cards, the second in an x4 slot and used by this very process."""
    fake = SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetName=lambda i: "NVIDIA GeForce RTX 4090",
        nvmlDeviceGetUUID=lambda i: f"GPU-{i}", nvmlSystemGetDriverVersion=lambda: "550.54.14",
        nvmlSystemGetCudaDriverVersion_v2=lambda: 12040, nvmlDeviceGetCudaComputeCapability=lambda i: (8, 9),
        nvmlDeviceGetMemoryInfo=lambda i: SimpleNamespace(total=24 * GIB, used=(1 + 8 * i) * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda i: [SimpleNamespace(pid=1, usedGpuMemory=5 << 20)] * i,
        nvmlDeviceGetCurrPcieLinkGeneration=lambda i: 1, nvmlDeviceGetCurrPcieLinkWidth=lambda i: 4 if i else 16,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda i: 4, nvmlDeviceGetMaxPcieLinkWidth=lambda i: 16,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(doctor, "_driver_present", lambda: True)
    return fake


def test_cards_and_who_uses_them(nvml):
    driver = doctor._read_driver_guarded()
    assert driver.version == "550.54.14" and driver.cuda == (12, 4) and len(driver.cards) == 2
    gpus = tuple(c.gpu for c in driver.cards)
    machine, idle, used = doctor._gpus(_Seen(driver, gpus))
    assert (
        machine.state == "ok" and "2 x NVIDIA GeForce RTX 4090, driver 550.54.14, for CUDA up to 12.4" in machine.says
    )
    assert idle.state == "ok" and "1.0 GiB of 24.0 GiB used, compute capability 8.9" in idle.says
    assert used.state == "warn" and "(1, 5 MiB)" in used.says and used.cure.startswith("ps -fp 1")
    wide, narrow = doctor._links(_Seen(driver, gpus))
    assert wide.state == "ok" and narrow.state == "warn" and "gen 1 x4, could be gen 4 x16" in narrow.says
    hidden = list(doctor._gpus(_Seen(driver, gpus[:1])))[0]
    assert "1 more hidden by CUDA_VISIBLE_DEVICES" in hidden.says


@pytest.mark.parametrize(
    ("words", "cure"),
    [("Driver/library version mismatch", "sudo reboot"), ("Driver Not Loaded", "modprobe nvidia"),
     ("NVML Shared Library Not Found", "--gpus all"), ("GPU is lost", "nvidia-smi")],
)  # fmt: skip
def test_a_broken_driver_is_a_line(nvml, words, cure):
    def broken():
        raise RuntimeError(words)

    nvml.nvmlInit = broken
    finding = only(doctor._gpus(_Seen(doctor._read_driver_guarded())))
    assert finding.state == "fail" and words in finding.says and cure in finding.cure


def test_no_card_is_no_failure(monkeypatch):
    monkeypatch.setattr(doctor, "_nvidia_hardware", lambda: False)
    assert only(doctor._gpus(_Seen())).state == "warn"
    monkeypatch.setattr(doctor, "_nvidia_hardware", lambda: True)
    assert only(doctor._gpus(_Seen())).state == "fail", "a card without a driver"


def test_a_card_without_bf16():
    finding = doctor._card(card(name="Tesla T4", capability=(7, 5)))
    assert finding.state == "warn" and "train.precision=fp16" in finding.cure


@pytest.mark.parametrize(
    ("machine", "state", "word"),
    [
        (seen(card()), "ok", "NCCL 2.27.3"),
        (seen(torch=TORCH | {"cuda": None, "version": "2.13.0+cpu"}), "ok", "for the CPU"),
        (seen(card(), torch=TORCH | {"cuda": None, "version": "2.13.0+cpu"}), "fail", "on a machine with GPUs"),
        (seen(card(), cuda=(12, 4)), "fail", "ends at CUDA 12.4"),
        (seen(card(), torch=TORCH | {"cuda": "12.8"}, cuda=(12, 4)), "ok", "CUDA 12.8"),
        (seen(card(), torch=TORCH | {"available": False, "why": "Error 803"}), "fail", "Error 803"),
        (seen(card(capability=(12, 0), name="RTX 5090")), "fail", "not built for RTX 5090"),
        (seen(card(), torch={"error": "ended by SIGILL"}), "fail", "ended by SIGILL"),
    ],
)
def test_torch_against_the_driver(machine, state, word):
    finding = only(doctor._torch(machine))
    assert finding.state == state and word in finding.says and bool(finding.cure) == (state == "fail")


def test_code_for_a_card():
    assert doctor._runs_on(["sm_80"], (8, 9)) and doctor._runs_on(["sm_50", "compute_90"], (12, 0))
    assert not doctor._runs_on(["sm_90"], (8, 9)) and not doctor._runs_on(["sm_80", "sm_90a"], (12, 0))


@pytest.mark.parametrize(("nvcc", "state"), [("13.0", "ok"), ("13.1", "ok"), ("12.4", "warn"), (None, "warn")])
def test_nvcc_against_torch(monkeypatch, nvcc, state):
    monkeypatch.setattr(doctor, "_nvcc_version", lambda: nvcc)
    assert only(doctor._nvcc(seen(card()))).state == state
    assert "not needed" in only(doctor._nvcc(seen())).says


def test_which_nvcc(monkeypatch, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor._nvcc_version() == "12.4"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
    assert doctor._nvcc_version() is None


# ------------------------------------------------------------------------------------------------------- builds


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = only(doctor._compiler(_Seen()))
    assert finding.state == "warn" and "a C++ compiler missing" in finding.says and "install g++" in finding.cure
    assert "shm_comm and cpu_adam cannot be built" in finding.says


def test_a_stale_lock_is_found_and_cleared_and_a_held_one_kept(monkeypatch, tmp_path):
    """Casebook JIT-2. The held one: a real process called ninja, at work in that folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    stale, held = tmp_path / "somebody_elses_op" / "lock", tmp_path / "cpu_adam" / "lock"
    for lock in (stale, held):
        lock.parent.mkdir()
        lock.touch()
        os.utime(lock, (time.time() - 600,) * 2)
    ninja = tmp_path / "ninja"
    ninja.write_text("#!/bin/sh\nread line\n")
    ninja.chmod(0o755)
    with subprocess.Popen([ninja], cwd=held.parent, stdin=subprocess.PIPE):
        finding = only(doctor._build_locks(_Seen()))
        assert finding.state == "warn" and finding.cure == "deepseek-ft doctor --clear-locks"
        assert str(stale) in finding.says and str(held) not in finding.says
        assert doctor.clear_locks() == [stale]
        assert not stale.exists() and held.exists()
        assert "is going on" in only(doctor._build_locks(_Seen())).says
    assert doctor.clear_locks() == [held]
    assert only(doctor._build_locks(_Seen())).says == "none"


# ------------------------------------------------------------------------------------------- between the cards


@pytest.fixture
def no_nccl_variables(monkeypatch):
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"):
        monkeypatch.delenv(name, raising=False)


OTHER = "NVIDIA RTX A6000"


@pytest.mark.parametrize(
    ("machine", "own", "state", "word"),
    [
        (seen(card(), card("1")), {}, "ok", "runs set"),
        (seen(card(), card("1")), {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}, "ok", "both variables are set"),
        (seen(card(), card("1")), {"NCCL_P2P_DISABLE": "0"}, "warn", "NCCL_P2P_DISABLE=0"),
        (seen(card(), card("1"), version="535.104.05"), {}, "ok", "before 550.40.07 (this is 535.104.05)"),
        (seen(card(), card("1", OTHER)), {}, "warn", "some of the cards"),
        (seen(card(name=OTHER), card("1", OTHER)), {}, "ok", "nothing to set"),
    ],
)
def test_cards_without_peer_to_peer(no_nccl_variables, monkeypatch, machine, own, state, word):
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    finding = only(doctor._nccl(machine))
    assert finding.state == state and word in finding.says


def test_one_card_has_nobody_to_talk_to():
    assert list(doctor._nccl(seen(card()))) == list(doctor._all_reduce(seen(card()))) == []


def test_copies_that_arrive_changed(no_nccl_variables):
    answer = {"pairs": 2, "access": [[0, 1]], "differ": [[0, 1]]}
    changed, *_ = doctor._peer_copies(seen(parts={"peer": answer}))
    assert changed.state == "fail" and "0 -> 1" in changed.says and "NCCL_P2P_DISABLE=1" in changed.cure
    same, *_ = doctor._peer_copies(seen(parts={"peer": answer | {"differ": []}}))
    assert same.state == "ok"
    untested, *_ = doctor._peer_copies(seen(parts={"peer": {"error": "no answer within 30 s"}}))
    assert untested.state == "warn" and "no answer" in untested.says


def test_iommu():
    assert doctor._iommu_translates("quiet intel_iommu=on".split())
    assert doctor._iommu_translates("amd_iommu=on quiet".split())
    assert not doctor._iommu_translates("intel_iommu=on iommu=pt".split())
    assert not doctor._iommu_translates("quiet iommu=pt".split())


def test_the_slowest_link_counts():
    pcie = {"to_card": [24e9, 6e9], "to_host": [25e9, 5.5e9], "pageable": 4e9}
    *_, finding = doctor._links(seen(card(), card("1"), parts={"pcie": pcie}))
    assert finding.measured == {"pcie_bytes_per_second": 5.5e9, "pageable_copy_bytes_per_second": 4e9}
    assert "1: 6.0 GB/s to the card, 5.5 GB/s back" in finding.says
    *_, finding = doctor._links(seen(card(), parts={"pcie": {"error": "OutOfMemoryError: CUDA out of memory"}}))
    assert finding.state == "warn" and not finding.measured


def test_all_reduce_in_ring_bytes(no_nccl_variables, monkeypatch):
    asked = []

    def ask(parts, seconds, defaults):
        asked.append(defaults)
        return {"all_reduce": {"ranks": 3, "bytes": 3 << 20, "seconds": 0.001}}

    monkeypatch.setattr(doctor, "_ask", ask)
    finding = only(doctor._all_reduce(seen(card(), card("1"), card("2"))))
    assert finding.measured["collective_bytes_per_second"] == pytest.approx((4 << 20) / 0.001)
    assert asked == [{"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}], "as a run would set them"
    monkeypatch.setattr(doctor, "_ask", lambda *_, **__: {"all_reduce": {"error": "no answer within 15 s"}})
    assert only(doctor._all_reduce(seen(card(), card("1")))).state == "fail"


# ------------------------------------------------------------------------------------------------- the child


def test_parts_that_were_not_answered():
    said = 'noise\n{"part": "torch", "version": "2"}\n{"part": "ad'
    answers = doctor._answers(["torch", "adam", "scan"], said, "ended by SIGILL", crashed=True)
    assert answers["torch"] == {"version": "2"} and answers["adam"] == {"error": "ended by SIGILL", "crashed": True}
    assert answers["scan"]["error"] == "torch did not come that far"
    broken = doctor._answers(["torch", "adam"], '{"part": "torch", "error": "ImportError"}', "exit code 0: ")
    assert broken["adam"]["error"] == "torch does not work"


def test_an_op_built_on_another_processor(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.ops, "built_library", lambda op: tmp_path / "cpu_adam" / "cpu_adam.so")
    finding = only(doctor._adam(seen(parts={"adam": {"error": "ended by SIGILL", "crashed": True}})))
    assert finding.state == "fail" and finding.cure.startswith(f"rm -r {tmp_path}/cpu_adam ")
    finding = only(doctor._adam(seen(parts={"adam": {"error": "no answer within 30 s", "crashed": False}})))
    assert finding.state == "warn" and finding.says == "not measured: no answer within 30 s"


@pytest.mark.parametrize(
    ("illness", "answer"),
    [("import time; time.sleep(60)", {"error": "no answer within 2 s", "crashed": False}),
     ("import os; os.abort()", {"error": "ended by SIGABRT", "crashed": True}),
     ("import sys; sys.exit('gone')", {"error": "SystemExit: gone"})],
)  # fmt: skip
def test_a_child_that_hangs_or_dies(tmp_path, monkeypatch, illness, answer):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(illness)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    assert doctor._ask(["torch"], seconds=2)["torch"] == answer


def test_adam_without_deepspeeds_op_and_an_all_reduce(tmp_path):
    """The real functions, on what this machine has: torch's own Adam, and gloo in place of NCCL."""
    code = """
from deepseek_ft import measure
if __name__ == "__main__":
    measure._ADAM_PARAMETERS = 1 << 20
    adam, ring = measure._adam_part(), measure._all_reduce_part(2, "gloo", 1 << 20)
    assert adam["which"].startswith("torch's fused AdamW") and adam["core_seconds"] > 0, adam
    assert ring["ranks"] == 2 and 0 < ring["seconds"] < 10, ring
"""
    (tmp_path / "script.py").write_text(code)
    env = environment(tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = run(sys.executable, "script.py", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout


# ---------------------------------------------------------------------------------------- the host and the world


def test_a_small_disk(monkeypatch, tmp_path):
    usage = SimpleNamespace(free=GIB)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    monkeypatch.chdir(tmp_path)
    disk, caches = doctor._disk(_Seen())
    assert disk.state == "fail" and "only 1.0 GiB free" in disk.says and caches.name == "caches"
    usage.free = 10 * GIB
    disk, caches = doctor._disk(_Seen(quick=True))
    assert disk.state == "warn" and "output_dir=" in disk.cure


def test_a_disk_that_cannot_be_written():
    finding = doctor._disk_speed(doctor.Path("/proc"))
    assert finding.state == "fail" and not finding.measured


@pytest.mark.parametrize(("total", "free", "cure"), [(GIB // 16, GIB // 16, "--shm-size=8g"), (8 * GIB, 0, "ls -lS")])
def test_little_shared_memory(monkeypatch, total, free, cure):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: (total, total - free, free))
    finding = only(doctor._shared_memory(_Seen()))
    assert finding.state == "warn" and cure in finding.cure


def test_a_containers_limit_is_named(monkeypatch):
    monkeypatch.setattr(hardware, "host_memory_bytes", lambda: 3 * GIB)
    memory = only(doctor._memory(_Seen(quick=True)))
    assert "this container's limit is 3.0 GiB" in memory.says


def test_a_busy_machine_is_said(monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 80.0)
    busy = only(doctor._cpu(_Seen()))
    assert busy.state == "warn" and "80 % busy" in busy.says
    assert only(doctor._cpu(_Seen(quick=True))).state == "ok", "nothing is measured then"


def test_limits(monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 2048))
    finding = only(doctor._limits(_Seen()))
    assert finding.state == "warn" and "ulimit -n 2048" in finding.cure and "ulimit -u" in finding.cure


def test_a_taken_port_names_its_process():
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        taken.listen()
        finding = only(doctor._port(_Seen(), port))
    assert finding.state == "warn" and f"(process {os.getpid()})" in finding.says
    assert f"--master_port={port + 1}" in finding.cure
    assert only(doctor._port(_Seen(), port)).state == "ok"


def test_the_hub(monkeypatch):
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        unreachable = only(doctor._hub(_Seen()))
        assert unreachable.state == "warn" and "hf-mirror.com" in unreachable.cure
        server.listen()
        reachable = only(doctor._hub(_Seen()))
        assert reachable.state == "ok" and "a token is set" in reachable.says and "secret" not in reachable.says
        monkeypatch.setenv("HF_ENDPOINT", "https://hub.invalid")
        monkeypatch.setenv("HTTPS_PROXY", address.removeprefix("http://"))
        proxied = only(doctor._hub(_Seen()))
        assert proxied.state == "ok" and "the proxy 127.0.0.1" in proxied.says
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline by choice" in only(doctor._hub(_Seen())).says


def test_variables_that_change_runs_in_silence(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ACCELERATE_"):
            monkeypatch.delenv(name)
    for name, value in {"ACCELERATE_USE_CPU": "true", "WORLD_SIZE": "3", "CUDA_LAUNCH_BLOCKING": "1",
                        "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    finding = only(doctor._environment(seen(card())))
    assert finding.state == "warn" and "ACCELERATE_USE_CPU=true" in finding.says
    unset = finding.cure.removeprefix("unset ").split()
    assert {"ACCELERATE_USE_CPU", "WORLD_SIZE", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"} <= {
        *unset
    }
    cpu = only(doctor._environment(_Seen()))
    assert "DS_ACCELERATOR" not in cpu.cure and "CUDA_VISIBLE_DEVICES" not in cpu.cure
