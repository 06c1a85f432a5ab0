/* Trees of the nodes that are most likely to be kept, as many as pay: what osd/drafting/growth/best_first.py decides
 * between two calls of a drafter, candidate for candidate, for drafters that are asked level by level in one call.
 */
#ifndef OSD_BEST_FIRST_H
#define OSD_BEST_FIRST_H

#include "common.h"

/* What decides: see PayingTrees and Worth in osd/drafting/worth.py. */
typedef struct {
  const double *chances, *firsts, *edges; /* [depths, ranks, buckets], [depths], [buckets - 1] */
  const double *rounds, *calls;           /* [known] seconds by rows; [priced] by the nodes that are asked about */
  int64_t depths, ranks, buckets, known, priced, levels, children, rows, usual; /* usual: -1 for none */
  double tokens;
} Paying;

/* A token that may become a node; `node` is its number then, -1 before. */
typedef struct {
  double chance, estimate;
  int64_t column;
  int32_t row, parent, depth, node;
} Candidate;

/* All candidates, from the most probable on; of equals those that were found first. */
typedef struct {
  Candidate *all;
  int64_t count, taken;
} Pool;

static double chance_of(const Paying *p, int64_t depth, int64_t rank, double estimate) {
  int64_t bucket = 0;
  while (bucket + 1 < p->buckets && p->edges[bucket] <= estimate) bucket++;
  if (depth >= p->depths) depth = p->depths - 1;
  if (rank >= p->ranks) rank = p->ranks - 1;
  return p->chances[(depth * p->ranks + rank) * p->buckets + bucket];
}

static void add_candidate(Pool *pool, Candidate one) {
  int64_t at = pool->count++;
  for (; at && pool->all[at - 1].chance < one.chance; at--) pool->all[at] = pool->all[at - 1];
  pool->all[at] = one;
}

/* How many of the first candidates give the most, of drafts for so many sequences: Worth.best. */
static int64_t paying_count(const Paying *p, const Pool *pool, int64_t sequences) {
  const int64_t last = p->known - 1, room = last - p->rows, count = pool->count < room ? pool->count : room;
  const double *rounds = p->rounds, share = (double)p->usual / (double)(sequences > 1 ? sequences : 1);
  double given = p->tokens, best = given / rounds[p->rows], speed = 0;
  int64_t found = 0;
  if (p->usual < 0) {
    for (int64_t n = 1; n <= count; n++) {
      given += pool->all[n - 1].chance;
      if (given / rounds[p->rows + n] > best) best = given / rounds[p->rows + n], found = n;
    }
    return found;
  }
  for (int64_t n = 0; n <= count; n++) {
    const int64_t rows = (int64_t)((double)p->usual + share * (double)n);
    const double mine = ((double)p->usual + share * (given - p->tokens)) / rounds[rows < last ? rows : last];
    if (!n || mine > speed) speed = mine;
    if (n < count) given += pool->all[n].chance;
  }
  given = p->tokens;
  for (int64_t n = 0; n <= count; n++) {
    const double value = given - speed * rounds[p->rows + n];
    if (!n || value > best) best = value, found = n;
    if (n < count) given += pool->all[n].chance;
  }
  return found;
}

/* Make nodes of the candidates that pay, as far as there is room [sequences]; those at `depth` are put into `level`, and
 * their number is returned. */
static int64_t take_nodes(const Paying *p, Pool *pool, const int32_t *room, int64_t *sizes, int64_t sequences, int64_t depth,
                          Candidate *level) {
  const int64_t count = paying_count(p, pool, sequences);
  int64_t found = 0;
  for (Candidate *one = pool->all; one < pool->all + count; one++) {
    if (one->node >= 0 || sizes[one->row] >= room[one->row]) continue;
    one->node = (int32_t)sizes[one->row]++;
    pool->taken++;
    if (one->depth == depth) level[found++] = *one;
  }
  return found;
}

/* Of the nodes in `level`, those whose first children are expected to bring more than asking takes; they come first
 * afterwards, and their number is returned. */
static int64_t worth_asking(const Paying *p, const Pool *pool, Candidate *level, int64_t count, int64_t depth) {
  const int64_t last = p->known - 1, rows = p->rows + pool->taken < last ? p->rows + pool->taken : last;
  const double first = p->firsts[depth < p->depths ? depth : p->depths - 1];
  double expected = 0, gain = 0, best = 0;
  int64_t asked = 0;
  for (int64_t i = 0; i < pool->count; i++)
    if (pool->all[i].node >= 0) expected += pool->all[i].chance;
  const double speed = p->usual >= 0 ? (double)p->usual / p->rounds[p->usual] : (p->tokens + expected) / p->rounds[rows];
  const double price = rows < last ? speed * (p->rounds[rows + 1] - p->rounds[rows]) : 0;
  for (int64_t i = 1; i < count; i++) {
    const Candidate one = level[i];
    int64_t at = i;
    for (; at && level[at - 1].chance * first < one.chance * first; at--) level[at] = level[at - 1];
    level[at] = one;
  }
  for (int64_t n = 1; n <= count; n++) {
    const double more = level[n - 1].chance * first - price;
    gain += more > 0 ? more : 0;
    const double value = gain - speed * p->calls[n < p->priced ? n : p->priced - 1];
    if (value > best) best = value, asked = n;
  }
  return asked;
}

#endif
