/* Multiplication of a few rows with packed weights on this CPU.
 *
 * Both headers define the formats of a channel and of a row, and multiply a tile: rows times panels of PANEL output
 * channels. A tile has at most tile_rows(dtype) rows and tile_panels(rows, dtype) panels. A chunk has chunk_panels(rows)
 * panels, by the rows of its widest tile; this is a multiple of a tile's panels.
 */
#ifndef OSD_PANELS_H
#define OSD_PANELS_H

#include "common.h"

#define LINE 64

/* Prefetch a few cache lines of the next weights into the second-level cache, during a computation. */
INLINE void fetch(const char **next, const int lines) {
#pragma GCC unroll 8
  for (int l = 0; l < lines; l++) _mm_prefetch(*next + l * LINE, _MM_HINT_T1);
  *next += lines * LINE;
}

/* Return the largest magnitude of a channel of type `from`. */
static float largest_element(const void *weight, int64_t first, int64_t inputs, int from) {
  float most = 0;
  for (int64_t k = 0; k < inputs; k++) most = fmaxf(most, fabsf(read_element(weight, first + k, from)));
  return most;
}

/* Return an element in 127ths of the largest of its channel. */
INLINE int8_t to_int8(float element, float most) { return most > 0 ? (int8_t)lrintf(element / most * 127) : 0; }

static float largest_magnitude(const float *x, int64_t count) {
  float most = 0;
  for (int64_t k = 0; k < count; k++) most = fabsf(x[k]) > most ? fabsf(x[k]) : most;
  return most;
}

#ifdef __AVX512BF16__
#include "panels_avx512.h"
#else
#include "panels_avx2.h"
#endif

#ifdef __AMX_TILE__
#include "panels_amx.h"
#endif

#endif
