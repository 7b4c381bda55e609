"""Replay: fine-tuning on each new task together with a memory of old images.

New and remembered images are shuffled into one set, and the loss is plain cross-entropy over all classes so far. The
baseline of all methods with a memory: nothing protects the network but the images themselves. They are few, so the head
prefers the classes of the newest task. With `replay_batches=balanced` a step has as many remembered images as new
ones, and the fewer there are, the more often each is shown: not what papers mean by replay.

The memory holds equally many images of every class and never more than its budget. Public codes often take the first
images of a data set; here they are drawn at random.
"""

from __future__ import annotations

from tpl.methods.base import register
from tpl.methods.parts.rehearsal import RehearsalMethod


@register
class Replay(RehearsalMethod):
    """One network, trained on new and remembered images alike."""

    name = "replay"
    summary = "fine-tuning on each new task together with a memory of old images"
    keeps = "a class-balanced memory of images"
    cost = "one pass per new or remembered image and epoch; one an answer"
    splits = True
    from_scratch = True
