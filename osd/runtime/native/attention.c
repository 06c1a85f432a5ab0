/* Attention of new tokens over KV slots; the result of a row does not depend on the other rows.
 *
 * A key and a value are converted once for all queries of a block. A row sees the places [from, visible), its ancestors
 * in a draft tree and, with a selection, the selected places before them. Its weights are summed as if these were one list.
 */
#include "scores.h"
#include "selection.h"
#include "team.h"

#define MAX_QUERIES 12
#define TILE_PLACES 32
#define TOGETHER (WIDTH / 8) /* queries computed together: enough sums to hide the latency of an addition */
#define MARGIN KEYS          /* floats that are read and written beyond the end */

/* Divide the rows into blocks for the threads. The caller frees plan->blocks. */
int osd_plan(Plan *plan, const Rows *rows, const Attention *shape, int threads) {
  const int64_t group = shape->heads / shape->kv_heads;
  int64_t size = (rows->count * shape->heads + 2 * threads - 1) / (2 * threads);
  if (size > MAX_QUERIES) size = MAX_QUERIES;
  if (size < 1) size = 1;
  plan->blocks = malloc(sizeof(Block) * (size_t)(rows->count * shape->heads + 1));
  plan->count = 0;
  const int64_t width = padded(shape->dim), seen = shape->places + rows->mask_width + 4 * MARGIN;
  plan->scratch = 4 * (MAX_QUERIES * (2 * width + seen) + seen + TILE_PLACES * width) + 64;
  if (!plan->blocks) return 1;
  for (int64_t row = 0, next; row < rows->count; row = next) {
    for (next = row + 1; next < rows->count && rows->slots[next] == rows->slots[row];) next++;
    const int64_t queries = (next - row) * group, pieces = (queries + size - 1) / size;
    for (int64_t kv_head = 0; kv_head < shape->kv_heads; kv_head++)
      for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t first = queries * piece / pieces;
        plan->blocks[plan->count++] = (Block){row, first, queries * (piece + 1) / pieces - first, kv_head};
      }
  }
  return 0;
}

/* out [rows, padded(dim)] float32 = `count` rows of `dtype`, and zeros. */
INLINE void widen(const char *at, float *out, int64_t count, int64_t rows, int64_t dim, const int dtype) {
  const int64_t width = dtype == BFLOAT16 ? 2 : 4, stride = padded(dim);
  memset(out + count * stride, 0, (size_t)((rows - count) * stride) * 4);
  for (int64_t r = 0; r < count; r++) {
    const char *row = at + r * dim * width;
    int64_t d = 0;
    for (; d + WIDTH <= dim; d += WIDTH) put(out + r * stride + d, load_wide(row + d * width, dtype == BFLOAT16));
    for (; d < stride; d++) out[r * stride + d] = d < dim ? read_element(row, d, dtype) : 0;
  }
}

/* out [queries, width] += weights [queries, stride] times values [count, width], `lanes` vectors of the width. */
INLINE void mix_lanes(const float *weights, int64_t stride, const int queries, const float *values, int64_t count,
                      int64_t width, float *out, const int lanes) {
  Vector sums[TOGETHER][64 / WIDTH];
#pragma GCC unroll 8
  for (int q = 0; q < queries; q++)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; l++) sums[q][l] = load(out + q * width + l * WIDTH);
  for (int64_t i = 0; i < count; i++)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; l++) {
      const Vector value = load(values + i * width + l * WIDTH);
#pragma GCC unroll 8
      for (int q = 0; q < queries; q++) sums[q][l] += weights[q * stride + i] * value;
    }
#pragma GCC unroll 8
  for (int q = 0; q < queries; q++)
#pragma GCC unroll 8
    for (int l = 0; l < lanes; l++) put(out + q * width + l * WIDTH, sums[q][l]);
}

/* The same over the whole width, 64 numbers at a time, then one vector at a time. */
INLINE void mix_queries(const float *weights, int64_t stride, const int queries, const float *values, int64_t count,
                        int64_t width, float *out) {
  int64_t d = 0;
  for (; d + 64 <= width; d += 64) mix_lanes(weights, stride, queries, values + d, count, width, out + d, 64 / WIDTH);
  for (; d < width; d += WIDTH) mix_lanes(weights, stride, queries, values + d, count, width, out + d, 1);
}

