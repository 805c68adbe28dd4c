"""Short ways to build plan entries and row parameters in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from noria.core.plan import Admitted
from noria.runner.row_params import ROW_PARAMS, RowParams, row_params
from noria.sampling import SamplingParams


def admitted(
    request_id: str = "r",
    tokens: Sequence[int] = (1,),
    *,
    blocks: Sequence[int] = (1,),
    prompt: int | None = None,
    computed: int = 0,
    seed: int = 0,
    index: int = 0,
    **sampling: Any,
) -> Admitted:
    return Admitted(
        request_id=request_id,
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        num_computed_tokens=computed,
        block_ids=tuple(blocks),
        sampling=SamplingParams(**sampling),
        seed=seed,
        index=index,
    )


def params_of(*rows: Admitted) -> RowParams:
    return np.array([row_params(row) for row in rows], dtype=ROW_PARAMS)
