/* Linear layers for few rows at a time.
 *
 * Every output element is summed in a fixed order that does not depend on the number of rows computed together. So the
 * results of a token are equal alone, in a batch and in a draft tree.
 *
 * Weights are packed in panels of output channels, interleaved by 32-bit words: see panels.h.
 */
#include <sys/syscall.h>
#include <unistd.h>

#include "panels.h"
#include "team.h"

#define ROW_BLOCK 48
#define ARCH_REQ_XCOMP_PERM 0x1023 /* from the Linux kernel */
#define XFEATURE_XTILEDATA 18

/* Return whether the system lets this process use the library's instructions; AMX tiles need a permission. */
int osd_allowed(void) {
#ifdef __AMX_TILE__
  return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
  return 1;
#endif
}

/* Return the bytes of a packed weight. */
int64_t osd_packed_bytes(int64_t outputs, int64_t inputs, int dtype) {
  return (outputs + PANEL - 1) / PANEL * panel_bytes(inputs, dtype);
}

/* weight [outputs, inputs] of `from` -> packed panels of `dtype`, zero padded; float types do not change. */
void osd_pack(const void *weight, void *packed, int64_t outputs, int64_t inputs, int from, int dtype) {
  const int64_t bytes = panel_bytes(inputs, dtype);
  memset(packed, 0, (size_t)osd_packed_bytes(outputs, inputs, dtype));
  for (int64_t channel = 0; channel < outputs; channel++)
    pack_channel((char *)packed + channel / PANEL * bytes, channel % PANEL, weight, channel * inputs, inputs, from,
                 dtype);
}

int64_t osd_input_bytes(int64_t rows, int64_t inputs, int dtype) {
  return reads_floats(dtype) ? 0 : (rows * (4 + row_bytes(inputs, dtype)) + 63) / 64 * 64;
}

Input osd_input(const float *x, int64_t rows, int64_t inputs, int dtype, void *space) {
  if (reads_floats(dtype)) return (Input){(const char *)x, NULL};
  float *units = space;
  char *to = (char *)(units + rows);
  for (int64_t r = 0; r < rows; r++)
    units[r] = read_row(x + r * inputs, to + r * row_bytes(inputs, dtype), inputs, dtype);
  return (Input){to, units};
}

#define TILE_OF(type, rows, panels) \
  if (dtype == type && rows <= tile_rows(type) && panels <= tile_panels(rows, type)) \
  tile(at, units, inputs, packed, y, stride, rows, panels, type, next, pieces)

#define TILE(rows, panels)               \
  case rows * 8 + panels:                \
    TILE_OF(FLOAT32, rows, panels);      \
    TILE_OF(BFLOAT16, rows, panels);     \
    TILE_OF(INT8, rows, panels);         \
    break

/* Return the most rows that are multiplied together. */
static int rows_together(int dtype) {
#ifdef __AMX_TILE__
  if (dtype != FLOAT32) return matrix_rows(dtype);
#endif
  return tile_rows(dtype);
}

/* Multiply the rows from `first` on. */
static void any_tile(const Input *x, int64_t first, int64_t inputs, const char *packed, float *y, int64_t stride,
                     int rows, int panels, int dtype, const char *next, int64_t pieces) {
  const char *at = x->rows + first * row_bytes(inputs, dtype);
  const float *units = x->units ? x->units + first : NULL;
#ifdef __AMX_TILE__
  if (dtype != FLOAT32) {
    matrix_tile(at, units, inputs, packed, y, stride, rows, panels, dtype, next, pieces);
    return;
  }
#endif
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
    TILE(5, 3);
    TILE(6, 1);
    TILE(6, 2);
    TILE(6, 3);
    TILE(7, 1);
    TILE(7, 2);
    TILE(7, 3);
    TILE(8, 1);
    TILE(8, 2);
    TILE(8, 3);
    default: break;
  }
}

/* Return the channels of a chunk. */
static int64_t chunk_channels(int64_t rows) {
  const int64_t pieces = (rows + MAX_TILE - 1) / MAX_TILE;
  return chunk_panels((int)((rows + pieces - 1) / pieces)) * PANEL;
}

