"""TOML files and overrides -> Config, and back.

A file, a ``--section.key value`` flag and a Python override meet in one dict that pydantic checks once, so the same
mistake reads the same from all three.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ValidationError

from solrl.config import Config
from solrl.errors import UsageError


def load_config(name_or_path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The checked settings of a TOML file or shipped config, with ``{"section.key": value}`` put over it."""
    file = _find(name_or_path)
    tree = _read(file)
    for key, value in (overrides or {}).items():
        _put(tree, key, value)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UsageError("\n".join(_lines(error, str(name_or_path), overrides or {}))) from None


def save_config(config: Config, path: Path) -> None:
    """Writes every setting that is not unset (None), defaults included; ``load_config`` reads an equal Config back."""
    path.write_bytes(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)).encode())


def shipped_configs() -> list[str]:
    """Names that ``load_config`` takes besides paths."""
    return sorted(file.stem for file in _shipped_folder().glob("*.toml"))


def setting_types(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, type) of every setting, in the order of config.py."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_types(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation


def read_flags(flags: Sequence[str]) -> dict[str, Any]:
    """``["--train.num_steps", "5", "--lora.targets", "to_q", "to_v"]`` -> overrides for ``load_config``.

    ``--key=value`` and hyphens in keys are fine, and so is a list as TOML: ``--evaluate.rewards=[]``. Values stay text
    where pydantic knows the type; those of ``reward.options`` and ``train.objective_options`` are read as TOML and stay
    text where they are none.
    """
    types = dict(setting_types())
    words: dict[str, list[str]] = {}
    current: list[str] | None = None
    for flag in flags:
        if flag.startswith("--"):
            name, has_value, value = flag[2:].partition("=")
            key = name.replace("-", "_")
            if key in words:
                raise UsageError(f"--{key} is given twice")
            current = words[key] = [value] if has_value else []
        elif current is None:
            raise UsageError(f"unexpected argument {flag!r}: settings are given as --section.key value")
        else:
            current.append(flag)
    return {key: _from_words(key, types.get(key), values) for key, values in words.items()}


def _from_words(key: str, annotation: Any, words: list[str]) -> Any:
    choices = get_args(annotation)
    if type(None) in choices:
        if words in (["None"], ["none"]):
            return None
        annotation = next(choice for choice in choices if choice is not type(None))
    if get_origin(annotation) is tuple:
        if len(words) == 1 and isinstance(listed := toml_value(words[0]), list):
            return listed
        element = get_args(annotation)[0]
        if get_origin(element) is not tuple:
            return words
        size = len(get_args(element))
        return [words[start : start + size] for start in range(0, len(words), size)]
    if len(words) != 1:
        raise UsageError(f"--{key} takes one value, got {' '.join(words) or 'none'}")
    if get_origin(annotation) is Literal:  # pydantic takes no text for a number here
        return next((choice for choice in get_args(annotation) if str(choice) == words[0]), words[0])
    return words[0] if annotation is not None else toml_value(words[0])


def toml_value(text: str) -> Any:
    """The text read as a TOML value, or itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _shipped_folder() -> Path:
    """A wheel carries the configs inside the package; in a checkout they stand beside it."""
    package = Path(__file__).parent
    return package / "configs" if (package / "configs").is_dir() else package.parent / "configs"


def _find(name_or_path: str | Path) -> Path:
    """A shipped name wins over a file or folder of that name; ``./name`` means the latter."""
    name, path, names = str(name_or_path), Path(name_or_path), shipped_configs()
    if name in names:
        return _shipped_folder() / f"{name}.toml"
    if path.is_file():
        return path
    if (path / "config.toml").is_file():
        return path / "config.toml"
    if name and path.is_dir():
        raise UsageError(f"{path} is not a run folder: it holds no config.toml")
    raise UsageError(f"no config {name!r}: neither a TOML file nor a shipped name ({', '.join(names)})")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is not TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise UsageError(f"cannot set {key}: {section} is not a section")
    tree[name] = value


def _lines(error: ValidationError, source: str, overrides: Mapping[str, Any]) -> Iterator[str]:
    """One line a problem: what, where it was set, and the nearest valid key or the reason."""
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"])
        is_override = any(f"{key}.".startswith(f"{name}.") for name in overrides)
        place = "override" if is_override else source
        if problem["type"] == "extra_forbidden":
            is_section = isinstance(problem["input"], dict) and problem["input"]
            for name in [f"{key}.{inner}" for inner in problem["input"]] if is_section else [key]:
                yield f"unknown setting {name} ({place}); the nearest valid one is {_nearest(name)}"
        elif not key:
            yield problem["msg"].removeprefix("Value error, ")
        else:
            reason = problem["msg"].removeprefix("Value error, ")
            yield f"{key} = {problem['input']!r} ({place}): {reason[0].lower()}{reason[1:]}"


def _nearest(key: str) -> str:
    """The valid dotted key most like ``key``; inside an existing section only its keys compete."""
    section, _, name = key.rpartition(".")
    known = [candidate for candidate, _ in setting_types()]
    siblings = [candidate for candidate in known if section and candidate.startswith(f"{section}.")]

    def likeness(candidate: str) -> float:
        last = candidate.rpartition(".")[2]
        return SequenceMatcher(None, key, candidate).ratio() + SequenceMatcher(None, name, last).ratio()

    return max(siblings or known, key=likeness)
