"""The native module (csrc/module.cpp)."""

import numpy as np
import numpy.typing as npt

interface: int

def has_avx512_bf16() -> bool: ...
def has_amx_bf16() -> bool: ...
def encodings() -> list[str]: ...
def decode(rows: npt.NDArray[np.uint8], encoding: str) -> npt.NDArray[np.float32]: ...
def read_bandwidth(threads: int, num_bytes: int) -> float: ...
def round_trip_seconds() -> float: ...
def bfloat16_kernel_flops(threads: int) -> float: ...
def float32_kernel_flops(threads: int) -> float: ...
def bfloat16_register_flops(threads: int) -> float: ...
def float32_register_flops(threads: int) -> float: ...

class _Executor:
    timed: bool
    def __init__(self, threads: int, use_amx: bool) -> None: ...
    def begin_matrix(self, outputs: int, inputs: int, interleave: bool) -> int: ...
    def fill_matrix(
        self,
        matrix: int,
        first_row: int,
        rows: npt.NDArray[np.uint8],
        encoding: str,
        interleaved_heads: int,
        begin: int,
        end: int,
    ) -> None: ...
    def set_bias(self, matrix: int, bias: list[float]) -> None: ...
    def add_vector(self, values: list[float]) -> int: ...
    def set_vector(self, vector: int, values: list[float]) -> None: ...
    def add_rows(self, width: int) -> int: ...
    def add_slabs(self, width: int) -> int: ...
    def add_attention(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        rotary_dim: int | None = None,
    ) -> int: ...
    def add_operation(
        self,
        kind: str,
        input: int = -1,
        table: int = -1,
        output: int = -1,
        weight: int = -1,
        layer: int = -1,
        attention: int = -1,
        q_norm: int = -1,
        k_norm: int = -1,
        epsilon: float = 0.0,
        factor: float = 1.0,
        soft_cap: float = 0.0,
        epilogue: str = "store",
        selects: bool = False,
        on_logit_rows: bool = False,
        label: str = "",
    ) -> None: ...
    def touch_kv(self) -> None: ...
    def place_layers(self, group_of: list[int], array_of: list[int], windows: list[int]) -> None: ...
    def allocate_kv(self, num_arrays: int, num_blocks: int, block_size: int, attention: int) -> None: ...
    def forward(
        self,
        token_ids: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        query_start: npt.NDArray[np.int32],
        context_len: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        logit_tokens: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.float32]: ...
    def sample(
        self,
        logits: npt.NDArray[np.float32],
        params: npt.NDArray[np.uint8],
        token_ids: npt.NDArray[np.int32],
        table_rows: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int32],
        num_prompt_tokens: npt.NDArray[np.int32],
        chosen: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float64],
        ranks: npt.NDArray[np.int32],
        top_ids: npt.NDArray[np.int32],
        top_logprobs: npt.NDArray[np.float64],
        masks: npt.NDArray[np.uint32] | None = None,
        mask_of_row: npt.NDArray[np.int32] | None = None,
        bias_start: npt.NDArray[np.int32] | None = None,
        bias_ids: npt.NDArray[np.int32] | None = None,
        biases: npt.NDArray[np.float32] | None = None,
        chosen_is_given: bool = False,
    ) -> None: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kernel(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def seconds(self) -> list[float]: ...

class ExecutorBF16(_Executor): ...
class ExecutorF32(_Executor): ...
