"""The loss of a window is Σ per-token loss / Σ tokens, so each micro-batch hands on a sum."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Σ of -log p(target) over the targets that are not -100, in nats; a float32 scalar.

    The softmax is in float32 whatever the logits' dtype. Targets that are all ignored give 0, never NaN.
    """
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=-100, reduction="sum")
