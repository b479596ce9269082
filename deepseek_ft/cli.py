"""The command line. The only room that prints, exits, or sets up logging; heavy imports stay inside functions."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import __version__
from .errors import ConfigError, DataError, DeepSeekFTError, PlanError, RunError

if TYPE_CHECKING:
    from .hardware import Hardware

_EPILOG = """\
examples:
  deepseek-ft train quickstart
  deepseek-ft train deepseek-llm-7b/wikitext103_full data.path=wikitext-103 train.precision=bf16 --gpus 3
  deepseek-ft plan deepseek-llm-7b/wikitext103_full --gpus 3 --gpu rtx4090 --host-ram-gib 256
  deepseek-ft bench --strategies single,ddp,zero3        a few steps under each, in one table
  deepseek-ft recipes deepseek-coder-7b/code_full        show a recipe, resolved
  deepseek-ft data show quickstart                       what is read and what is learnt
  deepseek-ft merge runs/my-run                          adapter and base -> a model folder
  deepseek-ft doctor                                     what would go wrong on this machine
"""


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; a whole number from 0")
    return int(text)


def _days(text: str) -> float:
    """What is not a number of days must not delete anything."""
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; a number of days from 0")
    return days


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepseek-ft",
        description="Fine-tune DeepSeek models on a few consumer cards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"deepseek_ft {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    train = commands.add_parser("train", help="train a recipe", description="Train a recipe; starts the ranks itself.")
    train.add_argument("recipe", help="a shipped recipe's name, or a YAML file")
    train.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example optim.lr=1e-5 train.max_steps=100"
    )
    train.add_argument(
        "--gpus", type=int, metavar="N", help="how many ranks; the first N visible GPUs (same as ranks=N)"
    )
    train.add_argument("--force", action="store_true", help="start even if the plan says that it does not fit")
    train.add_argument("--hostfile", help="DeepSpeed's hostfile, for ranks on several hosts")
    group = train.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true", help="continue the unfinished run in output_dir")
    group.add_argument("--new", action="store_true", help="start beside an unfinished run")

    plan = commands.add_parser(
        "plan",
        help="will it fit, and how long will it take",
        description="Memory, host memory, disk and time of a recipe under every strategy, before anything is downloaded. "
        "Without flags for this machine.",
    )
    plan.add_argument("recipe", help="a shipped recipe's name, or a YAML file")
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    _add_machine(plan)
    plan.add_argument("--json", action="store_true")

    bench = commands.add_parser(
        "bench",
        help="a recipe under every strategy, in one table",
        description="Train a recipe for a few steps under each strategy, in processes of its own, and put speed, memory and losses beside "
        "the plan. Without a GPU its tiny stand-in runs on CPU ranks. --predict runs nothing and prints the planned table.",
    )
    bench.add_argument("recipe", nargs="?", default="quickstart", help="a shipped recipe's name, or a YAML file (quickstart)")
    bench.add_argument("overrides", nargs="*", metavar="key=value")
    bench.add_argument("--strategies", metavar="A,B", help="which, by name (all)")
    bench.add_argument("--steps", type=_count, metavar="N", default=10, help="steps that count, of each run (10)")
    bench.add_argument("--warmup", type=_count, metavar="N", default=3, help="steps before them (3)")
    bench.add_argument("--repeats", type=_count, metavar="N", default=2, help="runs of each strategy, in turn (2)")
    bench.add_argument("--output", metavar="DIR", help="a new folder for the table, its JSON and a chart (runs/bench-RECIPE; with --predict none)")
    bench.add_argument("--predict", action="store_true", help="run nothing: the planned table, of this machine or of the one described")
    _add_machine(bench, " (with --predict)")
    bench.add_argument("--json", action="store_true", help="for programs")

    recipes = commands.add_parser("recipes", help="list the shipped recipes, or show one")
    recipes.add_argument("recipe", nargs="?")
    recipes.add_argument("overrides", nargs="*", metavar="key=value")

    data = commands.add_parser("data", help="see what is trained on", description="Rows, figures and the cache of a recipe's data.")
    of_data = data.add_subparsers(dest="data_command", metavar="show|stats|cache", required=True)
    show = of_data.add_parser("show", help="the first rows, with what is learnt marked")
    show.add_argument("-n", type=_count, default=3, metavar="N", help="rows of each source (3)")
    show.add_argument("--skip", type=_count, default=0, metavar="N", help="leave out the first N")
    stats = of_data.add_parser("stats", help="figures of the whole data; tokenises it, once")
    for one in (show, stats):
        one.add_argument("recipe", help="a shipped recipe's name, or a YAML file")
        one.add_argument("overrides", nargs="*", metavar="key=value")
        one.add_argument("--part", choices=("train", "eval", "both"), default="both" if one is stats else "train")
    cache = of_data.add_parser("cache", help="what the cache holds")
    cache.add_argument("--prune", type=_days, metavar="DAYS", help="delete what was not used for so many days; 0: everything")
    for one in (show, stats, cache):
        one.add_argument("--json", action="store_true", help="for programs")

    merge = commands.add_parser(
        "merge",
        help="add an adapter to its base",
        description="Write a whole model folder from an adapter and its base, and compare its logits with theirs.",
    )
    merge.add_argument("adapter", help="the folder of a run, or of an adapter")
    merge.add_argument("--output", metavar="DIR", help="a folder that is not there yet (merged, beside the adapter's)")

    doctor = commands.add_parser("doctor", help="check this machine, and measure it")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.add_argument("--quick", action="store_true", help="look only, measure nothing")
    doctor.add_argument("--clear-locks", action="store_true", help="first remove the locks of builds that were killed")
    return parser


def _add_machine(parser: argparse.ArgumentParser, when: str = "") -> None:
    """The flags that describe a machine; those but --gpus are of a machine that need not be there."""
    parser.add_argument("--gpus", type=int, metavar="N", help="how many cards (with --gpu: 3)")
    parser.add_argument("--gpu", metavar="NAME", help=f"which, such as rtx4090{when}")
    parser.add_argument("--host-ram-gib", type=float, metavar="GIB")
    parser.add_argument("--disk-gib", type=float, metavar="GIB", help="free where the run is written")
    parser.add_argument("--cores", type=int, metavar="N")
    parser.add_argument("--pcie", metavar="x16,x8,x4", help="lanes of each card, or of all")
    parser.add_argument("--constant", action="append", default=[], metavar="NAME=VALUE", help="one of timing.CONSTANTS, measured")


def _described(arguments: argparse.Namespace, here: Hardware) -> Hardware:
    from .hardware import described

    return described(
        here, gpus=arguments.gpus, gpu=arguments.gpu, host_ram_gib=arguments.host_ram_gib, disk_gib=arguments.disk_gib,
        cores=arguments.cores, pcie=arguments.pcie.split(",") if arguments.pcie else None, constants=_constants(arguments.constant),
    )  # fmt: skip


def set_up_logging() -> None:
    """Plain lines on standard error, from rank 0; warnings, also those of the libraries below, from every rank."""
    from . import launch

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("deepseek_ft").setLevel(logging.INFO if launch.is_main_rank() else logging.WARNING)
    # torchao reports, on import, each of its kernels that this Python or card has no use for.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # advice to install a kernel for CPUs
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    # peft asks models of transformers by a name that is about to go.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils")
    # A pipeline's ranks train as if each were alone, in a group all the same.
    logging.getLogger("transformers.training_args").addFilter(lambda record: "parallel_mode" not in record.getMessage())
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    # Trainer counts the micro-batches itself and leaves accelerate's own count at 1.
    logging.getLogger("accelerate.accelerator").addFilter(lambda record: "Gradient accumulation steps mismatch" not in record.getMessage())
    # DeepSpeed calls collectives by names that torch has begun to rename; torch says so at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def guard(action: Callable[[], object]) -> int:
    """Run an action; a user's error becomes its message and exit code, not a traceback."""
    from . import launch

    rank = os.environ.get("RANK", "0")  # a pipeline's ranks take it out of their environment
    try:
        action()
    except DeepSeekFTError as error:
        # What is wrong with a config is wrong on every rank, and said once. A rank that fails alone says so itself.
        if not launch.report_error(error) and (rank == "0" or isinstance(error, RunError)):
            who = "" if rank == "0" else f"rank {rank}: "
            print(f"{who}{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; everything saved so far is kept", file=sys.stderr)
        return 130
    return 0


