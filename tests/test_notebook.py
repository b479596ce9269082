"""In a real Jupyter kernel: the ranks are started from it, their progress arrives in the cell, the kernel stays clean."""

from __future__ import annotations

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.ranks


def test_in_a_kernel(tiny_recipe, tmp_path):
    cells = [
        "import os, sys\nbefore = dict(os.environ)\nfrom deepseek_ft import finetune",
        f"a = finetune({str(tiny_recipe)!r}, train={{'max_steps': 3}})",
        f"b = finetune({str(tiny_recipe)!r}, train={{'max_steps': 2}}, seed=3)",
        "assert dict(os.environ) == before and 'torch' not in sys.modules\n"
        "print(a.run['engine_facts'], a.run['steps'], b.run['steps'], b.run['config']['seed'], a.output_dir != b.output_dir)",
        f"try:\n    finetune({str(tiny_recipe)!r}, data={{'path': '/nowhere'}})\nexcept Exception as e:\n    print(type(e).__name__, e)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    texts = ["".join(o.get("text", "") for o in c.outputs) for c in notebook.cells]
    assert "step 3/3 | loss" in texts[1]
    assert "'world_size': 3" in texts[3] and "3 2 3 True" in texts[3] and "'zero_stage': 3" in texts[3]
    assert texts[4].startswith("DataError data.train.0: there is no file or folder '/nowhere'")
