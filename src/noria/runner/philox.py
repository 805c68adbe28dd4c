"""Counter-based random numbers: Philox4x32-10, vectorised over rows.

Called by the sampler, once per sampled token. There is no generator and no state: a number is a pure function of
(seed, output position, sequence index), so nothing has to be saved, rewound or kept apart between requests.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). This is the 4 x 32 bit kind;
`numpy.random.Philox` is 4 x 64 bit and gives other numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]

NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_11 = np.uint64(11)


def philox4x32(counter: UInt32Array, key: UInt32Array) -> UInt32Array:
    """Ten rounds of Philox: counter [rows, 4] and key [rows, 2] give random words [rows, 4]."""
    # Words live in uint64 so that a product of two of them keeps its high half.
    c0, c1, c2, c3 = counter.astype(np.uint64).T
    k0, k1 = key.astype(np.uint64).T
    for _ in range(NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _32) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> _32) ^ c3 ^ k1, product0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(
    seeds: UInt64Array, output_positions: npt.NDArray[np.integer], indexes: npt.NDArray[np.integer]
) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row; all arguments and the result are [rows].

    Key words are the seed's low and high half, counter words (output position, sequence index, 0, 0).
    """
    key = np.stack((seeds & _LOW, seeds >> _32), axis=1).astype(np.uint32)
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0] = output_positions
    counter[:, 1] = indexes
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << _32 | words[:, 1]) >> _11
    return bits.astype(np.float64) * 2.0**-53
