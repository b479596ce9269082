"""The errors a user can cause. Each says what, what was got, why it cannot work and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class DeepSeekFTError(Exception):
    """Base of every error that is the user's to mend; the command line shows it without a traceback."""

    exit_code = 2


class ConfigError(DeepSeekFTError):
    """A recipe, an override or a DeepSpeed file says something that cannot be meant."""


class PlanError(DeepSeekFTError):
    """The recipe is sound, but not on this hardware or under this strategy."""


class DataError(DeepSeekFTError):
    """A data source is missing, unreadable, or holds nothing to train on."""


class CheckpointError(DeepSeekFTError):
    """A model folder or checkpoint is incomplete, or does not belong to this run."""


class RunError(DeepSeekFTError):
    """A run that started did not come to its end: a rank died, or what it saved does not load."""

    exit_code = 1


def listing(headline: str, problems: Sequence[str]) -> str:
    """One message for any number of problems, so that nobody mends them one start at a time."""
    if len(problems) == 1:
        return f"{headline}\n  {problems[0]}"
    return "\n".join([f"{headline} ({len(problems)} problems)", *(f"  - {p}" for p in problems)])
