/* Linear layers for few rows at a time.
 *
 * Every output element is summed in one fixed order that does not depend on how many rows are
 * computed together, so a token's numbers are the same alone, in a batch and in a draft tree.
 *
 * Weights are packed in panels of 8 output channels, one 32-bit lane each. A bfloat16 panel holds 32 bytes
 * for two inputs: a shift gives those of the even input as float32, a mask those of the odd one.
 */
#include "common.h"
#include "team.h"

#define PANEL 8
#define MAX_TILE 6
#define MAX_CHUNK 6
#define ROW_BLOCK 48
#define AHEAD 1024 /* bytes: far enough for memory, near enough for the first-level cache */

static int64_t panel_bytes(int64_t inputs, int dtype) {
  return dtype == BFLOAT16 ? (inputs + 1) / 2 * PANEL * 4 : inputs * PANEL * 4;
}

/* The bytes of a packed weight. */
int64_t osd_packed_bytes(int64_t outputs, int64_t inputs, int dtype) {
  return (outputs + PANEL - 1) / PANEL * panel_bytes(inputs, dtype);
}

/* weight [outputs, inputs] -> packed panels, zero padded; dtype is that of both. */
void osd_pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int dtype) {
  const int64_t bytes = panel_bytes(inputs, dtype);
  memset(packed, 0, (size_t)osd_packed_bytes(outputs, inputs, dtype));
  for (int64_t channel = 0; channel < outputs; channel++) {
    char *panel = (char *)packed + channel / PANEL * bytes;
    const int64_t j = channel % PANEL;
    for (int64_t k = 0; k < inputs; k++)
      if (dtype == BFLOAT16)
        ((uint16_t *)panel)[k / 2 * PANEL * 2 + 2 * j + k % 2] = ((const uint16_t *)weight)[channel * inputs + k];
      else
        ((float *)panel)[k * PANEL + j] = ((const float *)weight)[channel * inputs + k];
  }
}

typedef __m256 Sums[MAX_TILE][MAX_CHUNK];

/* sums += x[:, k] times the weights of input k, which is the odd one of a bfloat16 pair or not. */
INLINE void accumulate(Sums sums, const float *x, int64_t inputs, const char *at, int64_t bytes, const int rows,
                       const int panels, const int dtype, const int odd) {
  __m256 weight[MAX_CHUNK];
#pragma GCC unroll 6
  for (int p = 0; p < panels; p++) {
    const char *from = at + p * bytes;
    if (dtype != BFLOAT16)
      weight[p] = _mm256_loadu_ps((const float *)from);
    else if (!odd)
      weight[p] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i *)from), 16));
    else
      weight[p] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i *)from),
                                                       _mm256_set1_epi32((int)0xffff0000u)));
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    const __m256 value = _mm256_broadcast_ss(x + r * inputs);
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) sums[r][p] = _mm256_fmadd_ps(weight[p], value, sums[r][p]);
  }
}

/* One tile: `rows` rows times `panels` panels, sums in registers, k strictly ascending. */
INLINE void tile(const float *x, int64_t inputs, const char *packed, float *y, int64_t stride, const int rows,
                 const int panels, const int dtype) {
  const int64_t bytes = panel_bytes(inputs, dtype), step = dtype == BFLOAT16 ? PANEL * 2 : PANEL * 4;
  Sums sums;
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) sums[r][p] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + 4 <= inputs; k += 4) {
    const char *at = packed + k * step;
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) {
      _mm_prefetch(at + p * bytes + AHEAD, _MM_HINT_T0);
      if (dtype != BFLOAT16) _mm_prefetch(at + p * bytes + AHEAD + 64, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      accumulate(sums, x + k + i, inputs, at + (dtype == BFLOAT16 ? i / 2 * 2 : i) * step, bytes, rows, panels, dtype,
                 i % 2);
  }
  for (; k < inputs; k++) {
    const char *at = packed + (dtype == BFLOAT16 ? k / 2 * 2 : k) * step;
    if (k % 2)
      accumulate(sums, x + k, inputs, at, bytes, rows, panels, dtype, 1);
    else
      accumulate(sums, x + k, inputs, at, bytes, rows, panels, dtype, 0);
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) _mm256_storeu_ps(y + r * stride + p * PANEL, sums[r][p]);
}

