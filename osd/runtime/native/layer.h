/* One Llama-shaped decoder layer, computed by a team of threads.
 *
 * The residual stream stays float32 between layers, for any dtype of weights and cache.
 */
#ifndef OSD_LAYER_H
#define OSD_LAYER_H

#include "common.h"
#include "selection.h"
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

/* y [rows, stride] = norm(x [rows, width]) * weight, in the first `width` columns. */
static void rms_norm(const float *x, const void *weight, float *y, int64_t rows, int64_t width, int64_t stride,
                     float eps, int dtype) {
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * width;
    Vector sums[4] = {all(0), all(0), all(0), all(0)};
    int64_t i = 0;
    for (; i + 4 * WIDTH <= width; i += 4 * WIDTH)
      for (int j = 0; j < 4; j++) {
        const Vector value = load(row + i + j * WIDTH);
        sums[j] += value * value;
      }
    float total = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < width; i++) total += row[i] * row[i];
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    const char *weights = weight;
    const int64_t element = dtype == BFLOAT16 ? 2 : 4;
    for (i = 0; i + WIDTH <= width; i += WIDTH)
      put(y + r * stride + i, load(row + i) * scale * load_wide(weights + i * element, dtype == BFLOAT16));
    for (; i < width; i++) y[r * stride + i] = row[i] * scale * read_element(weight, i, dtype);
  }
}

/* Rotate x [heads, dim] in place by cosines and sines [dim]; the halves of dim are the axes of the planes. */
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

/* Buffers of a forward. `normed`, `narrow` and `scratch` have a part for each thread. */
typedef struct {
  char *all;
  float *q, *mixed, *k, *v, *gated, *normed;
  int64_t normed_size, narrow_size; /* floats and bytes of a thread */
  char *narrow, *scratch;
  Plan plan;
  Chooser chooser;
} Space;

/* Buffers of one member. */
typedef struct {
  float *normed;
  char *narrow;
} LocalSpace;

static LocalSpace local_space(const Member *m, const Space *s) {
  return (LocalSpace){s->normed + m->me * s->normed_size, s->narrow + m->me * s->narrow_size};
}

/* Allocate buffers for the rows, and for `normed_rows` rows of `normed_width` as input of linear layers. Returns 1 if the
 * allocation failed. */
