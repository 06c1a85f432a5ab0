/* Linear layers for few rows at a time.
 *
 * Every output element is summed in one fixed order that does not depend on how many rows are
 * computed together, so a token's numbers are the same alone, in a batch and in a draft tree.
 *
 * Weights are packed in panels of 8 output channels, one 32-bit lane each. A bfloat16 panel holds 32 bytes
 * for two inputs: a shift gives those of the even input as float32, a mask those of the odd one. An int8 panel begins
 * with what one is worth in each channel and holds 16 bytes for two inputs. It is multiplied with rows of 16-bit
 * integers, as fine as 32-bit sums allow: such sums are exact, and this CPU adds two products in one instruction.
 */
#include "common.h"
#include "team.h"

#define PANEL 8
#define MAX_TILE 6
#define MAX_CHUNK 6
#define ROW_BLOCK 48
#define LINE 64

static int64_t panel_bytes(int64_t inputs, int dtype) {
  if (dtype == INT8) return PANEL * 4 + (inputs + 1) / 2 * PANEL * 2;
  return dtype == BFLOAT16 ? (inputs + 1) / 2 * PANEL * 4 : inputs * PANEL * 4;
}

/* The bytes of a packed weight. */
int64_t osd_packed_bytes(int64_t outputs, int64_t inputs, int dtype) {
  return (outputs + PANEL - 1) / PANEL * panel_bytes(inputs, dtype);
}

/* One channel of `from` as int8, 127 being its largest element. */
static void pack_int8(const void *weight, char *panel, int64_t first, int64_t inputs, int64_t j, int from) {
  float most = 0;
  for (int64_t k = 0; k < inputs; k++) most = fmaxf(most, fabsf(read_element(weight, first + k, from)));
  ((float *)panel)[j] = most / 127;
  int8_t *to = (int8_t *)(panel + PANEL * 4);
  for (int64_t k = 0; k < inputs; k++)
    to[k / 2 * PANEL * 2 + 2 * j + k % 2] =
        most > 0 ? (int8_t)lrintf(read_element(weight, first + k, from) / most * 127) : 0;
}

/* weight [outputs, inputs] of `from` -> packed panels of `dtype`, zero padded; float types stay what they are. */
void osd_pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int from, int dtype) {
  const int64_t bytes = panel_bytes(inputs, dtype);
  memset(packed, 0, (size_t)osd_packed_bytes(outputs, inputs, dtype));
  for (int64_t channel = 0; channel < outputs; channel++) {
    char *panel = (char *)packed + channel / PANEL * bytes;
    const int64_t j = channel % PANEL;
    if (dtype == INT8) {
      pack_int8(weight, panel, channel * inputs, inputs, j, from);
      continue;
    }
    for (int64_t k = 0; k < inputs; k++)
      if (dtype == BFLOAT16)
        ((uint16_t *)panel)[k / 2 * PANEL * 2 + 2 * j + k % 2] = ((const uint16_t *)weight)[channel * inputs + k];
      else
        ((float *)panel)[k * PANEL + j] = ((const float *)weight)[channel * inputs + k];
  }
}

static int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

int64_t osd_narrow_bytes(int64_t rows, int64_t inputs) { return (rows * (4 + 2 * even(inputs)) + 63) / 64 * 64; }

/* The row's largest element becomes the largest integer with which no sum of products can overflow. */
Input osd_input(const float *x, int64_t rows, int64_t inputs, int dtype, void *space) {
  if (dtype != INT8) return (Input){x, NULL, NULL};
  float *units = space;
  int16_t *narrow = (int16_t *)(units + rows);
  const int64_t width = even(inputs), room = INT32_MAX / 127 / inputs;
  const float limit = room < INT16_MAX ? (float)room : (float)INT16_MAX;
  for (int64_t r = 0; r < rows; r++) {
    const float *row = x + r * inputs;
    float most = 0;
    for (int64_t k = 0; k < inputs; k++) most = fabsf(row[k]) > most ? fabsf(row[k]) : most;
    units[r] = most / limit;
    const float scale = most > 0 ? limit / most : 0;
    for (int64_t k = 0; k < inputs; k++) narrow[r * width + k] = (int16_t)_mm_cvtss_si32(_mm_set_ss(row[k] * scale));
    if (inputs % 2) narrow[r * width + inputs] = 0;
  }
  return (Input){x, narrow, units};
}

/* sum + a * b. In assembly, because a compiler that is free to move these sums around runs out of registers. */
INLINE __m256 multiply_add(__m256 a, __m256 b, __m256 sum) {
  __asm__("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}

/* In each 32-bit lane, sum + the products of two pairs of 16-bit integers. */
INLINE __m256i multiply_add_pairs(__m256i a, __m256i b, __m256i sum) {
  __m256i products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(a), "x"(b));
  return sum;
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
    for (int p = 0; p < panels; p++) sums[r][p] = multiply_add(weight[p], value, sums[r][p]);
  }
}