/* Panels in a tile of so many rows: enough sums to hide the FMA's latency, few enough for the registers. */
static const int TOGETHER[MAX_TILE + 1] = {0, 6, 6, 3, 3, 2, 2};

#define TILE(rows, panels)                                        \
  case rows * 8 + panels:                                         \
    if (dtype == BFLOAT16)                                        \
      tile(x, inputs, packed, y, stride, rows, panels, BFLOAT16); \
    else                                                          \
      tile(x, inputs, packed, y, stride, rows, panels, FLOAT32);  \
    break

static void any_tile(const float *x, int64_t inputs, const char *packed, float *y, int64_t stride, int rows,
                     int panels, int dtype) {
  switch (rows * 8 + panels) {
    TILE(1, 1);
    TILE(1, 2);
    TILE(1, 3);
    TILE(1, 4);
    TILE(1, 5);
    TILE(1, 6);
    TILE(2, 1);
    TILE(2, 2);
    TILE(2, 3);
    TILE(2, 4);
    TILE(2, 5);
    TILE(2, 6);
    TILE(3, 1);
    TILE(3, 2);
    TILE(3, 3);
    TILE(3, 4);
    TILE(4, 1);
    TILE(4, 2);
    TILE(4, 3);
    TILE(5, 1);
    TILE(5, 2);
    TILE(6, 1);
    TILE(6, 2);
    default: break;
  }
}

/* Panels in a chunk: a multiple of what fits the widest tile. */
static int64_t chunk_panels(int64_t rows) {
  static const int COUNT[MAX_TILE + 1] = {0, 6, 6, 3, 3, 4, 4};
  const int64_t pieces = (rows + MAX_TILE - 1) / MAX_TILE;
  return COUNT[(rows + pieces - 1) / pieces];
}

int64_t osd_chunks(int64_t outputs, int64_t rows) {
  const int64_t channels = chunk_panels(rows) * PANEL;
  return (outputs + channels - 1) / channels;
}

/* y [rows, stride] = x [rows, inputs] times `panels` panels. */
static void multiply(const float *x, int64_t inputs, const char *packed, float *y, int64_t rows, int64_t stride,
                     int64_t panels, int dtype) {
  const int64_t pieces = (rows + MAX_TILE - 1) / MAX_TILE, bytes = panel_bytes(inputs, dtype);
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t a = rows * piece / pieces, b = rows * (piece + 1) / pieces;
    for (int64_t p = 0, step; p < panels; p += step) {
      step = panels - p < TOGETHER[b - a] ? panels - p : TOGETHER[b - a];
      any_tile(x + a * inputs, inputs, packed + p * bytes, y + a * stride + p * PANEL, stride, (int)(b - a), (int)step,
               dtype);
    }
  }
}

/* The channels of a chunk for the next rows: sums [rows, MAX_CHUNK * PANEL], of which `width` columns count. */
static void chunk_sums(const Linear *layer, const float *x, float *sums, int64_t rows, int64_t first, int64_t width) {
  const int64_t stride = MAX_CHUNK * PANEL;
  const char *packed = (const char *)layer->packed + first / PANEL * panel_bytes(layer->inputs, layer->dtype);
  multiply(x, layer->inputs, packed, sums, rows, stride, (width + PANEL - 1) / PANEL, layer->dtype);
  if (layer->bias)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t o = 0; o < width; o++) sums[r * stride + o] += layer->bias[first + o];
}

/* The channels [*first, *first + width) of a chunk. */
static int64_t chunk_width(const Linear *layer, int64_t rows, int64_t chunk, int64_t *first) {
  const int64_t channels = chunk_panels(rows) * PANEL;
  *first = chunk * channels;
  return layer->outputs - *first < channels ? layer->outputs - *first : channels;
}