def _train(arguments: argparse.Namespace) -> None:
    from .run import finetune

    overrides = list(arguments.overrides)
    if arguments.gpus is not None:
        overrides.append(f"ranks={arguments.gpus}")
    result = finetune(
        arguments.recipe, overrides, resume=arguments.resume, new=arguments.new, hostfile=arguments.hostfile,
        force=arguments.force,
    )  # fmt: skip
    print(result)


def _constants(words: list[str]) -> dict[str, float]:
    from .timing import check_constants

    given = {}
    for word in words:
        name, sign, value = word.partition("=")
        if name in given:
            raise ConfigError(f"--constant: {name} is given twice; keep one")
        try:
            given[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"--constant: got {word!r}; write NAME=VALUE, such as dram_bytes_per_second=2e11"
            ) from None
    return check_constants(given)


def _plan(arguments: argparse.Namespace) -> None:
    from . import launch, plan_view
    from .data.sources import guess_tokens
    from .hardware import probe
    from .planner import plan_run, schedule_run
    from .recipe import load_config
    from .shapes import fetch_config, find_shape

    config = load_config(arguments.recipe, arguments.overrides)
    if find_shape(config.model.path) is None and launch.hub_answers():
        fetch_config(config.model.path)  # a kilobyte; everything else is arithmetic
    here = probe(config.output_dir)
    other = arguments.gpu is not None or bool(arguments.gpus and not here.gpus)
    hardware = _described(arguments, here)
    plan = plan_run(config, hardware, can_build_ops=True if other else None, force=True)
    try:
        guesses = [guess_tokens(s, config.data, f"data.train.{i}") for i, s in enumerate(config.data.train)]
    except DataError:  # the data need not be there to be planned for
        guesses = [None]
    schedule = schedule_run(plan, config, None if None in guesses else sum(guesses))
    command = plan_view.start_command(arguments.recipe, arguments.overrides, plan, config)
    if arguments.json:
        print(json.dumps(plan_view.as_json(plan, config, schedule, command), indent=2, allow_nan=False))
    else:
        print(plan_view.text(plan, config, schedule, command))
        flags = {"--host-ram-gib": arguments.host_ram_gib, "--cores": arguments.cores, "--disk-gib": arguments.disk_gib}
        missing = [name for name, value in flags.items() if value is None]
        if other and missing:
            print(f"note      what {', '.join(missing)} would say is this machine's")
    if plan.misfits:
        raise PlanError(
            f"strategy {plan.strategy.name} {'; '.join(plan.misfits)}"
            if arguments.json
            else "it does not fit; see above"
        )