/* out [queries, padded(dim)] += weights [queries, stride] times `count` contiguous values. */
static void mix(const float *weights, int64_t stride, int64_t queries, const char *values, int64_t count, int64_t dim,
                float *out, float *wide, int dtype) {
  const int64_t row = dim * (dtype == BFLOAT16 ? 2 : 4), width = padded(dim);
  for (int64_t i = 0; i < count; i += TILE_PLACES) {
    const int64_t live = count - i < TILE_PLACES ? count - i : TILE_PLACES;
    if (dtype == BFLOAT16)
      widen(values + i * row, wide, live, live, dim, BFLOAT16);
    else
      widen(values + i * row, wide, live, live, dim, FLOAT32);
    int64_t q = 0;
    for (; q + TOGETHER <= queries; q += TOGETHER)
      mix_queries(weights + q * stride + i, stride, TOGETHER, wide, live, width, out + q * width);
    for (; q < queries; q++) mix_queries(weights + q * stride + i, stride, 1, wide, live, width, out + q * width);
  }
}

/* Replace scores by exp(score - best); returns their sum. */
static float soften(float *scores, int64_t count, float softcap) {
  if (softcap > 0)
    for (int64_t i = 0; i < count; i++) scores[i] = softcap * tanhf(scores[i] / softcap);
  const int64_t whole = padded(count);
  for (int64_t i = count; i < whole; i++) scores[i] = -INFINITY;
  float best;
  return exponentials(scores, whole, &best);
}

/* Compute the attention of one block, after its keys and values are stored; query and out are [rows, heads, dim]. */
void osd_attention_block(const Attention *a, const Rows *rows, const Block *block, Far far, const void *query, void *out,
                         char *scratch) {
  const int64_t group = a->heads / a->kv_heads, dim = a->dim, queries = block->count;
  const int64_t first_row = block->row + block->first / group;
  const int64_t last_row = block->row + (block->first + queries - 1) / group;
  int64_t low = INT64_MAX, high = 0, tree_low = INT64_MAX, tree_high = 0; /* the places that any row sees */
  for (int64_t r = first_row; r <= last_row; r++) {
    const int64_t from = rows->from[r] > far.begin ? rows->from[r] : far.begin;
    if (from < rows->visible[r]) {
      if (from < low) low = from;
      if (rows->visible[r] > high) high = rows->visible[r];
    }
    for (int64_t j = 0; rows->mask && j < rows->mask_width; j++)
      if (rows->mask[r * rows->mask_width + j]) {
        if (rows->base[r] + j < tree_low) tree_low = rows->base[r] + j;
        if (rows->base[r] + j >= tree_high) tree_high = rows->base[r] + j + 1;
      }
  }
  const int64_t flat = high > low ? high - low : 0, tree = tree_high > tree_low ? tree_high - tree_low : 0;
  const int64_t flat_at = (far.count + 7) / 8 * 8, tree_at = flat_at + (flat + 7) / 8 * 8;
  const int64_t stride = tree_at + (tree + 7) / 8 * 8 + MARGIN; /* of the scores of all three parts */

  const int64_t across = padded(dim);
  float *wide_query = (float *)(((uintptr_t)scratch + 63) / 64 * 64), *sums = wide_query + queries * across;
  float *wide = sums + queries * across, *scores = wide + TILE_PLACES * across, *seen = scores + queries * stride;
  memset(wide_query, 0, (size_t)(2 * queries * across) * 4);
  for (int64_t q = 0; q < queries; q++) {
    const int64_t row = block->row + (block->first + q) / group;
    const int64_t at = (row * a->heads + block->kv_head * group + (block->first + q) % group) * dim;
    for (int64_t d = 0; d < dim; d++) wide_query[q * across + d] = read_element(query, at + d, a->dtype) * a->scaling;
  }
  const int64_t width = a->cache_dtype == BFLOAT16 ? 2 : 4, place = dim * width;
  const int64_t offset = (rows->slots[block->row] * a->kv_heads + block->kv_head) * a->places * place;
  const char *keys = (const char *)a->keys + offset, *values = (const char *)a->values + offset;
  if (far.count) osd_score(wide_query, queries, far.keys, far.count, dim, scores, stride, wide, a->cache_dtype);
  if (flat)
    osd_score(wide_query, queries, keys + low * place, flat, dim, scores + flat_at, stride, wide, a->cache_dtype);
  if (tree)
    osd_score(wide_query, queries, keys + tree_low * place, tree, dim, scores + tree_at, stride, wide, a->cache_dtype);

  float totals[MAX_QUERIES];
  for (int64_t q = 0; q < queries; q++) {
    const int64_t r = block->row + (block->first + q) / group;
    const int64_t from = rows->from[r] > far.begin ? rows->from[r] : far.begin;
    const int64_t near_count = rows->visible[r] > from ? rows->visible[r] - from : 0, whole = far.count + near_count;
    const uint8_t *mask = tree ? rows->mask + r * rows->mask_width : NULL;
    const int64_t shift = tree ? tree_at + rows->base[r] - tree_low : 0; /* of node 0 among the scores */
    float *row = scores + q * stride, *near = row + flat_at + from - low;
    int64_t count = whole;
    memcpy(seen, row, (size_t)far.count * 4);
    if (near_count) memcpy(seen + far.count, near, (size_t)near_count * 4);
    for (int64_t j = 0; mask && j < rows->mask_width; j++)
      if (mask[j]) seen[count++] = row[shift + j];
    totals[q] = soften(seen, count, a->softcap);
    memset(row, 0, (size_t)stride * 4);
    memcpy(row, seen, (size_t)far.count * 4);
    if (near_count) memcpy(near, seen + far.count, (size_t)near_count * 4);
    count = whole;
    for (int64_t j = 0; mask && j < rows->mask_width; j++)
      if (mask[j]) row[shift + j] = seen[count++];
  }
  if (far.count) mix(scores, stride, queries, far.values, far.count, dim, sums, wide, a->cache_dtype);
  if (flat) mix(scores + flat_at, stride, queries, values + low * place, flat, dim, sums, wide, a->cache_dtype);
  if (tree)
    mix(scores + tree_at, stride, queries, values + tree_low * place, tree, dim, sums, wide, a->cache_dtype);

  for (int64_t q = 0; q < queries; q++) {
    const int64_t row = block->row + (block->first + q) / group;
    const int64_t at = (row * a->heads + block->kv_head * group + (block->first + q) % group) * dim;
    const float scale = 1.0f / totals[q];
    for (int64_t d = 0; d < dim; d++) write_element(out, at + d, sums[q * across + d] * scale, a->dtype);
  }
}

