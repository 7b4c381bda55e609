"""Is an image of any known class? Conformal p-values over images held out of training.

A new image of a task's classes is as likely to fall anywhere among the held-out ones, which the task's model never
saw either. So its p-value is at most `a` with probability at most `a`, whatever the scores are (Vovk et al., 2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def p_values(scores: Tensor, held_out: Tensor) -> Tensor:
    """(1 + how many of the sorted `held_out` scores are no larger) / (1 + how many there are); without any, 1."""
    if torch.compiler.is_compiling():  # ONNX has no counterpart of searchsorted
        below = (held_out <= scores.unsqueeze(1)).sum(dim=1)
    else:
        below = torch.searchsorted(held_out, scores, right=True)
    return (1 + below).double() / (1 + len(held_out))


def unknown_scores(scores: Sequence[Tensor], held_out: Sequence[Tensor]) -> Tensor:
    """1 - max_t p_t per image, in [0, 1]: high where no task would count the image among its own.

    `scores[t]` `[n]` are the images' under task t, `held_out[t]` those of its held-out images, sorted. The largest
    p-value is at least that of the true task: a known image reaches 1 - a with probability at most `a`, however many
    tasks there are.
    """
    each = [p_values(s, h) for s, h in zip(scores, held_out, strict=True)]
    return 1 - torch.stack(each).amax(dim=0)


def smallest_share(held_out: Sequence[Tensor]) -> float:
    """The smallest share of known images that may be rejected with any image being rejected at all.

    Every task must be able to rule an image out, so the task with the fewest held-out images decides: 1 / (n + 1). A
    held-out image with score -inf, about which its task would not have been asked, rules nothing out.
    """
    return max((1 + int(h.isneginf().sum())) / (1 + len(h)) for h in held_out)
