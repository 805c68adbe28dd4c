"""Every architecture whose configuration can be read: one module for each family, listed here.

Used by `noria.files.model_config`. What computes an architecture is in `noria.models.registry`, how its tensors are
named in `noria.weights.maps`; the three agree on `ModelConfig.architecture`. `docs/models.md` shows how to add one.
"""

from __future__ import annotations

from typing import Final

from noria.files.architectures.common import ArchitectureFiles
from noria.files.architectures.gemma import GEMMA2, GEMMA3
from noria.files.architectures.granite import GRANITE
from noria.files.architectures.llama import LLAMA, MISTRAL
from noria.files.architectures.phi3 import PHI3
from noria.files.architectures.qwen import QWEN2, QWEN3
from noria.files.architectures.smollm3 import SMOLLM3

ARCHITECTURES: Final[tuple[ArchitectureFiles, ...]] = (
    LLAMA,
    QWEN2,
    QWEN3,
    MISTRAL,
    GEMMA2,
    GEMMA3,
    PHI3,
    SMOLLM3,
    GRANITE,
)