/* Fetch a few lines of what is read next into the second-level cache, while there is something to compute. */
INLINE void fetch(const char **next, const int lines) {
#pragma GCC unroll 6
  for (int l = 0; l < lines; l++) _mm_prefetch(*next + l * LINE, _MM_HINT_T1);
  *next += lines * LINE;
}

/* One tile: `rows` rows times `panels` panels, sums in registers, k strictly ascending. Every `pieces`-th time it also
 * fetches as much as it reads. */
INLINE void tile(const float *x, int64_t inputs, const char *packed, float *y, int64_t stride, const int rows,
                 const int panels, const int dtype, const char *next, int64_t pieces) {
  const int64_t bytes = panel_bytes(inputs, dtype), step = dtype == BFLOAT16 ? PANEL * 2 : PANEL * 4;
  Sums sums;
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) sums[r][p] = _mm256_setzero_ps();
  int64_t k = 0, wait = 0;
  for (; k + 4 <= inputs; k += 4) {
    const char *at = packed + k * step;
    if (next && --wait < 0) {
      wait = pieces - 1;
      fetch(&next, dtype == BFLOAT16 ? panels : 2 * panels);
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

/* One pair of inputs of an int8 tile. */
INLINE void accumulate_pair(__m256i sums[MAX_TILE][MAX_CHUNK], const int16_t *x, int64_t width, const char *at,
                            int64_t bytes, const int rows, const int panels) {
  __m256i weight[MAX_CHUNK];
#pragma GCC unroll 6
  for (int p = 0; p < panels; p++)
    weight[p] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(at + p * bytes)));
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    int32_t pair;
    memcpy(&pair, x + r * width, 4);
    const __m256i value = _mm256_set1_epi32(pair);
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++)
      sums[r][p] = multiply_add_pairs(weight[p], value, sums[r][p]);
  }
}

/* The same of an int8 weight: x [rows, width], an even number of integers, and what each row's are worth. */
INLINE void narrow_tile(const int16_t *x, const float *units, int64_t width, const char *packed, int64_t bytes,
                        float *y, int64_t stride, const int rows, const int panels, const char *next, int64_t pieces) {
  __m256i sums[MAX_TILE][MAX_CHUNK];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) sums[r][p] = _mm256_setzero_si256();
  const char *first = packed + PANEL * 4;
  int64_t k = 0, wait = 0;
  for (; k + 8 <= width; k += 8) {
    if (next && --wait < 0) {
      wait = pieces - 1;
      fetch(&next, panels);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2)
      accumulate_pair(sums, x + k + i, width, first + (k + i) * PANEL, bytes, rows, panels);
  }
  for (; k < width; k += 2) accumulate_pair(sums, x + k, width, first + k * PANEL, bytes, rows, panels);
#pragma GCC unroll 6
  for (int p = 0; p < panels; p++) {
    const __m256 worth = _mm256_loadu_ps((const float *)(packed + p * bytes));
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
      _mm256_storeu_ps(y + r * stride + p * PANEL, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][p]),
                                                                 _mm256_mul_ps(worth, _mm256_set1_ps(units[r]))));
  }
}

/* Panels in a tile of so many rows: enough sums to hide the FMA's latency, few enough for the registers. */
static const int TOGETHER[MAX_TILE + 1] = {0, 6, 4, 3, 3, 2, 2}, TOGETHER_INT8[MAX_TILE + 1] = {0, 6, 4, 3, 2, 2, 2};

#define TILE(rows, panels)                                                                                         \
  case rows * 8 + panels:                                                                                          \
    if (dtype == INT8)                                                                                             \
      narrow_tile(x->narrow + first * even(inputs), x->units + first, even(inputs), packed, bytes, y, stride, rows, \
                  panels, next, pieces);                                                                           \
    else if (dtype == BFLOAT16)                                                                                    \
      tile(x->wide + first * inputs, inputs, packed, y, stride, rows, panels, BFLOAT16, next, pieces);             \
    else                                                                                                           \
      tile(x->wide + first * inputs, inputs, packed, y, stride, rows, panels, FLOAT32, next, pieces);              \
    break

/* The rows from `first` on. */
static void any_tile(const Input *x, int64_t first, int64_t inputs, const char *packed, float *y, int64_t stride,
                     int rows, int panels, int dtype, const char *next, int64_t pieces) {
  const int64_t bytes = panel_bytes(inputs, dtype);
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
    TILE(3, 1);
    TILE(3, 2);
    TILE(3, 3);
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
  static const int COUNT[MAX_TILE + 1] = {0, 6, 4, 3, 6, 4, 4};
  const int64_t pieces = (rows + MAX_TILE - 1) / MAX_TILE;
  return COUNT[(rows + pieces - 1) / pieces];
}

