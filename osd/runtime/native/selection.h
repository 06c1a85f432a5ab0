/* Selection of the tokens of a long context that a layer reads: see selection.c. */
#ifndef OSD_SELECTION_H
#define OSD_SELECTION_H

#include "common.h"
#include "team.h"

/* Sizes of a selection, and the selected places of each layer and slot. */
struct Selection {
  int64_t initial, top, local; /* numbers of first, selected and last tokens */
  int64_t slots;
  float threshold; /* least cosine of queries to reuse a selection */
  int32_t compact; /* whether the tokens that are read get adjacent rotary positions */
  float *queries;  /* [layers, slots, heads * dim] queries of the selections, without rotation */
  int32_t *chosen; /* [layers, slots, top] places, ascending */
  int32_t *begins; /* [layers, slots] first local place at the selection; 0: no selection */
  const float *cosines, *sines; /* [places, dim / 2] of the rotation by each number of places */
  int64_t *counts;              /* [2] selections made, and reused */
  char *keys, *values; /* [layers, slots, kv_heads, initial + top, dim] copies of the selected places */
};

/* Rows of one slot, and the selection of the current layer for them. `far` is 0 if they read all places. */
typedef struct {
  int64_t row, count, slot, first; /* `first`: number of tokens before all of them */
  int64_t begin, far, candidates;
  int fresh;             /* whether a new selection is needed */
  float *query;          /* [heads, whole vectors of dim] mean query, which scores the candidates */
  float *scores, *votes; /* [heads, stride] and [stride] of the candidates */
  int64_t stride;
  float *tops, *sums; /* [heads, chunks] maximum and sum of each chunk's scores */
} Span;

/* Buffers of a forward's selections. */
typedef struct {
  const Selection *selection;
  Span *spans;
  int64_t count;
  int32_t *owners; /* [rows] span of each row */
  char *all, *scratch;
  int64_t scratch_size; /* of a thread */
} Chooser;

/* Allocate the buffers. Without a selection, or if no context is long enough, `count` is 0. Returns 1 if an allocation
 * failed. */
int osd_make_chooser(Chooser *c, const Rows *rows, const Attention *shape, int threads);
void osd_free_chooser(Chooser *c);

/* Select the places of one layer, as a member of a team, and copy new selections. The keys of the rows must be stored. */
void osd_choose(const Member *m, Chooser *c, const Attention *a, const Rows *rows, const void *query, int64_t layer);

/* Return the copied places that a block of the layer reads. */
Far osd_far(const Chooser *c, const Attention *a, const Block *block, int64_t layer);

#endif
