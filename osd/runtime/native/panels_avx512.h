/* Panels of 16 output channels for CPUs whose AVX-512 multiplies bfloat16 and 8-bit integers.
 *
 * A vector holds a word of 32 bits for each channel: the weight of one input in float32, of two in bfloat16, of four in int8.
 * Rows are read as words of the same kind, so one instruction multiplies a word of a row with a vector and adds the
 * products to each channel's sum. Rows are rounded to bfloat16 for bfloat16 weights.
 *
 * For int8 weights rows are rounded to 16-bit integers, whose high and low bytes are multiplied separately: rows of 8 bits
 * cost a language model ten times as much of its quality. This CPU reads the bytes of a row as unsigned, so a high byte of
 * 128 stands for zero. An int8 panel begins with the scale of each channel, and with 128 times the sum of its integers,
 * which is subtracted at the end. Sums of up to 66,000 inputs are exact.
 */
#define PANEL 16
#define MAX_TILE 8
#define MAX_CHUNK 3
#define MIDDLE 128 /* the high byte that stands for zero */
#ifdef __AMX_TILE__
#define TOGETHER 16 /* words multiplied in one instruction */
#else
#define TOGETHER 1
#endif

/* Return the number of words, padded to a multiple of TOGETHER. */
static int64_t words(int64_t inputs, int dtype) {
  const int64_t in_word = dtype == INT8 ? 4 : dtype == BFLOAT16 ? 2 : 1, at_once = in_word * (dtype == FLOAT32 ? 1 : TOGETHER);
  return (inputs + at_once - 1) / at_once * at_once / in_word;
}

/* Vectors before the weights. */
INLINE int64_t head_vectors(int dtype) { return dtype == INT8 ? 2 : 0; }

static int64_t panel_bytes(int64_t inputs, int dtype) {
  return (head_vectors(dtype) + words(inputs, dtype)) * PANEL * 4;
}

/* Channel j of a zeroed panel = the elements of `weight` from `first` on. */
static void pack_channel(char *panel, int64_t j, const void *weight, int64_t first, int64_t inputs, int from,
                         int dtype) {
  if (dtype == INT8) {
    const float most = largest_element(weight, first, inputs, from);
    int8_t *to = (int8_t *)panel + head_vectors(INT8) * PANEL * 4;
    int32_t sum = 0;
    for (int64_t k = 0; k < inputs; k++)
      sum += to[(k / 4 * PANEL + j) * 4 + k % 4] = to_int8(read_element(weight, first + k, from), most);
    ((float *)panel)[j] = most / 127;
    ((int32_t *)panel)[PANEL + j] = MIDDLE * sum;
  } else if (dtype == BFLOAT16) {
    for (int64_t k = 0; k < inputs; k++)
      ((uint16_t *)panel)[(k / 2 * PANEL + j) * 2 + k % 2] = ((const uint16_t *)weight)[first + k];
  } else {
    for (int64_t k = 0; k < inputs; k++) ((float *)panel)[k * PANEL + j] = ((const float *)weight)[first + k];
  }
}

/* Return the bytes of a row in the input format. */
static int64_t row_bytes(int64_t inputs, int dtype) { return words(inputs, dtype) * (dtype == INT8 ? 8 : 4); }

static int reads_floats(int dtype) { return dtype == FLOAT32; }

/* Convert a row to bfloat16, or to 16-bit integers: all high bytes, then all low bytes. Returns the scale. */
static float read_row(const float *x, void *to, int64_t inputs, int dtype) {
  int64_t k = 0;
  if (dtype == BFLOAT16) {
    memset((char *)to + row_bytes(inputs, dtype) - 4 * TOGETHER, 0, 4 * TOGETHER);
    for (; k + 16 <= inputs; k += 16)
      _mm256_storeu_si256((__m256i *)((uint16_t *)to + k), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + k)));
    for (; k < inputs; k++) ((uint16_t *)to)[k] = to_bf16(x[k]);
    return 1;
  }
  const float most = largest_magnitude(x, inputs), scale = most > 0 ? INT16_MAX / most : 0;
  uint8_t *high = to, *low = high + words(inputs, INT8) * 4; /* the padding is multiplied by zeros */
  for (; k + 16 <= inputs; k += 16) {
    const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k), _mm512_set1_ps(scale)));
    const __m512i values = _mm512_add_epi32(integers, _mm512_set1_epi32(MIDDLE * 256));
    _mm_storeu_si128((__m128i *)(high + k), _mm512_cvtepi32_epi8(_mm512_srli_epi32(values, 8)));
    _mm_storeu_si128((__m128i *)(low + k), _mm512_cvtepi32_epi8(values));
  }
  for (; k < inputs; k++) {
    const int32_t value = MIDDLE * 256 + _mm_cvtss_si32(_mm_set_ss(x[k] * scale));
    high[k] = (uint8_t)(value >> 8);
    low[k] = (uint8_t)value;
  }
  return most / INT16_MAX;
}