static int make_space(Space *s, const Shape *shape, const Rows *rows, int64_t normed_rows, int64_t normed_width) {
  const Attention a = {.heads = shape->heads, .kv_heads = shape->kv_heads, .dim = shape->dim, .places = shape->places,
                       .cache_dtype = shape->cache_dtype};
  const int64_t q = shape->heads * shape->dim, kv = shape->kv_heads * shape->dim, count = rows->count;
  if (osd_plan(&s->plan, rows, &a, shape->threads)) return 1;
  s->normed_size = (normed_rows * normed_width + 15) / 16 * 16;
  int64_t widest = normed_width;
  if (q > widest) widest = q;
  if (shape->intermediate > widest) widest = shape->intermediate;
  s->narrow_size = osd_input_bytes(normed_rows, widest, shape->weight_dtype);
  const int64_t shared = (count * (2 * q + 2 * kv + shape->intermediate) + 15) / 16 * 16;
  const int64_t scratch = (s->plan.scratch + 63) / 64 * 64;
  const int64_t each = 4 * s->normed_size + s->narrow_size + scratch;
  s->all = NULL;
  if (osd_make_chooser(&s->chooser, rows, &a, shape->threads) ||
      posix_memalign((void **)&s->all, 64, (size_t)(4 * shared + each * shape->threads))) {
    osd_free_chooser(&s->chooser);
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
  s->narrow = (char *)(s->normed + s->normed_size * shape->threads);
  s->scratch = s->narrow + s->narrow_size * shape->threads;
  return 0;
}

static void free_space(Space *s) {
  free(s->all);
  free(s->plan.blocks);
  osd_free_chooser(&s->chooser);
}

/* The linear layers of one step, with chunks numbered over all of them. */
typedef struct {
  const Linear *layers[3];
  int64_t chunks[3], count;
} Step;

static Step step_of(const Linear *a, const Linear *b, const Linear *c, int64_t rows) {
  Step s = {{a, b, c}, {0}, 0};
  for (int i = 0; i < 3; i++) s.count += s.chunks[i] = s.layers[i] ? osd_chunks(s.layers[i]->outputs, rows) : 0;
  return s;
}

/* Return the layer of a chunk of the step; `chunk` becomes the number within the layer. */
static int layer_at(const Step *s, int64_t *chunk) {
  int which = 0;
  while (*chunk >= s->chunks[which]) *chunk -= s->chunks[which++];
  return which;
}

static const char *weights_at(const Step *s, int64_t rows, int64_t chunk) {
  const int which = layer_at(s, &chunk);
  return osd_chunk_at(s->layers[which], rows, chunk);
}

/* Return the weights that a member reads after a chunk: its next chunk, or its first one of the next step. */
static const char *reads_on(const Member *m, const Step *now, const Step *then, int64_t rows, int64_t chunk) {
  const int64_t end = last_of(m, now->count);
  if (chunk + 1 != end) return chunk + 1 < now->count ? weights_at(now, rows, chunk + 1) : NULL;
  const int64_t first = then ? first_of(m, then->count) : 0;
  return then && first < then->count ? weights_at(then, rows, first) : NULL;
}

/* Linear layers of a decoder layer. */
typedef struct {
  Linear q, k, v, o, gate, up, down;
} Projections;

static Projections projections(const Layer *l, const Shape *shape, int64_t input) {
  const int64_t h = shape->hidden, inner = shape->intermediate;
  const int64_t q = shape->heads * shape->dim, kv = shape->kv_heads * shape->dim;
  const int w = shape->weight_dtype;
  return (Projections){{l->q, l->q_bias, input, q, w}, {l->k, l->k_bias, input, kv, w}, {l->v, l->v_bias, input, kv, w},
                       {l->o, l->o_bias, q, h, w},     {l->gate, NULL, h, inner, w},    {l->up, NULL, h, inner, w},
                       {l->down, NULL, inner, h, w}};
}

/* Rotate the key of item `row` * kv_heads + `head`, and store key and value at the row's place. */
static void keep(const Layer *layer, const Shape *shape, const Rows *r, Space *s, int64_t item) {
  const int64_t row = item / shape->kv_heads, head = item % shape->kv_heads, dim = shape->dim;
  const int64_t to = ((r->slots[row] * shape->kv_heads + head) * shape->places + r->stores[row]) * dim;
  rotate(s->k + item * dim, r->cosines + r->positions[row] * dim, r->sines + r->positions[row] * dim, 1, dim);
  store(s->k + item * dim, layer->keys, to, dim, shape->cache_dtype);
  store(s->v + item * dim, layer->values, to, dim, shape->cache_dtype);
}

/* Run one layer as a member of a team: x [rows, hidden] += attention(normed [rows, input]), then x += mlp(norm(x)).
 * Each member computes the norms and input formats itself, because a meeting would take longer. `then` is the step after
 * the layer, or null; `number` is the layer's number for selections. */
static void run_layer(const Member *m, const Layer *layer, int64_t number, const Shape *shape, const Rows *r, Space *s,
                      float *x, LocalSpace local, int64_t input, const Step *then) {
  const int64_t h = shape->hidden, inner = shape->intermediate, rows = r->count, dim = shape->dim;
  const int64_t q_width = shape->heads * dim, group = shape->heads / shape->kv_heads;
  const Projections p = projections(layer, shape, input);
  const Step reads = step_of(&p.q, &p.k, &p.v, rows), mixes = step_of(&p.o, NULL, NULL, rows),
             widens = step_of(&p.gate, NULL, NULL, rows), narrows = step_of(&p.down, NULL, NULL, rows);
  float *const outputs[3] = {s->q, s->k, s->v};
  const Attention attention = {layer->keys,   layer->values,  shape->heads, shape->kv_heads, dim,
                               shape->places, shape->scaling, 0.0f,         FLOAT32,         shape->cache_dtype};

  Input in = osd_input(local.normed, rows, input, p.q.dtype, local.narrow);
  for (int64_t item; (item = take(m, reads.count)) >= 0;) {
    const char *next = reads_on(m, &reads, &mixes, rows, item);
    const int which = layer_at(&reads, &item);
    osd_linear_chunk(reads.layers[which], &in, outputs[which], rows, item, REPLACE, FLOAT32, next);
  }
  meet(m);

  for (int64_t item; (item = take(m, rows * shape->kv_heads)) >= 0;) {
    const int64_t row = item / shape->kv_heads, head = item % shape->kv_heads;
    const float *cosines = r->cosines + r->positions[row] * dim, *sines = r->sines + r->positions[row] * dim;
    rotate(s->q + row * q_width + head * group * dim, cosines, sines, group, dim);
    keep(layer, shape, r, s, item);
  }
  meet(m);

  if (s->chooser.count) osd_choose(m, &s->chooser, &attention, r, s->q, number);
  for (int64_t item; (item = take(m, s->plan.count)) >= 0;)
    osd_attention_block(&attention, r, s->plan.blocks + item,
                        osd_far(&s->chooser, &attention, s->plan.blocks + item, number), s->q, s->mixed,
                        s->scratch + m->me * s->plan.scratch);
  meet(m);

  in = osd_input(s->mixed, rows, q_width, p.o.dtype, local.narrow);
  for (int64_t item; (item = take(m, mixes.count)) >= 0;)
    osd_linear_chunk(&p.o, &in, x, rows, item, ADD, FLOAT32, reads_on(m, &mixes, &widens, rows, item));
  meet(m);

  rms_norm(x, layer->post_norm, local.normed, rows, h, h, shape->eps, shape->norm_dtype);
  in = osd_input(local.normed, rows, h, p.gate.dtype, local.narrow);
  for (int64_t item; (item = take(m, widens.count)) >= 0;)
    osd_gated_chunk(&p.gate, &p.up, &in, s->gated, rows, item, reads_on(m, &widens, &narrows, rows, item));
  meet(m);

  in = osd_input(s->gated, rows, inner, p.down.dtype, local.narrow);
  for (int64_t item; (item = take(m, narrows.count)) >= 0;)
    osd_linear_chunk(&p.down, &in, x, rows, item, ADD, FLOAT32, reads_on(m, &narrows, then, rows, item));
  meet(m);
}

/* Compute logits [wanted, vocabulary] after the rows last[0..wanted) of x [rows, hidden], by a norm and a linear layer. */
static void to_logits(const Member *m, const Shape *shape, const void *norm, const Linear *head, const float *x,
                      const int64_t *last, int64_t wanted, LocalSpace local, float *logits) {
  const int64_t h = shape->hidden;
  for (int64_t i = 0; i < wanted; i++)
    rms_norm(x + last[i] * h, norm, local.normed + i * h, 1, h, h, shape->eps, shape->norm_dtype);
  const Input in = osd_input(local.normed, wanted, h, head->dtype, local.narrow);
  const Step step = wanted ? step_of(head, NULL, NULL, wanted) : (Step){0};
  for (int64_t item; (item = take(m, step.count)) >= 0;)
    osd_linear_chunk(head, &in, logits, wanted, item, REPLACE, FLOAT32, reads_on(m, &step, NULL, wanted, item));
  meet(m);
}

#endif
