"""Advice over HTTP: uploaded photos are checked before they are learned, or the most useful ones are picked.

Nothing is stored or changed. Forward passes go between those of predictions; one request is served at a time.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fastapi import UploadFile

from tpl.advice.check import Reference, check
from tpl.advice.features import FeatureReader
from tpl.advice.suggest import suggested
from tpl.errors import TplError
from tpl.serve.errors import Refusal
from tpl.serve.jobs import new_id, without_paths
from tpl.serve.model import Batcher, ServedModel
from tpl.serve.uploads import Limits, check_archive, check_images
from tpl.stream import find_images, labelled_images
from tpl.stream.folders import Archive, is_image_name

MAX_IMAGES = 2000  # in one request: comparing all of them with each other takes seconds
BATCH = 32  # images in a forward pass: a prediction waits for one at most
MAX_SUGGESTED = 100

Result = TypeVar("Result")
Compute = Callable[[Callable[[], Any]], Any]  # runs a function in the thread that computes


class Advice:
    """What can be said about uploaded photos with the served model."""

    def __init__(self, batcher: Batcher, limits: Limits) -> None:
        self.batcher, self.limits = batcher, limits
        self._busy = asyncio.Lock()

    async def check(self, model: ServedModel, upload: UploadFile, spool: Path) -> dict[str, Any]:
        """The findings of `tpl check --model` on a zip of class folders."""
        return await self._advise(_check, model, upload, spool)

    async def suggest(self, model: ServedModel, upload: UploadFile, spool: Path, count: int) -> dict[str, Any]:
        """What `tpl suggest` picks from a zip of photos."""

        def work(model: ServedModel, archive: Path, compute: Compute) -> dict[str, Any]:
            found = find_images([str(archive)])
            rows = suggested(model.learner.method, found, count, BATCH, compute=compute)
            if not rows.images:
                why = rows.unreadable[0] if rows.unreadable else "there is none in the zip."
                raise Refusal(422, f"No photo can be read: {why}")
            return rows.to_dict()

        return await self._advise(work, model, upload, spool)

    async def _advise(
        self,
        work: Callable[[ServedModel, Path, Compute], dict[str, Any]],
        model: ServedModel,
        upload: UploadFile,
        spool: Path,
    ) -> dict[str, Any]:
        if not model.task_of_class:
            raise Refusal(409, "Nothing was learned yet: send a task first.")
        if self._busy.locked():
            raise Refusal(429, "Other photos are being checked; try again in a moment.", Retry_After="5")
        loop, archive = asyncio.get_running_loop(), spool / f"{new_id()}.zip"

        def compute(function: Callable[[], Result]) -> Result:
            return asyncio.run_coroutine_threadsafe(self.batcher.call(function), loop).result()

        def advise() -> dict[str, Any]:
            with archive.open("xb") as target:
                shutil.copyfileobj(upload.file, target)
            self._check_limits(archive)
            return work(model, archive, compute)

        async with self._busy:
            try:
                found = await asyncio.to_thread(advise)
            except Refusal as refusal:
                raise Refusal(refusal.status, _without(str(refusal), archive)) from refusal
            except TplError as error:
                raise Refusal(422, without_paths(_without(str(error), archive))) from error
            finally:
                archive.unlink(missing_ok=True)
        cleaned: dict[str, Any] = _without(found, archive)
        return cleaned

    def _check_limits(self, archive: Path) -> None:
        check_archive(archive, self.limits)
        check_images(archive, self.limits)
        if sum(map(is_image_name, Archive(archive).members())) > MAX_IMAGES:
            raise Refusal(413, f"At most {MAX_IMAGES} photos at a time; `tpl check` takes any number.")


def _check(model: ServedModel, archive: Path, compute: Compute) -> dict[str, Any]:
    method = model.learner.method
    reader = FeatureReader(method.encoder, method.compute)
    features = reader.features
    reader.features = lambda pixels: compute(lambda: features(pixels))  # type: ignore[assignment]
    reference = Reference.of(method, reader)
    found = check(labelled_images(archive), archive, reader, reference, BATCH)
    return {"encoder": method.encoder.name} | found.to_dict()


def _without(found: Any, archive: Path) -> Any:
    """Findings with the names of files inside the zip, without the place where the zip was stored."""
    if isinstance(found, str):
        return found.replace(f"{archive}/", "").replace(str(archive), "the zip")
    if isinstance(found, dict):
        return {key: _without(value, archive) for key, value in found.items()}
    return [_without(entry, archive) for entry in found] if isinstance(found, (list, tuple)) else found
