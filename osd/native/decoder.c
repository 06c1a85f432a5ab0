/* A stack of Llama-shaped decoder layers in one call and one parallel region: nothing but arithmetic between reading
 * one weight and the next.
 *
 * The residual stream stays float32 between layers, whatever the dtype of weights and cache.
 */
#include "common.h"
#include "team.h"

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
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= width; i += 32)
      for (int j = 0; j < 4; j++) {
        const __m256 value = _mm256_loadu_ps(row + i + j * 8);
        sums[j] = _mm256_fmadd_ps(value, value, sums[j]);
      }
    float total = sum8(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
    for (; i < width; i++) total += row[i] * row[i];
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    const int64_t element = dtype == BFLOAT16 ? 2 : 4;
    for (i = 0; i + 8 <= width; i += 8) {
      const __m256 value = _mm256_mul_ps(_mm256_loadu_ps(row + i), _mm256_set1_ps(scale));
      _mm256_storeu_ps(y + r * stride + i, _mm256_mul_ps(value, load8((const char *)weight + i * element, dtype)));
    }
    for (; i < width; i++) y[r * stride + i] = row[i] * scale * read_element(weight, i, dtype);
  }
}

/* Rotate x [heads, dim] in place; cosines and sines are [dim], the halves of dim are the planes' axes. */
static void rotate(float *restrict x, const float *restrict cosines, const float *restrict sines, int64_t heads,
                   int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t d = 0; d < half; d++) {
      const float first = x[h * dim + d], second = x[h * dim + half + d];
      x[h * dim + d] = first * cosines[d] - second * sines[d];
      x[h * dim + half + d] = second * cosines[half + d] + first * sines[half + d];
    }
}

static void store(const float *x, void *to, int64_t at, int64_t count, int dtype) {
  if (dtype == BFLOAT16)
    for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[at + i] = to_bf16(x[i]);
  else
    memcpy((float *)to + at, x, (size_t)count * 4);
}

/* What a forward works with beside the weights. `normed` and `scratch` have a part for each thread. */
typedef struct {
  char *all;
  float *q, *mixed, *k, *v, *gated, *normed;
  int64_t normed_size; /* floats of a thread */
  char *scratch;
  Plan plan;
} Space;

static int make_space(Space *s, const Shape *shape, const Rows *rows, int64_t normed_size) {
  const Attention a = {.heads = shape->heads, .kv_heads = shape->kv_heads, .dim = shape->dim, .places = shape->places};
  const int64_t q = shape->heads * shape->dim, kv = shape->kv_heads * shape->dim, count = rows->count;
  if (osd_plan(&s->plan, rows, &a, shape->threads)) return 1;
  s->normed_size = (normed_size + 15) / 16 * 16;
  const int64_t shared = (count * (2 * q + 2 * kv + shape->intermediate) + 15) / 16 * 16;
  const int64_t scratch = (s->plan.scratch + 63) / 64 * 64;
  if (posix_memalign((void **)&s->all, 64, (size_t)(4 * shared + (4 * s->normed_size + scratch) * shape->threads))) {
    free(s->plan.blocks);
    return 1;
  }
  s->plan.scratch = scratch;
  s->q = (float *)s->all;
  s->mixed = s->q + count * q;
  s->k = s->mixed + count * q;
  s->v = s->k + count * kv;
  s->gated = s->v + count * kv;
  s->normed = s->q + shared;
  s->scratch = (char *)(s->normed + s->normed_size * shape->threads);
  return 0;
}

static void free_space(Space *s) {
  free(s->all);
  free(s->plan.blocks);
}

/* One layer, by every member of a team: x [rows, hidden] += attention(normed [rows, input]), then x += mlp(norm(x)).
 * `normed` is the member's own: computing a norm twice costs less than a meeting. */
