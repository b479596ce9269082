"""Fine-tune DeepSeek language models on a few consumer cards.

>>> from deepseek_ft import finetune
>>> result = finetune("quickstart", train={"max_steps": 20})
>>> result.perplexity_after

Importing this package imports nothing else: names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {  # public name -> the room it lives in
    "finetune": "run",
    "RunResult": "report",
    "load_config": "recipe",
    "list_recipes": "recipe",
    "Config": "config",
    "plan_run": "planner",
    "Plan": "planner",
    "ModelShape": "shapes",
    "DeepSeekFTError": "errors",
    "ConfigError": "errors",
    "PlanError": "errors",
    "DataError": "errors",
    "CheckpointError": "errors",
    "RunError": "errors",
}
__all__ = [*_HOME, "__version__"]

if TYPE_CHECKING:
    from .config import Config
    from .errors import CheckpointError, ConfigError, DataError, DeepSeekFTError, PlanError, RunError
    from .planner import Plan, plan_run
    from .recipe import list_recipes, load_config
    from .report import RunResult
    from .run import finetune
    from .shapes import ModelShape


def __getattr__(name: str):
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_HOME})
