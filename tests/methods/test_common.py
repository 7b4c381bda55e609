"""The common checks for the TIL+OOD family, with techniques and protections, and for what goes beyond the paper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common_checks import *  # noqa: F403 (the tests)
from common_checks import FAMILY, HAT_FROM_SCRATCH, Case
from tpl.methods.bank.techniques import TECHNIQUES, ClassVAE

CASES: dict[str, Case] = {name: (name, {}) for name in FAMILY}
CASES["tpl"] = ("tpl", {"encoder": "compact"})  # what everybody starts with
CASES |= {f"hat, {name}": ("hat", {"technique": name}) for name in TECHNIQUES if name != "none"}
CASES["tpl, supsup"] = ("tpl", {"protect": "supsup"})
# From scratch, more and smaller steps are worth more than passes.
CASES |= {"resnet18, tpl": ("tpl", HAT_FROM_SCRATCH[1]), "resnet18, hat": HAT_FROM_SCRATCH}


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """CMG's generator, as short as it can be and still be trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClassVAE, "steps", 10)
        yield


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found
