/* Multiplication of the panels of panels_avx512.h by AMX, for bfloat16 and int8 weights: one instruction multiplies 16 rows
 * with 16 words of 16 output channels.
 */
#include "tiles.h"

/* Tiles 0 to 2 hold the sums of three panels; 3 to 5 the sums of further rows, or for int8 of the same rows' low bytes. */
#define ROWS_TILE 6
#define WEIGHTS_TILE 7

INLINE int matrix_rows(int dtype) { return dtype == INT8 ? TILE_ROWS : 2 * TILE_ROWS; }

/* Macros, because the instructions need constant tile numbers. */
#define ADD_PRODUCTS(sums, weights, dtype)                   \
  _tile_loadd(WEIGHTS_TILE, weights, LINE);                  \
  if (dtype == INT8)                                         \
    _tile_dpbusd(sums, ROWS_TILE, WEIGHTS_TILE);             \
  else                                                       \
    _tile_dpbf16ps(sums, ROWS_TILE, WEIGHTS_TILE)

#define ADD_PANELS(first, second, third, x, width, weights, bytes, panels, dtype)  \
  do {                                                                             \
    _tile_loadd(ROWS_TILE, x, width);                                              \
    ADD_PRODUCTS(first, weights, dtype);                                           \
    if (panels < 2) break;                                                         \
    ADD_PRODUCTS(second, (weights) + (bytes), dtype);                              \
    if (panels < 3) break;                                                         \
    ADD_PRODUCTS(third, (weights) + 2 * (bytes), dtype);                           \
  } while (0)

/* y [rows, stride] = at most matrix_rows(dtype) rows times at most three panels. Every `pieces`-th time it also prefetches
 * as much as it reads. */
static void matrix_tile(const char *x, const float *units, int64_t inputs, const char *packed, float *y, int64_t stride,
                        int rows, int panels, int dtype, const char *next, int64_t pieces) {
  const int64_t bytes = panel_bytes(inputs, dtype), width = row_bytes(inputs, dtype), count = words(inputs, dtype);
  const int both = dtype == INT8 || rows > TILE_ROWS, half = rows > TILE_ROWS ? (rows + 1) / 2 : rows;
  const int behind = rows - half; /* first row of the second half, which may overlap the first half */
  const char *weights = packed + head_vectors(dtype) * LINE, *second = x + (dtype == INT8 ? count * 4 : behind * width);
  _Alignas(64) float sums[2 * MAX_CHUNK][TILE_ROWS * PANEL];
  int64_t wait = 0;
  begin_tiles(half);
  for (int64_t k = 0; k < count; k += TOGETHER, weights += TOGETHER * LINE) {
    if (next && --wait < 0) {
      wait = pieces - 1;
      for (int p = 0; p < 2 * panels; p++) fetch(&next, TOGETHER / 2);
    }
    ADD_PANELS(0, 1, 2, x + k * 4, width, weights, bytes, panels, dtype);
    if (both) ADD_PANELS(3, 4, 5, second + k * 4, width, weights, bytes, panels, dtype);
  }
  _tile_stored(0, sums[0], LINE);
  _tile_stored(1, sums[1], LINE);
  _tile_stored(2, sums[2], LINE);
  _tile_stored(3, sums[3], LINE);
  _tile_stored(4, sums[4], LINE);
  _tile_stored(5, sums[5], LINE);
  _tile_release();
  for (int p = 0; p < panels; p++)
    for (int r = 0; r < rows; r++) {
      const float *row = r < half ? sums[p] + r * PANEL : sums[MAX_CHUNK + p] + (r - behind) * PANEL;
      const __m512 low = _mm512_load_ps(sums[MAX_CHUNK + p] + (r < half ? r : 0) * PANEL);
      _mm512_storeu_ps(y + r * stride + p * PANEL, worth(_mm512_load_ps(row), low, (const float *)(packed + p * bytes),
                                                         units + r, dtype));
    }
}