def _bench(arguments: argparse.Namespace) -> None:
    from . import benchmark
    from .hardware import probe
    from .recipe import load_config

    if "=" in arguments.recipe:  # settings of the recipe that needs no name
        arguments.recipe, arguments.overrides = "quickstart", [arguments.recipe, *arguments.overrides]
    config = load_config(arguments.recipe, arguments.overrides)
    names = benchmark.chosen_strategies(arguments.strategies)
    machine = ("gpu", "host_ram_gib", "disk_gib", "cores", "pcie")
    if arguments.predict:
        table = benchmark.predict(config, _described(arguments, probe(config.output_dir)), names)
        if arguments.output:
            logging.getLogger("deepseek_ft").info("%s: table.md, table.json, tokens_per_second.png", table.save(arguments.output))
    else:
        if given := [f"--{name.replace('_', '-')}" for name in machine if getattr(arguments, name) is not None] + ["--constant"] * bool(arguments.constant):
            raise ConfigError(f"{', '.join(given)} would describe another machine, and what is measured is this one: add --predict, or leave "
                              "it out")  # fmt: skip
        for name in ("steps", "repeats"):
            if getattr(arguments, name) < 1:
                raise ConfigError(f"--{name}: got {getattr(arguments, name)}; at least 1")
        output = arguments.output or f"runs/bench-{config.name}"
        table, folder = benchmark.bench(config, names, output, arguments.gpus, arguments.steps, arguments.warmup, arguments.repeats)
        logging.getLogger("deepseek_ft").info("%s: table.md, table.json, tokens_per_second.png, and each run with its log", folder)
    print(benchmark.to_json(table) if arguments.json else table.markdown())
    if not arguments.predict and not any(row.runs for row in table.rows):
        raise RunError("no strategy ran; the table says why")


def _recipes(arguments: argparse.Namespace) -> None:
    from .config import to_yaml
    from .recipe import list_recipes, load_config

    if arguments.recipe:
        print(to_yaml(load_config(arguments.recipe, arguments.overrides)), end="")
        return
    recipes = list_recipes()
    width = max(map(len, recipes))
    for name, summary in recipes.items():
        print(f"{name:{width}}  {summary}")


def _doctor(arguments: argparse.Namespace) -> None:
    import json

    from . import doctor

    if arguments.clear_locks:
        doctor.clear_locks()
    findings = doctor.examine(arguments.quick)
    findings.append(doctor.remember(findings))
    if arguments.json:
        print(json.dumps(doctor.to_json(findings), indent=2))
    else:
        print(doctor.describe(findings, colour=sys.stdout.isatty()))
    if any(finding.state == "fail" for finding in findings):
        raise SystemExit(1)


