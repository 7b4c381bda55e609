"""Configurations: values as typed, as stored and as given by a program."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tpl.config import Config, option
from tpl.errors import TplError


@dataclass(frozen=True)
class Example(Config):
    size: int = option(4, "a whole number", minimum=1)
    rate: float = option(0.5, "a number", above=0)
    flag: bool = option(True, "a switch")
    kind: str = option("none", "a choice", ("none", "some"))
    scale: float | None = option(None, "a number or nothing", minimum=0)
    limit: int | None = option(3, "a whole number or nothing")


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("size", "7", 7),
        ("size", 7, 7),
        ("size", np.int64(7), 7),
        ("rate", "1e-3", 0.001),
        ("rate", "2", 2.0),
        ("rate", 2, 2.0),
        ("rate", 0.25, 0.25),
        ("flag", "true", True),
        ("flag", "False", False),
        ("flag", False, False),
        ("kind", "none", "none"),  # text, not the absence of a value
        ("kind", "some", "some"),
        ("scale", "none", None),
        ("scale", "None", None),
        ("scale", None, None),
        ("scale", "0.5", 0.5),
        ("scale", 2, 2.0),
        ("limit", "none", None),
        ("limit", "12", 12),
    ],
)
def test_values_are_parsed_to_their_type(name: str, given: Any, expected: Any) -> None:
    value = getattr(Example.parse({name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


def test_what_is_not_given_keeps_its_default() -> None:
    assert Example.parse({}) == Example()
    assert Example.parse({"size": "2"}) == Example(size=2)


def test_an_unknown_option_lists_those_there_are() -> None:
    with pytest.raises(TplError, match=r"'sise'.*flag, kind, limit, rate, scale, size"):
        Example.parse({"sise": "3"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "0"}, "size must be at least 1; got 0"),
        ({"size": -5}, "size must be at least 1; got -5"),
        ({"rate": "0"}, "rate must be above 0; got 0"),
        ({"rate": "nan"}, "rate must be above 0; got nan"),
        ({"scale": "-0.1"}, "scale must be at least 0; got -0.1"),
        ({"kind": "None"}, "kind must be one of none, some; got 'None'"),
        ({"kind": "other"}, "kind must be one of none, some; got 'other'"),
        ({"size": "four"}, "size must be a int; got 'four'"),
        ({"size": "1.5"}, "size must be a int; got '1.5'"),
        ({"size": "none"}, "size must be a int; got 'none'"),
        ({"rate": "fast"}, "rate must be a float; got 'fast'"),
        ({"scale": ""}, "scale must be a float; got ''"),
        ({"flag": "yes"}, "flag must be true or false; got 'yes'"),
        # The same, not as text.
        ({"size": 1.5}, "size must be a int; got '1.5'"),
        ({"size": None}, "size must be a int; got 'None'"),
        ({"size": True}, "size must be a int; got 'True'"),
        ({"rate": [1]}, "rate must be a float"),
        ({"rate": True}, "rate must be a float"),
        ({"flag": 1}, "flag must be a bool"),
        ({"kind": None}, "kind must be a str"),
    ],
    ids=str,
)
def test_impossible_values_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TplError) as error:
        Example.parse(options)
    assert message in str(error.value)


def test_bounds_hold_however_a_configuration_is_made() -> None:
    for make in (lambda: Example(size=0), lambda: Example().replace(size=0)):
        with pytest.raises(TplError, match="at least 1"):
            make()
    assert Example(size=1, scale=0.0).replace(size=2) == Example(size=2, scale=0.0)


def test_bounds_are_where_they_say() -> None:
    assert Example.parse({"size": "1", "scale": "0"}) == Example(size=1, scale=0.0)


def test_a_configuration_survives_json() -> None:
    config = Example(size=9, rate=2.0, flag=False, kind="some", scale=0.1, limit=None)
    assert Example.parse(json.loads(json.dumps(config.to_dict()))) == config


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Example().size = 3  # type: ignore[misc]
