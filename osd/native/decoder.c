/* A stack of Llama-shaped decoder layers in one call: nothing but arithmetic between reading one weight and the next.
 *
 * The residual stream stays float32 between layers, whatever the dtype of weights and cache.
 */
#include "common.h"

typedef struct {
  const void *input_norm, *post_norm; /* [hidden] of norm_dtype */
  const void *q, *k, *v, *o, *gate, *up, *down; /* packed */
  const float *q_bias, *k_bias, *v_bias, *o_bias; /* or null */
  void *keys, *values; /* [slots, kv_heads, places, dim] */
} Layer;

typedef struct {
  int64_t layers, hidden, heads, kv_heads, dim, intermediate, places;
  float eps, scaling;
  int32_t weight_dtype, norm_dtype, cache_dtype, threads;
} Shape;

static void rms_norm(const float *x, const void *weight, float *y, int64_t rows, int64_t width, float eps, int dtype) {
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * width;
    __m256 sum = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 8 <= width; i += 8) {
      const __m256 value = _mm256_loadu_ps(row + i);
      sum = _mm256_fmadd_ps(value, value, sum);
    }
    float total = sum8(sum);
    for (; i < width; i++) total += row[i] * row[i];
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    for (i = 0; i < width; i++) y[r * width + i] = row[i] * scale * read_element(weight, i, dtype);
  }
}

/* Rotate [rows, heads, dim] in place; cosines and sines are [rows, dim], the halves of dim are the planes' axes. */
static void rotate(float *x, const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < heads; h++) {
      float *a = x + (r * heads + h) * dim, *b = a + half;
      const float *c = cosines + r * dim, *s = sines + r * dim;
      for (int64_t d = 0; d < half; d++) {
        const float first = a[d], second = b[d];
        a[d] = first * c[d] - second * s[d];
        b[d] = second * c[half + d] + first * s[half + d];
      }
    }
}

/* gate = silu(gate) * up */
static void swiglu(float *gate, const float *up, int64_t count, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 1 << 14)
  for (int64_t i = 0; i < count / 8; i++) {
    const __m256 x = _mm256_loadu_ps(gate + i * 8), one = _mm256_set1_ps(1.0f);
    const __m256 small = exp_nonpositive(_mm256_or_ps(x, _mm256_set1_ps(-0.0f))); /* exp(-|x|) */
    const __m256 above = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ);
    const __m256 sigmoid = _mm256_div_ps(_mm256_blendv_ps(small, one, above), _mm256_add_ps(one, small));
    _mm256_storeu_ps(gate + i * 8, _mm256_mul_ps(_mm256_mul_ps(x, sigmoid), _mm256_loadu_ps(up + i * 8)));
  }
  for (int64_t i = count / 8 * 8; i < count; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void add(float *x, const float *y, int64_t count) {
  for (int64_t i = 0; i < count; i++) x[i] += y[i];
}

/* Run x [rows, hidden] through all layers, in place.
 *
 * cosines and sines [rows, dim]; slots, stores, from, visible, base, mask as osd_attention takes them. The outputs of
 * the layers tap_layers[0..taps) go to tapped [rows, taps * hidden].
 */
int osd_decoder(const Layer *layers, const Shape *shape, float *x, int64_t rows, const float *cosines,
                const float *sines, const int32_t *slots, const int32_t *stores, const int32_t *from,
                const int32_t *visible, const int32_t *base, const uint8_t *mask, int64_t mask_width,
                const int32_t *tap_layers, int64_t taps, float *tapped) {
  const int64_t h = shape->hidden, inner = shape->intermediate;
  const int64_t q_width = shape->heads * shape->dim, kv_width = shape->kv_heads * shape->dim;
  const int64_t widest = h > q_width ? h : q_width;
  float *scratch = malloc((size_t)(rows * (widest + 2 * q_width + 2 * kv_width + 2 * inner)) * 4);
  if (!scratch) return 1;
  float *normed = scratch, *q = normed + rows * widest, *mixed = q + rows * q_width, *k = mixed + rows * q_width;
  float *v = k + rows * kv_width, *gate = v + rows * kv_width, *up = gate + rows * inner;
  const int w = shape->weight_dtype, threads = shape->threads;
  int failed = 0;
  for (int64_t l = 0; l < shape->layers && !failed; l++) {
    const Layer *layer = layers + l;
    rms_norm(x, layer->input_norm, normed, rows, h, shape->eps, shape->norm_dtype);
    failed |= osd_linear(normed, layer->q, layer->q_bias, q, rows, h, q_width, FLOAT32, w, threads);
    failed |= osd_linear(normed, layer->k, layer->k_bias, k, rows, h, kv_width, FLOAT32, w, threads);
    failed |= osd_linear(normed, layer->v, layer->v_bias, v, rows, h, kv_width, FLOAT32, w, threads);
    rotate(q, cosines, sines, rows, shape->heads, shape->dim);
    rotate(k, cosines, sines, rows, shape->kv_heads, shape->dim);
    failed |= osd_attention(q, k, v, layer->keys, layer->values, mixed, rows, shape->heads, shape->kv_heads, shape->dim,
                            shape->places, slots, stores, from, visible, base, mask, mask_width, shape->scaling, 0.0f,
                            FLOAT32, shape->cache_dtype, threads);
    failed |= osd_linear(mixed, layer->o, layer->o_bias, normed, rows, q_width, h, FLOAT32, w, threads);
    add(x, normed, rows * h);
    rms_norm(x, layer->post_norm, normed, rows, h, shape->eps, shape->norm_dtype);
    failed |= osd_linear(normed, layer->gate, NULL, gate, rows, h, inner, FLOAT32, w, threads);
    failed |= osd_linear(normed, layer->up, NULL, up, rows, h, inner, FLOAT32, w, threads);
    swiglu(gate, up, rows * inner, threads);
    failed |= osd_linear(gate, layer->down, NULL, normed, rows, inner, h, FLOAT32, w, threads);
    add(x, normed, rows * h);
    for (int64_t t = 0; t < taps; t++)
      if (tap_layers[t] == l)
        for (int64_t r = 0; r < rows; r++) memcpy(tapped + (r * taps + t) * h, x + r * h, (size_t)h * 4);
  }
  free(scratch);
  return failed;
}
