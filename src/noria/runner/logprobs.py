"""Log-probabilities of sampled tokens and of the most probable alternatives, from raw scores.

Called by the sampler for rows that ask for them. "Raw" means before penalties, temperature and filters: what the
model said, not what the sampler made of it.
"""

from __future__ import annotations

import math

import numpy as np

from noria.core.plan import TokenLogprobs
from noria.runner.executor import Float32Array
from noria.runner.exponential import token_weights, weight_scale
from noria.runner.filters import largest


def token_logprobs(scores: Float32Array, token_id: int, num_top: int) -> TokenLogprobs:
    """What to report about `token_id` given one row's raw `scores` [vocab_size], with `num_top` alternatives.

    `rank` is 1 + the number of tokens with a strictly greater score. `top` is in falling order of score, lower id
    first on ties, and has fewer entries only when the vocabulary does.
    """
    best = float(scores.max())
    scale = weight_scale(len(scores))
    total = token_weights(scores, best, 1.0, 0.0, scale).sum(dtype=np.float64)
    log_total = best + math.log(total / scale)  # the C library's, which numpy's need not equal in the last bit
    score = scores[token_id]
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        ids = largest(scores, min(num_top, len(scores)))
        ids = ids[np.argsort(-scores[ids], kind="stable")]
        top = tuple((int(i), float(scores[i]) - log_total) for i in ids)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(score) - log_total,
        rank=1 + int(np.count_nonzero(scores > score)),
        top=top,
    )
