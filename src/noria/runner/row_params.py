"""How each row wants its tokens chosen, as numpy columns: `SamplingParams` in the form that the sampler reads.

Written by the persistent batch when a row is admitted, read by the sampler. Bounds are not checked here:
`SamplingParams` has done that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from noria.core.plan import Admitted

ROW_PARAMS = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int32),  # 0: off
        ("top_p", np.float64),  # 1: off
        ("min_p", np.float64),  # 0: off
        ("repetition_penalty", np.float64),  # 1: off
        ("presence_penalty", np.float64),  # 0: off
        ("frequency_penalty", np.float64),  # 0: off
        ("seed", np.uint64),
        ("index", np.uint32),
        ("wants_logprobs", np.bool_),
        ("num_top_logprobs", np.int32),
    ],
    align=True,  # as the struct of csrc/sampling.h
)
RowParams = npt.NDArray[Any]
"""A structured array [rows] of dtype `ROW_PARAMS`."""


def row_params(admitted: Admitted) -> tuple[Any, ...]:
    """The record of one row, in the order of `ROW_PARAMS`."""
    sampling = admitted.sampling
    return (
        sampling.temperature,
        # -1 and 0 both mean off; anything at or above the vocabulary keeps all of it, so clipping loses nothing.
        min(max(sampling.top_k, 0), np.iinfo(np.int32).max),
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        admitted.seed % 2**64,
        admitted.index,
        sampling.logprobs is not None,
        sampling.logprobs or 0,
    )
