#include "quants.h"

#include <immintrin.h>

#include <cstring>
#include <stdexcept>

namespace noria {

namespace {

constexpr int kBlock = 32;        // numbers in a block of the simple encodings
constexpr int kSuperBlock = 256;  // in one of the "K" encodings: groups of 16 or 32 have scales of their own

float half(const uint8_t* p) {
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

// --- whole numbers ---

void decode_f32(const uint8_t* p, size_t count, float* y) { std::memcpy(y, p, count * sizeof(float)); }

void decode_f16(const uint8_t* p, size_t count, float* y) {
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 mask = count - i >= 16 ? 0xFFFF : (1u << (count - i)) - 1;
    _mm512_mask_storeu_ps(y + i, mask, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p + 2 * i)));
  }
}

void decode_bf16(const uint8_t* p, size_t count, float* y) {
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 mask = count - i >= 16 ? 0xFFFF : (1u << (count - i)) - 1;
    const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p + 2 * i)), 16);
    _mm512_mask_storeu_ps(y + i, mask, _mm512_castsi512_ps(bits));
  }
}

// --- blocks of 32: a scale, perhaps a minimum, then numbers. The low halves of the bytes are the first 16 numbers, the
// high halves the others; a fifth bit stands in a word of its own. ---

// values[j] of 4 bits, or of 5 if there is a word of fifth bits.
void unpack_block(const uint8_t* nibbles, const uint8_t* fifth, int* values) {
  for (int j = 0; j < 16; ++j) {
    values[j] = nibbles[j] & 15;
    values[j + 16] = nibbles[j] >> 4;
  }
  if (fifth == nullptr) return;
  uint32_t bits;
  std::memcpy(&bits, fifth, 4);
  for (int j = 0; j < kBlock; ++j) values[j] |= int(bits >> j & 1) << 4;
}

// scale * (q - offset)
template <bool has_fifth>
void decode_around_zero(const uint8_t* p, size_t num_blocks, float* y) {
  constexpr int kNumbers = has_fifth ? 6 : 2, kOffset = has_fifth ? 16 : 8;
  int q[kBlock];
  for (; num_blocks > 0; --num_blocks, p += kNumbers + 16, y += kBlock) {
    unpack_block(p + kNumbers, has_fifth ? p + 2 : nullptr, q);
    const float scale = half(p);
    for (int j = 0; j < kBlock; ++j) y[j] = scale * float(q[j] - kOffset);
  }
}

// scale * q + minimum
template <bool has_fifth>
void decode_from_minimum(const uint8_t* p, size_t num_blocks, float* y) {
  constexpr int kNumbers = has_fifth ? 8 : 4;
  int q[kBlock];
  for (; num_blocks > 0; --num_blocks, p += kNumbers + 16, y += kBlock) {
    unpack_block(p + kNumbers, has_fifth ? p + 4 : nullptr, q);
    const float scale = half(p), minimum = half(p + 2);
    for (int j = 0; j < kBlock; ++j) y[j] = scale * float(q[j]) + minimum;
  }
}

void decode_q8_0(const uint8_t* p, size_t num_blocks, float* y) {
  for (; num_blocks > 0; --num_blocks, p += 2 + kBlock, y += kBlock) {
    const float scale = half(p);
    for (int j = 0; j < kBlock; ++j) y[j] = scale * float(int8_t(p[2 + j]));
  }
}

// What 4 bits stand for in the IQ4 encodings: steps that are finer around zero.
constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void decode_iq4_nl(const uint8_t* p, size_t num_blocks, float* y) {
  int q[kBlock];
  for (; num_blocks > 0; --num_blocks, p += 2 + 16, y += kBlock) {
    unpack_block(p + 2, nullptr, q);
    const float scale = half(p);
    for (int j = 0; j < kBlock; ++j) y[j] = scale * float(kIq4Values[q[j]]);
  }
}

// --- blocks of 256 ---

// 16 scales and 16 minima of 4 bits; then numbers of 2 bits: each byte has one of each of four groups of 32.
void decode_q2_k(const uint8_t* p, size_t num_blocks, float* y) {
  for (; num_blocks > 0; --num_blocks, p += 84, y += kSuperBlock) {
    const float scale = half(p + 80), minimum = half(p + 82);
    for (int group = 0; group < 16; ++group) {
      const uint8_t* from = p + 16 + group / 8 * 32 + group % 2 * 16;
      const int shift = group % 8 / 2 * 2;
      const float d = scale * float(p[group] & 15), m = minimum * float(p[group] >> 4);
      for (int j = 0; j < 16; ++j) y[group * 16 + j] = d * float(from[j] >> shift & 3) - m;
    }
  }
}

// Numbers of 2 bits as above, and a third bit in 32 bytes before them: 4 is subtracted where it is not set. Scales of 6
// bits around 32: four bits in 8 bytes, two more in the 4 that follow.
void decode_q3_k(const uint8_t* p, size_t num_blocks, float* y) {
  for (; num_blocks > 0; --num_blocks, p += 110, y += kSuperBlock) {
    const uint8_t* scales = p + 96;
    const float scale = half(p + 108);
    for (int group = 0; group < 16; ++group) {
      const uint8_t* from = p + 32 + group / 8 * 32 + group % 2 * 16;
      const uint8_t* third = p + group % 2 * 16;
      const int shift = group % 8 / 2 * 2, bit = group / 2;
      const int low = scales[group % 8] >> (group / 8 * 4) & 15, high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
      const float d = scale * float((low | high << 4) - 32);
      for (int j = 0; j < 16; ++j) y[group * 16 + j] = d * float((from[j] >> shift & 3) - (third[j] >> bit & 1 ? 0 : 4));
    }
  }
}

