/* Attention scores of blocks of queries, for attention itself and for the selection of tokens: see scores.c. */
#ifndef OSD_SCORES_H
#define OSD_SCORES_H

#include "common.h"

#define KEYS (2 * WIDTH) /* keys that are multiplied together */

/* Return `count` rounded up to whole vectors. */
INLINE int64_t padded(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

/* scores [queries, stride] = queries [queries, padded(dim)] times `count` contiguous keys; up to 32 more scores are
 * written. `wide` is a buffer for 32 keys. */
void osd_score(const float *queries, int64_t count_queries, const char *keys, int64_t count, int64_t dim, float *scores,
               int64_t stride, float *wide, int dtype);

#endif
