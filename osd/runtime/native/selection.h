/* Which tokens of a long context a layer reads, chosen one by one: see selection.c. */
#ifndef OSD_SELECTION_H
#define OSD_SELECTION_H

#include "common.h"
#include "team.h"

/* How many tokens are read, and what each layer has chosen for each slot. */
struct Selection {
  int64_t initial, top, local; /* the first, the chosen, and the last tokens */
  int64_t slots;
  float threshold; /* the cosine of queries from which on a choice is kept */
  int32_t compact; /* whether the tokens that are read stand side by side for the rotary embedding */
  float *queries;  /* [layers, slots, heads * dim] that the choices were made for, without their rotation */
  int32_t *chosen; /* [layers, slots, top] places, ascending */
  int32_t *begins; /* [layers, slots] where the local tokens began then; 0: nothing is chosen */
  const float *cosines, *sines; /* [places, dim / 2] of the rotation by so many places */
  int64_t *counts;              /* [2] choices that were made, and kept */
  char *keys, *values; /* [layers, slots, kv_heads, initial + top, dim] copies of what was chosen, side by side */
};

/* The rows of one slot, and what the layer at hand does for them. `far` is 0 where they see everything. */
typedef struct {
  int64_t row, count, slot, first; /* `first` tokens come before all of them */
  int64_t begin, far, candidates;
  int fresh;             /* whether a choice has to be made */
  float *query;          /* [heads, whole vectors of dim] their mean, which the candidates are scored with */
  float *scores, *votes; /* [heads, stride] and [stride] of the candidates */
  int64_t stride;
  float *tops, *sums; /* [heads, chunks] of the scores of a chunk of candidates */
} Span;

/* What a forward's choices need beside the selection. */
typedef struct {
  const Selection *selection;
  Span *spans;
  int64_t count;
  int32_t *owners; /* [rows] the span of each */
  char *all, *scratch;
  int64_t scratch_size; /* of a thread */
} Chooser;

/* Make room. Without a selection, or where no row has a context that is long enough, there is nothing to choose and
 * `count` is 0. */
int osd_make_chooser(Chooser *c, const Rows *rows, const Attention *shape, int threads);
void osd_free_chooser(Chooser *c);

/* Choose for one layer, by all members of a team, and gather what is chosen anew. The keys of the rows are stored. */
void osd_choose(const Member *m, Chooser *c, const Attention *a, const Rows *rows, const void *query, int64_t layer);

/* What a block of the layer reads of it. */
Far osd_far(const Chooser *c, const Attention *a, const Block *block, int64_t layer);

#endif
