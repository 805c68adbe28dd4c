"""Which tokens may be drawn: the borders of top-k and top-p, and the draw itself, for one row.

Called by the sampler for rows that are not greedy; each function sees one row and nothing else, so a row's token
cannot depend on its neighbours. Kept sets are arrays of ids in ascending order. Weights are whole numbers
(`noria.runner.exponential`), so their sums are exact and do not depend on the order.

Ties are settled by id: of equal values at a border, the lower ids are inside. Top-k compares scores (after
penalties); top-p compares weights, whose rounding may make scores equal that differ in their last bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from noria.runner.executor import Float32Array
from noria.runner.exponential import token_weights, weight_scale

Ids = npt.NDArray[np.intp]

_LONG = 4096
"""From this length on a row is worth a cheap pass that narrows the work; results are the same without."""
_GROUPS = 512
_BLOCK = 256


def largest(values: Float32Array, count: int) -> Ids:
    """Positions of the `count` largest of `values` [n] (1 <= count <= n), ascending; lower positions win ties."""
    candidates = values
    if len(values) >= _LONG and count <= _GROUPS // 2:
        # The count-th largest of the maxima of 512 disjoint groups is not above the count-th largest of all, and
        # little else reaches it: one cheap pass in place of a partition of the whole row.
        maxima = values[: len(values) // _GROUPS * _GROUPS].reshape(-1, _GROUPS).max(axis=0)
        candidates = values[values >= np.partition(maxima, _GROUPS - count)[_GROUPS - count]]
    border = np.partition(candidates, len(candidates) - count)[len(candidates) - count]
    return _at_least(values, border, count)


def nucleus(weights: Float32Array, top_p: float) -> Ids:
    """Positions of top-p's tokens among `weights` [n], ascending: the fewest whose sum reaches `top_p` of the total.

    In falling order a token is inside while the float64 sum of those before it is below `top_p` x total, so the
    heaviest always is.
    """
    total = float(weights.sum(dtype=np.float64))
    wanted = top_p * total
    # Tokens lighter than this together weigh at most half of what top-p leaves out, so the border lies above them:
    # a peaked row sorts a few hundred tokens instead of the vocabulary.
    floor = 0.5 * (total - wanted) / len(weights)
    falling = np.sort(weights[weights >= floor])[::-1]
    sums = np.cumsum(falling, dtype=np.float64)
    count = min(int(np.searchsorted(sums, wanted, side="left")) + 1, len(falling))
    return _at_least(weights, falling[count - 1], count)


def _at_least(values: Float32Array, border: np.float32, count: int) -> Ids:
    """Positions of values above `border`, the `count`-th largest, and the lowest equal to it that make up `count`."""
    inside = np.flatnonzero(values >= border)
    surplus = len(inside) - count
    if surplus:
        ties = np.flatnonzero(values[inside] == border)
        inside = np.delete(inside, ties[-surplus:])
    return inside


def draw(scores: Float32Array, best: float, u: float, params: Any) -> int:
    """The token that `u` in [0, 1) picks from one row's `scores` [vocab_size], whose largest value is `best`.

    `params` is a `ROW_PARAMS` record with a temperature that is not greedy. Applying top-k before min-p is only
    cheaper: both keep a prefix of the same falling order, so the order between the two does not matter. Top-p comes
    last, on what they left.
    """
    scale = weight_scale(len(scores))
    ids: Ids | None = None
    top_k = int(params["top_k"])
    if 0 < top_k < len(scores):
        ids = largest(scores, top_k)
        scores = scores[ids]
    weights = token_weights(scores, best, float(params["temperature"]), float(params["min_p"]), scale)
    top_p = float(params["top_p"])
    if top_p < 1:
        kept = nucleus(weights, top_p)
        weights = weights[kept]
        ids = kept if ids is None else ids[kept]
    place = pick(weights, u)
    return place if ids is None else int(ids[place])


def pick(weights: Float32Array, u: float) -> int:
    """The smallest position whose running sum of `weights` [n] exceeds u x total, for u in [0, 1).

    A u of 53 bits times the total never reaches the total, so a position always exists.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = u * sums[-1]
    block = int(np.searchsorted(sums, target, side="right"))
    before = sums[block - 1] if block else 0.0
    start = block * _BLOCK
    running = before + np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + int(np.searchsorted(running, target, side="right"))
