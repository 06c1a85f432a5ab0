/* Vectors of this CPU's width, with the same source for every CPU. */
#ifndef OSD_VECTOR_H
#define OSD_VECTOR_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif

typedef float Vector __attribute__((vector_size(4 * WIDTH)));
typedef float Loose __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias)); /* in memory */
typedef int32_t Mask __attribute__((vector_size(4 * WIDTH)));                      /* all bits of a lane, or none */

INLINE Vector load(const float *at) { return *(const Loose *)at; }

INLINE void put(float *at, Vector value) { *(Loose *)at = value; }

INLINE Vector all(float value) { return value - (Vector){0}; }

INLINE Vector choose(Mask first, Vector a, Vector b) { return (Vector)((first & (Mask)a) | (~first & (Mask)b)); }

/* Return the larger of a and b, or b if a or b is NaN. */
INLINE Vector larger(Vector a, Vector b) { return choose(a > b, a, b); }

INLINE int any(Mask mask) {
  int32_t bits = 0;
  for (int lane = 0; lane < WIDTH; lane++) bits |= mask[lane];
  return bits != 0;
}

/* Return the sum of all lanes, halves first. */
INLINE float sum_of(Vector v) {
  float lanes[WIDTH];
  put(lanes, v);
  for (int half = WIDTH / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

INLINE float largest_of(Vector v) {
  float most = v[0];
  for (int lane = 1; lane < WIDTH; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
}

/* Transpose a square of vectors. */
INLINE void transpose(Vector rows[WIDTH]) {
  for (int round = 1; round < WIDTH; round *= 2) { /* each interleaves row i and row i + WIDTH / 2 */
    Vector next[WIDTH];
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH / 2; i++) {
      const Vector a = rows[i], b = rows[i + WIDTH / 2];
#ifdef __AVX512F__
      next[2 * i] = __builtin_shuffle(a, b, (Mask){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      next[2 * i + 1] = __builtin_shuffle(a, b, (Mask){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#else
      next[2 * i] = __builtin_shuffle(a, b, (Mask){0, 8, 1, 9, 2, 10, 3, 11});
      next[2 * i + 1] = __builtin_shuffle(a, b, (Mask){4, 12, 5, 13, 6, 14, 7, 15});
#endif
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) rows[i] = next[i];
  }
}

/* Load a vector of float32 or bfloat16 numbers. */
INLINE Vector load_wide(const void *at, int bfloat16) {
  if (!bfloat16) return load(at);
#ifdef __AVX512F__
  return (Vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at)), 16);
#else
  return (Vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16);
#endif
}

/* Return exp(x) for x <= 0, with a relative error below 2e-7 (Cody and Waite reduction, degree 6). */
INLINE Vector exp_nonpositive(Vector x) {
  const float rounding = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  x = larger(x, all(-87.0f));
  const Vector shifted = x * 1.44269504f + rounding, n = shifted - rounding;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector y = all(1.0f / 720);
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const Mask power = ((Mask)shifted + (127 - 0x4b400000)) << 23; /* the low bits of `shifted` are n */
  return y * (Vector)power;
}

/* Return x sigmoid(x). */
INLINE Vector silu(Vector x) {
  const Vector small = exp_nonpositive(choose(x > 0, -x, x)); /* exp(-|x|) */
  const Vector sigmoid = choose(x >= 0, all(1), small) / (1 + small);
  return x * sigmoid;
}

/* Return the inner product of a and b [count]. */
INLINE float product(const float *a, const float *b, int64_t count) {
  Vector sums = all(0);
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) sums += load(a + i) * load(b + i);
  float total = sum_of(sums);
  for (; i < count; i++) total += a[i] * b[i];
  return total;
}

/* Replace scores [whole vectors] by exp(score - the largest, `best`); returns their sum. */
INLINE float exponentials(float *scores, int64_t whole, float *best) {
  Vector most = all(-INFINITY), total = all(0);
  for (int64_t i = 0; i < whole; i += WIDTH) most = larger(load(scores + i), most);
  *best = largest_of(most);
  for (int64_t i = 0; i < whole; i += WIDTH) {
    const Vector delta = load(scores + i) - *best;
    const Vector weight = choose(delta > -87.0f, exp_nonpositive(delta), all(0));
    put(scores + i, weight);
    total += weight;
  }
  return sum_of(total);
}

#endif
