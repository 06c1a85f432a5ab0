/* Types and functions of all kernels. See linear.c for the layout of packed weights. */
#ifndef OSD_COMMON_H
#define OSD_COMMON_H

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vector.h"

enum { KEPT = 8 }; /* tokens of a distribution that recall keeps and drafts from */

enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 }; /* INT8 only for weights */

INLINE float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE float read_element(const void *base, int64_t index, int dtype) {
  return dtype == BFLOAT16 ? from_bf16(((const uint16_t *)base)[index]) : ((const float *)base)[index];
}

INLINE void write_element(void *base, int64_t index, float value, int dtype) {
  if (dtype == BFLOAT16)
    ((uint16_t *)base)[index] = to_bf16(value);
  else
    ((float *)base)[index] = value;
}

/* The products replace y, or are added to it (float32 only). */
enum { REPLACE = 0, ADD = 1 };

typedef struct {
  const void *packed;
  const float *bias; /* or null */
  int64_t inputs, outputs;
  int dtype; /* of the weight */
} Linear;

/* Input of linear layers: rows of float32, or rows in the format that this CPU multiplies weights of a type with (see
 * panels.h). `units` are the scales of integer rows. */
typedef struct {
  const char *rows;
  const float *units; /* [rows], or null */
} Input;

/* Return the bytes of rows in the input format of layers with weights of `dtype`. */
int64_t osd_input_bytes(int64_t rows, int64_t inputs, int dtype);

/* Return x [rows, inputs] in this format; it is x itself if the format is float32. */
Input osd_input(const float *x, int64_t rows, int64_t inputs, int dtype, void *space);

/* Linear layers are computed in chunks of output channels, which the threads share: see linear.c. During a chunk the
 * weights at `next`, which may be null, are prefetched. */
int64_t osd_chunks(int64_t outputs, int64_t rows);
const char *osd_chunk_at(const Linear *layer, int64_t rows, int64_t chunk);
void osd_linear_chunk(const Linear *layer, const Input *x, void *y, int64_t rows, int64_t chunk, int how, int y_dtype,
                      const char *next);
void osd_gated_chunk(const Linear *gate, const Linear *up, const Input *x, float *y, int64_t rows, int64_t chunk,
                     const char *next);

/* Write the k most probable tokens of a distribution, see top.c. */
void osd_few(const float *row, int64_t vocabulary, int k, int64_t *ids, float *logp);

typedef struct Selection Selection; /* see selection.h */

/* New tokens of a forward: their places in the KV slots and the places that each sees, see attention.c. */
typedef struct {
  const float *cosines, *sines; /* [places, dim] of the rotary embedding */
  const int64_t *positions;     /* [rows] index into these tables */
  const int32_t *slots, *stores, *from, *visible, *base;
  const uint8_t *mask;
  int64_t count, mask_width;
  const Selection *selection; /* null: each row reads all that it sees */
} Rows;

/* Keys and values of one layer: [slots, kv_heads, places, dim]. */
typedef struct {
  void *keys, *values;
  int64_t heads, kv_heads, dim, places;
  float scaling, softcap;
  int dtype, cache_dtype; /* of query and out, and of keys and values */
} Attention;

/* Queries of adjacent rows of a slot, row-major over rows and the heads that share a key head. */
typedef struct {
  int64_t row, first, count, kv_head;
} Block;

/* Copied keys and values [count, dim] that a block reads instead of the places before `begin`. Without copies it reads the
 * places themselves. */
typedef struct {
  const char *keys, *values;
  int64_t count, begin;
} Far;

/* Division of a forward's attention into blocks, the same for all layers. */
typedef struct {
  Block *blocks;
  int64_t count, scratch; /* bytes for each thread */
} Plan;

int osd_plan(Plan *plan, const Rows *rows, const Attention *shape, int threads);
void osd_attention_block(const Attention *a, const Rows *rows, const Block *block, Far far, const void *query, void *out,
                         char *scratch);

#endif
