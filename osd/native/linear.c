/* Linear layers for few rows at a time.
 *
 * Every output element is summed in one fixed order that does not depend on how many rows are
 * computed together, so a token's numbers are the same alone, in a batch and in a draft tree.
 *
 * Weights are packed in panels of 16 output channels. A bfloat16 panel holds, for each input k, 32
 * bytes in which channel j and channel j + 8 share a 32-bit lane: a shift gives channels 0..7 as
 * float32, a mask gives channels 8..15.
 */
#include "common.h"

#define PANEL 16
#define MAX_TILE 6
#define ROW_BLOCK 48

int64_t osd_panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

/* weight [outputs, inputs] -> packed [panels, inputs, 16], zero padded; dtype is that of both. */
void osd_pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int dtype) {
  int64_t panels = osd_panels(outputs);
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t k = 0; k < inputs; k++)
      for (int64_t j = 0; j < PANEL; j++) {
        int64_t channel = panel * PANEL + j;
        int64_t place = (panel * inputs + k) * PANEL;
        if (dtype == BFLOAT16) {
          int64_t lane = j < 8 ? 2 * j : 2 * (j - 8) + 1;
          ((uint16_t *)packed)[place + lane] =
              channel < outputs ? ((const uint16_t *)weight)[channel * inputs + k] : 0;
        } else {
          ((float *)packed)[place + j] = channel < outputs ? ((const float *)weight)[channel * inputs + k] : 0;
        }
      }
}

/* One tile: `rows` rows times `panels` panels, accumulators in registers, k strictly ascending. */
INLINE void tile(const float *x, int64_t inputs, const char *packed, float *y, int64_t stride, const int rows,
                 const int panels, const int dtype) {
  const int64_t width = dtype == BFLOAT16 ? 2 : 4;
  const int64_t panel_bytes = inputs * PANEL * width;
  __m256 low[MAX_TILE][MAX_TILE], high[MAX_TILE][MAX_TILE];
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) low[r][p] = high[r][p] = _mm256_setzero_ps();
  for (int64_t k = 0; k < inputs; k++) {
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) {
      const char *at = packed + p * panel_bytes + k * PANEL * width;
      __m256 first, second;
      if (dtype == BFLOAT16) {
        _mm_prefetch(at + 1024, _MM_HINT_T0);
        __m256i bits = _mm256_loadu_si256((const __m256i *)at);
        first = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
        second = _mm256_castsi256_ps(_mm256_and_si256(bits, mask));
      } else {
        _mm_prefetch(at + 1024, _MM_HINT_T0);
        first = _mm256_loadu_ps((const float *)at);
        second = _mm256_loadu_ps((const float *)at + 8);
      }
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        __m256 value = _mm256_broadcast_ss(x + r * inputs + k);
        low[r][p] = _mm256_fmadd_ps(first, value, low[r][p]);
        high[r][p] = _mm256_fmadd_ps(second, value, high[r][p]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 6
    for (int p = 0; p < panels; p++) {
      _mm256_storeu_ps(y + r * stride + p * PANEL, low[r][p]);
      _mm256_storeu_ps(y + r * stride + p * PANEL + 8, high[r][p]);
    }
}

#define TILE(rows, panels)                                                       \
  do {                                                                           \
    if (dtype == BFLOAT16)                                                       \
      tile(x, inputs, packed, y, stride, rows, panels, BFLOAT16);                \
    else                                                                         \
      tile(x, inputs, packed, y, stride, rows, panels, FLOAT32);                 \
  } while (0)

/* Panels computed together for a number of rows, so that enough accumulators hide the FMA latency. */
static const int TOGETHER[MAX_TILE + 1] = {0, 4, 3, 2, 1, 1, 1};

static void tiles(const float *x, int64_t inputs, const char *packed, float *y, int64_t stride, int rows, int together,
                  int dtype) {
  switch (rows * 8 + together) {
    case 8 + 4: TILE(1, 4); break;
    case 8 + 3: TILE(1, 3); break;
    case 8 + 2: TILE(1, 2); break;
    case 8 + 1: TILE(1, 1); break;
    case 16 + 3: TILE(2, 3); break;
    case 16 + 2: TILE(2, 2); break;
    case 16 + 1: TILE(2, 1); break;
    case 24 + 2: TILE(3, 2); break;
    case 24 + 1: TILE(3, 1); break;
    case 32 + 1: TILE(4, 1); break;
    case 40 + 1: TILE(5, 1); break;
    case 48 + 1: TILE(6, 1); break;
    default: break;
  }
}

/* y [rows, outputs] = x [rows, inputs] @ weight^T + bias. x and y have x_dtype, the bias is float32 or null. */
int osd_linear(const void *x, const void *packed, const float *bias, void *y, int64_t rows, int64_t inputs,
               int64_t outputs, int x_dtype, int dtype, int threads) {
  const int64_t panels = osd_panels(outputs), stride = panels * PANEL;
  const int64_t panel_bytes = inputs * PANEL * (dtype == BFLOAT16 ? 2 : 4);
  const int64_t block = rows < ROW_BLOCK ? rows : ROW_BLOCK;
  float *copy = NULL, *sums = NULL;
  if (x_dtype != FLOAT32 && posix_memalign((void **)&copy, 64, (size_t)(rows * inputs) * 4)) return 1;
  if (posix_memalign((void **)&sums, 64, (size_t)(block * stride) * 4)) {
    free(copy);
    return 1;
  }
  const float *wide = copy ? copy : x;
#pragma omp parallel num_threads(threads)
  {
    const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
    if (copy) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < rows * inputs; i++) copy[i] = read_element(x, i, x_dtype);
    }
    const int64_t first = panels * me / team, last = panels * (me + 1) / team;
    for (int64_t start = 0; start < rows; start += block) {
      const int64_t count = rows - start < block ? rows - start : block;
      const int64_t pieces = (count + MAX_TILE - 1) / MAX_TILE;
      const int64_t widest = (count + pieces - 1) / pieces;
      for (int64_t p = first; p < last;) {
        int64_t together = TOGETHER[widest];
        if (together > last - p) together = last - p;
        for (int64_t piece = 0; piece < pieces; piece++) {
          const int64_t a = count * piece / pieces, b = count * (piece + 1) / pieces;
          for (int64_t q = 0; q < together;) {
            int64_t step = TOGETHER[b - a];
            if (step > together - q) step = together - q;
            tiles(wide + (start + a) * inputs, inputs, (const char *)packed + (p + q) * panel_bytes,
                  sums + a * stride + (p + q) * PANEL, stride, (int)(b - a), (int)step, dtype);
            q += step;
          }
        }
        const int64_t from = p * PANEL, to = (p + together) * PANEL < outputs ? (p + together) * PANEL : outputs;
        for (int64_t r = 0; r < count; r++)
          for (int64_t o = from; o < to; o++)
            write_element(y, (start + r) * outputs + o, sums[r * stride + o] + (bias ? bias[o] : 0.0f), x_dtype);
        p += together;
      }
    }
  }
  free(copy);
  free(sums);
  return 0;
}
