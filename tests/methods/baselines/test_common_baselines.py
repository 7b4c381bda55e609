"""The common checks for all methods that are not in `test_common.py`: the baselines, and whatever comes next."""

from __future__ import annotations

import pytest

from common_checks import *  # noqa: F403 (the tests)
from common_checks import FAMILY, Case
from tpl.methods import load_methods

CASES: dict[str, Case] = {name: (name, {}) for name in sorted(load_methods()) if name not in FAMILY}
CASES["foster"] = ("foster", {"epochs": 4, "compression": 1.0})  # a student that begins anew needs its time


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found
