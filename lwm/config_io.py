"""YAML files and `a.b=value` overrides as plain trees that remember which line each value came from.

Knows nothing of the models in `lwm.config`: it reads text, applies overrides, and turns a pydantic error about a
tree back into one sentence that names the file, the line, the field, the value and what is allowed.
"""

import difflib
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

Key = str | int
KeyPath = tuple[Key, ...]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the person who wrote it."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 core scalars: only true/false are booleans, `1e-3` is a float, `no` and `1_000` are strings."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


_CORE_SCALARS: tuple[tuple[str, str, str | None], ...] = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", None),
    ("tag:yaml.org,2002:int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789"),
    ("tag:yaml.org,2002:merge", r"^<<$", "<"),
)
for _tag, _pattern, _first in _CORE_SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), None if _first is None else list(_first))


@dataclass
class Tree:
    """A configuration as nested dicts and lists, and where each of its values was written."""

    values: dict[str, Any]
    source: str
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, path: KeyPath) -> str:
        """Where the value at `path`, or the nearest thing around it, was written: `file.yaml:12`."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return self.source


def parse_yaml(text: str, source: str) -> Tree:
    """Parse one YAML document whose top level is a mapping.

    Args:
        text: the document.
        source: what to call it in errors, usually the file's path.

    Raises:
        ConfigError: not YAML, a key written twice, or not a mapping; names source and line.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{source}{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    tree = Tree({}, source)
    if node is None:
        return tree
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source}:{node.start_mark.line + 1}: the file must be a mapping of fields, `name: value`")
    tree.values = _convert(node, (), tree)
    return tree


def _convert(node: yaml.Node, path: KeyPath, tree: Tree) -> Any:
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, item in enumerate(node.value):
            tree.origins[(*path, index)] = _where(item, tree)
            items.append(_convert(item, (*path, index), tree))
        return items
    if isinstance(node, yaml.MappingNode):
        return _convert_mapping(node, path, tree)
    assert isinstance(node, yaml.ScalarNode)
    return _scalar(node, tree)


def _convert_mapping(node: yaml.MappingNode, path: KeyPath, tree: Tree) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    own: dict[str, Any] = {}
    lines: dict[str, int] = {}
    # Merged mappings first, so that the lines of keys written here replace the lines of the keys they override.
    for key, value in sorted(node.value, key=lambda pair: pair[0].tag != "tag:yaml.org,2002:merge"):
        if key.tag == "tag:yaml.org,2002:merge":
            bases = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for base in reversed(bases):
                if not isinstance(base, yaml.MappingNode):
                    raise ConfigError(f"{_where(base, tree)}: `<<` takes a mapping or a list of mappings")
                merged |= _convert_mapping(base, path, tree)
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigError(f"{_where(key, tree)}: a key must be a single word")
        name = key.value
        if name in own:
            raise ConfigError(
                f"{_where(key, tree)}: {name!r} is written twice; it was already set on line {lines[name]}"
            )
        lines[name] = key.start_mark.line + 1
        for stale in [known for known in tree.origins if known[: len(path) + 1] == (*path, name)]:
            del tree.origins[stale]
        tree.origins[(*path, name)] = _where(key, tree)
        own[name] = _convert(value, (*path, name), tree)
    return merged | own


def _where(node: yaml.Node, tree: Tree) -> str:
    return f"{tree.source}:{node.start_mark.line + 1}"


def _scalar(node: yaml.ScalarNode, tree: Tree) -> Any:
    text = node.value
    match node.tag.rpartition(":")[2]:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text)
        case "float":
            return float(text)
    raise ConfigError(f"{_where(node, tree)}: {text!r} has the tag {node.tag}, which configurations do not use")


