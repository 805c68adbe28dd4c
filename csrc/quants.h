// How model files store numbers, and how to read them: blocks of bytes into float32.
//
// The encodings are GGUF's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md names them); F32, F16 and BF16 are
// safetensors' as well. The numbers are those of the `gguf` package, bit for bit (tests/ops/test_quants.py): scales have 11
// bits and what they are multiplied with at most 13, so products are exact in float32, and only an addition rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace noria {

struct Encoding {
  const char* name;
  int block_values;  // consecutive numbers of a row ...
  int block_bytes;   // ... in so many bytes
  void (*decode)(const uint8_t* blocks, size_t num_blocks, float* values);

  size_t row_bytes(int num_values) const { return size_t(num_values / block_values) * block_bytes; }
};

// All that can be read here.
const std::vector<Encoding>& encodings();

// By name. Raises std::invalid_argument.
const Encoding& encoding_of(const std::string& name);

}  // namespace noria
