"""TensorBoard: event files that `tensorboard --logdir` shows."""

from __future__ import annotations

from pathlib import Path

from tpl.bench.trackers.base import LOSS, Numbers, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Event files in RUN/tensorboard, or in WHERE/NAME-OF-RUN."""

    package, extra = "tensorboard", "tensorboard"

    def __init__(self, where: str, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(where).expanduser() / run.place.name if where else run.place / "tensorboard"
        # Two files, as tasks and epochs count apart. What an interrupted task had told beyond is wiped out.
        self.stages = SummaryWriter(str(folder), purge_step=run.learned + 1)
        self.training = SummaryWriter(str(folder / "training"), purge_step=run.epochs + 1)
        if not run.learned:
            rows = "".join(f"| {key} | {value} |\n" for key, value in run.settings.items())
            self.stages.add_text("settings", f"| setting | value |\n| --- | --- |\n{rows}")

    def stage(self, task: int, numbers: Numbers) -> None:
        """The numbers after a task."""
        for key, value in numbers.items():
            self.stages.add_scalar(key, value, task)
        self.stages.flush()

    def loss(self, epoch: int, value: float) -> None:
        """The loss of an epoch."""
        self.training.add_scalar(LOSS, value, epoch)
        self.training.flush()

    def close(self, finished: bool) -> None:
        """No more to tell."""
        self.stages.close()
        self.training.close()
