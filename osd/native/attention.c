/* Attention of new tokens over KV slots, row by row: a row's numbers do not depend on its neighbours. */
#include "common.h"

INLINE void attend(const float *query, const char *keys, const char *values, const int32_t *places, int64_t count,
                   int64_t dim, float *scores, float *out, float softcap, const int dtype) {
  const int64_t width = dtype == BFLOAT16 ? 2 : 4, row = dim * width;
  float best = -INFINITY;
  for (int64_t i = 0; i < count; i++) {
    const char *key = keys + places[i] * row;
    __m256 a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16) {
      a = _mm256_fmadd_ps(_mm256_loadu_ps(query + d), load8(key + d * width, dtype), a);
      b = _mm256_fmadd_ps(_mm256_loadu_ps(query + d + 8), load8(key + (d + 8) * width, dtype), b);
    }
    for (; d < dim; d += 8) a = _mm256_fmadd_ps(_mm256_loadu_ps(query + d), load8(key + d * width, dtype), a);
    float score = sum8(_mm256_add_ps(a, b));
    if (softcap > 0) score = softcap * tanhf(score / softcap);
    scores[i] = score;
    if (score > best) best = score;
  }
  const int64_t padded = (count + 7) / 8 * 8;
  for (int64_t i = count; i < padded; i++) scores[i] = -INFINITY;
  const __m256 shift = _mm256_set1_ps(best);
  __m256 total = _mm256_setzero_ps();
  for (int64_t i = 0; i < padded; i += 8) {
    const __m256 delta = _mm256_sub_ps(_mm256_loadu_ps(scores + i), shift);
    const __m256 live = _mm256_cmp_ps(delta, _mm256_set1_ps(-87.0f), _CMP_GT_OQ);
    const __m256 weight = _mm256_and_ps(exp_nonpositive(delta), live);
    _mm256_storeu_ps(scores + i, weight);
    total = _mm256_add_ps(total, weight);
  }
  const float scale = 1.0f / sum8(total);
  for (int64_t d = 0; d < dim; d += 8) _mm256_storeu_ps(out + d, _mm256_setzero_ps());
  for (int64_t d = 0; d < dim; d += 32) {
    const int64_t lanes = dim - d < 32 ? (dim - d) / 8 : 4;
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t i = 0; i < count; i++) {
      const __m256 weight = _mm256_set1_ps(scores[i]);
      const char *value = values + places[i] * row + d * width;
      for (int64_t l = 0; l < lanes; l++)
        sums[l] = _mm256_fmadd_ps(weight, load8(value + l * 8 * width, dtype), sums[l]);
    }
    for (int64_t l = 0; l < lanes; l++)
      _mm256_storeu_ps(out + d + l * 8, _mm256_mul_ps(sums[l], _mm256_set1_ps(scale)));
  }
}

/* Attention of `rows` new tokens over their KV slots, after storing their keys and values there.
 *
 * query [rows, heads, dim], key and value [rows, kv_heads, dim], out [rows, heads, dim]: contiguous, of `dtype`;
 * cache keys and values: [slots, kv_heads, places, dim] of `cache_dtype`. Row r belongs to slots[r], is stored at
 * stores[r], and sees the places [from[r], visible[r]) and, in a tree, base[r] + j for every mask[r, j] != 0.
 */
int osd_attention(const void *query, const void *key, const void *value, void *cache_keys, void *cache_values,
                  void *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t places_per_slot,
                  const int32_t *slots, const int32_t *stores, const int32_t *from, const int32_t *visible,
                  const int32_t *base, const uint8_t *mask, int64_t mask_width, float scaling, float softcap,
                  int dtype, int cache_dtype, int threads) {
  const int64_t width = cache_dtype == BFLOAT16 ? 2 : 4, head_bytes = places_per_slot * dim * width;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t to = ((slots[r] * kv_heads + h) * places_per_slot + stores[r]) * dim;
      const int64_t at = (r * kv_heads + h) * dim;
      for (int64_t d = 0; d < dim; d++) {
        write_element(cache_keys, to + d, read_element(key, at + d, dtype), cache_dtype);
        write_element(cache_values, to + d, read_element(value, at + d, dtype), cache_dtype);
      }
    }
  const int64_t share = (places_per_slot + 8) * 8 + dim * 8;
  char *scratch = malloc((size_t)(share * threads));
  if (!scratch) return 1;
#pragma omp parallel num_threads(threads)
  {
    char *mine = scratch + share * omp_get_thread_num();
    float *scores = (float *)mine, *wide = scores + places_per_slot + 8;
    int32_t *places = (int32_t *)(wide + 2 * dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < rows * heads; item++) {
      const int64_t r = item / heads, h = item % heads, kv = h / (heads / kv_heads);
      int64_t count = 0;
      for (int32_t place = from[r]; place < visible[r]; place++) places[count++] = place;
      if (mask)
        for (int64_t j = 0; j < mask_width; j++)
          if (mask[r * mask_width + j]) places[count++] = base[r] + (int32_t)j;
      for (int64_t d = 0; d < dim; d++) wide[d] = read_element(query, item * dim + d, dtype) * scaling;
      const int64_t offset = (slots[r] * kv_heads + kv) * head_bytes;
      const char *keys = (const char *)cache_keys + offset, *values = (const char *)cache_values + offset;
      if (cache_dtype == BFLOAT16)
        attend(wide, keys, values, places, count, dim, scores, wide + dim, softcap, BFLOAT16);
      else
        attend(wide, keys, values, places, count, dim, scores, wide + dim, softcap, FLOAT32);
      for (int64_t d = 0; d < dim; d++) write_element(out, item * dim + d, wide[dim + d], dtype);
    }
  }
  free(scratch);
  return 0;
}