/* Return sum + the products of the words of a and b. In assembly, so that sums stay in their registers. */
INLINE __m512 multiply_add(__m512 weight, __m512 value, __m512 sum, const int dtype) {
  if (dtype == INT8)
    __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(weight), "v"(value));
  else if (dtype == BFLOAT16)
    __asm__("vdpbf16ps %1, %2, %0" : "+v"(sum) : "v"(weight), "v"(value));
  else
    __asm__("vfmadd231ps %1, %2, %0" : "+v"(sum) : "v"(weight), "v"(value));
  return sum;
}

/* Return the sums of a row in a panel as floats. For int8 they are combined from the sums of high bytes, minus 128 times
 * the sum of the weights, and of low bytes, and scaled by the panel's `head` and the row's `unit`. */
INLINE __m512 worth(__m512 high, __m512 low, const float *head, const float *unit, const int dtype) {
  if (dtype != INT8) return high;
  const __m512i signed_high = _mm512_sub_epi32(_mm512_castps_si512(high), _mm512_loadu_si512(head + PANEL));
  const __m512 sums = _mm512_fmadd_ps(_mm512_cvtepi32_ps(signed_high), _mm512_set1_ps(256),
                                      _mm512_cvtepi32_ps(_mm512_castps_si512(low)));
  return _mm512_mul_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(head), _mm512_set1_ps(*unit)));
}

/* y [rows, stride] = `rows` rows times `panels` panels, sums in registers, inputs strictly ascending. Every `pieces`-th time
 * it also prefetches as much as it reads. */
INLINE void tile(const char *x, const float *units, int64_t inputs, const char *packed, float *y, int64_t stride,
                 const int rows, const int panels, const int dtype, const char *next, int64_t pieces) {
  const int64_t bytes = panel_bytes(inputs, dtype), width = row_bytes(inputs, dtype), count = words(inputs, dtype);
  const int parts = dtype == INT8 ? 2 : 1; /* of a row: high and low bytes */
  const char *first = packed + head_vectors(dtype) * PANEL * 4;
  __m512 sums[MAX_TILE][MAX_CHUNK]; /* of tile_rows(dtype) rows */
#pragma GCC unroll 8
  for (int r = 0; r < rows * parts; r++)
#pragma GCC unroll 8
    for (int p = 0; p < panels; p++) sums[r][p] = _mm512_setzero_ps();
  int64_t wait = 0;
  for (int64_t k = 0; k < count; k++) {
    __m512 weight[MAX_CHUNK];
    if (next && --wait < 0) {
      wait = pieces - 1;
      fetch(&next, panels);
    }
#pragma GCC unroll 8
    for (int p = 0; p < panels; p++) weight[p] = _mm512_loadu_ps(first + p * bytes + k * PANEL * 4);
#pragma GCC unroll 8
    for (int r = 0; r < rows * parts; r++) {
      const __m512 value = _mm512_set1_ps(*(const float *)(x + r / parts * width + (r % parts * count + k) * 4));
#pragma GCC unroll 8
      for (int p = 0; p < panels; p++) sums[r][p] = multiply_add(weight[p], value, sums[r][p], dtype);
    }
  }
#pragma GCC unroll 8
  for (int p = 0; p < panels; p++)
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
      _mm512_storeu_ps(y + r * stride + p * PANEL, worth(sums[r * parts][p], sums[r * parts + parts - 1][p],
                                                         (const float *)(packed + p * bytes), units + r, dtype));
}

INLINE int tile_rows(int dtype) { return dtype == INT8 ? MAX_TILE / 2 : MAX_TILE; }

/* Three for any number of rows: a few rows have few sums, but wait for memory in any case. */
INLINE int tile_panels(int rows, int dtype) {
  (void)rows, (void)dtype;
  return MAX_CHUNK;
}

INLINE int chunk_panels(int rows) {
  (void)rows;
  return MAX_CHUNK;
}
