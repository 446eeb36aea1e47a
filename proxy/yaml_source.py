"""YAML read into typed values without losing where each came from, so that every complaint names its line.

`decode` walks a composed document beside a type made of msgspec Structs, dicts, tuples, Literals and scalars. It
collects every problem instead of stopping at the first one.
"""

from __future__ import annotations

import difflib
import errno
import os
import stat
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

import msgspec
import yaml

DecimalText = Annotated[str, msgspec.Meta(title="decimal")]
"""A decimal kept as its text: 0.28 and "0.28" read the same, and neither passes through a float."""

MAX_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Problem:
    """One complaint. `line` is None or 0 when the value did not come from a file."""

    path: str
    message: str
    line: int | None = None

    def text(self, source: str) -> str:
        place = source if not self.line else f"{source}:{self.line}"
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


class SourceError(Exception):
    """The document cannot be accepted; one line for each problem."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self.lines = [problem.text(source) for problem in problems]
        super().__init__("\n".join(self.lines))


@dataclass
class Source:
    """A composed document, the lines of its keys, and the problems found so far."""

    name: str
    root: yaml.Node | None
    base_dir: Path
    environ: Mapping[str, str]
    optional_secrets: frozenset[str] = frozenset()
    """Paths whose `env:` variable may be unset: the value is then None."""
    unneeded_secrets: tuple[str, ...] = ()
    """Patterns of paths whose `env:` or `file:` need not be there: the value is then None."""
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    guessed: set[str] = field(default_factory=set)
    """Paths of values that are needed and not there: placeholders stand for them."""
    shapeless: bool = False
    """Whether a mapping is none: what refers to its names cannot be judged then."""

    def complain(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message, self.line_of(path)))

    def complain_of_what_is_known(self, path: str, message: str) -> None:
        """As `complain`, unless the value there is a placeholder: what is wrong with it has been said."""
        if path not in self.guessed and all(problem.path != path for problem in self.problems):
            self.complain(path, message)

    def line_of(self, path: str) -> int | None:
        """The line of the value at `path`, or of the nearest one above it that the file has."""
        while path and path not in self.lines:
            path = _parent(path)
        return self.lines.get(path)

    def needs(self, path: str) -> bool:
        return not any(fnmatchcase(path, pattern) for pattern in self.unneeded_secrets)

    def raise_if_any(self) -> None:
        if self.problems:
            raise SourceError(self.name, sorted(self.problems, key=lambda problem: problem.line or 0))


def _parent(path: str) -> str:
    cut = max(path.rfind("."), path.rfind("["))
    return path[:cut] if cut > 0 else ""


def compose(name: str, text: str, base_dir: Path, environ: Mapping[str, str], optional: frozenset[str]) -> Source:
    """Parse `text`. Raises SourceError with the line of a syntax error."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise SourceError(name, [Problem("", f"not valid YAML: {error.problem or error.context}", line)]) from None
    except yaml.YAMLError as error:
        raise SourceError(name, [Problem("", f"not valid YAML: {error}")]) from None
    except RecursionError:
        raise SourceError(name, [Problem("", "nested too deeply: not a configuration file")]) from None
    return Source(name, root, base_dir, environ, optional)