int64_t osd_chunks(int64_t outputs, int64_t rows) {
  const int64_t channels = chunk_panels(rows) * PANEL;
  return (outputs + channels - 1) / channels;
}

/* y [rows, stride] = the rows of x from `first` on, times `panels` panels; as many bytes are fetched from `next`. */
static void multiply(const Input *x, int64_t first, int64_t inputs, const char *packed, float *y, int64_t rows,
                     int64_t stride, int64_t panels, int dtype, const char *next) {
  const int64_t pieces = (rows + MAX_TILE - 1) / MAX_TILE, bytes = panel_bytes(inputs, dtype);
  const int *together = dtype == INT8 ? TOGETHER_INT8 : TOGETHER;
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t a = rows * piece / pieces, b = rows * (piece + 1) / pieces;
    for (int64_t p = 0, step; p < panels; p += step) {
      step = panels - p < together[b - a] ? panels - p : together[b - a];
      any_tile(x, first + a, inputs, packed + p * bytes, y + a * stride + p * PANEL, stride, (int)(b - a), (int)step,
               dtype, next ? next + (piece * panels + p) * bytes / pieces : NULL, pieces);
    }
  }
}

/* The channels of a chunk for the rows from `start` on: sums [rows, MAX_CHUNK * PANEL], of which `width` columns
 * count. */
static void chunk_sums(const Linear *layer, const Input *x, int64_t start, float *sums, int64_t rows, int64_t first,
                       int64_t width, const char *next) {
  const int64_t stride = MAX_CHUNK * PANEL;
  const char *packed = (const char *)layer->packed + first / PANEL * panel_bytes(layer->inputs, layer->dtype);
  multiply(x, start, layer->inputs, packed, sums, rows, stride, (width + PANEL - 1) / PANEL, layer->dtype,
           start ? NULL : next);
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

const char *osd_chunk_at(const Linear *layer, int64_t rows, int64_t chunk) {
  return (const char *)layer->packed + chunk * chunk_panels(rows) * panel_bytes(layer->inputs, layer->dtype);
}

/* One chunk of y [rows, outputs], of y_dtype, = (or +=) x [rows, inputs] @ weight^T + bias. */
void osd_linear_chunk(const Linear *layer, const Input *x, void *y, int64_t rows, int64_t chunk, int how, int y_dtype,
                      const char *next) {
  const int64_t stride = MAX_CHUNK * PANEL;
  _Alignas(64) float sums[ROW_BLOCK * MAX_CHUNK * PANEL];
  int64_t first;
  const int64_t width = chunk_width(layer, rows, chunk, &first);
  for (int64_t start = 0; start < rows; start += ROW_BLOCK) {
    const int64_t count = rows - start < ROW_BLOCK ? rows - start : ROW_BLOCK;
    chunk_sums(layer, x, start, sums, count, first, width, next);
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
void osd_gated_chunk(const Linear *gate, const Linear *up, const Input *x, float *y, int64_t rows, int64_t chunk,
                     const char *next) {
  const int64_t stride = MAX_CHUNK * PANEL;
  _Alignas(64) float gates[ROW_BLOCK * MAX_CHUNK * PANEL], ups[ROW_BLOCK * MAX_CHUNK * PANEL];
  int64_t first;
  const int64_t width = chunk_width(gate, rows, chunk, &first);
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t start = 0; start < rows; start += ROW_BLOCK) {
    const int64_t count = rows - start < ROW_BLOCK ? rows - start : ROW_BLOCK;
    chunk_sums(gate, x, start, gates, count, first, width, osd_chunk_at(up, rows, chunk));
    chunk_sums(up, x, start, ups, count, first, width, next);
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
  const int64_t wide = x_dtype == FLOAT32 ? 0 : (rows * inputs * 4 + 63) / 64 * 64;
  const int64_t narrow = dtype == INT8 ? osd_narrow_bytes(rows, inputs) : 0;
  char *space = NULL;
  if (!rows) return 0;
  if (wide + narrow && posix_memalign((void **)&space, 64, (size_t)(wide + narrow))) return 1;
  float *copy = (float *)space;
  Input input;
  Team team = {0};
#pragma omp parallel num_threads(threads)
  {
    const Member m = {&team, omp_get_thread_num(), omp_get_num_threads()};
    for (int64_t r; wide && (r = take(&m, rows)) >= 0;)
      for (int64_t i = r * inputs; i < (r + 1) * inputs; i++) copy[i] = read_element(x, i, x_dtype);
    meet(&m);
    if (m.me == 0) input = osd_input(wide ? copy : x, rows, inputs, dtype, space + wide);
    meet(&m);
    const int64_t chunks = osd_chunks(outputs, rows);
    for (int64_t chunk; (chunk = take(&m, chunks)) >= 0;)
      osd_linear_chunk(&layer, &input, y, rows, chunk, REPLACE, x_dtype, osd_chunk_at(&layer, rows, chunk + 1));
  }
  free(space);
  return 0;
}