def parse_value(text: str, source: str) -> Any:
    """Parse the right side of an override by the rules of the files: `1e-3`, `true`, `[1, 2]`, `{sp: 4}`, words."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {text!r} is not a valid value: {' '.join(str(error).split())}") from error
    return None if node is None else _convert(node, (), Tree({}, source))


def apply_overrides(tree: Tree, overrides: Sequence[str]) -> None:
    """Set `a.b=value` in the tree; list entries go by index or by their `name` (or `corpus`).

    Raises:
        ConfigError: no `=`, a list entry that does not exist, or a path through a plain value; names the override.
    """
    for override in overrides:
        dotted, separator, text = override.partition("=")
        source = f"override {override!r}"
        if not separator or not dotted.strip():
            raise ConfigError(f"{source}: write it as field=value, for example seed=1 or stages.0.steps=10")
        keys = dotted.strip().split(".")
        node: Any = tree.values
        path: KeyPath = ()
        for key in keys[:-1]:
            step = _step(node, key, path, source)
            if isinstance(node, dict) and node.get(key) is None:
                node[key] = {}
                tree.origins[(*path, step)] = source
            node = node[step]
            path = (*path, step)
        step = _step(node, keys[-1], path, source)
        for stale in [known for known in tree.origins if known[: len(path) + 1] == (*path, step)]:
            del tree.origins[stale]
        node[step] = parse_value(text, source)
        tree.origins[(*path, step)] = source


def _step(node: Any, key: str, path: KeyPath, source: str) -> Key:
    """The key or index that `key` means inside `node`."""
    if isinstance(node, dict):
        return key
    if not isinstance(node, list):
        raise ConfigError(f"{source}: {dotted_path(path)} is {node!r}, a single value; it has no field {key!r}")
    names = [str(item.get("name", item.get("corpus", ""))) if isinstance(item, dict) else "" for item in node]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(node):
        return int(key)
    known = ", ".join(name for name in names if name)
    have = f"entries 0 to {len(node) - 1}" if node else "no entries"
    raise ConfigError(f"{source}: {dotted_path(path)} has {have}{f' ({known})' if known else ''}, not {key!r}")


def freeze(value: Any) -> Any:
    """The same tree with tuples for lists: what strict, hashable models accept."""
    if isinstance(value, dict):
        return {key: freeze(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


def dotted_path(path: KeyPath) -> str:
    """`("stages", 0, "steps")` as a person writes it: `stages.0.steps`."""
    return ".".join(str(key) for key in path)


def describe(error: ValidationError, model: type[BaseModel], tree: Tree | None = None) -> str:
    """One sentence for a pydantic error about `tree` (or about an object built in Python when there is no tree)."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")  # a misspelt key explains the rest
    sentence = _describe_one(first, model, tree)
    more = len(problems) - 1
    return sentence if not more else f"{sentence} ({more} more problem{'s' if more > 1 else ''} after this one)"


def _describe_one(problem: Any, model: type[BaseModel], tree: Tree | None) -> str:
    context = problem.get("ctx", {})
    path: KeyPath = tuple(problem["loc"])
    if "field" in context:
        path = (*path, *(int(key) if key.isdecimal() else key for key in str(context["field"]).split(".")))
    where = f"{tree.origin(path)}: " if tree is not None else ""
    name = dotted_path(path)
    if problem["type"] == "extra_forbidden":
        return where + _unknown_key(path, model)
    if problem["type"] == "missing":
        return f"{where}{name} is missing{_describe_field(path, model)}"
    if "field" in context:
        return f"{where}{problem['msg']}"
    text = problem["msg"].replace("Input should be", "it must be").replace("Value error, ", "")
    if not path:
        return where + text
    return f"{where}{name} is {_short(problem['input'])}; {text}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unknown_key(path: KeyPath, model: type[BaseModel]) -> str:
    *parents, key = path
    owner = model_at(model, tuple(parents))
    known = list(owner.model_fields) if owner else []
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
    inside = f" in {dotted_path(tuple(parents))}" if parents else ""
    if close:
        return f"unknown key {key!r}{inside}; did you mean {close[0]!r}?"
    elsewhere = [dotted for dotted, _, _ in walk_fields(model) if dotted.rpartition(".")[2] == str(key)]
    if elsewhere:
        return f"unknown key {key!r}{inside}; did you mean {elsewhere[0]!r}?"
    return f"unknown key {key!r}{inside}; the keys there are {', '.join(known)}"


def _describe_field(path: KeyPath, model: type[BaseModel]) -> str:
    *parents, key = path
    owner = model_at(model, tuple(parents))
    info = owner.model_fields.get(str(key)) if owner else None
    return f" ({info.description})" if info is not None and info.description else ""


def model_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    """The model class that describes the mapping at `path`, or None where there is none."""
    for key in path:
        if isinstance(key, int):
            continue
        info = model.model_fields.get(key)
        inner = nested_model(info.annotation) if info is not None else None
        if inner is None:
            return None
        model = inner
    return model


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model`, `Model | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple):
        return next(filter(None, map(nested_model, get_args(annotation))), None)
    return None


def is_sequence(annotation: Any) -> bool:
    """Whether a field holds a list of entries."""
    return get_origin(annotation) is tuple


def walk_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any, type[BaseModel]]]:
    """Every field below `model` as (dotted name with `*` for list entries, pydantic FieldInfo, owning model)."""
    for name, info in model.model_fields.items():
        yield prefix + name, info, model
        inner = nested_model(info.annotation)
        if inner is not None:
            yield from walk_fields(inner, f"{prefix}{name}.*." if is_sequence(info.annotation) else f"{prefix}{name}.")


def read_tree(path: Path) -> Tree:
    """Read one YAML file.

    Raises:
        ConfigError: unreadable, not UTF-8, or not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the file is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror or error}") from error
    return parse_yaml(text, str(path))


def as_plain(value: Any) -> Any:
    """A model as nested dicts and lists of JSON types."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: as_plain(item) for key, item in value.items()}
    return value