def _start_of(path: Path) -> bytes:
    """One byte more than allowed at most. Raises OSError, also for what is no file, which might never answer or end."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)  # a FIFO opens without its writer
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no regular file; copy it into one")
        with open(fd, "rb", closefd=False) as file:
            return file.read(MAX_BYTES + 1)
    finally:
        os.close(fd)


def read(path: Path, base_dir: Path, environ: Mapping[str, str], optional: frozenset[str]) -> Source:
    """Read and parse a file. Raises SourceError when it is missing, unreadable, too large or not UTF-8 YAML."""
    try:
        raw = _start_of(path)
    except OSError as error:
        raise SourceError(str(path), [Problem("", f"cannot be read: {error.strerror}")]) from None
    if len(raw) > MAX_BYTES:
        raise SourceError(str(path), [Problem("", f"larger than {MAX_BYTES // 2**20} MiB: not a configuration file")])
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SourceError(str(path), [Problem("", "not UTF-8 text", line)]) from None
    return compose(str(path), text, base_dir, environ, optional)


_MISSING: Any = object()


def decode(source: Source, kind: Any, node: yaml.Node | None, path: str = "") -> Any:
    """The value of `node` as `kind`; on a problem it is noted in `source` and a placeholder comes back."""
    if node is not None:
        source.lines.setdefault(path, node.start_mark.line + 1)
    origin = get_origin(kind)
    if origin is Annotated:
        inner, *metas = get_args(kind)
        if any(getattr(meta, "title", None) == "decimal" for meta in metas) and _is_number(node):
            return node.value
        return _leaf(source, kind, node, path) if get_origin(inner) is None else decode(source, inner, node, path)
    if origin in (Union, types.UnionType):
        return _optional(source, kind, node, path)
    if origin is Literal:
        return _choice(source, get_args(kind), node, path)
    if origin in (dict, Mapping):
        return _mapping(source, get_args(kind)[1], node, path)
    if origin in (tuple, list):
        return _sequence(source, get_args(kind)[0], node, path)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(source, kind, node, path)
    return _leaf(source, kind, node, path)


def _is_number(node: yaml.Node | None) -> TypeGuard[yaml.ScalarNode]:
    return isinstance(node, yaml.ScalarNode) and node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def _is_null(node: yaml.Node | None) -> bool:
    return node is None or node.tag == "tag:yaml.org,2002:null"


def _optional(source: Source, kind: Any, node: yaml.Node | None, path: str) -> Any:
    others = [option for option in get_args(kind) if option is not type(None)]
    if _is_null(node) and len(others) < len(get_args(kind)):
        return None
    return decode(source, others[0], node, path)


def _choice(source: Source, options: tuple[Any, ...], node: yaml.Node | None, path: str) -> Any:
    value = _scalar(source, node, path)
    if value is _MISSING:
        return options[0]
    if value in options and not isinstance(value, bool):
        return value
    source.complain(path, f"{value!r} is not one of: {', '.join(map(str, options))}")
    return options[0]


def _entries(source: Source, node: yaml.Node | None, path: str) -> list[tuple[str, yaml.Node]]:
    """Key and value nodes of a mapping, merge keys resolved; duplicates and non-mappings are complaints."""
    if _is_null(node):
        return []
    if not isinstance(node, yaml.MappingNode):
        source.shapeless = True
        source.complain(path, f"expected a mapping of names to values, got {_describe(node)}")
        return []
    _refuse_duplicates(source, node, path)
    yaml.SafeLoader("").flatten_mapping(node)
    seen: dict[str, yaml.Node] = {}
    for key, value in node.value:
        seen[str(key.value)] = value
        source.lines.setdefault(_join(path, str(key.value)), key.start_mark.line + 1)
    return list(seen.items())


def _refuse_duplicates(source: Source, node: yaml.MappingNode, path: str) -> None:
    """YAML readers keep the last of two equal keys in silence; here the second is a complaint."""
    seen: set[str] = set()
    for key, _ in node.value:
        name = str(key.value)
        if name in seen:
            source.problems.append(Problem(_join(path, name), "given twice", key.start_mark.line + 1))
        seen.add(name)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _mapping(source: Source, kind: Any, node: yaml.Node | None, path: str) -> dict[str, Any]:
    return {name: decode(source, kind, value, _join(path, name)) for name, value in _entries(source, node, path)}


def _sequence(source: Source, kind: Any, node: yaml.Node | None, path: str) -> tuple[Any, ...]:
    if _is_null(node):
        return ()
    if not isinstance(node, yaml.SequenceNode):
        source.complain(path, f"expected a list, got {_describe(node)}")
        return ()
    return tuple(decode(source, kind, item, f"{path}[{index}]") for index, item in enumerate(node.value))


def _struct(source: Source, kind: type[msgspec.Struct], node: yaml.Node | None, path: str) -> Any:
    if node is not None and not _is_null(node) and not isinstance(node, yaml.MappingNode):
        source.shapeless = True
        source.complain(path, f"expected a mapping with: {_allowed(kind)}; got {_describe(node)}")
        return None
    fields = {item.encode_name: item for item in msgspec.structs.fields(kind) if not item.name.startswith("_")}
    given: dict[str, Any] = {}
    for name, value in _entries(source, node, path):
        if name not in fields:
            source.complain(_join(path, name), _unknown(name, list(fields)))
        else:
            given[fields[name].name] = decode(source, fields[name].type, value, _join(path, name))
    missing = [name for name, item in fields.items() if item.required and item.name not in given]
    for name in missing:
        source.complain(path, f"needs `{name}`")
        source.guessed.add(_join(path, name))
        given[fields[name].name] = _placeholder(fields[name].type)
    return kind(**given)


def _placeholder(kind: Any) -> Any:
    if get_origin(kind) is Annotated:
        return _placeholder(get_args(kind)[0])
    return () if get_origin(kind) is tuple else _PLACEHOLDERS.get(kind)


def _unknown(name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1, cutoff=0.6)
    hint = f"did you mean `{close[0]}`? " if close else ""
    return f"unknown key; {hint}allowed here: {', '.join(allowed)}"


def _allowed(kind: type[msgspec.Struct]) -> str:
    return ", ".join(item.encode_name for item in msgspec.structs.fields(kind) if item.name[0] != "_")


def _describe(node: yaml.Node | None) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "nothing" if node is None or _is_null(node) else repr(node.value)


def _scalar(source: Source, node: yaml.Node | None, path: str) -> Any:
    """The plain value of a scalar with `env:` and `file:` resolved, or _MISSING after a complaint."""
    if not isinstance(node, yaml.ScalarNode):
        source.complain(path, f"expected one value, got {_describe(node)}")
        return _MISSING
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except yaml.YAMLError as error:
        source.complain(path, f"cannot be read as a value: {getattr(error, 'problem', error)}")
        return _MISSING
    return _resolve(source, value, path) if isinstance(value, str) else value


def _resolve(source: Source, value: str, path: str) -> Any:
    if value.startswith("env:"):
        name = value[4:]
        if source.environ.get(name):
            return source.environ[name]
        if path in source.optional_secrets or not source.needs(path):
            return None
        source.complain(path, f"the environment variable {name} is not set; set it or write the value here")
        return _MISSING
    if value.startswith("file:"):
        target = source.base_dir / value[5:]
        try:
            raw = _start_of(target)
            if len(raw) <= MAX_BYTES:
                return raw.decode().strip()
            source.complain(path, f"{os.fspath(target)} is larger than {MAX_BYTES // 2**20} MiB: not a secret")
            return _MISSING
        except (OSError, UnicodeDecodeError) as error:
            if not source.needs(path):
                return None
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            source.complain(path, f"cannot read {os.fspath(target)}: {reason}")
            return _MISSING
    return value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_PLACEHOLDERS: dict[Any, Any] = {str: "", int: 1, float: 1.0, bool: False}


def _leaf(source: Source, kind: Any, node: yaml.Node | None, path: str) -> Any:
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    value = _scalar(source, node, path)
    if value is _MISSING:
        return _PLACEHOLDERS.get(base)
    if value is None and (path in source.optional_secrets or not source.needs(path)):
        return None
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, str) and base in (int, float) and node is not None and node.value != value:
        return _from_environment(source, kind, base, value, path)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if type(value) is base:
            source.complain(path, f"{value!r} is out of range: {str(error).lower().replace('`', '')}")
        else:
            shown = node.value if isinstance(node, yaml.ScalarNode) else value
            hint = "; put it in quotes" if base is str and value is not None else ""
            source.complain(path, f"expected {_NAMES.get(base, base)}, got {shown!r}{hint}")
        return _PLACEHOLDERS.get(base)


def _from_environment(source: Source, kind: Any, base: Any, value: str, path: str) -> Any:
    """A number that came as text from the environment or a file."""
    try:
        return msgspec.convert(base(value), kind)
    except (ValueError, msgspec.ValidationError):
        source.complain(path, f"expected {_NAMES[base]}, got {value!r} from the environment")
        return _PLACEHOLDERS[base]