/* Store the keys and values of `rows` new tokens in their KV slots, and compute their attention.
 *
 * query [rows, heads, dim], key and value [rows, kv_heads, dim], out [rows, heads, dim]: contiguous, of `dtype`;
 * cache keys and values: [slots, kv_heads, places, dim] of `cache_dtype`. Row r belongs to slots[r], is stored at
 * stores[r], and sees the places [from[r], visible[r]) and, in a tree, base[r] + j for every mask[r, j] != 0. With a
 * `selection`, which needs `positions`, it reads only the places selected in `layer`. Returns 1 if an allocation failed.
 */
int osd_attention(const void *query, const void *key, const void *value, void *cache_keys, void *cache_values,
                  void *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t places_per_slot,
                  const int32_t *slots, const int32_t *stores, const int32_t *from, const int32_t *visible,
                  const int32_t *base, const uint8_t *mask, int64_t mask_width, float scaling, float softcap,
                  int dtype, int cache_dtype, int threads, const int64_t *positions, const Selection *selection,
                  int64_t layer) {
  const Rows all = {NULL, NULL, positions, slots, stores, from, visible, base, mask, rows, mask_width, selection};
  const Attention a = {cache_keys, cache_values, heads,   kv_heads, dim,
                       places_per_slot, scaling, softcap, dtype,    cache_dtype};
  Plan plan;
  if (osd_plan(&plan, &all, &a, threads)) return 1;
  Chooser chooser;
  char *scratch = malloc((size_t)(plan.scratch * threads));
  if (osd_make_chooser(&chooser, &all, &a, threads) || !scratch) {
    osd_free_chooser(&chooser);
    free(scratch);
    free(plan.blocks);
    return 1;
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < kv_heads; h++) {
      const int64_t to = ((slots[r] * kv_heads + h) * places_per_slot + stores[r]) * dim;
      const int64_t at = (r * kv_heads + h) * dim;
      for (int64_t d = 0; d < dim; d++) {
        write_element(cache_keys, to + d, read_element(key, at + d, dtype), cache_dtype);
        write_element(cache_values, to + d, read_element(value, at + d, dtype), cache_dtype);
      }
    }
  Team team = {0};
#pragma omp parallel num_threads(threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    if (chooser.count) osd_choose(&m, &chooser, &a, &all, query, layer);
    for (int64_t item; (item = take(&m, plan.count)) >= 0;)
      osd_attention_block(&a, &all, plan.blocks + item, osd_far(&chooser, &a, plan.blocks + item, layer), query, out,
                          scratch + m.me * plan.scratch);
  }
  osd_free_chooser(&chooser);
  free(scratch);
  free(plan.blocks);
  return 0;
}
