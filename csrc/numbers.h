// Conversions between float32 and the type of weights, activations and KV, and exp, 16 numbers at a time.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "gemm.h"

namespace noria {

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load16(const bf16* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store16(float* p, __m512 x) { _mm512_storeu_ps(p, x); }
inline void store16(bf16* p, __m512 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
}

// What a kernel multiplies: 16 outputs at a time, each taking `kDepth` inputs that stand together in memory.
template <typename T>
struct Lanes;

template <>
struct Lanes<bf16> {
  using Vector = __m512bh;
  static constexpr int kDepth = 2;
  static Vector load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Vector spread(const bf16* p) {  // the same inputs for all outputs
    int both;
    std::memcpy(&both, p, 4);
    return (__m512bh)_mm512_set1_epi32(both);
  }
  static __m512 add_product(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};

template <>
struct Lanes<float> {
  using Vector = __m512;
  static constexpr int kDepth = 1;
  static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  static Vector spread(const float* p) { return _mm512_set1_ps(*p); }
  static __m512 add_product(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

template <typename T>
inline T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return bf16(_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(x)), 0));
  }
}

template <bool kSecond>
inline void Ahead::fetch(int times) {
  for (size_t byte = 0; byte < times * step || byte == 0; byte += 64) {
    const char* line = reinterpret_cast<const char*>(at + byte);
    kSecond ? _mm_prefetch(line, _MM_HINT_T1) : _mm_prefetch(line, _MM_HINT_T0);
  }
  at += times * step;
}

// e^x to about 2 units in the last place; exactly 1 at 0 and 0 below -87; NaN for NaN.
inline __m512 exp16(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  const __m512 ln2_high = _mm512_set1_ps(0.693359375f), ln2_low = _mm512_set1_ps(-2.12194440e-4f);
  const __mmask16 is_tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_LT_OQ);
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));  // in this order they pass NaN on
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, ln2_high, x);
  r = _mm512_fnmadd_ps(n, ln2_low, r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(_mm512_knot(is_tiny), p, n);
}

// The same for weights that are rounded to bfloat16 afterwards, x <= 0: with a relative error below 3e-6.
inline __m512 rough_exp16(__m512 x) {
  const __m512 scaled = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));  // e^x = 2^scaled
  const __mmask16 counts = _mm512_cmp_ps_mask(scaled, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);  // NaN does
  const __m512 n = _mm512_roundscale_ps(scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(scaled, n);
  __m512 p = _mm512_set1_ps(9.58284736e-3f);  // fitted, with exactly 1 at 0
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.59064299e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40240991e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93124175e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(counts, p, n);
}

// To about 4 units in the last place; NaN for NaN.
inline __m512 tanh16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), size = _mm512_abs_ps(x);
  const __m512 t = exp16(_mm512_mul_ps(size, _mm512_set1_ps(-2.0f)));
  const __m512 large = _mm512_div_ps(_mm512_sub_ps(one, t), _mm512_add_ps(one, t));
  // Where 1 - t would lose what x has: its series, whose next term is below a tenth of a unit.
  const __m512 square = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(2.18694885e-2f);
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-5.39682540e-2f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(1.33333333e-1f));
  p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(-3.33333333e-1f));
  const __m512 small = _mm512_fmadd_ps(_mm512_mul_ps(size, square), p, size);
  const __mmask16 is_small = _mm512_cmp_ps_mask(size, _mm512_set1_ps(0.25f), _CMP_LT_OQ);
  const __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
  return _mm512_or_ps(_mm512_mask_mov_ps(large, is_small, small), sign);
}

inline __m512 soft_cap16(__m512 x, float cap) {
  const __m512 caps = _mm512_set1_ps(cap);
  return _mm512_mul_ps(tanh16(_mm512_div_ps(x, caps)), caps);
}

inline __m512 sigmoid16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(one, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

inline __m512 silu16(__m512 x) { return _mm512_mul_ps(x, sigmoid16(x)); }

// In its tanh form, x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3), which is x * sigmoid(2 u).
inline __m512 gelu16(__m512 x) {
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  const __m512 u = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f));
  return _mm512_mul_ps(x, sigmoid16(u));
}

template <typename T>
inline __m512 softmax16(__m512 x) {
  if constexpr (sizeof(T) == 2) return rough_exp16(x);
  return exp16(x);
}

}  // namespace noria