// Scale and minimum of group `j` of 8, 6 bits each in 12 bytes: the first four have bytes of their own, whose upper two
// bits belong to the last four.
void scale_and_minimum(const uint8_t* p, int j, int* scale, int* minimum) {
  if (j < 4) {
    *scale = p[j] & 63;
    *minimum = p[j + 4] & 63;
  } else {
    *scale = (p[j + 4] & 15) | p[j - 4] >> 6 << 4;
    *minimum = p[j + 4] >> 4 | p[j] >> 6 << 4;
  }
}

// Numbers of 4 bits, 32 bytes for two groups of 32; with `has_fifth` bit j of 32 bytes before them is group j's fifth.
template <bool has_fifth>
void decode_q4_k_or_q5_k(const uint8_t* p, size_t num_blocks, float* y) {
  constexpr int kNumbers = has_fifth ? 48 : 16;
  for (; num_blocks > 0; --num_blocks, p += kNumbers + 128, y += kSuperBlock) {
    const float scale = half(p), minimum = half(p + 2);
    for (int group = 0; group < 8; ++group) {
      int group_scale, group_minimum;
      scale_and_minimum(p + 4, group, &group_scale, &group_minimum);
      const float d = scale * float(group_scale), m = minimum * float(group_minimum);
      const uint8_t* from = p + kNumbers + group / 2 * 32;
      const int shift = group % 2 * 4;
      for (int j = 0; j < 32; ++j) {
        int q = from[j] >> shift & 15;
        if (has_fifth) q |= (p[16 + j] >> group & 1) << 4;
        y[group * 32 + j] = d * float(q) - m;
      }
    }
  }
}

// Numbers of 6 bits around 32: four in 128 bytes, each half of which has two groups of 32 in its low and two in its high
// halves; two in 64 bytes, each with those of four groups. 16 signed scales.
void decode_q6_k(const uint8_t* p, size_t num_blocks, float* y) {
  for (; num_blocks > 0; --num_blocks, p += 210, y += kSuperBlock) {
    const float scale = half(p + 208);
    for (int group = 0; group < 16; ++group) {
      const int part = group / 8, within = group % 8 / 2, side = group % 2 * 16;
      const uint8_t* low = p + part * 64 + within % 2 * 32 + side;
      const uint8_t* high = p + 128 + part * 32 + side;
      const float d = scale * float(int8_t(p[192 + group]));
      for (int j = 0; j < 16; ++j) {
        const int q = (low[j] >> (within / 2 * 4) & 15) | (high[j] >> (within * 2) & 3) << 4;
        y[group * 16 + j] = d * float(q - 32);
      }
    }
  }
}

// Eight groups of 32 as in IQ4_NL, with scales of 6 bits around 32: two bits each in a word of 16, four in 4 bytes.
void decode_iq4_xs(const uint8_t* p, size_t num_blocks, float* y) {
  int q[kBlock];
  for (; num_blocks > 0; --num_blocks, p += 136) {
    const float scale = half(p);
    uint16_t high;
    std::memcpy(&high, p + 2, 2);
    for (int group = 0; group < 8; ++group, y += kBlock) {
      const int low = p[4 + group / 2] >> (group % 2 * 4) & 15;
      const float d = scale * float((low | (high >> (2 * group) & 3) << 4) - 32);
      unpack_block(p + 8 + group * 16, nullptr, q);
      for (int j = 0; j < kBlock; ++j) y[j] = d * float(kIq4Values[q[j]]);
    }
  }
}

}  // namespace

const std::vector<Encoding>& encodings() {
  static const std::vector<Encoding> all = {
      {"F32", 1, 4, decode_f32},
      {"F16", 1, 2, decode_f16},
      {"BF16", 1, 2, decode_bf16},
      {"Q4_0", kBlock, 18, decode_around_zero<false>},
      {"Q4_1", kBlock, 20, decode_from_minimum<false>},
      {"Q5_0", kBlock, 22, decode_around_zero<true>},
      {"Q5_1", kBlock, 24, decode_from_minimum<true>},
      {"Q8_0", kBlock, 34, decode_q8_0},
      {"Q2_K", kSuperBlock, 84, decode_q2_k},
      {"Q3_K", kSuperBlock, 110, decode_q3_k},
      {"Q4_K", kSuperBlock, 144, decode_q4_k_or_q5_k<false>},
      {"Q5_K", kSuperBlock, 176, decode_q4_k_or_q5_k<true>},
      {"Q6_K", kSuperBlock, 210, decode_q6_k},
      {"IQ4_NL", kBlock, 18, decode_iq4_nl},
      {"IQ4_XS", kSuperBlock, 136, decode_iq4_xs},
  };
  return all;
}

const Encoding& encoding_of(const std::string& name) {
  for (const Encoding& encoding : encodings())
    if (name == encoding.name) return encoding;
  throw std::invalid_argument("no encoding is called " + name);
}

}  // namespace noria
