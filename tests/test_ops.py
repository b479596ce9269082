from __future__ import annotations

import os
import time

import pytest

from deepseek_ft import PlanError, ops


@pytest.fixture
def extensions(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    return folder


def test_built_means_for_these_versions(extensions):
    assert not ops.is_built("shm_comm")
    (extensions / "deepspeed_shm_comm.so").write_bytes(b"x")
    assert not ops.is_built("shm_comm")
    (extensions / "deepseek_ft.stamp").write_text(ops._versions())
    assert ops.is_built("shm_comm")
    (extensions / "deepseek_ft.stamp").write_text("torch 1.0 deepspeed 0.1")
    assert not ops.is_built("shm_comm")


def test_a_stale_lock_is_removed_and_a_fresh_one_kept(extensions):
    """Casebook JIT-2: a killed build leaves a lock on which every later run would wait for ever."""
    lock = extensions / "lock"
    lock.touch()
    assert ops.clear_stale_locks(["shm_comm"]) == [] and lock.exists()
    os.utime(lock, (time.time() - 600,) * 2)
    assert ops.clear_stale_locks(["shm_comm"]) == [lock] and not lock.exists()


def test_a_lock_that_a_build_holds_is_kept(extensions, monkeypatch):
    lock = extensions / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 600,) * 2)
    monkeypatch.setattr(ops, "_is_compiling", lambda folder: folder == extensions)
    assert ops.clear_stale_locks(["shm_comm"]) == [] and lock.exists()


def test_a_build_waits_for_a_compiler_that_outlived_its_parent(extensions, monkeypatch):
    """And then takes the lock, whose owner is dead, instead of waiting on it for ever."""
    lock = extensions / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 6,) * 2)
    left, built = [True, True, False], []
    monkeypatch.setattr(ops, "_is_compiling", lambda folder: left.pop(0) if left else False)
    monkeypatch.setattr(ops, "_build", built.append)
    monkeypatch.setattr(ops.time, "sleep", lambda seconds: None)
    ops.build(["shm_comm"])
    assert built == ["shm_comm"] and not lock.exists()


def test_a_folder_that_cannot_be_written_is_said(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/nowhere")
    with pytest.raises(PlanError, match="TORCH_EXTENSIONS_DIR"):
        ops.build(["shm_comm"])


def test_no_compiler(monkeypatch, tmp_path, extensions):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not ops.have_compiler() and not ops.available(["shm_comm"])
    assert ops.available([])


def test_no_headers(monkeypatch, tmp_path, extensions):
    monkeypatch.setattr(ops.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert not ops.have_compiler()


def test_a_failing_build_is_one_message(monkeypatch, extensions, tmp_path):
    compiler = tmp_path / "bin" / "c++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file or directory' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PlanError, match="cannot be built"):
        ops.build(["shm_comm"])
    assert not ops.is_built("shm_comm")