def _merge(arguments: argparse.Namespace) -> None:
    from pathlib import Path

    from . import adapters

    done = adapters.merge(Path(arguments.adapter), Path(arguments.output) if arguments.output else None)
    print(f"{done['adapter']} merged into {done['base']} ({done['precision']}) -> {done['folder']}")
    of = " of the mean: rounding moves a few tokens to other experts" if done["judged"] == "mean" else ""
    print(f"  logits of {done['rows']} rows differ by at most {done['largest_difference']:.2g}, {done['mean_difference']:.2g} on average, from "
          f"those of base and adapter (tolerance {done['tolerance']:.2g}{of})")  # fmt: skip
    if done["quantized_base"]:
        print("  the adapter was trained beside the base in 4 bits, and is now in the whole one: score the merged model before you "
              "use it, or go on using the adapter beside the 4-bit base")  # fmt: skip


def _data(arguments: argparse.Namespace) -> None:
    from .data import view
    from .recipe import load_config
    from .run import cache_dir, load_data, open_data

    if arguments.data_command == "cache":
        folder = cache_dir(None)
        entries = view.cache_entries(folder)
        if arguments.prune is not None:
            entries = view.prune(entries, arguments.prune)
        if arguments.json:
            print(json.dumps(entries, indent=2))
        elif arguments.prune is not None:
            print(f"deleted {len(entries)} entries, {sum(e['bytes'] for e in entries) / 2**20:,.1f} MiB")
        else:
            print(view.cache_text(entries, folder))
        return
    config = load_config(arguments.recipe, arguments.overrides)
    parts = ["train", "eval"] if arguments.part == "both" else [arguments.part]
    parts = [part for part in parts if getattr(config.data, part)]
    if not parts:
        raise ConfigError(f"data.{arguments.part}: the recipe has no source there")
    if arguments.data_command == "show":
        encoder, corpora = open_data(config, cache_dir(config), parts)
        rows = [row for part in parts for corpus in corpora[part]
                for row in view.first_rows(corpus, encoder, config.data, arguments.n, arguments.skip)]  # fmt: skip
        if arguments.json:
            print(json.dumps(rows, ensure_ascii=False, indent=2))
        else:
            for number, row in enumerate(rows, 1):
                print(view.row_text(row, number, sys.stdout.isatty()))
        return
    if config.data.streaming:
        raise ConfigError("data.streaming: figures of the whole need the whole tokenised; add data.streaming=false")
    _, blocks = load_data(config, cache_dir(config), parts)
    found = {part: view.stats(blocks[part]) for part in parts}
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False, indent=2))
    else:
        print("\n\n".join(view.stats_text(part, figures) for part, figures in found.items()))


def _worker(words: list[str]) -> int:
    """`worker STAGE TASK`: a process that a run started for itself."""
    from . import launch

    if words[0] == "stages":
        launch.die_with_parent()
        set_up_logging()
        code = launch.fork_stages(words[-1], _worker)
        sys.stdout.flush()
        os._exit(code)  # there is nothing to tear down; the libraries' own would take a second and report what is still imported
    if multiprocessing.parent_process() is None:
        launch.die_with_parent()
    set_up_logging()
    rank = os.environ.get("RANK", "0")
    from .run import worker

    try:
        return guard(lambda: worker(words[0], words[-1]))
    except RuntimeError as error:
        if launch.timed_out(error):
            return guard(functools.partial(_give_up, error))
        # When one rank dies the others' collectives break. Theirs is not the story.
        if not any(sign in str(error) for sign in ("Connection closed by peer", "Connection reset", "gloo/transport")):
            raise
        print(f"rank {rank} lost its connection to another rank", file=sys.stderr)
        return 1


def _give_up(error: RuntimeError) -> None:
    from . import launch

    raise RunError(f"{launch.STANDSTILL}\n  {error}") from error


def main(argv: list[str] | None = None) -> int:
    words = [w for w in (sys.argv[1:] if argv is None else argv) if not w.startswith("--local_rank")]
    if words[:1] == ["worker"]:
        return _worker(words[1:])
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    # argparse gives up on positional words after a flag, as in `train NAME --gpus 3 key=value`
    late = [w for w in rest if "=" in w and not w.startswith("-")]
    unknown = [w for w in rest if w not in late]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; settings are written key=value, without dashes")
    if late and "overrides" not in arguments:
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    if late:
        arguments.overrides += late
    set_up_logging()
    actions = {"train": _train, "plan": _plan, "bench": _bench, "recipes": _recipes, "data": _data, "doctor": _doctor, "merge": _merge}
    action = actions[arguments.command]
    try:
        return guard(lambda: action(arguments))
    except BrokenPipeError:  # as in `deepseek-ft recipes | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