/* One chunk of y [rows, outputs], of y_dtype, = (or +=) x [rows, inputs] @ weight^T + bias. */
void osd_linear_chunk(const Linear *layer, const float *x, void *y, int64_t rows, int64_t chunk, int how,
                      int y_dtype) {
  const int64_t stride = MAX_CHUNK * PANEL;
  _Alignas(64) float sums[ROW_BLOCK * MAX_CHUNK * PANEL];
  int64_t first;
  const int64_t width = chunk_width(layer, rows, chunk, &first);
  for (int64_t start = 0; start < rows; start += ROW_BLOCK) {
    const int64_t count = rows - start < ROW_BLOCK ? rows - start : ROW_BLOCK;
    chunk_sums(layer, x + start * layer->inputs, sums, count, first, width);
    for (int64_t r = 0; r < count; r++) {
      const int64_t to = (start + r) * layer->outputs + first;
      const float *row = sums + r * stride;
      if (y_dtype == BFLOAT16)
        for (int64_t o = 0; o < width; o++) ((uint16_t *)y)[to + o] = to_bf16(row[o]);
      else if (how == ADD)
        for (int64_t o = 0; o < width; o++) ((float *)y)[to + o] += row[o];
      else
        memcpy((float *)y + to, row, (size_t)width * 4);
    }
  }
}

/* One chunk of y [rows, outputs] = silu(gate(x)) * up(x). */
void osd_gated_chunk(const Linear *gate, const Linear *up, const float *x, float *y, int64_t rows, int64_t chunk) {
  const int64_t stride = MAX_CHUNK * PANEL;
  _Alignas(64) float gates[ROW_BLOCK * MAX_CHUNK * PANEL], ups[ROW_BLOCK * MAX_CHUNK * PANEL];
  int64_t first;
  const int64_t width = chunk_width(gate, rows, chunk, &first);
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t start = 0; start < rows; start += ROW_BLOCK) {
    const int64_t count = rows - start < ROW_BLOCK ? rows - start : ROW_BLOCK;
    chunk_sums(gate, x + start * gate->inputs, gates, count, first, width);
    chunk_sums(up, x + start * gate->inputs, ups, count, first, width);
    for (int64_t r = 0; r < count; r++) {
      float *row = gates + r * stride;
      for (int64_t o = 0; o < width; o += 8) { /* the padding beyond width is zero */
        const __m256 value = _mm256_load_ps(row + o);
        const __m256 small = exp_nonpositive(_mm256_or_ps(value, _mm256_set1_ps(-0.0f))); /* exp(-|value|) */
        const __m256 above = _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_GE_OQ);
        const __m256 sigmoid = _mm256_div_ps(_mm256_blendv_ps(small, one, above), _mm256_add_ps(one, small));
        _mm256_store_ps(row + o, _mm256_mul_ps(_mm256_mul_ps(value, sigmoid), _mm256_load_ps(ups + r * stride + o)));
      }
      memcpy(y + (start + r) * gate->outputs + first, row, (size_t)width * 4);
    }
  }
}

/* y [rows, outputs] = x [rows, inputs] @ weight^T + bias. x and y have x_dtype, the bias is float32 or null. */
int osd_linear(const void *x, const void *packed, const float *bias, void *y, int64_t rows, int64_t inputs,
               int64_t outputs, int x_dtype, int dtype, int threads) {
  const Linear layer = {packed, bias, inputs, outputs, dtype};
  float *copy = NULL;
  if (!rows) return 0;
  if (x_dtype != FLOAT32 && posix_memalign((void **)&copy, 64, (size_t)(rows * inputs) * 4)) return 1;
  const float *wide = copy ? copy : x;
  Team team = {0};
#pragma omp parallel num_threads(threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    if (copy) {
      for (int64_t r; (r = take(&m, rows)) >= 0;)
        for (int64_t i = r * inputs; i < (r + 1) * inputs; i++) copy[i] = read_element(x, i, x_dtype);
      meet(&m);
    }
    const int64_t chunks = osd_chunks(outputs, rows);
    for (int64_t chunk; (chunk = take(&m, chunks)) >= 0;)
      osd_linear_chunk(&layer, wide, y, rows, chunk, REPLACE, x_dtype);
  }
  free(copy);
  return 0;
}
