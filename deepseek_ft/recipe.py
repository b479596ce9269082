"""How recipes and overrides become one frozen `Config`.

A recipe is a YAML file. It is read, overridden, checked as a whole and resolved before anything heavy is
imported; every problem is reported at once, with the file and line that it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from .config import ALTERNATIVES, OTHER_NAMES, PATH_KEYS, Config, SourceConfig, contradictions, known_keys
from .errors import ConfigError, listing

PACKAGE_ROOT = Path(__file__).resolve().parent


# ------------------------------------------------------------------------------- trees of values with origins


@dataclass(frozen=True)
class Leaf:
    """One value, the text it was written as (None from Python), and where."""

    value: Any
    text: str | None
    origin: str


_INT = re.compile(r"[-+]?[0-9][0-9_]*\Z")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar, as YAML 1.2 reads it: `1e-5` is a number, `no` and `12:30` are not."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _FLOAT.match(text) or text.lower().lstrip("+-") in (".inf", ".nan"):
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _read_yaml(text: str, origin: str) -> dict:
    """YAML text -> nested dicts and lists of `Leaf`.

    Raises:
        ConfigError: not YAML, not a mapping, or a key given twice.
    """
    import yaml

    problems: list[str] = []

    def convert(node) -> Any:
        where = f"{origin}:{node.start_mark.line + 1}"
        if isinstance(node, yaml.MappingNode):
            tree: dict[str, Any] = {}
            lines: dict[str, int] = {}
            for key_node, value_node in node.value:
                key = str(key_node.value)
                line = key_node.start_mark.line + 1
                if key == "<<" and key_node.style is None:  # YAML's merge key: defaults from another mapping
                    merged = convert(value_node)
                    for defaults in merged if isinstance(merged, list) else [merged]:
                        if isinstance(defaults, dict):
                            tree = {**defaults, **tree}
                    continue
                if key in lines:
                    problems.append(f"{key}: given twice, in lines {lines[key]} and {line} of {origin}; keep one")
                lines[key] = line
                _put(tree, key, convert(value_node), f"{origin}:{line}")
            return tree
        if isinstance(node, yaml.SequenceNode):
            return [convert(item) for item in node.value]
        if node.style is None:  # unquoted
            return Leaf(_scalar(node.value), node.value, where)
        return Leaf(node.value, node.value, where)

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = {} if root is None else convert(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{origin} is nested too deeply, or refers to itself") from None
    if problems:
        raise ConfigError(listing(f"{origin} cannot be read", problems))
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin} holds {_describe(tree)}; a recipe is a mapping of keys such as `model:`, `data:`")
    return tree


def _from_python(value: Any, origin: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        tree: dict[str, Any] = {}
        for key, item in value.items():
            _put(tree, str(key), _from_python(item, origin), origin)
        return tree
    if isinstance(value, (list, tuple)):
        return [_from_python(item, origin) for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # numpy
        return _from_python(value.tolist(), origin)
    return Leaf(value, None, origin)


def _from_command_line(words: Sequence[str]) -> dict:
    tree: dict[str, Any] = {}
    seen: dict[str, str] = {}
    problems = []
    for word in words:
        word = word if isinstance(word, str) else repr(word)
        key, sign, text = word.partition("=")
        if not sign or not key.strip():
            problems.append(f"{word!r} is not an override; write key=value, for example optim.lr=1e-5")
            continue
        key, text = key.strip().replace("[", ".").replace("]", ""), text.strip()
        if key in seen:
            problems.append(f"{key}: given twice, as {seen[key]} and {text}; keep one")
            continue
        seen[key] = text
        if text[:1] in "[{" and text:
            value = _read_yaml(f"value: {text}", f"command line: {word}")["value"]
        else:
            quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
            value = Leaf(text[1:-1] if quoted else _scalar(text), text[1:-1] if quoted else text, "command line")
        _put(tree, key, value, "command line")
    if problems:
        raise ConfigError(listing("the overrides cannot be read", problems))
    return tree


def _put(tree: dict, dotted: str, value: Any, origin: str) -> None:
    """Set `a.b.c` in a tree of dicts; a dict on both sides is merged."""
    *parents, last = dotted.split(".")
    for part in parents:
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"{dotted} ({origin}): {part} is one value, not a section")
        tree = below
    if isinstance(value, dict) and isinstance(tree.get(last), dict):
        for key, item in value.items():
            _put(tree[last], key, item, origin)
    else:
        tree[last] = value


def _get(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _is_set(tree: dict, dotted: str) -> bool:
    node = _get(tree, dotted)
    return node is not None and not (isinstance(node, Leaf) and node.value is None)


def _overlay(base: Any, layer: Any, prefix: str = "") -> Any:
    """`layer` over `base`: dicts merge, an index such as `0` reaches into a list, everything else replaces."""
    if isinstance(base, dict) and isinstance(layer, dict):
        return {**base, **{k: _overlay(base[k], v, f"{prefix}{k}.") if k in base else v for k, v in layer.items()}}
    if isinstance(base, list) and isinstance(layer, dict):
        indexes = [str(i) for i in range(len(base))]
        for key, node in layer.items():
            if key not in indexes:
                has = f"it has {', '.join(indexes)}" if indexes else "the list is empty"
                raise ConfigError(f"{prefix}{key}: there is no such entry in {prefix[:-1]}; {has} ({_origin(node)})")
        return [
            _overlay(item, layer[i], f"{prefix}{i}.") if i in layer else item
            for i, item in zip(indexes, base, strict=True)
        ]
    return layer


def _stack(base: dict, layer: dict) -> dict:
    for one, other in ALTERNATIVES:
        for given, replaced in ((one, other), (other, one)):
            if _is_set(layer, given) and not _is_set(layer, replaced) and _is_set(base, replaced):
                layer = _overlay({}, layer)
                base = _overlay(base, {})
                *parents, last = replaced.split(".")
                holder = base
                for part in parents:
                    holder[part] = dict(holder[part])
                    holder = holder[part]
                del holder[last]
    return _overlay(base, layer)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, node in items:
        if isinstance(node, Leaf):
            yield f"{prefix}{key}", node
        else:
            yield from _leaves(node, f"{prefix}{key}.")


def _origin(node: Any) -> str:
    if isinstance(node, Leaf):
        return node.origin
    return next((leaf.origin for _, leaf in _leaves(node)), "empty")


def _describe(node: Any) -> str:
    if isinstance(node, dict):
        return "a section"
    if isinstance(node, list):
        return "a list"
    value = node.value if isinstance(node, Leaf) else node
    kind = {str: "text", bool: "true/false", int: "a number", float: "a number", type(None): "nothing"}
    shown = "null" if value is None else repr(value)
    return f"{shown} ({kind.get(type(value), type(value).__name__)})"


# ------------------------------------------------------------------------------------------------ checking


def _unknown(dotted: str, node: Any) -> str:
    generic = re.sub(r"\.\d+\.", ".", dotted)
    leaf = generic.rsplit(".", 1)[-1].lower()
    keys = known_keys()
    same_leaf = [k for k in keys if k.rsplit(".", 1)[-1] == leaf]
    near_key = difflib.get_close_matches(generic, keys, n=1, cutoff=0.75)
    near_leaf = difflib.get_close_matches(
        leaf, [k.rsplit(".", 1)[-1] for k in keys] + list(OTHER_NAMES), n=1, cutoff=0.7
    )
    if leaf in OTHER_NAMES:
        hint = f"Here it is called {OTHER_NAMES[leaf]}."
    elif same_leaf:
        hint = f"Did you mean {same_leaf[0]}?"
    elif near_key:
        hint = f"Did you mean {near_key[0]}?"
    elif near_leaf:
        meant = next((k for k in keys if k.rsplit(".", 1)[-1] == near_leaf[0]), None) or OTHER_NAMES[near_leaf[0]]
        hint = f"Did you mean {meant}?"
    else:
        section = generic.rsplit(".", 1)[0] if "." in generic else ""
        here = [k for k in keys if section and k.startswith(f"{section}.")] or [k for k in keys if "." not in k]
        hint = f"Known here: {', '.join(here)}."
    return f"{dotted}: unknown key ({_origin(node)}). {hint}"


def _expected(kind: Any) -> str:
    if getattr(kind, "__origin__", None) is list:
        return f"a list of {'numbers' if kind.__args__[0] in (int, float) else 'texts'}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    args = [a for a in getattr(kind, "__args__", (kind,)) if a is not type(None)]
    if getattr(args[0], "__origin__", None) is list:
        return _expected(args[0])
    return names.get(args[0], str(args[0]))


def _assign(target, tree: dict, schema: type, prefix: str, problems: list[str]) -> None:
    """Write a tree into an OmegaConf structured node, which checks the types; collect what does not go in."""
    from omegaconf import OmegaConf, flag_override
    from omegaconf.errors import OmegaConfBaseException

    hints = get_type_hints(schema)
    for key, node in tree.items():
        dotted = f"{prefix}{key}"
        if key not in hints:
            inside = list(_leaves(node, f"{dotted}.")) if isinstance(node, dict) else []
            problems += [_unknown(*leaf) for leaf in inside] or [_unknown(dotted, node)]
            continue
        kind = hints[key]
        optional = type(None) in getattr(kind, "__args__", ())
        core = next(a for a in kind.__args__ if a is not type(None)) if optional else kind
        if dataclasses.is_dataclass(core):
            if isinstance(node, dict):
                _assign(target[key], node, core, f"{dotted}.", problems)
            else:
                problems.append(f"{dotted}: expects a section of keys, got {_describe(node)} ({_origin(node)})")
            continue
        value: Any = None
        if getattr(core, "__origin__", None) is list and dataclasses.is_dataclass(core.__args__[0]):
            if not isinstance(node, list) or not all(isinstance(item, dict) for item in node):
                problems.append(f"{dotted}: expects a list of sources such as [{{source: text, path: my/folder}}], "
                                f"got {_describe(node)} ({_origin(node)})")  # fmt: skip
                continue
            value = []
            for i, item in enumerate(node):
                entry = OmegaConf.structured(core.__args__[0])
                _assign(entry, item, core.__args__[0], f"{dotted}.{i}.", problems)
                value.append(entry)
        elif getattr(core, "__origin__", None) is list:
            if isinstance(node, Leaf) and node.value is None and optional:
                value = None
            elif isinstance(node, list) and all(isinstance(item, Leaf) for item in node):
                value = [
                    item.text if core.__args__[0] is str and item.text is not None else item.value for item in node
                ]
                if core.__args__[0] is float:
                    value = [float(v) if type(v) is int else v for v in value]
            else:
                problems.append(f"{dotted}: expects {_expected(core)} such as [a, b], got {_describe(node)} "
                                f"({_origin(node)})")  # fmt: skip
                continue
        elif not isinstance(node, Leaf):
            hint = "; put it into a .json file and give its path" if key == "deepspeed" else ""
            problems.append(f"{dotted}: expects {_expected(core)}, got {_describe(node)} ({_origin(node)}){hint}")
            continue
        else:
            value = node.value
            if core is str and value is not None and node.text is not None:
                value = node.text
            elif core is bool and isinstance(value, str) and value.lower() in _SWITCHES:
                value = _SWITCHES[value.lower()]
            elif core is not str and isinstance(value, str) and "${" not in value:
                value = _scalar(value)  # a quoted number is a number
            if core is int and isinstance(value, float) and value.is_integer():
                value = int(value)
            elif core is float and type(value) is int:
                value = float(value)
            elif core in (int, float) and isinstance(value, bool) or core is bool and type(value) in (int, float):
                problems.append(f"{dotted}: expects {_expected(core)}, got {_describe(node)} ({node.origin})")
                continue
            elif core is str and value is not None and not isinstance(value, str):
                problems.append(f"{dotted}: expects text, got {_describe(node)} ({node.origin})")
                continue
        try:
            with flag_override(target, "readonly", False):
                target[key] = value
        except OmegaConfBaseException:
            hint = ""
            if key == "warmup_steps" and isinstance(value, float) and 0 < value < 1:
                hint = f"; a share of all steps is optim.warmup_ratio={value}"
            problems.append(f"{dotted}: expects {_expected(core)}, got {_describe(node)} ({_origin(node)}){hint}")


def _resolve(cfg, origins: dict[str, str], problems: list[str]) -> None:
    """Read every value once, so that an unset variable is known now and not minutes into the run."""
    from omegaconf import ListConfig, OmegaConf, flag_override
    from omegaconf.errors import (
        InterpolationResolutionError,
        InterpolationToMissingValueError,
        MissingMandatoryValue,
        OmegaConfBaseException,
    )

    def visit(node, prefix: str) -> None:
        keys = range(len(node)) if isinstance(node, ListConfig) else list(node)
        for key in keys:
            dotted = f"{prefix}{key}"
            where = f" ({origins[dotted]})" if dotted in origins else ""
            try:
                value = node[key]
                if OmegaConf.is_config(value):
                    visit(value, f"{dotted}.")
                continue
            except MissingMandatoryValue:
                problems.append(f"{dotted}: required, and not given")
            except InterpolationToMissingValueError:
                pass  # the missing value is named itself
            except InterpolationResolutionError as error:
                problems.append(f"{dotted}: {str(error).splitlines()[0]}{where}; set it, or give the value itself")
            except OmegaConfBaseException as error:
                problems.append(f"{dotted}: {str(error).splitlines()[0]}{where}")
            # Stand in for what cannot be read, so that everything else is still looked at.
            with flag_override(node, "readonly", False):
                for stand_in in (None, "", 1):
                    try:
                        node[key] = stand_in
                        break
                    except OmegaConfBaseException:
                        continue

    visit(cfg, "")


def _expand_path(text: str | None) -> str | None:
    return None if text is None else os.path.expanduser(os.path.expandvars(text))


def _expand_paths(config: Config, origins: dict[str, str], problems: list[str]) -> Config:
    def expand(dotted: str, text: str | None) -> str | None:
        expanded = _expand_path(text)
        unset = re.search(r"\$(\w+|\{[^}]*\})", expanded or "")
        if unset:
            where = f" ({origins[dotted]})" if dotted in origins else ""
            problems.append(f"{dotted}: the environment variable in {text!r} is not set{where}")
        return expanded

    def section(name: str, value: Any) -> Any:
        changed = {
            f.name: expand(f"{name}.{f.name}", getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f"{name}.{f.name}" in PATH_KEYS
        }
        return dataclasses.replace(value, **changed)

    def sources(name: str, items: list[SourceConfig]) -> list[SourceConfig]:
        return [dataclasses.replace(s, path=expand(f"data.{name}.{i}.path", s.path)) for i, s in enumerate(items)]

    data = section("data", config.data)
    data = dataclasses.replace(data, train=sources("train", data.train), eval=sources("eval", data.eval))
    return dataclasses.replace(
        config,
        output_dir=expand("output_dir", config.output_dir),
        deepspeed=expand("deepspeed", config.deepspeed),
        model=section("model", config.model),
        data=data,
    )


# ------------------------------------------------------------------------------------------------- recipes


def resource_dir(name: str) -> Path:
    """`recipes` or `ds_configs`: inside an installed package, beside it in a checkout or an editable install."""
    inside, beside = PACKAGE_ROOT / name, PACKAGE_ROOT.parent / name
    return inside if inside.is_dir() else beside


def list_recipes() -> dict[str, str]:
    """Name -> what the first line of its head comment says."""
    root = resource_dir("recipes")
    recipes = {}
    for path in sorted(root.rglob("*.yaml")):
        first = path.read_text(encoding="utf-8").split("\n", 1)[0]
        recipes[path.relative_to(root).with_suffix("").as_posix()] = first.lstrip("# ").strip()
    return recipes


def find_recipe(name: str) -> Path:
    """The file of a shipped recipe's name, or of a path to one's own.

    Raises:
        ConfigError: there is neither.
    """
    shipped = resource_dir("recipes") / f"{name}.yaml"
    candidates = [shipped] if name else []
    if name and not name.endswith(("/", ".")):
        own = _expand_path(name)
        candidates += [Path(own), Path(f"{own}.yaml")]
    for path in candidates:
        try:
            if path.is_file():
                return path
        except OSError:  # a name that no file can have
            continue
    names = list(list_recipes())
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    near = near or [n for n in names if n.rsplit("/", 1)[-1] == name.rsplit("/", 1)[-1]]
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Shipped: {', '.join(names)}."
    raise ConfigError(f"no recipe named {name!r}, and no such file in {Path.cwd()}. {hint}")


def load_config(
    recipe: str | os.PathLike | Mapping | Config,
    overrides: Sequence[str] | Mapping | None = None,
    **sections: Any,
) -> Config:
    """One frozen, fully resolved `Config`.

    Args:
        recipe: a shipped recipe's name, a YAML file, a mapping, or a `Config` to start from.
        overrides: `["optim.lr=1e-5", ...]` as on the command line, or a (nested or dotted) mapping.
        sections: the same by keyword, `train={"max_steps": 20}, seed=1`; they win over `overrides`.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    from omegaconf import OmegaConf

    if isinstance(recipe, (str, os.PathLike)):
        path = find_recipe(os.fspath(recipe))
        label = f"recipe {os.fspath(recipe)!r}"
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        tree = _read_yaml(text, path.name)
    else:
        label = "the given config"
        tree = _from_python(recipe, "given config")
        if not isinstance(tree, dict):
            raise ConfigError(f"a recipe is a name, a file or a mapping, got {_describe(tree)}")

    if isinstance(overrides, str):
        overrides = [overrides]
    if overrides is not None and not isinstance(overrides, (Mapping, Sequence)):
        raise ConfigError(f"overrides are a mapping or a list of key=value texts, got {overrides!r}")
    layer = (
        _from_python(overrides, "overrides") if isinstance(overrides, Mapping) else _from_command_line(overrides or [])
    )
    tree = _stack(tree, layer)
    tree = _stack(tree, _from_python(sections, "keyword argument"))

    problems: list[str] = []
    cfg = OmegaConf.structured(Config)
    _assign(cfg, tree, Config, "", problems)
    origins = {dotted: leaf.origin for dotted, leaf in _leaves(tree)}
    _resolve(cfg, origins, problems)
    config = _expand_paths(OmegaConf.to_object(cfg), origins, problems)
    problems += contradictions(config)
    if problems:
        first_of_its_key = {p.split(":", 1)[0]: p for p in reversed(problems)}  # one mistake is said once
        raise ConfigError(listing(f"{label} cannot be used", [p for p in problems if p in first_of_its_key.values()]))
    return config
