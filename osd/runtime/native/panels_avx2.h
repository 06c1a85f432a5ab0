/* Panels of 8 output channels for CPUs with AVX2 and FMA.
 *
 * A vector holds 32 bits for each channel. A bfloat16 panel has a vector for two inputs: a shift gives the weights of the
 * even input as float32, a mask the weights of the odd input. An int8 panel begins with the scale of each channel and holds
 * 16 bytes for two inputs. It is multiplied with rows of 16-bit integers, scaled as large as 32-bit sums allow: such sums
 * are exact, and this CPU adds two products in one instruction. Rows for float weights are not converted.
 */
#define PANEL 8
#define MAX_TILE 6
#define MAX_CHUNK 6

static int64_t panel_bytes(int64_t inputs, int dtype) {
  if (dtype == INT8) return PANEL * 4 + (inputs + 1) / 2 * PANEL * 2;
  return dtype == BFLOAT16 ? (inputs + 1) / 2 * PANEL * 4 : inputs * PANEL * 4;
}

/* Channel j of a zeroed panel = the elements of `weight` from `first` on. */
static void pack_channel(char *panel, int64_t j, const void *weight, int64_t first, int64_t inputs, int from,
                         int dtype) {
  if (dtype == INT8) {
    const float most = largest_element(weight, first, inputs, from);
    ((float *)panel)[j] = most / 127;
    for (int64_t k = 0; k < inputs; k++)
      (panel + PANEL * 4)[k / 2 * PANEL * 2 + 2 * j + k % 2] = to_int8(read_element(weight, first + k, from), most);
  } else if (dtype == BFLOAT16) {
    for (int64_t k = 0; k < inputs; k++)
      ((uint16_t *)panel)[k / 2 * PANEL * 2 + 2 * j + k % 2] = ((const uint16_t *)weight)[first + k];
  } else {
    for (int64_t k = 0; k < inputs; k++) ((float *)panel)[k * PANEL + j] = ((const float *)weight)[first + k];
  }
}

static int64_t even(int64_t count) { return (count + 1) / 2 * 2; }

/* Return the bytes of a row in the input format. */
static int64_t row_bytes(int64_t inputs, int dtype) { return dtype == INT8 ? 2 * even(inputs) : 4 * inputs; }

static int reads_floats(int dtype) { return dtype != INT8; }

/* Convert a row to 16-bit integers, scaled as large as possible without overflow of a sum; returns the scale. */
static float read_row(const float *x, void *to, int64_t inputs, int dtype) {
  (void)dtype;
  const int64_t room = INT32_MAX / 127 / inputs;
  const float limit = room < INT16_MAX ? (float)room : (float)INT16_MAX, most = largest_magnitude(x, inputs);
  const float scale = most > 0 ? limit / most : 0;
  int16_t *narrow = to;
  for (int64_t k = 0; k < inputs; k++) narrow[k] = (int16_t)_mm_cvtss_si32(_mm_set_ss(x[k] * scale));
  if (inputs % 2) narrow[inputs] = 0;
  return most / limit;
}

/* Return sum + a * b. In assembly, because a compiler that may reorder these sums runs out of registers. */
INLINE __m256 multiply_add(__m256 a, __m256 b, __m256 sum) {
  __asm__("vfmadd231ps %1, %2, %0" : "+x"(sum) : "x"(a), "x"(b));
  return sum;
}

/* Return in each 32-bit lane sum + the products of two pairs of 16-bit integers. */
INLINE __m256i multiply_add_pairs(__m256i a, __m256i b, __m256i sum) {
  __m256i products;
  __asm__("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(products) : "x"(a), "x"(b));
  return sum;
}

typedef __m256 Sums[MAX_TILE][MAX_CHUNK];

/* sums += x[:, k] times the weights of input k; `odd` for the second input of a bfloat16 pair. */
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

/* Multiply a tile of floats. */
INLINE void float_tile(const float *x, int64_t inputs, const char *packed, float *y, int64_t stride, const int rows,
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

/* Add the products of one pair of inputs of an int8 tile. */
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

/* Multiply a tile of an int8 weight with x [rows, width], `width` even; `units` are the scales of the rows. */
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

/* y [rows, stride] = `rows` rows times `panels` panels, sums in registers, inputs strictly ascending. Every `pieces`-th time
 * it also prefetches as much as it reads. */
INLINE void tile(const char *x, const float *units, int64_t inputs, const char *packed, float *y, int64_t stride,
                 const int rows, const int panels, const int dtype, const char *next, int64_t pieces) {
  if (dtype == INT8)
    narrow_tile((const int16_t *)x, units, even(inputs), packed, panel_bytes(inputs, INT8), y, stride, rows, panels, next,
                pieces);
  else
    float_tile((const float *)x, inputs, packed, y, stride, rows, panels, dtype, next, pieces);
}

INLINE int tile_rows(int dtype) {
  (void)dtype;
  return MAX_TILE;
}

/* Return enough panels to hide the FMA's latency, and few enough for the registers. */
INLINE int tile_panels(int rows, int dtype) {
  static const int FLOATS[MAX_TILE + 1] = {0, 6, 4, 3, 3, 2, 2}, INTEGERS[MAX_TILE + 1] = {0, 6, 4, 3, 2, 2, 2};
  return dtype == INT8 ? INTEGERS[rows] : FLOATS[rows];
}

INLINE int chunk_panels(int rows) {
  static const int PANELS[MAX_TILE + 1] = {0, 6, 4, 3, 6, 4, 4};
  return PANELS[rows];
}
