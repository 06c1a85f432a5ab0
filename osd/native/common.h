/* What all kernels share. See linear.c for the layout of packed weights. */
#ifndef OSD_COMMON_H
#define OSD_COMMON_H

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1 };

INLINE float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE float read_element(const void *base, int64_t index, int dtype) {
  return dtype == BFLOAT16 ? from_bf16(((const uint16_t *)base)[index]) : ((const float *)base)[index];
}

INLINE void write_element(void *base, int64_t index, float value, int dtype) {
  if (dtype == BFLOAT16)
    ((uint16_t *)base)[index] = to_bf16(value);
  else
    ((float *)base)[index] = value;
}

/* exp for x <= 0, relative error below 2e-7 (Cody and Waite reduction, degree 6). */
INLINE __m256 exp_nonpositive(__m256 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-87.0f));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 y = _mm256_set1_ps(1.0f / 720);
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 120));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 24));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 6));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.5f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
  y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

INLINE float sum8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE __m256 load8(const char *at, int dtype) {
  if (dtype == BFLOAT16)
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
  return _mm256_loadu_ps((const float *)at);
}

int64_t osd_panels(int64_t outputs);
int osd_linear(const void *x, const void *packed, const float *bias, void *y, int64_t rows, int64_t inputs,
               int64_t outputs, int x_dtype, int dtype, int threads);
int osd_attention(const void *query, const void *key, const void *value, void *cache_keys, void *cache_values,
                  void *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t places_per_slot,
                  const int32_t *slots, const int32_t *stores, const int32_t *from, const int32_t *visible,
                  const int32_t *base, const uint8_t *mask, int64_t mask_width, float scaling, float softcap,
                  int dtype, int cache_dtype, int threads);

#endif
