"""Configurations: dataclasses whose fields document, check and parse themselves."""

from __future__ import annotations

import dataclasses
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from tpl.errors import TplError

C = TypeVar("C", bound="Config")


def option(
    default: Any,
    help: str,
    choices: Iterable[str] = (),
    minimum: float | None = None,
    above: float | None = None,
    group: str = "",
    maximum: float | None = None,
) -> Any:
    """A field with a default, a sentence of help, the values it accepts, and the heading it is listed under.

    An option that sizes a tensor has a maximum: a stored model must not make its reader allocate without end.
    """
    bounds = {"minimum": minimum, "above": above, "maximum": maximum}
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": tuple(choices), "group": group} | bounds
    )


@dataclass(frozen=True)
class Config:
    """Base of all configurations: checks every field against its `option`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field.name, getattr(self, field.name), field.metadata)

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        """A configuration from names and values, which may be text as typed on a command line."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        hints = typing.get_type_hints(cls)
        for name in options:
            if name not in known:
                raise TplError(f"There is no option '{name}' here; there are {', '.join(sorted(known))}.")
        return cls(**{name: _convert(name, value, hints[name]) for name, value in options.items()})

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def part(self, kind: type[C]) -> C:
        """Those fields that a base class declares, as one of its own."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def to_dict(self) -> dict[str, Any]:
        """Plain names and values, for JSON."""
        return dataclasses.asdict(self)


def _check(name: str, value: Any, rules: Mapping[str, Any]) -> None:
    choices, minimum, above, maximum = (rules.get(k) for k in ("choices", "minimum", "above", "maximum"))
    if choices and value not in choices:
        raise TplError(f"{name} must be one of {', '.join(choices)}; got '{value}'.")
    if value is None:
        return
    if minimum is not None and not value >= minimum:
        raise TplError(f"{name} must be at least {minimum}; got {value}.")
    if above is not None and not value > above:
        raise TplError(f"{name} must be above {above}; got {value}.")
    if maximum is not None and not value <= maximum:
        raise TplError(f"{name} must be at most {maximum}; got {value}.")


def _convert(name: str, value: Any, hint: Any) -> Any:
    accepted = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if not isinstance(value, str):
        return _convert_number(name, value, accepted)
    if types.NoneType in accepted and value.lower() == "none":
        return None
    if bool in accepted:
        if value.lower() not in ("true", "false"):
            raise TplError(f"{name} must be true or false; got '{value}'.")
        return value.lower() == "true"
    kinds = [kind for kind in accepted if kind is not types.NoneType]
    for kind in kinds:
        try:
            return kind(value)
        except ValueError:
            continue
    raise TplError(f"{name} must be a {kinds[0].__name__}; got '{value}'.") from None


def _convert_number(name: str, value: Any, accepted: tuple[type, ...]) -> Any:
    """A value that is no text: a number, a truth value or None, as JSON or a program has it."""
    if type(value) in accepted:
        return value
    if not isinstance(value, bool):
        if float in accepted and isinstance(value, numbers.Real):
            return float(value)
        if int in accepted and isinstance(value, numbers.Integral):
            return int(value)
    raise TplError(f"{name} must be a {accepted[0].__name__}; got '{value}'.")