int64_t osd_chunks(int64_t outputs, int64_t rows) {
  const int64_t channels = chunk_channels(rows);
  return (outputs + channels - 1) / channels;
}

/* y [rows, stride] = the rows of x from `first` on, times `panels` panels; prefetches as many bytes at `next`. */
static void multiply(const Input *x, int64_t first, int64_t inputs, const char *packed, float *y, int64_t rows,
                     int64_t stride, int64_t panels, int dtype, const char *next) {
  const int64_t most = rows_together(dtype), pieces = (rows + most - 1) / most, bytes = panel_bytes(inputs, dtype);
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t a = rows * piece / pieces, b = rows * (piece + 1) / pieces;
    const int together = tile_panels((int)(b - a), dtype);
    for (int64_t p = 0, step; p < panels; p += step) {
      step = panels - p < together ? panels - p : together;
      any_tile(x, first + a, inputs, packed + p * bytes, y + a * stride + p * PANEL, stride, (int)(b - a), (int)step,
               dtype, next ? next + (piece * panels + p) * bytes / pieces : NULL, pieces);
    }
  }
}

/* Compute a chunk for the rows from `start` on: sums [rows, MAX_CHUNK * PANEL], with `width` valid columns. */
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

/* Return the number of a chunk's channels; `first` becomes the first of them. */
static int64_t chunk_width(const Linear *layer, int64_t rows, int64_t chunk, int64_t *first) {
  const int64_t channels = chunk_channels(rows);
  *first = chunk * channels;
  return layer->outputs - *first < channels ? layer->outputs - *first : channels;
}

const char *osd_chunk_at(const Linear *layer, int64_t rows, int64_t chunk) {
  return (const char *)layer->packed + chunk * chunk_channels(rows) / PANEL * panel_bytes(layer->inputs, layer->dtype);
}

/* Compute one chunk of y [rows, outputs], of y_dtype, = (or +=) x [rows, inputs] @ weight^T + bias. */
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

/* Compute one chunk of y [rows, outputs] = silu(gate(x)) * up(x). */
void osd_gated_chunk(const Linear *gate, const Linear *up, const Input *x, float *y, int64_t rows, int64_t chunk,
                     const char *next) {
  const int64_t stride = MAX_CHUNK * PANEL;
  _Alignas(64) float gates[ROW_BLOCK * MAX_CHUNK * PANEL], ups[ROW_BLOCK * MAX_CHUNK * PANEL];
  int64_t first;
  const int64_t width = chunk_width(gate, rows, chunk, &first);
  for (int64_t start = 0; start < rows; start += ROW_BLOCK) {
    const int64_t count = rows - start < ROW_BLOCK ? rows - start : ROW_BLOCK;
    chunk_sums(gate, x, start, gates, count, first, width, osd_chunk_at(up, rows, chunk));
    chunk_sums(up, x, start, ups, count, first, width, next);
    for (int64_t r = 0; r < count; r++) {
      float *row = gates + r * stride;
      for (int64_t o = 0; o < width; o += WIDTH) /* the padding beyond width is zero */
        put(row + o, silu(load(row + o)) * load(ups + r * stride + o));
      memcpy(y + (start + r) * gate->outputs + first, row, (size_t)width * 4);
    }
  }
}

/* y [rows, outputs] = x [rows, inputs] @ weight^T + bias. x and y have x_dtype, the bias is float32 or null. Returns 1 if
 * an allocation failed. */
int osd_linear(const void *x, const void *packed, const float *bias, void *y, int64_t rows, int64_t inputs,
               int64_t outputs, int x_dtype, int dtype, int threads) {
  const Linear layer = {packed, bias, inputs, outputs, dtype};
  const int64_t wide = x_dtype == FLOAT32 ? 0 : (rows * inputs * 4 + 63) / 64 * 64;
  const int64_t narrow = osd_input_bytes(rows, inputs, dtype);
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
