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

/* y [rows, stride], of which the first `width` of each row are written, = norm(x [rows, width]) * weight. */
static void rms_norm(const float *x, const void *weight, float *y, int64_t rows, int64_t width, int64_t stride,
                     float eps, int dtype) {
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
    for (i = 0; i < width; i++) y[r * stride + i] = row[i] * scale * read_element(weight, i, dtype);
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

/* The new tokens of a forward: their places in the KV slots and what each sees, as osd_attention takes them. */
typedef struct {
  const float *cosines, *sines; /* [rows, dim] */
  const int32_t *slots, *stores, *from, *visible, *base;
  const uint8_t *mask;
  int64_t count, mask_width;
} Rows;

/* Scratch of one layer. */
typedef struct {
  float *all, *normed, *q, *mixed, *k, *v, *gate, *up;
} Scratch;

static int make_scratch(Scratch *s, const Shape *shape, int64_t rows, int64_t input) {
  const int64_t q = shape->heads * shape->dim, kv = shape->kv_heads * shape->dim, inner = shape->intermediate;
  int64_t widest = input > q ? input : q;
  if (shape->hidden > widest) widest = shape->hidden;
  s->all = malloc((size_t)(rows * (widest + 2 * q + 2 * kv + 2 * inner)) * 4);
  if (!s->all) return 1;
  s->normed = s->all;
  s->q = s->normed + rows * widest;
  s->mixed = s->q + rows * q;
  s->k = s->mixed + rows * q;
  s->v = s->k + rows * kv;
  s->gate = s->v + rows * kv;
  s->up = s->gate + rows * inner;
  return 0;
}

/* One layer: x [rows, hidden] += attention(s->normed [rows, input]), then x += mlp(norm(x)). */
static int run_layer(const Layer *layer, const Shape *shape, const Rows *r, Scratch *s, float *x, int64_t input) {
  const int64_t h = shape->hidden, inner = shape->intermediate, rows = r->count;
  const int64_t q_width = shape->heads * shape->dim, kv_width = shape->kv_heads * shape->dim;
  const int w = shape->weight_dtype, threads = shape->threads;
  int failed = osd_linear(s->normed, layer->q, layer->q_bias, s->q, rows, input, q_width, FLOAT32, w, threads);
  failed |= osd_linear(s->normed, layer->k, layer->k_bias, s->k, rows, input, kv_width, FLOAT32, w, threads);
  failed |= osd_linear(s->normed, layer->v, layer->v_bias, s->v, rows, input, kv_width, FLOAT32, w, threads);
  rotate(s->q, r->cosines, r->sines, rows, shape->heads, shape->dim);
  rotate(s->k, r->cosines, r->sines, rows, shape->kv_heads, shape->dim);
  failed |= osd_attention(s->q, s->k, s->v, layer->keys, layer->values, s->mixed, rows, shape->heads, shape->kv_heads,
                          shape->dim, shape->places, r->slots, r->stores, r->from, r->visible, r->base, r->mask,
                          r->mask_width, shape->scaling, 0.0f, FLOAT32, shape->cache_dtype, threads);
  failed |= osd_linear(s->mixed, layer->o, layer->o_bias, s->normed, rows, q_width, h, FLOAT32, w, threads);
  add(x, s->normed, rows * h);
  rms_norm(x, layer->post_norm, s->normed, rows, h, h, shape->eps, shape->norm_dtype);
  failed |= osd_linear(s->normed, layer->gate, NULL, s->gate, rows, h, inner, FLOAT32, w, threads);
  failed |= osd_linear(s->normed, layer->up, NULL, s->up, rows, h, inner, FLOAT32, w, threads);
  swiglu(s->gate, s->up, rows * inner, threads);
  failed |= osd_linear(s->gate, layer->down, NULL, s->normed, rows, inner, h, FLOAT32, w, threads);
  add(x, s->normed, rows * h);
  return failed;
}

/* Run x [rows, hidden] through all layers, in place. The outputs of the layers tap_layers[0..taps) go to
 * tapped [rows, taps * hidden]. */
int osd_decoder(const Layer *layers, const Shape *shape, const Rows *r, float *x, const int32_t *tap_layers,
                int64_t taps, float *tapped) {
  const int64_t h = shape->hidden, rows = r->count;
  Scratch s;
  if (make_scratch(&s, shape, rows, h)) return 1;
  int failed = 0;
  for (int64_t l = 0; l < shape->layers && !failed; l++) {
    rms_norm(x, layers[l].input_norm, s.normed, rows, h, h, shape->eps, shape->norm_dtype);
    failed = run_layer(layers + l, shape, r, &s, x, h);
    for (int64_t t = 0; t < taps; t++)
      if (tap_layers[t] == l)
        for (int64_t i = 0; i < rows; i++) memcpy(tapped + (i * taps + t) * h, x + i * h, (size_t)h * 4);
  }
  free(s.all);
  return failed;
}

/* One step of an EAGLE layer, whose attention reads [norm(embedded), norm(features)] and whose input_norm is that of
 * the features. features [rows, hidden] become the next ones in place; logits [asked, vocabulary] are those after the
 * rows last[0..asked). */
int osd_eagle(const Layer *layer, const Shape *shape, const Rows *r, const float *embedding_norm,
              const float *final_norm, const void *head, int64_t vocabulary, const float *embedded, float *features,
              const int64_t *last, int64_t asked, float *logits) {
  const int64_t h = shape->hidden, rows = r->count;
  Scratch s;
  if (make_scratch(&s, shape, rows > asked ? rows : asked, 2 * h)) return 1;
  rms_norm(embedded, embedding_norm, s.normed, rows, h, 2 * h, shape->eps, FLOAT32);
  rms_norm(features, layer->input_norm, s.normed + h, rows, h, 2 * h, shape->eps, FLOAT32);
  int failed = run_layer(layer, shape, r, &s, features, 2 * h);
  for (int64_t i = 0; i < asked; i++)
    rms_norm(features + last[i] * h, final_norm, s.normed + i * h, 1, h, h, shape->eps, FLOAT32);
  failed |= osd_linear(s.normed, head, NULL, logits, asked, h, vocabulary, FLOAT32, shape->weight_dtype, shape->threads);
  free(s.all);
  return failed;
}