static void run_layer(const Member *m, const Layer *layer, const Shape *shape, const Rows *r, const Space *s, float *x,
                      float *normed, int64_t input) {
  const int64_t h = shape->hidden, inner = shape->intermediate, rows = r->count, dim = shape->dim;
  const int64_t q_width = shape->heads * dim, kv_width = shape->kv_heads * dim, group = shape->heads / shape->kv_heads;
  const int w = shape->weight_dtype;
  const Linear q = {layer->q, layer->q_bias, input, q_width, w}, k = {layer->k, layer->k_bias, input, kv_width, w},
               v = {layer->v, layer->v_bias, input, kv_width, w}, o = {layer->o, layer->o_bias, q_width, h, w},
               gate = {layer->gate, NULL, h, inner, w}, up = {layer->up, NULL, h, inner, w},
               down = {layer->down, NULL, inner, h, w};
  const Attention attention = {layer->keys,   layer->values,  shape->heads, shape->kv_heads, dim,
                               shape->places, shape->scaling, 0.0f,         FLOAT32,         shape->cache_dtype};

  const int64_t q_chunks = osd_chunks(q_width, rows), kv_chunks = osd_chunks(kv_width, rows);
  for (int64_t item; (item = take(m, q_chunks + 2 * kv_chunks)) >= 0;)
    if (item < q_chunks)
      osd_linear_chunk(&q, normed, s->q, rows, item, REPLACE, FLOAT32);
    else if (item < q_chunks + kv_chunks)
      osd_linear_chunk(&k, normed, s->k, rows, item - q_chunks, REPLACE, FLOAT32);
    else
      osd_linear_chunk(&v, normed, s->v, rows, item - q_chunks - kv_chunks, REPLACE, FLOAT32);
  meet(m);

  for (int64_t item; (item = take(m, rows * shape->kv_heads)) >= 0;) {
    const int64_t row = item / shape->kv_heads, head = item % shape->kv_heads;
    const float *cosines = r->cosines + row * dim, *sines = r->sines + row * dim;
    const int64_t to = ((r->slots[row] * shape->kv_heads + head) * shape->places + r->stores[row]) * dim;
    rotate(s->q + row * q_width + head * group * dim, cosines, sines, group, dim);
    rotate(s->k + item * dim, cosines, sines, 1, dim);
    store(s->k + item * dim, layer->keys, to, dim, shape->cache_dtype);
    store(s->v + item * dim, layer->values, to, dim, shape->cache_dtype);
  }
  meet(m);

  for (int64_t item; (item = take(m, s->plan.count)) >= 0;)
    osd_attention_block(&attention, r, s->plan.blocks + item, s->q, s->mixed, s->scratch + m->me * s->plan.scratch);
  meet(m);

  const int64_t h_chunks = osd_chunks(h, rows), inner_chunks = osd_chunks(inner, rows);
  for (int64_t item; (item = take(m, h_chunks)) >= 0;) osd_linear_chunk(&o, s->mixed, x, rows, item, ADD, FLOAT32);
  meet(m);

  rms_norm(x, layer->post_norm, normed, rows, h, h, shape->eps, shape->norm_dtype);
  for (int64_t item; (item = take(m, inner_chunks)) >= 0;) osd_gated_chunk(&gate, &up, normed, s->gated, rows, item);
  meet(m);

  for (int64_t item; (item = take(m, h_chunks)) >= 0;) osd_linear_chunk(&down, s->gated, x, rows, item, ADD, FLOAT32);
  meet(m);
}

/* Run x [rows, hidden] through all layers, in place. The outputs of the layers tap_layers[0..taps) go to
 * tapped [rows, taps * hidden]. */
int osd_decoder(const Layer *layers, const Shape *shape, const Rows *r, float *x, const int32_t *tap_layers,
                int64_t taps, float *tapped) {
  const int64_t h = shape->hidden, rows = r->count;
  Space s;
  if (!rows) return 0;
  if (make_space(&s, shape, r, rows * h)) return 1;
  Team team = {0};
#pragma omp parallel num_threads(shape->threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    float *normed = s.normed + m.me * s.normed_size;
    for (int64_t l = 0; l < shape->layers; l++) {
      rms_norm(x, layers[l].input_norm, normed, rows, h, h, shape->eps, shape->norm_dtype);
      run_layer(&m, layers + l, shape, r, &s, x, normed, h);
      /* x stays as it is until this thread reaches the next layer's meetings */
      for (int64_t t = 0; t < taps && m.me == 0; t++)
        if (tap_layers[t] == l)
          for (int64_t i = 0; i < rows; i++) memcpy(tapped + (i * taps + t) * h, x + i * h, (size_t)h * 4);
    }
  }
  free_space(&s);
  return 0;
}

/* One step of an EAGLE layer, whose attention reads [norm(embedded), norm(features)] and whose input_norm is that of
 * the features. features [rows, hidden] become the next ones in place; logits [asked, vocabulary] are those after the
 * rows last[0..asked). */
int osd_eagle(const Layer *layer, const Shape *shape, const Rows *r, const float *embedding_norm,
              const float *final_norm, const void *head, int64_t vocabulary, const float *embedded, float *features,
              const int64_t *last, int64_t asked, float *logits) {
  const int64_t h = shape->hidden, rows = r->count;
  const Linear to_logits = {head, NULL, h, vocabulary, shape->weight_dtype};
  Space s;
  if (!rows) return 0;
  if (make_space(&s, shape, r, (rows > asked ? rows : asked) * 2 * h)) return 1;
  Team team = {0};
#pragma omp parallel num_threads(shape->threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    float *normed = s.normed + m.me * s.normed_size;
    rms_norm(embedded, embedding_norm, normed, rows, h, 2 * h, shape->eps, FLOAT32);
    rms_norm(features, layer->input_norm, normed + h, rows, h, 2 * h, shape->eps, FLOAT32);
    run_layer(&m, layer, shape, r, &s, features, normed, 2 * h);
    for (int64_t i = 0; i < asked; i++)
      rms_norm(features + last[i] * h, final_norm, normed + i * h, 1, h, h, shape->eps, FLOAT32);
    const int64_t chunks = asked ? osd_chunks(vocabulary, asked) : 0;
    for (int64_t item; (item = take(&m, chunks)) >= 0;)
      osd_linear_chunk(&to_logits, normed, logits, asked, item, REPLACE, FLOAT32);
  }
  free_space(&s);
  return 0;
}
