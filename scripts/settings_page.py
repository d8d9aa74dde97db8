"""docs/settings.md: every setting with its meaning, type and default, from solrl/config.py.

python scripts/settings_page.py          # writes the page; a test says when it is out of date
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from solrl.config import Config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
HEAD = """# Every setting

Defaults are those of `solrl/config.py`. A shipped config changes some: `solrl train CONFIG --help` shows them. In a
TOML file `explore.num_steps` is `num_steps` under `[explore]`; on the command line it is `--explore.num_steps 6`.

<!-- written by scripts/settings_page.py -->
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section(Config, "")])


def _section(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Plain settings first, then a heading for each section inside."""
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            inner.append((name, kind))
        else:
            yield _setting(f"{prefix}{name}", field)
    for name, kind in inner:
        yield f"## {prefix}{name}\n\n{' '.join((kind.__doc__ or '').split())}\n"
        yield from _section(kind, f"{prefix}{name}.")


def _setting(key: str, field: FieldInfo) -> str:
    meaning = " ".join((field.description or "").split())
    return f"- **`{key}`** ({_type(field.annotation)}; default {_value(field.default)})\n  {meaning}\n"


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(argument) for argument in arguments if argument is not type(None)) + ", may be unset"
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "table"
    return {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}[annotation]


def _value(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return f"`{', '.join(str(item) for item in value)}`" if value else "none"
    return "none" if value == {} else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
