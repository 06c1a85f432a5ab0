/* Attention scores: products of queries with contiguous keys of one slot. */
#include "scores.h"

#ifdef __AMX_TILE__
#include "tiles.h"
#endif

/* Transpose the 32-bit words of up to WIDTH rows to [words, stride], with zeros for missing rows. */
static void transpose_words(const char *rows, int64_t count, int64_t row, int64_t words, float *to, int64_t stride) {
  int64_t w = 0;
  for (; w + WIDTH <= words; w += WIDTH) {
    Vector block[WIDTH];
#pragma GCC unroll 16
    for (int r = 0; r < WIDTH; r++) block[r] = r < count ? load((const float *)(rows + r * row) + w) : all(0);
    transpose(block);
#pragma GCC unroll 16
    for (int r = 0; r < WIDTH; r++) put(to + (w + r) * stride, block[r]);
  }
  for (; w < words; w++)
    for (int r = 0; r < WIDTH; r++) to[w * stride + r] = r < count ? ((const float *)(rows + r * row))[w] : 0;
}

/* scores [queries, stride] = queries [queries, width] times the keys in `wide` [dim, KEYS]. */
INLINE void score_queries(const float *queries, int64_t width, const int count, const float *wide, int64_t dim,
                          float *scores, int64_t stride) {
  Vector sums[4][2];
#pragma GCC unroll 4
  for (int q = 0; q < count; q++) sums[q][0] = sums[q][1] = all(0);
  for (int64_t d = 0; d < dim; d++) {
    const Vector first = load(wide + d * KEYS), second = load(wide + d * KEYS + WIDTH);
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) {
      sums[q][0] += queries[q * width + d] * first;
      sums[q][1] += queries[q * width + d] * second;
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < count; q++) {
    put(scores + q * stride, sums[q][0]);
    put(scores + q * stride + WIDTH, sums[q][1]);
  }
}

#ifdef __AMX_TILE__
#define SCORES_TILE 0
#define KEYS_TILE 6
#define QUERIES_TILE 7

/* Compute `osd_score` by AMX tiles for bfloat16 keys, if `dim` is a multiple of 32. The queries are rounded to bfloat16 and
 * transposed; each product takes TILE_ROWS keys. `wide` is a buffer for both. */
static void score_by_tiles(const float *queries, int64_t count_queries, const char *keys, int64_t count, int64_t dim,
                           float *scores, int64_t stride, float *wide) {
  const int64_t row = 2 * dim, words = dim / 2, width = padded(dim);
  uint16_t *narrow = (uint16_t *)(wide + words * WIDTH);
  for (int64_t q = 0; q < count_queries; q++)
    for (int64_t d = 0; d < dim; d++) narrow[q * dim + d] = to_bf16(queries[q * width + d]);
  transpose_words((const char *)narrow, count_queries, row, words, wide, WIDTH);
  char *last = (char *)narrow; /* the last keys, fewer than TILE_ROWS */
  begin_tiles(TILE_ROWS);
  for (int64_t i = 0; i < count; i += TILE_ROWS) {
    const char *from = keys + i * row;
    Vector sums[TILE_ROWS];
    if (count - i < TILE_ROWS) from = memcpy(last, from, (size_t)((count - i) * row));
    _tile_zero(SCORES_TILE);
    for (int64_t w = 0; w < words; w += TILE_BYTES / 4) {
      _tile_loadd(KEYS_TILE, from + w * 4, row);
      _tile_loadd(QUERIES_TILE, wide + w * WIDTH, TILE_BYTES);
      _tile_dpbf16ps(SCORES_TILE, KEYS_TILE, QUERIES_TILE);
    }
    _tile_stored(SCORES_TILE, sums, TILE_BYTES);
    transpose(sums);
    for (int64_t q = 0; q < count_queries; q++) put(scores + q * stride + i, sums[q]);
  }
  _tile_release();
}
#endif

void osd_score(const float *queries, int64_t count_queries, const char *keys, int64_t count, int64_t dim, float *scores,
               int64_t stride, float *wide, int dtype) {
#ifdef __AMX_TILE__
  if (dtype == BFLOAT16 && dim % (TILE_BYTES / 2) == 0) {
    score_by_tiles(queries, count_queries, keys, count, dim, scores, stride, wide);
    return;
  }
#endif
  const int64_t row = dim * (dtype == BFLOAT16 ? 2 : 4), words = row / 4, width = padded(dim);
  for (int64_t i = 0; i < count; i += KEYS) {
    for (int half = 0; half < 2; half++) {
      const int64_t first = i + half * WIDTH, live = count - first;
      float *to = wide + half * WIDTH;
      transpose_words(keys + first * row, live, row, words, to, dtype == BFLOAT16 ? 2 * KEYS : KEYS);
      for (int64_t w = 0; dtype == BFLOAT16 && w < words; w++) { /* two numbers in a word */
        const Mask pair = (Mask)load(to + 2 * w * KEYS);
        put(to + 2 * w * KEYS, (Vector)(pair << 16));
        put(to + (2 * w + 1) * KEYS, (Vector)(pair & (int32_t)0xffff0000));
      }
    }
    for (int64_t q = 0; q < count_queries; q += 4) {
      const float *from = queries + q * width;
      float *to = scores + q * stride + i;
      switch (count_queries - q) {
        case 1: score_queries(from, width, 1, wide, dim, to, stride); break;
        case 2: score_queries(from, width, 2, wide, dim, to, stride); break;
        case 3: score_queries(from, width, 3, wide, dim, to, stride); break;
        default: score_queries(from, width, 4, wide, dim, to, stride);
      }
    }
  }
}
