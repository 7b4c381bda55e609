"""Where compiled code is kept; a thread without denormal numbers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tpl.engine.compute import QUAD, Inference, choose_compute, keep_compiled_code, without_denormals
from tpl.errors import TplError


def test_compiled_code_is_kept_in_the_users_cache_folder_unless_another_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "tpl" / "compiled")
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == str(tmp_path / "tpl" / "compiled")


def test_training_on_a_cpu_knows_no_denormal_numbers_and_nothing_else_changes() -> None:
    tiny = torch.full((1_000_000,), 1e-39)  # large enough for all threads
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot do without denormal numbers")
    left: list[int] = []

    def work(interrupted: threading.Event) -> None:
        left.append(int((tiny * 0.5).count_nonzero()))

    without_denormals(work)
    assert left == [0]
    assert int((tiny * 0.5).count_nonzero()) == len(tiny)


def test_what_goes_wrong_in_a_thread_goes_wrong_outside() -> None:
    def fail(interrupted: threading.Event) -> None:
        raise TplError("too high")

    with pytest.raises(TplError, match="too high"):
        without_denormals(fail)


def test_an_interrupt_ends_the_work_first() -> None:
    told: list[bool] = []

    def work(interrupted: threading.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        known = interrupted.wait(30)
        time.sleep(0.5)  # what the last step takes
        told.append(known)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have left its own
    try:
        with pytest.raises(KeyboardInterrupt):
            without_denormals(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert told == [True]


def test_a_program_of_its_own_trains_in_its_own_thread() -> None:
    """In another process, as the settings are those of a whole process."""
    lines = [
        "import threading, torch",
        "from tpl import program",
        "from tpl.engine import choose_compute",
        "from tpl.engine.compute import without_denormals",
        "program.claim()",
        "choose_compute('cpu')",
        "seen = []",
        "def work(interrupted):",
        "    left = torch.full((1_000_000,), 1e-39) * 0.5",
        "    seen.append((threading.current_thread() is threading.main_thread(), int(left.count_nonzero())))",
        "without_denormals(work)",
        "assert seen == [(True, 0)], seen",
    ]
    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU cannot do without denormal numbers")
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("side", "widest"), [(224, 197 * 768), (128, 65 * 768), (32, 64 * 32 * 32)])
def test_a_pass_on_a_cpu_is_small_enough_for_its_caches_and_loses_no_image(side: int, widest: int) -> None:
    """ViT-tiny at 224 and 128 pixels, and ResNet-18: below 32 MiB an activation reuses memory."""
    passes = list[int]()

    def brightness(images: torch.Tensor) -> torch.Tensor:
        passes.append(len(images))
        return images.mean(dim=(1, 2, 3)).unsqueeze(1)

    pixels = torch.randint(0, 256, (203, 3, side, side), dtype=torch.uint8)
    found = Inference(brightness, choose_compute("cpu"), torch.Tensor.float)(pixels)
    torch.testing.assert_close(found, pixels.float().mean(dim=(1, 2, 3)).unsqueeze(1))
    assert sum(passes) == 204 and all(count % QUAD == 0 and 4 * count * widest < 2**25 for count in passes)
    assert max(passes) >= 20  # many small passes are slow, too
